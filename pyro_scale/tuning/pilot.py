"""The bias of a step size, measured before the run by a coupled run at half of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.autocorrelation import autocorrelation_time
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.policy import PILOTS, TOLERANCE


class Bias(NamedTuple):
    """By how much a step size is too long, element by element of the latents, `[d]`.

    Attributes:
        mean: what is too much in the mean, in posterior sds.
        mean_mcse: its standard error.
        log_sd: what is too much in the logarithm of the sd.
        log_sd_mcse: its standard error.
    """

    mean: Tensor
    mean_mcse: Tensor
    log_sd: Tensor
    log_sd_mcse: Tensor

    @property
    def excess(self) -> float:
        """How many times too large what is surely there is."""
        means = (self.mean.abs() - PILOTS.errors * self.mean_mcse) / PILOTS.mean_bias
        sds = (self.log_sd.abs() - PILOTS.errors * self.log_sd_mcse) / PILOTS.sd_bias
        return float(torch.maximum(means, sds).max())

    def factor(self, order: int) -> float:
        """Factor to multiply a step size by so that its bias falls to the tolerance; 1 if no bias
        is significantly above it.

        Args:
            order: the power of lr with which the bias falls.
        """
        factor = self.excess ** (-1 / order) if self.excess > 1 else 1.0
        return 1.0 if factor == 1 else min(max(factor, PILOTS.shorter), PILOTS.longer)

    @property
    def is_vague(self) -> bool:
        """Whether paths have parted: a bias twice as large as may be would not be seen."""
        return bool(
            (self.mean_mcse > TOLERANCE.mean).any() | (self.log_sd_mcse > TOLERANCE.sd).any()
        )

    @property
    def is_known(self) -> Tensor:
        """Whether it is known to be inside of what a run is judged by, `[d]`."""
        means = self.mean.abs() + PILOTS.errors * self.mean_mcse < TOLERANCE.mean
        return means & (self.log_sd.abs() + PILOTS.errors * self.log_sd_mcse < TOLERANCE.sd)


class Pilot(NamedTuple):
    """What pilots have come to.

    Attributes:
        problem: with the step size, and the chains' positions after them.
        steps: taken by each chain, those of coupled runs included.
        bias: of the step size; None where all coupled runs broke.
        time: steps per independent draw, of the slowest element or its square.
        draws: of the last pilot, `[chains, draws, D]`.
    """

    problem: Problem
    steps: int
    bias: Bias | None
    time: float
    draws: Tensor


#: Runs chains: (problem, steps, seed, whether at half the step on the same noise) -> draws.
CoupledRun = Callable[[Problem, Steps, int, bool], Draws]


def pilot(
    problem: Problem, run: CoupledRun, time: float, order: int, most_steps: int, budget: Budget
) -> Pilot:
    """Shortens the step size until its bias is small.

    Args:
        problem: chains in their stationary law.
        run: takes steps.
        time: steps per independent draw, about.
        order: the power of lr with which the bias falls.
        most_steps: of each chain.
        budget: whose time may be over.
    """
    total, length = 0, max(PILOTS.least, math.ceil(PILOTS.times * time))
    length = min(PILOTS.longest, length, most_steps // 3)
    bias, draws, every = None, None, 1
    lengthened = 0
    for number in range(PILOTS.most):
        every = max(1, length // PILOTS.draws)
        steps = Steps(length // every, 0, every)
        seed = derived_seed(problem.seed, number, Purpose.PILOT)
        own, half = run(problem, steps, seed, False), run(problem, steps, seed, True)
        for ran in (own, half):
            if ran.error is not None:
                raise ran.error
        total += own.num_steps + half.num_steps
        both = [chain for chain in own.finished if chain in half.finished]
        if len(both) == len(own.positions):
            draws = own.positions
            latents = problem.engine.num_latents
            one, other = (ran.positions[..., :latents].double() for ran in (own, half))
            bias = bias_of(one, other, order)
            problem = problem.moved_to(own, both)
            factor = bias.factor(order)
            if factor == 1 and bias.is_vague:
                factor = PILOTS.if_vague
            elif factor == 1 and not bool(bias.is_known.all()) and lengthened < PILOTS.lengthenings:
                lengthened, length = lengthened + 1, min(PILOTS.longest, 2 * length)
                if total + 3 * length <= most_steps:
                    continue
        else:
            factor = 0.5
        if factor == 1:
            break
        if total + 3 * length / factor > most_steps or budget.is_over_for_all:
            break
        problem = problem.with_lr(float(problem.engine.kernel.lr) * factor)
        length = min(PILOTS.longest, math.ceil(length / factor))
    if draws is None:
        return Pilot(problem, total, None, math.inf, problem.positions[:, None])
    z = draws[..., : problem.engine.num_latents].double()
    center = z.mean((0, 1))
    times = torch.maximum(autocorrelation_time(z), autocorrelation_time((z - center).square()))
    return Pilot(problem, total, bias, float(times.max()) * every, draws)


def bias_of(own: Tensor, half: Tensor, order: int) -> Bias:
    """From draws at a step and at half of it on the same noise, `[chains, draws, d]`."""
    center = (own + half).mean((0, 1)) / 2
    sd = half.flatten(0, 1).std(0).clamp(min=1e-300)
    factor = 2.0**order / (2.0**order - 1)  # of the bias over its difference to that at half
    squares = ((own - center).square() - (half - center).square()) / (2 * sd.square())
    mean, mean_mcse = _mean_of((own - half) / sd)
    log_sd, log_sd_mcse = _mean_of(squares)
    return Bias(*(factor * each for each in (mean, mean_mcse, log_sd, log_sd_mcse)))


def _mean_of(series: Tensor) -> tuple[Tensor, Tensor]:
    """(Mean, standard error) over draws `[chains, draws, d]`, by batch means."""
    count = series.shape[1] // PILOTS.parts * PILOTS.parts
    parts = series[:, :count].unflatten(1, (PILOTS.parts, -1)).mean(2).flatten(0, 1)
    return parts.mean(0), parts.std(0) / len(parts) ** 0.5
