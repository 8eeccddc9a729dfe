"""What is known of Langevin dynamics without running it: orders, rates and heat.

A kernel's theory is optional.  `lr="auto"` and some diagnostics build on it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Kernel, Linearized, Theory


class OverdampedTheory(Theory):
    """Of d theta = g dt + sqrt(2 T) dw, by steps of lr."""

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        return 1 / (values["lr"] * precision)

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return values["lr"] * gradient_noise / 2


class UnderdampedTheory(Theory):
    """Of Langevin dynamics of a position and a momentum, by steps of lr."""

    order: ClassVar[int] = 2

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        lr, friction = values["lr"], values["friction"]
        overdamped = friction * values["mass"] / (lr * precision)
        return torch.maximum(overdamped, 2 / (lr * friction))

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return values["lr"] * gradient_noise / (2 * values["friction"] * values["mass"])

    def metric(self, values: Values, mean_square: Tensor) -> Tensor:
        return (1 / values["mass"]).expand_as(mean_square)

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        return Linearized(kernel, {**values, "mass": torch.ones(())}, gradient_noise)
