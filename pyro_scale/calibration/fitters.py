"""Ways to fit a method to many data sets: to all in the same compiled steps, or one after another.

A fitter's `fit(stack, lengths)` draws from the posterior of each data set. `lengths` are numbers of
steps of warm-up and thinning; if None, these data sets determine them. `has_lengths` is True if the
method has such lengths. `most_at_once` is the number of data sets that are fitted together, and
lost by an interrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.calibration.chains import Sampled, Stacked, effective_size
from pyro_scale.calibration.modes import find_modes
from pyro_scale.calibration.stack import Stack, find_starts
from pyro_scale.calibration.stacked_chains import StackedChains
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import evenly
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import PyroScaleError
from pyro_scale.exact.chains import sample_each
from pyro_scale.exact.log_density import EarlierFunction, log_density
from pyro_scale.exact.nutpie_api import Settings
from pyro_scale.model.init_strategies import InitFunction
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.tuning.groups import Lengths
from pyro_scale.tuning.policy import SIMULATIONS

#: Largest length of a failure's message, in characters.
_MOST_LETTERS = 200


@dataclass(frozen=True)
class StackedNUTS:
    """Fits NUTS to many data sets: one compiled log density is called with the data of each chain.

    Attributes:
        warmup_steps, max_depth, target_accept, low_rank: nutpie's settings of each chain.
        temperature: number that divides the log joint.
        compiled: whether to compile the log density.
        init: one of Pyro's init functions, for the starts; None for the library's default.
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
        density = log_density(
            stack.log_posterior,
            stack.arguments(torch.tensor(0)),
            stack.layout.unflatten(starts[0]),
            self.temperature,
            self.compiled,
            EarlierFunction(),
        )
        numbers = torch.arange(stack.num_chains)
        densities = [density.on(stack.arguments(number)) for number in numbers]
        count = SIMULATIONS.draws if lengths is None else SIMULATIONS.draws * lengths.thinning
        allowed = SIMULATIONS.slow * stack.num_chains + (lengths is None)
        for doublings in range(SIMULATIONS.doublings_of_nuts + 1):
            settings = Settings(
                count, self.warmup_steps, self.max_depth, self.target_accept, self.low_rank
            )
            draws = sample_each(densities, starts, settings, stack.seeds, stack.bar)
            log_joint = draws.sample_stats["lp"]
            ess = effective_size(torch.cat([draws.positions, log_joint[..., None]], -1))
            num_slow = int((ess < SIMULATIONS.least_ess).sum())
            if num_slow <= allowed or doublings == SIMULATIONS.doublings_of_nuts:
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
    """Fits VI or IVON to many data sets, in the same compiled steps: each fit is a Gaussian, of
    which independent draws are ranked.

    Attributes:
        kernel: the method, VI or IVON.
        num_steps: number of optimization steps on each data set.
        fit_of: function (last state, last hyperparameters by name, seed) -> Gaussian fit of a data
            set.
        init: one of Pyro's init functions, for the means; None for the library's default.
    """

    kernel: Any
    num_steps: int
    fit_of: Callable[[Any, Mapping[str, Tensor], int], Fit]
    init: InitFunction | None = None

    most_at_once = 500
    has_lengths = False

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        starts, steps = find_starts(stack, self.init), Steps(self.num_steps, positions=False)
        draws = StackedChains(stack, self.kernel, starts).simulate(steps)
        values, samples = self.kernel.values(self.num_steps - 1), []
        for chain, seed in enumerate(stack.seeds):
            state = pytree.tree_map(lambda leaf, i=chain: leaf[i], draws.state)
            fit = self.fit_of(state, values, seed)
            noise = fit.seeded_noise(SIMULATIONS.ranked, seed)
            samples.append(torch.cat(list(fit.draws(noise).blocks())))
        positions = torch.stack(samples)
        failed = {one.chain: f"not finite after step {one.step:,}" for one in draws.failures}
        positions[list(failed)] = torch.nan
        ess = torch.full((stack.num_chains,), float(SIMULATIONS.ranked), dtype=torch.float64)
        ess[list(failed)] = 0
        return Sampled(
            positions=positions,
            ess=ess,
            enough=SIMULATIONS.ranked / 2,
            failed=failed,
            steps={"optimizer": self.num_steps},
            program=draws.program,
        )


@dataclass(frozen=True)
class OneByOne:
    """Fits any other method, to one data set after another.

    Attributes:
        run: function (the model's arguments, a seed, a dict from sites to their values at the mode
            or None) -> (unconstrained draws `[chains, draws, D]`, True if the draws are
            independent).
        takes_modes: True if the method starts at the posterior's mode; modes are then found for all
            data sets at once.
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
            draws, is_independent = None, False
            try:
                arguments = stack.arguments(torch.tensor(number))
                draws, is_independent = self.run(arguments, seed, modes[number])
            except (PyroScaleError, RuntimeError, ValueError) as error:
                failed[number] = in_one_line(error)
                if len(failed) == stack.num_chains:  # the call is wrong, not the data
                    raise
            if draws is None:
                draws = torch.full((1, SIMULATIONS.ranked, stack.layout.size), torch.nan)
            flat = draws.flatten(0, 1)
            count = len(flat)
            positions.append(flat[evenly(count, SIMULATIONS.ranked)])
            ess.append(count if is_independent else float(effective_size(draws.double()).sum()))
        return Sampled(
            positions=torch.stack(positions),
            ess=torch.tensor(ess, dtype=torch.float64),
            enough=min(SIMULATIONS.least_ess, count / 2),
            failed=failed,
        )

    def _modes(self, stack: Stack) -> list[dict[str, Tensor] | None]:
        """For each data set, a dict from the names of its latent sites to constrained values at the
        posterior's mode; None for a data set whose search found no mode, or if the method does not
        start at modes.
        """
        if not (self.takes_modes and stack.vectorized):
            return [None] * stack.num_chains
        modes = find_modes(stack, find_starts(stack, None))
        return [
            stack.log_posterior.constrain(stack.layout.unflatten(mean)) if is_mode else None
            for mean, is_mode in zip(modes.mean, modes.is_mode.tolist(), strict=True)
        ]


def in_one_line(error: Exception) -> str:
    """The message of an error for the list of failed simulations, shortened."""
    return " ".join(format(error).split())[:_MOST_LETTERS]


Fitter: TypeAlias = Stacked | StackedNUTS | StackedFit | OneByOne
