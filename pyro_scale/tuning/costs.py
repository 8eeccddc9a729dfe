"""Predicts the seconds of exact methods from the arithmetic of a model.

Seconds are those of one core of a fixed reference machine, so they depend on the problem alone.
What BAOA takes cannot be told from a model's rows and dimensions: on hierarchies, searches for
modes, pilots and autocorrelation times are 3 to 20 times as long as elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pyro_scale.core.thread_count import Arithmetic
from pyro_scale.run.problem import Problem, arithmetic
from pyro_scale.tuning.policy import SEARCH


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of compiled code on one core of the reference machine (Intel, 2.1 GHz)."""

    #: A gradient without any elements.
    gradient: float = 1.5e-6
    #: An element of the log joint with its gradient; one of a function that is computed one number
    #: at a time, such as `lgamma`; one of a product of matrices.
    element: float = 0.3e-9
    special: float = 16e-9
    product: float = 6e-9


@dataclass(frozen=True, kw_only=True)
class Typical:
    """What exact methods need at a typical posterior: medians of `benchmarks/accuracy/jobs`."""

    #: NUTS: warm-up draws, and gradients per draw.
    nuts_warmup: int = 1000
    leapfrogs: int = 10
    #: GHMC: steps of warm-up, and per draw.
    ghmc_warmup: int = 5000
    ghmc_steps: int = 10


RATES = Rates()
TYPICAL = Typical()


@dataclass(frozen=True)
class Costs:
    """Seconds of a run by each exact method, on the reference machine.

    Attributes:
        problem: the analyzed model and its data.
        num_samples: draws of each chain.
        num_chains: number of chains.
    """

    problem: Problem
    num_samples: int
    num_chains: int

    @property
    def nuts(self) -> float:
        """Seconds of NUTS."""
        draws = self.num_chains * (TYPICAL.nuts_warmup + self.num_samples)
        return (1 + SEARCH.fraction_of_nuts) * draws * TYPICAL.leapfrogs * self.gradient

    @property
    def ghmc(self) -> float:
        """Seconds of GHMC, without its searches for modes."""
        steps = TYPICAL.ghmc_warmup + TYPICAL.ghmc_steps * self.num_samples
        return self.num_chains * steps * self.gradient

    @cached_property
    def gradient(self) -> float:
        """Seconds of a compiled gradient of the log joint of all rows."""
        problem = self.problem
        params = problem.engine.layout.unflatten(problem.positions[0])
        counted: Arithmetic = arithmetic(problem.log_posterior, params, problem.data.first())
        num_data = problem.log_posterior.num_data
        batches = num_data / (problem.data.batch_size or num_data)
        elements = counted.elements * RATES.element + counted.special * RATES.special
        products = (counted.total - counted.elements) * RATES.product
        return RATES.gradient + batches * (elements + products)
