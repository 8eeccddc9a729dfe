"""Tells from the noisy trace of an objective (the log joint at each step of training) whether it
still rises."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.engine.draws import Draws
from pyro_scale.tuning.policy import TRAINING


class EarlyStopping:
    """A rule that ends training when every chain's objective (the log joint on its batches) no
    longer rises.

    Args:
        window: steps from one check to the next.
        size: number of the model's dimensions, D, which scales the change that counts as
            negligible.
    """

    def __init__(self, window: int, size: int):
        self.window, self._size = window, size

    def reached(self, draws: Draws) -> bool:
        """Whether training is to end: the log joint of every chain that has not broken no longer
        rises. False before 4 * `window` steps.

        Args:
            draws: the chains' steps so far.
        """
        if draws.num_steps < 4 * self.window:
            return False
        traces = draws.log_joint[draws.finished, : draws.num_steps]
        return bool(has_converged(traces, self._size).all())


def has_converged(trace: Tensor, size: int) -> Tensor:
    """Whether each trace of an objective has stopped rising, booleans `[...]`: its mean changes
    from the third to the last quarter by less than a negligible amount, even allowing for noise,
    and has not fallen since the first quarter. False for traces of less than 8 steps.

    Args:
        trace: log joint at each step, in nats, `[..., steps]`.
        size: number of the model's dimensions; a change below a constant times its root is
            negligible.
    """
    rise, error = _rise(trace, 2)
    is_small = rise.abs() + TRAINING.errors * error < TRAINING.small_change * size**0.5
    return is_small & ~got_worse(trace, size)


def still_rises(trace: Tensor, size: int) -> Tensor:
    """Whether the mean of each trace rises significantly from its third to its last quarter,
    booleans `[...]`: by more than noise explains, and more than is negligible.

    Args:
        trace: an objective at each step, in nats, `[..., steps]`.
        size: number of the model's dimensions, with whose square root the negligible change grows.
    """
    rise, error = _rise(trace, 2)
    return rise - TRAINING.errors * error > TRAINING.small_change * size**0.5


def got_worse(trace: Tensor, size: int) -> Tensor:
    """Whether the mean of each trace falls significantly from its first to its last quarter,
    booleans `[...]`: by more than noise explains, and more than is negligible.

    Args:
        trace: an objective at each step, in nats, `[..., steps]`.
        size: number of the model's dimensions, with whose square root the negligible change grows.
    """
    rise, error = _rise(trace, 0)
    return rise + TRAINING.errors * error < -TRAINING.small_change * size**0.5


def _rise(trace: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(Rise of each trace's mean from one quarter of its steps to the last quarter, in nats;
    standard error of the rise), `[...]` each. A trace of less than 8 steps has a rise of 0 with an
    infinite error.

    Args:
        trace: an objective at each step, `[..., steps]`.
        first: number of the earlier quarter, 0 to 2.
    """
    quarter = trace.shape[-1] // 4
    if quarter < 2:
        return torch.zeros(trace.shape[:-1]), torch.full(trace.shape[:-1], torch.inf)
    quarters = trace[..., -4 * quarter :].unflatten(-1, (4, quarter))
    before, last = quarters[..., first, :], quarters[..., 3, :]
    error = (_square_error(before) + _square_error(last)).sqrt()
    return last.mean(-1) - before.mean(-1), error


def _square_error(values: Tensor) -> Tensor:
    """The squared standard error, `[...]`, of the mean of the autocorrelated numbers `values`,
    `[..., steps]`, from the variance of the means of successive batches of steps."""
    parts = min(TRAINING.parts, values.shape[-1])
    length = values.shape[-1] // parts
    means = values[..., : parts * length].unflatten(-1, (parts, length)).mean(-1)
    return means.var(-1) / parts
