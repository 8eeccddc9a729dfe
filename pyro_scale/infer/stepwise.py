"""Methods that take single steps, on batches that the caller passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import NotRunError
from pyro_scale.infer.method import Chain, Finished, Method, NotRun
from pyro_scale.results.posterior import Posterior
from pyro_scale.run.problem import Problem
from pyro_scale.run.single_step import Stepping


class Stepwise(Method):
    """A method whose chain can be moved step by step."""

    def begin(self, *args: Any, **kwargs: Any) -> Chain:
        """A chain at its start, for loops of your own: `chain.step(*batch)` moves it, and
        `chain.posterior` is the state after the latest step.

        `num_data` is needed, unless the model's plate says it; the seed is drawn from torch's
        generator.

        Args:
            *args: a batch, as the model's own arguments, on which the model is understood.
            **kwargs: likewise.

        Raises:
            ArgumentError: an option that needs the whole data.
            ModelError, SiteError, PlateError: the model cannot be run.
        """
        raise NotImplementedError

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a batch, given as the model's own arguments, with the chain that
        `begin` gives at the first call.

        Returns:
            The objective's estimate from the batch, in nats, before the step: of samplers and `MAP`
            the log joint (of `SVGD` its mean over particles), of `VI` and `IVON` the ELBO, of `EKF`
            the batch's log likelihood.

        Raises:
            ArgumentError: an option that needs the whole data.
            NonFiniteError: the state became NaN or infinite.
        """
        last = self._last
        chain = self.begin(*args, **kwargs) if isinstance(last, NotRun | Finished) else last
        value = chain.step(*args, **kwargs)
        self._last = chain
        return value


class SteppedChain:
    """A chain, or particles, that a kernel moves.

    Args:
        stepping: the chain at its start.
        check: raises for a step that broke the chain: (problem, draws, values, batch).
        posterior_of: the posterior of one step's draws: (problem, draws, values, first batch).
    """

    def __init__(
        self,
        stepping: Stepping,
        check: Callable[[Problem, Draws, Mapping[str, Tensor], Arguments], None],
        posterior_of: Callable[[Problem, Draws, Mapping[str, Tensor], Arguments], Posterior],
    ):
        self._stepping, self._check, self._posterior_of = stepping, check, posterior_of
        self._last: tuple[Draws, Mapping[str, Tensor]] | None = None
        self._posterior: Posterior | None = None

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a batch, given as the model's own arguments."""
        problem = self._stepping.problem
        with without_vmap_warnings():
            draws, values = self._stepping.step(args, kwargs)
        if draws.failures:
            self._check(problem, draws, values, problem.log_posterior.bind(args, kwargs))
        self._last, self._posterior = (draws, values), None
        return float(draws.log_joint.mean())

    @property
    def posterior(self) -> Posterior:
        """The state after the latest step.

        Raises:
            NotRunError: there was none.
        """
        if self._last is None:
            raise NotRunError("the chain has taken no step yet: call step(*batch) first")
        if self._posterior is None:
            problem = self._stepping.problem
            self._posterior = self._posterior_of(problem, *self._last, problem.data.first())
        return self._posterior
