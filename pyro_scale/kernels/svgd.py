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
    """Stein variational gradient descent (Liu and Wang 2016, algorithm 1) of n particles x_i:

        x_i' = x_i + optimizer(phi(x_i))
        phi(x) = 1/n sum_j [k(x_j, x) g(x_j) + T d k(x_j, x) / d x_j]
        k(x, x') = exp(-|x - x'|^2 / h),        h = med^2 / log(n + 1)

    with g the gradient of log joint / N, N the number of rows of the data, T the temperature
    divided by N, and med^2 the median of all n^2 squared distances at each step. The paper has log
    n, its released code log(n + 1), which is also defined for one particle: that is MAP.

    Use this if a few points are to represent a posterior of few dimensions.  A step costs n
    gradients, and n^2 distances.

    Args:
        optimizer: optimizer that receives the negative phi as the gradient of a loss.
        temperature: 1 approximates the posterior; below 1, particles are closer together.
    """

    temperature: Hyper = 1.0

    normals: ClassVar[int] = 0
    settings: ClassVar[tuple[str, ...]] = ("optimizer",)

    def init(self, position: Tensor, values: Values, noise: Tensor) -> MAPState:
        """The state of one particle that starts at a position.

        Args:
            position: unconstrained parameters where the particle starts, `[D]`.
            values: hyperparameters at step 0 by name.
            noise: not used.
        """
        return MAPState(position, init_optimizer(self.optimizer_at(values), [position]))

    def couple(self, positions: Tensor, gradients: Tensor, values: Values) -> Tensor:
        """phi, the direction in which each particle moves, `[n, D]`: the gradients averaged by the
        RBF kernel, plus T times the repulsion of the particles.

        Args:
            positions: particles, `[n, D]`.
            gradients: gradient, at each particle, of the log joint divided by N, the number of rows
                of the data, `[n, D]`.
            values: hyperparameters of the step by name, the temperature T divided by N.
        """
        centered = positions - positions.mean(0)  # distances are differences of squares
        kernel, bandwidth = rbf(centered)
        repulsion = 2 / bandwidth * (centered * kernel.sum(1, keepdim=True) - kernel @ centered)
        return (kernel @ gradients + values["temperature"] * repulsion) / len(positions)

    def move(self, state: MAPState, direction: Tensor, values: Values) -> MAPState:
        """A particle's state after one step of the optimizer.

        Args:
            state: particle's position, and the optimizer's state.
            direction: phi at the particle, `[D]`, in which the optimizer ascends.
            values: hyperparameters of the step by name.
        """
        (position,), optimizer = ascend(
            self.optimizer_at(values), [direction], state.optimizer, [state.position]
        )
        return MAPState(position, optimizer)


def rbf(points: Tensor) -> tuple[Tensor, Tensor]:
    """(The RBF kernel exp(-|x - x'|^2 / h) of all pairs of points, `[n, n]`; its bandwidth h, 0-d,
    from the median of the squared distances). Points are `[n, D]`."""
    squares = points.square().sum(1)
    distances = squares[:, None] + squares - 2 * points @ points.T
    bandwidth = median(distances) / math.log(len(points) + 1)
    bandwidth = torch.where(bandwidth > 0, bandwidth, 1)  # for one particle
    return torch.exp(-distances / bandwidth), bandwidth


def median(values: Tensor) -> Tensor:
    """The median of all elements, 0-d; the mean of the two in the middle for an even number of
    elements, where torch returns the lower one."""
    lower = values.median()
    above = torch.where(values > lower, values, torch.inf).min()
    is_middle = 2 * (values <= lower).sum() > values.numel()  # an odd number, or a tie
    return (lower + torch.where(is_middle, lower, above)) / 2
