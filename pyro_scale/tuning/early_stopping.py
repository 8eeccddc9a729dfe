"""Whether an objective still improves, judged from its noisy trace."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.engine.draws import Draws
from pyro_scale.tuning.policy import TRAINING


class EarlyStopping:
    """Says when every chain's objective is known not to rise any more.

    Args:
        window: steps from one time that it is asked to the next.
        size: dimensions.
    """

    def __init__(self, window: int, size: int):
        self.window, self._size = window, size

    def reached(self, draws: Draws) -> bool:
        """Whether the run until now says so."""
        if draws.num_steps < 4 * self.window:
            return False
        return bool(
            has_converged(draws.log_joint[draws.finished, : draws.num_steps], self._size).all()
        )


def has_converged(trace: Tensor, size: int) -> Tensor:
    """Whether each trace `[..., steps]` is known to change by nothing that matters from its third
    quarter to its last, up or down, and has not got worse since its first; where noise hides it, it
    is not."""
    rise, error = _rise(trace, 2, 3)
    is_small = rise.abs() + TRAINING.errors * error < TRAINING.small_change * size**0.5
    return is_small & ~got_worse(trace, size)


def still_rises(trace: Tensor, size: int) -> Tensor:
    """Whether each trace `[..., steps]` is known to rise by what matters from its third quarter to
    its last."""
    rise, error = _rise(trace, 2, 3)
    return rise - TRAINING.errors * error > TRAINING.small_change * size**0.5


def got_worse(trace: Tensor, size: int) -> Tensor:
    """Whether each trace `[..., steps]` is known to fall by what matters from its first quarter to
    its last."""
    rise, error = _rise(trace, 0, 3)
    return rise + TRAINING.errors * error < -TRAINING.small_change * size**0.5


def _rise(trace: Tensor, one: int, other: int) -> tuple[Tensor, Tensor]:
    """(By how much a quarter's mean is above that of one before; its error)."""
    quarter = trace.shape[-1] // 4
    if quarter < 2:
        return torch.zeros(trace.shape[:-1]), torch.full(trace.shape[:-1], torch.inf)
    quarters = trace[..., -4 * quarter :].unflatten(-1, (4, quarter))
    before, now = quarters[..., one, :], quarters[..., other, :]
    error = (_square_error(before) + _square_error(now)).sqrt()
    return now.mean(-1) - before.mean(-1), error


def _square_error(part: Tensor) -> Tensor:
    """The square of the standard error of a mean over dependent steps, by means of its parts."""
    parts = min(TRAINING.parts, part.shape[-1])
    length = part.shape[-1] // parts
    means = part[..., : parts * length].unflatten(-1, (parts, length)).mean(-1)
    return means.var(-1) / parts
