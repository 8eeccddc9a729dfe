"""Ways to fit many data sets: all chains by one program, NUTS on one function, or one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_scale.calibration import chains
from pyro_scale.calibration.chains import LEAST_ESS, NUM_DRAWS, Sampled, effective
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.warm_up import Lengths
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import evenly
from pyro_scale.errors import PyroScaleError, SiteError
from pyro_scale.exact.chains import sample_each
from pyro_scale.exact.log_density import EarlierFunction, log_density
from pyro_scale.exact.nutpie_api import Settings
from pyro_scale.model.log_posterior import MOST_STARTS
from pyro_scale.model.preflight import InitFunction

#: Draws of NUTS, at first, and times that there are twice as many until they are enough.
_NUTS_DRAWS, _MOST_DOUBLINGS, _MOST_SLOW = 400, 4, 0.01
#: Letters of what a failure says.
_LONGEST = 200


class Fitter(Protocol):
    """Fits all data sets of a stack."""

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        """Draws from each posterior.

        Args:
            stack: the data sets.
            lengths: of the stages; None has these data sets decide.
        """
        ...


@dataclass(frozen=True)
class Stacked:
    """A sampler whose chains have a data set each.

    Attributes:
        method: the sampler.
        init: where chains start, one of Pyro's; None for the library's own.
    """

    method: chains.Method
    init: InitFunction | None = None

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        return chains.sample(stack, self.method, find_starts(stack, self.init), lengths)


@dataclass(frozen=True)
class StackedNUTS:
    """NUTS on one compiled function, which is given another data set for each chain.

    Attributes:
        warmup_steps, max_depth, target_accept, low_rank: of each chain.
        temperature: what the log joint is divided by.
        compiled: whether to compile it.
        by_pointer: whether nutpie takes machine code.
        init: where chains start.
    """

    warmup_steps: int
    max_depth: int
    target_accept: float
    low_rank: bool
    temperature: float
    compiled: bool
    by_pointer: bool
    init: InitFunction | None = None

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        starts = find_starts(stack, self.init)
        first = torch.tensor(0)
        density = log_density(
            stack.log_posterior,
            stack.arguments(first),
            stack.layout.unflatten(starts[0]),
            self.temperature,
            self.compiled,
            EarlierFunction(),
        )
        numbers = torch.arange(stack.num_chains)
        own = [density.on(stack.arguments(number)) for number in numbers]
        count = _NUTS_DRAWS if lengths is None else _NUTS_DRAWS * lengths.thinning
        for doublings in range(_MOST_DOUBLINGS + 1):
            settings = Settings(
                count, self.warmup_steps, self.max_depth, self.target_accept, self.low_rank
            )
            draws = sample_each(own, self.by_pointer, starts, settings, stack.seeds, stack.bar)
            log_joint = draws.sample_stats["lp"]
            ess = effective(torch.cat([draws.positions, log_joint[..., None]], -1))
            few = int((ess < LEAST_ESS).sum())
            if few <= max(1, _MOST_SLOW * stack.num_chains) or doublings == _MOST_DOUBLINGS:
                break
            count *= 2
        every = count // NUM_DRAWS
        diverging = draws.sample_stats["diverging"].sum(1)
        return Sampled(
            positions=draws.positions[:, every - 1 :: every].to(starts),
            ess=ess,
            failed={},
            lengths=Lengths(thinning=count // _NUTS_DRAWS),
            steps={"warm-up": self.warmup_steps, "draws": count},
            facts={
                "divergent": int(diverging.sum()),
                "divergent_simulations": int((diverging > 0).sum()),
            },
            program=density.program,
        )


@dataclass(frozen=True)
class OneByOne:
    """A method that is run for each data set by itself.

    Attributes:
        run: (model, its arguments, seed) -> draws `[chains, draws, D]`, and whether they are
            independent of each other.
    """

    run: Callable[[Arguments, int], tuple[Tensor, bool]]

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        positions, ess, failed = list[Tensor](), list[float](), dict[int, str]()
        most = NUM_DRAWS
        for number, seed in enumerate(stack.seeds):
            drawn, is_independent = None, False
            try:
                drawn, is_independent = self.run(stack.arguments(torch.tensor(number)), seed)
            except (PyroScaleError, RuntimeError, ValueError) as error:
                failed[number] = " ".join(str(error).split())[:_LONGEST]
                if lengths is None and len(failed) == stack.num_chains:  # it is the call
                    raise
            if drawn is None:
                drawn = torch.full((1, NUM_DRAWS, stack.layout.size), torch.nan)
            flat = drawn.flatten(0, 1)
            positions.append(flat[evenly(len(flat), NUM_DRAWS)])
            most = max(most, len(flat))
            ess.append(len(flat) if is_independent else float(effective(drawn.double()).sum()))
        return Sampled(
            positions=torch.stack(positions),
            ess=torch.tensor(ess, dtype=torch.float64),
            failed=failed,
            lengths=Lengths(),
            steps={},
            facts={},
            program="one by one",
            enough=min(LEAST_ESS, most),
        )


def find_starts(stack: Stack, init: InitFunction | None) -> Tensor:
    """Where each data set's chain starts, params `[chains, D]`: where a run with its seed would.

    Raises:
        SiteError: the log joint of a data set is not finite at any start.
    """

    def drawn(number: int, attempt: int) -> Tensor:
        params = stack.log_posterior.start(
            stack.arguments(torch.tensor(number)), stack.seeds[number], 0, init, attempt=attempt
        )
        return stack.layout.flatten(params)

    starts = torch.stack([drawn(number, 0) for number in range(stack.num_chains)])
    for attempt in range(1, MOST_STARTS):
        values = stack.log_joints(starts)
        broken = torch.nonzero(~values.isfinite())[:, 0].tolist()
        if not broken:
            return starts
        for number in broken:
            starts[number] = drawn(number, attempt)
    site = stack.log_posterior.broken_site(
        stack.layout.unflatten(starts[broken[0]]), stack.arguments(torch.tensor(broken[0]))
    )
    raise SiteError(
        f"site '{site}': the log joint of simulation {broken[0]} is not finite at any of "
        f"{MOST_STARTS} starts: the model draws data that it gives no density, or init_strategy "
        "starts where there is none"
    )
