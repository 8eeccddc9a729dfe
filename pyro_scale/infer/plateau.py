"""Whether an objective still rises, judged by windows of its noisy trace."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.drive.simulate import Draws

#: Standard errors below which a rise may be noise.
_ERRORS = 2.0
#: A rise that is too small to matter from one window to the next, in nats.
_SMALL = 1e-3


class Plateau:
    """Says when no chain's objective has risen from one window of steps to the next.

    Args:
        window: steps.
    """

    def __init__(self, window: int):
        self.window = window

    def reached(self, draws: Draws) -> bool:
        """Whether the last two windows say so."""
        if draws.num_steps < 2 * self.window:
            return False
        trace = draws.log_joint[draws.finished, : draws.num_steps]
        before, now = trace[:, -2 * self.window :].split(self.window, dim=1)
        return not bool(still_rises(before, now).any())


def still_rises(before: Tensor, now: Tensor, small: float = _SMALL) -> Tensor:
    """Whether the mean `[...]` of one part `[..., steps]` of a trace is above that of the part
    before it, by more than their errors and more than is small, in nats."""
    rise = now.mean(-1) - before.mean(-1)
    errors = [part.var(-1) / part.shape[-1] for part in (before, now)]
    return rise > torch.clamp(_ERRORS * sum(errors, torch.zeros(())).sqrt(), min=small)
