"""What a kernel is: hyperparameters and two pure functions.

A kernel moves one chain by one step.  It is written with arithmetic on vectors alone, so that
the driver may vmap it over chains and compile it.  It has no step counter, no device, no
randomness of its own and writes nothing in place: the step's noise, batch (inside the target)
and hyperparameter values come in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper, Hyperparameters


class Target(Protocol):
    """The log posterior of one batch, as a kernel sees it."""

    @property
    def num_data(self) -> int:
        """N."""
        ...

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        """(Gradient of the log joint over N at the position [D], the log joint's evaluation)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kernel(Hyperparameters):
    """A sampler: hyperparameters as fields, `init` and `update` as pure functions of them once
    they are bound to a step's values."""

    lr: Hyper
    temperature: Hyper = 1.0

    #: Standard-normal vectors [D] that one step uses.
    normals: ClassVar[int] = 1
    #: Fields that may differ from site to site.
    per_site: ClassVar[tuple[str, ...]] = ("lr",)
    #: The power of lr with which the bias of the position's law falls, without gradient noise.
    order: ClassVar[int] = 1
    #: Whether gradient noise heats, and by `added_temperature` exactly to first order.
    heated: ClassVar[bool] = True
    #: The largest lr that makes sense for any posterior, where the method has a clock of its own.
    largest_lr: ClassVar[float] = math.inf
    #: How rows are drawn unless the user says otherwise.
    sampling: ClassVar[Literal["shuffle", "replacement"]] = "shuffle"

    def _columns(self, steps: range) -> dict[str, Tensor]:
        columns = super()._columns(steps)
        if isinstance(self.lr, Cyclical):
            explores = torch.tensor([self.lr.explores(step) for step in steps])
            columns["temperature"] = torch.where(explores, 0.0, columns["temperature"])
        return columns

    @classmethod
    def from_sgd(cls, lr: Hyper, momentum: float) -> dict[str, Hyper]:
        """The hyperparameters with which temperature 0 is `torch.optim.SGD`, step for step, on
        the negative log joint over N.

        Args:
            lr: SGD's learning rate, a float or a schedule.
            momentum: SGD's; dampening is 0.

        Raises:
            ArgumentError: there are none; a value out of range.
        """
        raise ArgumentError(f"{cls.__name__} at temperature 0 is not SGD: use BAOA or SGHMC")

    def metric(self, mean_square: Tensor) -> Tensor:
        """Stationary diagonal preconditioner of a bound kernel, [D].

        Args:
            mean_square: of the gradient over N, [D].
        """
        return torch.ones_like(mean_square)

    def traveling_steps(self, distance: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
        """Steps that a bound kernel cannot but take on its way from a start, besides relaxing.

        Args:
            distance: from the mode, where the kernel's metric is 1: root mean square, 0-d.
            gradient: of the log joint over N at the start, likewise.
            scale: of an element where that metric's length is 1, likewise.
        """
        return torch.zeros_like(distance)

    def linear(self, gradient_noise: Tensor) -> tuple[Kernel, Tensor]:
        """(What a bound kernel settles to on a Gaussian, where its metric is 1; the gradient noise
        that heats it), without what adapts.

        Args:
            gradient_noise: the variance of the minibatch gradient over N, [D].
        """
        return self, gradient_noise

    def init(self, position: Tensor, noise: Tensor) -> Any:
        """The state of a chain that starts at a position [D]; noise [D] is standard normal."""
        raise NotImplementedError

    def update(self, state: Any, target: Target, noise: Tensor) -> tuple[Any, Any]:
        """(The next state, the target's evaluation); noise is [normals, D]."""
        raise NotImplementedError

    def relaxation_steps(self, precision: Tensor) -> Tensor:
        """About how many steps a chain needs to forget its start.

        Args:
            precision: the posterior's precision over N, L in the formulas.
        """
        raise NotImplementedError

    def added_temperature(self, gradient_noise: Tensor) -> Tensor:
        """What minibatches add to the temperature, to first order in lr, batches drawn anew.

        Args:
            gradient_noise: the variance of the gradient of the log joint over N, if the
                temperature is over N; both times N, if it is not.
        """
        raise NotImplementedError
