"""What is known of a kernel without running it: its order, its rates and its heat.

Theory is optional.  `lr="auto"` and some diagnostics build on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pyro_scale.kernels.hyperparameters import Values

if TYPE_CHECKING:
    from pyro_scale.kernels.kernel import Kernel


class Linearized(NamedTuple):
    """What a kernel settles to on a Gaussian, in units where its metric is 1.

    Attributes:
        kernel: a kernel without anything that adapts.
        values: its hyperparameters' values.
        gradient_noise: the variance of the minibatch gradient over N that heats it.
    """

    kernel: Kernel
    values: Values
    gradient_noise: Tensor


class Theory(Protocol):
    """A method's orders, rates and heat, at values as `update` takes them.

    A kernel without a theory samples all the same.  It has no `lr="auto"`, no `subtract_noise`,
    and no diagnostics that compare a run with what is expected of it.
    """

    #: The power of lr with which the bias of the position's law falls, without gradient noise.
    order: ClassVar[int] = 1
    #: Whether gradient noise heats, and by `added_temperature` exactly to first order.
    heated: ClassVar[bool] = True
    #: The largest lr that makes sense for any posterior, where the method has a clock of its own.
    largest_lr: ClassVar[float] = math.inf

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        """About how many steps a chain needs to forget its start.

        Args:
            values: the hyperparameters'.
            precision: the posterior's precision over N, L in the formulas.
        """
        raise NotImplementedError

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        """What minibatches add to the temperature over N, to first order in lr, batches drawn
        anew.

        Args:
            values: the hyperparameters'.
            gradient_noise: the variance of the gradient of the log joint over N.
        """
        raise NotImplementedError

    def metric(self, values: Values, mean_square: Tensor) -> Tensor:
        """Stationary diagonal preconditioner, [D].

        Args:
            values: the hyperparameters'.
            mean_square: of the gradient over N, [D].
        """
        return torch.ones_like(mean_square)

    def traveling_steps(
        self, values: Values, distance: Tensor, gradient: Tensor, scale: Tensor
    ) -> Tensor:
        """Steps that a chain takes on its way from a start, besides relaxing.

        Args:
            values: the hyperparameters'.
            distance: from the mode, where the metric is 1: root mean square, 0-d.
            gradient: of the log joint over N at the start, likewise.
            scale: of an element where that metric's length is 1, likewise.
        """
        return torch.zeros_like(distance)

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        """The kernel on a Gaussian where its metric is 1, without what adapts.

        Args:
            kernel: whose theory this is.
            values: the hyperparameters'.
            gradient_noise: the variance of the minibatch gradient over N, [D].
        """
        return Linearized(kernel, values, gradient_noise)


class Overdamped(Theory):
    """Of d theta = g dt + sqrt(2 T) dw, by steps of lr."""

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        return 1 / (values["lr"] * precision)

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return values["lr"] * gradient_noise / 2


class Underdamped(Theory):
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
