"""Ways to fit many data sets: all chains by one program, NUTS on one function, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.calibration import chains
from pyro_scale.calibration.chains import Sampled, effective
from pyro_scale.calibration.modes import find_modes
from pyro_scale.calibration.stack import Stack
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import evenly
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import PyroScaleError, SiteError
from pyro_scale.exact.chains import sample_each
from pyro_scale.exact.log_density import EarlierFunction, log_density
from pyro_scale.exact.nutpie_api import Settings
from pyro_scale.model.diagnose import find_broken_site
from pyro_scale.model.init_strategies import InitFunction
from pyro_scale.model.log_posterior import MOST_STARTS
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.tuning.groups import Lengths
from pyro_scale.tuning.policy import SIMULATIONS

#: Letters of what a failure says.
_MOST_LETTERS = 200


class Fitter(Protocol):
    """Fits all data sets of a stack.

    Attributes:
        most_at_once: data sets that are fitted together at most: what Control-C costs.
        has_lengths: whether some of them show how long the stages are.
    """

    @property
    def most_at_once(self) -> int: ...

    @property
    def has_lengths(self) -> bool: ...

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

    most_at_once = 500

    @property
    def has_lengths(self) -> bool:
        method = self.method
        is_set = method.warmup_steps is not None and method.thinning is not None
        return method.kind is not None or not is_set

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        return chains.sample(stack, self.method, find_starts(stack, self.init), lengths)


@dataclass(frozen=True)
class StackedNUTS:
    """NUTS on one compiled function, which is given another data set for each chain.

    Attributes:
        warmup_steps, max_depth, target_accept, low_rank: of each chain.
        temperature: what the log joint is divided by.
        compiled: whether to compile it.
        init: where chains start.
    """

    warmup_steps: int
    max_depth: int
    target_accept: float
    low_rank: bool
    temperature: float
    compiled: bool
    init: InitFunction | None = None

    most_at_once = 100
    has_lengths = True

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
        count = SIMULATIONS.draws if lengths is None else SIMULATIONS.draws * lengths.thinning
        for doublings in range(SIMULATIONS.doublings_of_nuts + 1):
            settings = Settings(
                count, self.warmup_steps, self.max_depth, self.target_accept, self.low_rank
            )
            draws = sample_each(own, starts, settings, stack.seeds, stack.bar)
            log_joint = draws.sample_stats["lp"]
            ess = effective(torch.cat([draws.positions, log_joint[..., None]], -1))
            few = int((ess < SIMULATIONS.least_ess).sum())
            if (
                few <= SIMULATIONS.slow * stack.num_chains + (lengths is None)
                or doublings == SIMULATIONS.doublings_of_nuts
            ):
                break
            count *= 2
        every = count // SIMULATIONS.ranked
        diverging = draws.sample_stats["diverging"].sum(1)
        return Sampled(
            positions=draws.positions[:, every - 1 :: every].to(starts),
            ess=ess,
            enough=SIMULATIONS.least_ess,
            failed={},
            lengths=Lengths(thinning=count // SIMULATIONS.draws),
            steps={"warm-up": self.warmup_steps, "draws": count},
            facts={
                "divergent": int(diverging.sum()),
                "divergent_simulations": int((diverging > 0).sum()),
            },
            program=density.program,
        )


@dataclass(frozen=True)
class StackedFit:
    """A Gaussian that follows an optimizer, from a start for each data set.

    Attributes:
        kernel: the method.
        num_steps: of each.
        fit_of: (a start's last state, the hyperparameters' last values, its seed) -> the fit.
        init: where means start.
    """

    kernel: Any
    num_steps: int
    fit_of: Callable[[Any, Mapping[str, Tensor], int], Fit]
    init: InitFunction | None = None

    most_at_once = 500
    has_lengths = False

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        starts, steps = find_starts(stack, self.init), Steps(self.num_steps, positions=False)
        draws = stack.run(self.kernel, starts, steps)
        values, drawn = self.kernel.values(self.num_steps - 1), []
        for chain, seed in enumerate(stack.seeds):
            state = pytree.tree_map(lambda leaf, i=chain: leaf[i], draws.state)
            fit = self.fit_of(state, values, seed)
            noise = fit.seeded_noise(SIMULATIONS.ranked, seed)
            drawn.append(torch.cat(list(fit.draws(noise).blocks())))
        positions = torch.stack(drawn)
        failed = {each.chain: f"not finite after step {each.step:,}" for each in draws.failures}
        positions[list(failed)] = torch.nan
        ess = torch.full((stack.num_chains,), float(SIMULATIONS.ranked), dtype=torch.float64)
        ess[list(failed)] = 0
        return Sampled(
            positions=positions,
            ess=ess,
            enough=SIMULATIONS.ranked / 2,
            failed=failed,
            lengths=Lengths(),
            steps={"optimizer": self.num_steps},
            facts={},
            program=draws.program,
        )


@dataclass(frozen=True)
class OneByOne:
    """A method that is run for each data set by itself.

    Attributes:
        run: (the model's arguments, a seed, the mode by site if it is known) -> draws
            `[chains, draws, D]`, and whether they are independent of each other.
        takes_modes: whether it begins with the search for a mode, which is faster for all at once.
    """

    run: Callable[[Arguments, int, Mapping[str, Tensor] | None], tuple[Tensor, bool]]
    takes_modes: bool = False

    has_lengths = False

    @property
    def most_at_once(self) -> int:
        return 100 if self.takes_modes else 20

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        positions, ess, failed = list[Tensor](), list[float](), dict[int, str]()
        count, modes = SIMULATIONS.ranked, self._modes(stack)
        for number, seed in enumerate(stack.seeds):
            drawn, is_independent = None, False
            try:
                arguments = stack.arguments(torch.tensor(number))
                drawn, is_independent = self.run(arguments, seed, modes[number])
            except (PyroScaleError, RuntimeError, ValueError) as error:
                failed[number] = " ".join(format(error).split())[:_MOST_LETTERS]
                if len(failed) == stack.num_chains:  # it is the call
                    raise
            if drawn is None:
                drawn = torch.full((1, SIMULATIONS.ranked, stack.layout.size), torch.nan)
            flat = drawn.flatten(0, 1)
            count = len(flat)
            positions.append(flat[evenly(len(flat), SIMULATIONS.ranked)])
            ess.append(len(flat) if is_independent else float(effective(drawn.double()).sum()))
        return Sampled(
            positions=torch.stack(positions),
            ess=torch.tensor(ess, dtype=torch.float64),
            enough=min(SIMULATIONS.least_ess, count / 2),
            failed=failed,
            lengths=Lengths(),
            steps={},
            facts={},
            program="one by one",
        )

    def _modes(self, stack: Stack) -> list[dict[str, Tensor] | None]:
        """The mode of each data set, by site; None where none was found."""
        if not (self.takes_modes and stack.vectorized):
            return [None] * stack.num_chains
        modes = find_modes(stack, find_starts(stack, None))
        return [
            stack.log_posterior.constrain(stack.layout.unflatten(mean)) if found else None
            for mean, found in zip(modes.mean, modes.found.tolist(), strict=True)
        ]


def find_starts(stack: Stack, init: InitFunction | None) -> Tensor:
    """Where each data set's chain starts, params `[chains, D]`: where a run with its seed would.

    The log joint of some may be finite at none: these break at once, and are counted as such.

    Raises:
        SiteError: the log joint of no data set is finite anywhere.
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
    if len(broken) < stack.num_chains:
        return starts
    place = stack.layout.unflatten(starts[broken[0]]), stack.arguments(torch.tensor(broken[0]))
    site, _ = find_broken_site(stack.log_posterior, *place)
    raise SiteError(
        f"site '{site or '?'}': the log joint of simulation {broken[0]} is not finite at any of "
        f"{MOST_STARTS} starts: the model draws data that it gives no density, or init_strategy "
        "starts where there is none",
        code="not-finite",
    )
