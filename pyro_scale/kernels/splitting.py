"""The parts of splittings of Langevin dynamics, as pure functions of a time.

d theta = p/m dt,    dp = g dt - f p dt + sqrt(2 f m T) dw
"""

from __future__ import annotations

import torch
from torch import Tensor


def kick(momentum: Tensor, gradient: Tensor, time: Tensor) -> Tensor:
    """B: dp = g dt, exactly."""
    return momentum + time * gradient


def drift(position: Tensor, momentum: Tensor, mass: Tensor, time: Tensor) -> Tensor:
    """A: d theta = p/m dt, exactly."""
    return position + time / mass * momentum


def ornstein_uhlenbeck(
    momentum: Tensor, noise: Tensor, friction: Tensor, variance: Tensor, time: Tensor
) -> Tensor:
    """O: dp = -f p dt + sqrt(2 f variance) dw, exactly, given a standard normal."""
    decay = torch.exp(-time * friction)
    return decay * momentum + torch.sqrt((1 - decay * decay) * variance) * noise
