"""Schedules: step -> value.

Any hyperparameter of a sampler that is a rate or a temperature may be a float or a function of
the step's number, counted from 0 with warm-up included.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pyro_scale.errors import ArgumentError

#: A function of the step's number.
Schedule = Callable[[int], float]


def polynomial_decay(start: float, power: float = 0.33, delay: float = 1.0) -> Schedule:
    """start * (1 + step / delay)^(-power), Welling and Teh's decreasing step size (2011).

    Args:
        start: the value at step 0.
        power: how fast it falls; in (0.5, 1] the steps' sum diverges while their squares' does
            not, and 1/3 minimises the mean squared error of averages (Teh, Thiery and Vollmer
            2016), hence the default.
        delay: steps until the value has fallen by 2^-power.

    Example:
        >>> lr = polynomial_decay(0.1, power=0.5, delay=100)
        >>> lr(0), lr(300)
        (0.1, 0.05)
    """
    if start <= 0 or power < 0 or delay <= 0:
        raise ArgumentError("polynomial_decay needs start > 0, power >= 0 and delay > 0")
    return lambda step: start * (1.0 + step / delay) ** -power


def cosine_decay(start: float, num_steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `start` at step 0 to `end` at step `num_steps`, and `end` from there.

    Example:
        >>> lr = cosine_decay(0.2, num_steps=100)
        >>> lr(0), round(lr(50), 12), lr(100), lr(1000)
        (0.2, 0.1, 0.0, 0.0)
    """
    if num_steps < 1:
        raise ArgumentError(f"cosine_decay needs num_steps >= 1, not {num_steps}")

    def value(step: int) -> float:
        phase = math.pi * min(step, num_steps) / num_steps
        return end + (start - end) * (1.0 + math.cos(phase)) / 2.0

    return value
