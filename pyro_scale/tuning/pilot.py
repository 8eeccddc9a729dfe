"""The bias of a step size, measured before the run by a coupled run at half of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pyro_scale.engine.draws import Steps
from pyro_scale.rng.seeds import Purpose
from pyro_scale.tuning.groups import Groups, Limit, are_most, slow_time, times_about_mean
from pyro_scale.tuning.policy import PILOTS, TOLERANCE, Pilots

G = TypeVar("G", bound=Groups)


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
    """Measurements of the pilots of a step size.

    Attributes:
        number: number of pilots.
        length: steps of the last pilot.
        steps: steps of each chain in all pilots, coupled runs included.
        time: autocorrelation time in steps, of the slowest element or its square; not finite if all
            pilots broke.
        biases: step-size bias of each group; None if all its coupled runs broke.
        acceptance: acceptance rate of the last pilot, `[groups]`; None for kernels that accept
            every step.
    """

    number: int
    length: int
    steps: int
    time: float
    biases: Sequence[Bias | None] = ()
    acceptance: Tensor | None = None

    @property
    def bias(self) -> Bias | None:
        """Step-size bias of a single group; None if it was not measured."""
        return next(iter(self.biases), None)


def pilot(groups: G, time: float, order: int, limit: Limit, policy: Pilots) -> tuple[G, Pilot]:
    """Shortens step sizes until the bias of most groups is small.

    A pilot is a run and a coupled run at half the step size, whose difference shows the bias.

    Args:
        groups: chains in their stationary distribution.
        time: rough autocorrelation time in steps.
        order: power of lr with which the bias falls.
        limit: most steps and time, and number and length of pilots if they are set.
        policy: the numbers of pilots.

    Returns:
        The groups with their step sizes, after the last pilot; its measurements.
    """
    fixed, total, lengthened, number = limit.lengths, 0, 0, 0
    length = min(policy.longest, max(policy.least, math.ceil(policy.times * time)))
    length = int(min(length, limit.steps / 3)) if fixed is None else fixed.pilot
    ran, biases = length, list[Bias | None]([None] * len(groups.lr))
    times = torch.full_like(groups.lr, math.inf)
    for number in range(1, 1 + (policy.most if fixed is None else fixed.pilots)):
        ran, every = length, max(1, length // policy.draws)
        steps = Steps(length // every, 0, every)
        own = groups.run(steps, Purpose.PILOT, number - 1)
        half = groups.run(steps, Purpose.PILOT, number - 1, halved=True)
        total += own.num_steps + half.num_steps
        sound = groups.are_sound(own) & groups.are_sound(half)
        intact = sound.all(1)
        if fixed is not None or bool(intact.any()):  # a group's chains depend on no other group
            kept = groups.sound_draws(own, sound), groups.sound_draws(half, sound)
            one, other = (each[..., : groups.num_latents].double() for each in kept)
            for group in torch.nonzero(intact)[:, 0].tolist():
                biases[group] = bias_of(one[group], other[group], order)
            groups, times = groups.moved_to(own, sound), times_about_mean(one) * every
        factor = torch.tensor(
            [
                _factor(bias, order, policy) if bias is not None and is_intact else 0.5
                for bias, is_intact in zip(biases, intact.tolist(), strict=True)
            ],
            dtype=torch.float64,
        )
        settled = fixed is None and are_most(factor == 1)
        may_lengthen = settled and lengthened < policy.lengthenings
        if may_lengthen and not all(bias is None or bias.is_known.all() for bias in biases):
            lengthened, length = lengthened + 1, min(policy.longest, 2 * length)
            if total + 3 * length <= limit.steps:
                continue
        typical = float(factor.median())
        if fixed is None and not settled and limit.is_passed(total + 3 * length / typical):
            break
        groups, times = groups.with_lr(groups.lr * factor), times / factor
        if settled:
            break
        if fixed is None:
            length = min(policy.longest, math.ceil(length / typical))
    return groups, Pilot(number, ran, total, slow_time(times), biases)


def _factor(bias: Bias, order: int, policy: Pilots) -> float:
    """Factor on the step size of a group.  If coupled paths have parted, a bias at the tolerance
    would not be detected, and the step is shortened as well."""
    factor = bias.factor(order)
    return policy.if_vague if factor == 1 and bias.is_vague else factor


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
