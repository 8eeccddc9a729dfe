"""What kernels with a position and a momentum share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.kernels.kernel import Hyper, Kernel


class PhaseState(NamedTuple):
    """A chain's position and momentum, each [D]."""

    position: Tensor
    momentum: Tensor


@dataclass(frozen=True, kw_only=True)
class Underdamped(Kernel):
    """Langevin dynamics of a position and a momentum of mass 1, which friction damps.

        d theta = p dt,    dp = g dt - friction p dt + sqrt(2 friction T) dw

    (the paper's B.2).  Momenta start at their stationary N(0, T), so at rest at temperature 0.
    """

    friction: Hyper = 1.0

    def init(self, position: Tensor, noise: Tensor) -> PhaseState:
        return PhaseState(position, torch.sqrt(self.temperature) * noise)

    def relaxation_steps(self, precision: Tensor) -> Tensor:
        return torch.maximum(self.friction / (self.lr * precision), 2 / (self.lr * self.friction))

    def added_temperature(self, gradient_noise: Tensor) -> Tensor:
        return self.lr * gradient_noise / (2 * self.friction)
