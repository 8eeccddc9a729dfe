"""Chooses the step size by its bias, which is estimated from the difference between a run and a
coupled run (the same Brownian path) at half the step size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pyro_scale.engine.draws import Draws, Steps
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
        return float(self._relative(-PILOTS.errors, PILOTS.mean_bias, PILOTS.sd_bias).max())

    def factor(self, order: int) -> float:
        """The factor, at most 1, by which to multiply the step size so that its largest significant
        bias falls to what is allowed; 1 if it is allowed already.

        Args:
            order: the power of lr with which the bias falls.
        """
        factor = self.excess ** (-1 / order) if self.excess > 1 else 1.0
        return 1.0 if factor == 1 else min(max(factor, PILOTS.shorter), PILOTS.longer)

    def factor_until_known(self, order: int) -> float:
        """The factor, at most 1, by which to multiply the step size so that the bias of every
        element is surely within tolerance (`is_known`).

        Args:
            order: the power of lr with which the bias and its error fall.
        """
        worst = float(self._relative(PILOTS.errors_of_yes, TOLERANCE.mean, TOLERANCE.sd).max())
        return 1.0 if worst < 1 else 0.99 * worst ** (-1 / order)

    def or_more_precise(self, other: Bias) -> Bias:
        """Of each element, this bias or another one, whichever has smaller standard errors
        (relative to the tolerances)."""
        errors, of_other = (
            torch.maximum(bias.mean_mcse / TOLERANCE.mean, bias.log_sd_mcse / TOLERANCE.sd)
            for bias in (self, other)
        )
        pairs = zip(self, other, strict=True)
        return Bias(*(torch.where(of_other < errors, theirs, own) for own, theirs in pairs))

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
        """Whether each element's bias is surely within tolerance, as a YES asks, `[d]`."""
        return self.is_within(PILOTS.errors_of_yes)

    def is_within(self, errors: float) -> Tensor:
        """Whether each element's bias is within tolerance, `[d]`: the absolute bias of the mean (in
        posterior sds) and of the log sd, plus so many standard errors, are below `TOLERANCE`."""
        return self._relative(errors, TOLERANCE.mean, TOLERANCE.sd) < 1

    def _relative(self, errors: float, mean: float, sd: float) -> Tensor:
        """Each element's bias plus so many standard errors, divided by a limit, of the mean or of
        the log sd, whichever is larger, `[d]`.

        Args:
            errors: number of standard errors; negative ones are subtracted.
            mean: limit for biases of means, in posterior sds.
            sd: limit for biases of log sds.
        """
        means = (self.mean.abs() + errors * self.mean_mcse) / mean
        return torch.maximum(means, (self.log_sd.abs() + errors * self.log_sd_mcse) / sd)


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
    """Shortens step sizes until the step-size bias of most groups of chains is small and known.

    A pilot is a run and a coupled run at half the step size, whose difference shows the bias. If
    that is small but uncertain, the step is shortened until it is known: theory says how much
    smaller than the measured bias that of the last step size is. Pilots are made longer only where
    steps would become too short, and theory is also used where no more pilots are allowed.

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
            measured, times = _biases_and_times(groups, full, half, sound, order)
            pairs = zip(measured, biases, strict=True)
            biases = [before if bias is None else bias for bias, before in pairs]
            groups, times = groups.moved_to(full, sound), times * every
        factors = [
            _factor(bias, order, policy) if bias is not None and is_intact else 0.5
            for bias, is_intact in zip(biases, intact.tolist(), strict=True)
        ]
        until_known = [
            None if bias is None else _factor_until_known(bias, order, policy, factor)
            for bias, factor in zip(biases, factors, strict=True)
        ]
        settled = fixed is None and are_most(torch.tensor(factors) == 1)
        if settled and None in until_known and lengthened < policy.lengthenings and number < most:
            lengthened, length = lengthened + 1, min(policy.longest, 2 * length)
            if not limit.is_passed(total + 3 * length):
                continue
        if fixed is None:
            length = min(policy.longest, math.ceil(length / statistics.median_low(factors)))
        out_of_steps = fixed is None and limit.is_passed(total + 3 * length)
        is_last = settled or number == most or out_of_steps
        if is_last:
            known = zip(factors, until_known, strict=True)
            factors = [own if factor is None else factor for own, factor in known]
            scales = zip(biases, factors, strict=True)
            biases = [bias if bias is None else bias.scaled(by**order) for bias, by in scales]
        factor = torch.tensor(factors, dtype=torch.float64)
        groups, times = groups.with_lr(groups.lr * factor), times / factor
        if is_last:
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


def _factor_until_known(bias: Bias, order: int, policy: Pilots, factor: float) -> float | None:
    """The factor, at most `factor`, by which to multiply a group's step size so that its bias is
    surely within tolerance. None if the step would be too short, or if the policy does not ask
    whether biases are known.

    Shortening the step is preferred to a longer pilot, as it makes the run dearer by less.

    Args:
        bias: step-size bias of the group.
        order: power of lr with which the bias falls.
        policy: thresholds of pilots.
        factor: the factor that the bias itself calls for.
    """
    known = min(factor, bias.factor_until_known(order))
    return known if policy.lengthenings and known >= min(factor, policy.shorter) else None


def _biases_and_times(
    groups: G, full: Draws, half: Draws, sound: Tensor, order: int
) -> tuple[list[Bias | None], Tensor]:
    """(Step-size bias of each group, None if one of its chains broke; autocorrelation time of the
    slowest element of each group as users read it, or of its square, in draws, `[groups]`).

    Biases are of unconstrained elements or of the values that users read, whichever are more
    precise: the logarithm of a scale that data hardly bound from below has a long tail, in which
    the paths part.

    Args:
        groups: chains before the pilot.
        full: draws at the step size.
        half: draws at half the step size, driven by the same Brownian path.
        sound: whether the draws of each chain can be used, booleans `[groups, chains]`.
        order: power of lr with which the bias falls.
    """
    kept = groups.sound_draws(full, sound), groups.sound_draws(half, sound)
    latents, of_half = (draws[..., : groups.num_latents].double() for draws in kept)
    values, values_of_half = groups.to_values(latents), groups.to_values(of_half)
    biases = list[Bias | None]([None] * len(sound))
    for group in torch.nonzero(sound.all(1))[:, 0].tolist():
        bias = bias_between(latents[group], of_half[group], order)
        of_values = bias_between(values[group], values_of_half[group], order)
        biases[group] = bias.or_more_precise(of_values)
    return biases, times_about_mean(values)


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
