"""Chooses the step size by its bias, which is estimated from the difference between a run and a
coupled run (the same Brownian path) at half the step size."""

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
    """Step-size bias of every latent element, `[d]`.

    Attributes:
        mean: bias of the mean, in posterior sds.
        mean_mcse: standard error of `mean`.
        log_sd: bias of the log sd.
        log_sd_mcse: standard error of `log_sd`.
    """

    mean: Tensor
    mean_mcse: Tensor
    log_sd: Tensor
    log_sd_mcse: Tensor

    @property
    def excess(self) -> float:
        """The largest of the elements' biases, each less a few standard errors and divided by the
        bias that is allowed (for means in posterior sds, for log sds as they are). Above 1, the
        step is significantly too long."""
        means = (self.mean.abs() - PILOTS.errors * self.mean_mcse) / PILOTS.mean_bias
        sds = (self.log_sd.abs() - PILOTS.errors * self.log_sd_mcse) / PILOTS.sd_bias
        return float(torch.maximum(means, sds).max())

    def factor(self, order: int) -> float:
        """The factor, at most 1, by which to multiply the step size so that its largest significant
        bias falls to what is allowed; 1 if it is allowed already.

        Args:
            order: the power of lr with which the bias falls.
        """
        factor = self.excess ** (-1 / order) if self.excess > 1 else 1.0
        return 1.0 if factor == 1 else min(max(factor, PILOTS.shorter), PILOTS.longer)

    def scaled(self, by: float) -> Bias:
        """The bias and its standard errors, multiplied by a factor: those of another step size."""
        return Bias(*(by * values for values in self))

    @property
    def is_vague(self) -> bool:
        """Whether the estimated bias is too uncertain to judge the step size by: some element's
        standard error exceeds the tolerance for a bias (of means in posterior sds, of log sds as
        they are), because the run and its coupled run have drifted apart."""
        return bool(
            (self.mean_mcse > TOLERANCE.mean).any() | (self.log_sd_mcse > TOLERANCE.sd).any()
        )

    @property
    def is_known(self) -> Tensor:
        """Whether each element's bias is surely within tolerance, by 2 standard errors, `[d]`."""
        return self.is_within(PILOTS.errors)

    def is_within(self, errors: float) -> Tensor:
        """Whether each element's bias is within tolerance, `[d]`: the absolute bias of the mean (in
        posterior sds) and of the log sd, plus so many standard errors, are below `TOLERANCE`."""
        means = self.mean.abs() + errors * self.mean_mcse < TOLERANCE.mean
        return means & (self.log_sd.abs() + errors * self.log_sd_mcse < TOLERANCE.sd)


class Pilot(NamedTuple):
    """Measurements of the pilots, short runs that measure the error of a step size.

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
    """Shortens step sizes until the step-size bias of most groups of chains is small.

    A pilot is a run and a coupled run at half the step size, whose difference shows the bias. Where
    no more pilots are allowed, theory says how much smaller than the measured bias that of the last
    step sizes is.

    Args:
        groups: chains in their stationary distribution.
        time: rough autocorrelation time in steps.
        order: power of lr with which the bias falls.
        limit: most steps and time, and number and length of pilots if they are set.
        policy: lengths and thresholds of pilots.

    Returns:
        The groups with their step sizes and the chains after the last pilot; the measurements of
        the pilots.
    """
    fixed, total, lengthened, number = limit.lengths, 0, 0, 0
    length = min(policy.longest, max(policy.least, math.ceil(policy.times * time)))
    length = int(min(length, limit.steps / 3)) if fixed is None else fixed.pilot
    ran, biases = length, list[Bias | None]([None] * len(groups.lr))
    times = torch.full_like(groups.lr, math.inf)
    most = policy.most if fixed is None else fixed.pilots
    for number in range(1, 1 + most):
        ran, every = length, max(1, length // policy.draws)
        steps = Steps(length // every, 0, every)
        full = groups.run(steps, Purpose.PILOT, number - 1)
        half = groups.run(steps, Purpose.PILOT, number - 1, halved=True)
        total += full.num_steps + half.num_steps
        common = min(full.positions.shape[1], half.positions.shape[1])  # if the time is over
        full, half = full.first(common), half.first(common)
        sound = groups.are_sound(full) & groups.are_sound(half)
        intact = sound.all(1)
        if fixed is not None or bool(intact.any()):  # set lengths: no group depends on another
            kept = groups.sound_draws(full, sound), groups.sound_draws(half, sound)
            latents, of_half = (draws[..., : groups.num_latents].double() for draws in kept)
            for group in torch.nonzero(intact)[:, 0].tolist():
                biases[group] = bias_between(latents[group], of_half[group], order)
            groups, times = groups.moved_to(full, sound), times_about_mean(latents) * every
        factor = torch.tensor(
            [
                _factor(bias, order, policy) if bias is not None and is_intact else 0.5
                for bias, is_intact in zip(biases, intact.tolist(), strict=True)
            ],
            dtype=torch.float64,
        )
        settled = fixed is None and are_most(factor == 1)
        may_lengthen = settled and lengthened < policy.lengthenings and number < most
        if may_lengthen and not all(bias is None or bias.is_known.all() for bias in biases):
            lengthened, length = lengthened + 1, min(policy.longest, 2 * length)
            if not limit.is_passed(total + 3 * length):
                continue
        typical = float(factor.median())
        groups, times = groups.with_lr(groups.lr * factor), times / factor
        if settled:
            break
        if fixed is None:
            length = min(policy.longest, math.ceil(length / typical))
        if number == most or (fixed is None and limit.is_passed(total + 3 * length)):
            scales = (factor**order).tolist()
            biases = [
                None if bias is None else bias.scaled(by)
                for bias, by in zip(biases, scales, strict=True)
            ]
            break
    return groups, Pilot(number, ran, total, slow_time(times), biases)


def _factor(bias: Bias, order: int, policy: Pilots) -> float:
    """The factor by which to multiply a group's step size after a pilot: what the bias calls for;
    below 1, too, if the bias is too uncertain to be judged; otherwise 1.

    Args:
        bias: step-size bias of the group.
        order: power of lr with which the bias falls.
        policy: thresholds of pilots.
    """
    factor = bias.factor(order)
    return policy.if_vague if factor == 1 and bias.is_vague else factor


def bias_between(full: Tensor, half: Tensor, order: int) -> Bias:
    """The bias of a step size in every latent element, extrapolated to step size 0 from two coupled
    runs.

    Args:
        full: draws at the step size, `[chains, draws, d]`.
        half: draws at half the step size, driven by the same Brownian path, `[chains, draws, d]`.
        order: power of lr with which the bias falls.
    """
    center = (full + half).mean((0, 1)) / 2
    sd = half.flatten(0, 1).std(0).clamp(min=1e-300)
    factor = 2.0**order / (2.0**order - 1)  # bias over the difference to the bias at half
    squares = ((full - center).square() - (half - center).square()) / (2 * sd.square())
    moments = *_mean_and_error((full - half) / sd), *_mean_and_error(squares)
    return Bias(*(factor * moment for moment in moments))


def _mean_and_error(series: Tensor) -> tuple[Tensor, Tensor]:
    """(Mean over chains and draws of a series `[chains, draws, d]`; its standard error by batch
    means), `[d]` each. Draws at the end that do not fill a batch are left out."""
    count = series.shape[1] // PILOTS.parts * PILOTS.parts
    parts = series[:, :count].unflatten(1, (PILOTS.parts, -1)).mean(2).flatten(0, 1)
    return parts.mean(0), parts.std(0) / len(parts) ** 0.5
