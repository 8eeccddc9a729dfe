"""Schedules: functions from the number of a step to a step size, a temperature or the like.

A rate or temperature of a sampler may be a float or a function of the step's number, which counts
from 0 and includes warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from pyro_scale.errors import ArgumentError

#: A function of the step's number.
Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Falling:
    """A schedule that falls linearly to 0 over the length of a run; if the length is not known
    (single steps, early stopping), as start / (1 + step / 1,000).

    Attributes:
        start: value at step 0.
    """

    start: float

    def __call__(self, step: Any) -> Any:
        """The value at a step, if the run's length is not known: start / (1 + step / 1,000)."""
        return self.start / (1 + step / 1000)

    def over(self, num_steps: int) -> Callable[[Any], Any]:
        """The schedule for a run of known length: a function of the step's number that falls
        linearly from `start` at step 0 to 0 at step `num_steps`.
        """
        return partial(_linear, self.start, num_steps)


def _linear(start: float, num_steps: int, step: Any) -> Any:
    return start * (1 - step / num_steps)


def polynomial_decay(start: float, power: float = 0.33, delay: float = 1.0) -> Schedule:
    """A schedule of Welling and Teh's decreasing step size (2011): start * (1 + step /
    delay)^(-power).

    Draws then have weights proportional to lr, `sample_stats["weight"]`, which `summary` and
    `predict` use.

    Args:
        start: the value at step 0.
        power: how fast it falls.  In (0.5, 1] the sum of the steps diverges and that of their
            squares converges; 1/3, near the default, minimizes the mean squared error of averages
            (Teh, Thiery and Vollmer 2016).
        delay: steps until the value has fallen by 2^-power.

    Examples:
        >>> lr = polynomial_decay(0.1, power=0.5, delay=100)
        >>> lr(0), lr(300)
        (0.1, 0.05)
    """
    if start <= 0 or power < 0 or delay <= 0:
        raise ArgumentError("polynomial_decay needs start > 0, power >= 0 and delay > 0")
    return partial(_polynomial, start, power, delay)


def _polynomial(start: float, power: float, delay: float, step: int) -> float:
    return start * (1.0 + step / delay) ** -power


def cosine_decay(start: float, num_steps: int, end: float = 0.0) -> Schedule:
    """A schedule that follows half a cosine from `start` at step 0 to `end` at step `num_steps`,
    and stays at `end`, which must be above 0 for an lr.

    Examples:
        >>> lr = cosine_decay(0.2, num_steps=100)
        >>> lr(0), round(lr(50), 12), lr(100), lr(1000)
        (0.2, 0.1, 0.0, 0.0)
    """
    if num_steps < 1:
        raise ArgumentError(f"cosine_decay needs num_steps >= 1, not {num_steps}")
    if start < 0 or end < 0:
        raise ArgumentError("cosine_decay needs start >= 0 and end >= 0")
    return partial(_cosine, start, num_steps, end)


def _cosine(start: float, num_steps: int, end: float, step: int) -> float:
    phase = math.pi * min(step, num_steps) / num_steps
    return end + (start - end) * (1.0 + math.cos(phase)) / 2.0


@dataclass(frozen=True)
class Cyclical:
    """The cyclical step size of Zhang et al. (2020), for multimodal posteriors: warm restarts.

        lr = start/2 (cos(pi (step mod cycle_steps) / cycle_steps) + 1)

    The first part of a cycle explores: large steps without noise may find another mode.  The next
    part settles there, with noise, and the last part samples, with ever smaller steps.  As the `lr`
    of a sampler, it sets the temperature to 0 while exploring, and draws are kept only while
    sampling: after every `thinning`-th of these steps, with equal weights.

    Exploration ends at the bottom of a mode, so draws have the posterior's spread within a mode
    only if settling takes several relaxation times.  How often a mode is visited depends on starts
    and basins of attraction, not on its posterior mass.

    Args:
        start: the step size at which each cycle begins.
        cycle_steps: steps from one restart to the next.
        exploration: the fraction of a cycle's steps that explore, at least 0 and below 1.
        settling: the fraction of a cycle's steps, after those that explore, that settle; no draws
            are kept there. At least 0 and below 1.

    Raises:
        ArgumentError: an argument is out of range, or no step of a cycle samples.

    Examples:
        >>> lr = Cyclical(0.2, cycle_steps=100, exploration=0.8)
        >>> lr(0), round(lr(50), 12), lr(100)
        (0.2, 0.1, 0.2)
        >>> [step for step in range(1000) if lr.explores(step) != lr.explores(step + 1)][:3]
        [79, 99, 179]
        >>> [step for step in range(1000) if lr.keeps(step) != lr.keeps(step + 1)][:3]
        [89, 99, 189]
    """

    start: float
    cycle_steps: int
    exploration: float = 0.8
    settling: float = 0.1

    def __post_init__(self) -> None:
        is_count = isinstance(self.cycle_steps, int) and self.cycle_steps >= 1
        parts = 0 <= self.exploration < 1 and 0 <= self.settling < 1
        if not (self.start > 0 and parts and is_count):
            raise ArgumentError(
                f"{self}: start must be > 0, cycle_steps a whole number, exploration and settling "
                "in [0, 1)"
            )
        if not self.keeps(self.cycle_steps - 1):
            raise ArgumentError(
                f"{self}: no step of a cycle samples; lower exploration or settling"
            )

    def __call__(self, step: int) -> float:
        """The step size at a step, which counts from 0."""
        phase = (step % self.cycle_steps) / self.cycle_steps
        return self.start / 2 * (math.cos(math.pi * phase) + 1)

    def explores(self, step: int) -> bool:
        """True if a step is in the exploring part of its cycle, in which the temperature is 0.
        Steps count from 0.
        """
        return step % self.cycle_steps < self.exploration * self.cycle_steps

    def keeps(self, step: int) -> bool:
        """Whether the state after a step may be kept as a draw: the step is in the sampling part of
        its cycle."""
        return step % self.cycle_steps >= (self.exploration + self.settling) * self.cycle_steps


def map_schedule(function: Callable[[float], float], value: float | Schedule) -> float | Schedule:
    """`function` applied to a hyperparameter that may change from step to step: `function(value)`
    if `value` is a number; if it is a schedule, the schedule step -> function(value(step)).
    """
    if callable(value):
        return lambda step: function(value(step))
    return function(value)


def initial(value: float | Schedule) -> float:
    """The value at step 0 of a hyperparameter, as a float: the number itself, or the schedule's
    value there.

    Raises:
        ArgumentError: the number is not finite and above 0, or `value` is a `Cyclical`.
    """
    if isinstance(value, Cyclical):
        raise ArgumentError("a Cyclical is a schedule of the sampler's own lr, not of SGD's")
    number = value(0) if callable(value) else value
    if not isinstance(number, Real) or isinstance(number, bool) or not 0 < number < math.inf:
        raise ArgumentError(f"lr={number!r}: pass a number > 0, or a schedule (step -> number)")
    return float(number)
