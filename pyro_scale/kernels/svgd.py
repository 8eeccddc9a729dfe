"""Stein variational gradient descent: particles that move together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.map import MAPState
from pyro_scale.kernels.optimizer import Optimizing, ascend, init_optimizer


@dataclass(frozen=True, kw_only=True)
class SVGD(Optimizing):
    """x_i' = x_i + optimizer(phi(x_i)), over n particles (Liu and Wang 2016, algorithm 1):

        phi(x) = 1/n sum_j [k(x_j, x) g(x_j) + T d k(x_j, x) / d x_j]
        k(x, x') = exp(-|x - x'|^2 / h),        h = med^2 / log(n + 1)

    with g the gradient of log joint / N, T the temperature over N, and med^2 the median of all n^2
    squared distances at each step.  The paper has log n, its released code log(n + 1), which is
    also defined for one particle: that is MAP.

    Use this if a few points are to represent a posterior of few dimensions.  A step costs n
    gradients, and n^2 distances.

    Args:
        optimizer: receives the negative phi as the gradient of a loss.
        temperature: 1 is the posterior; below 1, it is narrower.
    """

    temperature: Hyper = 1.0

    normals: ClassVar[int] = 0
    settings: ClassVar[tuple[str, ...]] = ("optimizer",)

    def init(self, position: Tensor, values: Values, noise: Tensor) -> MAPState:
        """The state of a particle that starts at a position [D]."""
        return MAPState(position, init_optimizer(self.optimizer_at(values), [position]))

    def couple(self, positions: Tensor, gradients: Tensor, values: Values) -> Tensor:
        """phi of all particles, from their positions and gradients; all are `[n, D]`."""
        centered = positions - positions.mean(0)  # distances are differences of squares
        kernel, bandwidth = rbf(centered)
        repulsion = 2 / bandwidth * (centered * kernel.sum(1, keepdim=True) - kernel @ centered)
        return (kernel @ gradients + values["temperature"] * repulsion) / len(positions)

    def move(self, state: MAPState, direction: Tensor, values: Values) -> MAPState:
        """A particle's next state, from its phi [D]."""
        (position,), optimizer = ascend(
            self.optimizer_at(values), [direction], state.optimizer, [state.position]
        )
        return MAPState(position, optimizer)


def rbf(points: Tensor) -> tuple[Tensor, Tensor]:
    """(k of all pairs of points `[n, D]`, `[n, n]`; h, 0-d)."""
    squares = points.square().sum(1)
    distances = squares[:, None] + squares - 2 * points @ points.T
    bandwidth = median(distances) / math.log(len(points) + 1)
    bandwidth = torch.where(bandwidth > 0, bandwidth, 1)  # for one particle
    return torch.exp(-distances / bandwidth), bandwidth


def median(values: Tensor) -> Tensor:
    """The median, 0-d; the mean of the two in the middle for an even number of values, where torch
    returns the lower one."""
    lower = values.median()
    above = torch.where(values > lower, values, torch.inf).min()
    is_middle = 2 * (values <= lower).sum() > values.numel()  # an odd number, or a tie
    return (lower + torch.where(is_middle, lower, above)) / 2
