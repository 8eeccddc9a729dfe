"""Schedules: step -> value.

Any hyperparameter of a sampler that is a rate or a temperature may be a float or a function of
the step's number, counted from 0 with warm-up included.
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
    """A rate that falls to 0 over a run's own length, linearly; where a run has no end that is
    known (single steps, early stopping), as 1 / (1 + step / 1,000).

    Attributes:
        start: the value at step 0.
    """

    start: float

    def __call__(self, step: Any) -> Any:
        """The value where the run's length is not known."""
        return self.start / (1 + step / 1000)

    def over(self, num_steps: int) -> Callable[[Any], Any]:
        """The schedule of a run of so many steps."""
        return partial(_linear, self.start, num_steps)


def _linear(start: float, num_steps: int, step: Any) -> Any:
    return start * (1 - step / num_steps)


def polynomial_decay(start: float, power: float = 0.33, delay: float = 1.0) -> Schedule:
    """start * (1 + step / delay)^(-power), Welling and Teh's decreasing step size (2011).

    Draws at decreasing steps count by their weights, `sample_stats["weight"]`, in proportion to
    lr; `summary` and `predict` use them.

    Args:
        start: the value at step 0.
        power: how fast it falls; in (0.5, 1] the steps' sum diverges while their squares' does
            not, and 1/3 minimizes the mean squared error of averages (Teh, Thiery and Vollmer
            2016), hence the default.
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
    """Half a cosine from `start` at step 0 to `end` at step `num_steps`, and `end` from there,
    which for an lr must be above 0.

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

    A cycle's first part explores: large steps without noise may find another mode.  The next part
    settles there, with noise, and the rest is sampled, with ever smaller steps.  As the `lr` of a
    sampler it sets the temperature to 0 while exploring, and draws are kept of the sampled parts
    alone: every `thinning`-th of their steps, all with one weight.

    Draws spread over a mode as the posterior does only where settling takes several relaxation
    times, for exploration ends at its bottom; and how often a mode is visited follows from where
    chains start and from its basin, not from its posterior mass.

    Args:
        start: the step size at which each cycle begins.
        cycle_steps: steps from one restart to the next.
        exploration: the part of a cycle that explores, at least 0 and below 1.
        settling: the part of a cycle after it that settles and is not kept, likewise.

    Raises:
        ArgumentError: an argument out of its range, or a cycle without a step that samples.

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
        """The step size at a step."""
        phase = (step % self.cycle_steps) / self.cycle_steps
        return self.start / 2 * (math.cos(math.pi * phase) + 1)

    def explores(self, step: int) -> bool:
        """Whether a step is of an exploration phase: there is no noise."""
        return step % self.cycle_steps < self.exploration * self.cycle_steps

    def keeps(self, step: int) -> bool:
        """Whether the state after a step may be kept."""
        return step % self.cycle_steps >= (self.exploration + self.settling) * self.cycle_steps


def map_schedule(function: Callable[[float], float], value: float | Schedule) -> float | Schedule:
    """A function of a number, or of every value of a schedule."""
    if callable(value):
        return lambda step: function(value(step))
    return function(value)


def initial(value: float | Schedule) -> float:
    """A number, or a schedule's value at step 0.

    Raises:
        ArgumentError: it is not a number above 0.
    """
    if isinstance(value, Cyclical):
        raise ArgumentError("a Cyclical is a schedule of the sampler's own lr, not of SGD's")
    number = value(0) if callable(value) else value
    if not isinstance(number, Real) or isinstance(number, bool) or not 0 < number < math.inf:
        raise ArgumentError(f"lr={number!r}: pass a number > 0, or a schedule (step -> number)")
    return float(number)
