"""The interface of kernels: hyperparameters and two pure functions.

A kernel moves one chain by one step.  It consists of arithmetic on vectors, so that it can be
vmapped over chains and compiled.  It has no step counter, no device and no randomness of its own,
and writes nothing in place: noise, batch (inside the target) and hyperparameter values of the step
are arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper, Hyperparameters, Values


class Target(Protocol):
    """The log posterior of one batch, as a kernel sees it."""

    @property
    def num_data(self) -> int:
        """N."""
        ...

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        """(Gradient of the log joint at the position [D], over N; the log joint's evaluation)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kernel(Hyperparameters):
    """A sampler: hyperparameters as fields, `init` and `update` as pure functions of their values
    at a step.

    Gradients are of the log joint divided by N.  The temperature that `init` and `update` take is
    divided by N, too: `at(step, num_data)` returns values in these units.

    Examples:
        A chain by hand, on the posterior of 100 rows of variance 1:

        >>> import torch
        >>> from pyro_scale.kernels import BAOA
        >>> class Rows:
        ...     num_data = 100
        ...     def grad(self, position):
        ...         return -position, None  # of the log joint, over 100
        >>> kernel, source = BAOA(lr=0.3), torch.Generator().manual_seed(0)
        >>> values = kernel.at(step=0, num_data=100)
        >>> state = kernel.init(torch.zeros(2000), values, torch.randn(2000, generator=source))
        >>> for _ in range(100):
        ...     noise = torch.randn(kernel.normals, 2000, generator=source)
        ...     state, _ = kernel.update(state, Rows(), values, noise)
        >>> bool((state.position.var() * 100 - 1).abs() < 0.1)
        True
    """

    lr: Hyper
    temperature: Hyper = 1.0

    #: Number of standard-normal vectors [D] that one step uses.
    normals: ClassVar[int] = 1
    #: Fields that may have a value for each site.
    per_site: ClassVar[tuple[str, ...]] = ("lr",)
    #: How rows are drawn unless the user says otherwise.
    sampling: ClassVar[Literal["shuffle", "replacement"]] = "shuffle"
    #: Whether it may move in whitened coordinates, as it has no preconditioner itself.
    whitens: ClassVar[bool] = True
    #: Whether proposals are accepted or rejected, so that draws have no bias at any step size.  A
    #: step then uses all rows, and the state counts the `accepted` proposals.
    adjusted: ClassVar[bool] = False
    #: Predictions of theory about the method; None if there are none.
    theory: ClassVar[Theory | None] = None

    def _columns(self, steps: range) -> dict[str, Tensor]:
        columns = super()._columns(steps)
        if isinstance(self.lr, Cyclical):
            explores = torch.tensor([self.lr.explores(step) for step in steps])
            columns["temperature"] = torch.where(explores, 0.0, columns["temperature"])
        return columns

    @classmethod
    def from_sgd(cls, lr: Hyper, momentum: float) -> dict[str, Hyper]:
        """Hyperparameters with which the method at temperature 0 equals `torch.optim.SGD`, step for
        step, on the negative log joint over N.

        Args:
            lr: SGD's learning rate, a float or a schedule.
            momentum: SGD's momentum, with dampening 0.

        Raises:
            ArgumentError: the method has no such hyperparameters; a value is out of range.
        """
        raise ArgumentError(f"{cls.__name__} at temperature 0 is not SGD: use BAOA or SGHMC")

    def init(self, position: Tensor, values: Values, noise: Tensor) -> Any:
        """The state of a chain that starts at a position.

        Args:
            position: [D].
            values: hyperparameters at step 0, each 0-d or [D], the temperature over N.
            noise: standard normals, [D].
        """
        raise NotImplementedError

    def update(self, state: Any, target: Target, values: Values, noise: Tensor) -> tuple[Any, Any]:
        """One step: (next state, the target's evaluation).

        Args:
            state: of the chain.
            target: the log posterior of the step's batch.
            values: hyperparameters at this step, each 0-d or [D], the temperature over N.
            noise: standard normals, `[normals, D]`.
        """
        raise NotImplementedError


class Linearized(NamedTuple):
    """The limit of an adaptive kernel on a Gaussian, in units where its metric is 1.

    Attributes:
        kernel: a kernel that does not adapt.
        values: of its hyperparameters.
        gradient_noise: variance of the minibatch gradient over N that heats it.
    """

    kernel: Kernel
    values: Values
    gradient_noise: Tensor


class Theory(Protocol):
    """A method's convergence orders, rates and heating, at values as `update` takes them.

    A kernel needs no theory to sample.  Without one it has no `lr="auto"`, no `subtract_noise`, and
    no diagnostics that compare a run with predictions.
    """

    #: The bias of the position's distribution, without gradient noise, is of this order in lr.
    order: ClassVar[int] = 1
    #: Whether gradient noise heats, by `added_temperature` to first order.
    heated: ClassVar[bool] = True
    #: Largest useful lr on any posterior, for methods with a time scale of their own.
    largest_lr: ClassVar[float] = math.inf

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        """Approximate number of steps in which a chain forgets its start.

        Args:
            values: hyperparameters.
            precision: the posterior's precision over N, L in the formulas.
        """
        raise NotImplementedError

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        """Temperature over N that minibatches add, to first order in lr, if batches are drawn
        independently.

        Args:
            values: hyperparameters.
            gradient_noise: variance of the gradient of the log joint over N.
        """
        raise NotImplementedError

    def metric(self, values: Values, mean_square: Tensor) -> Tensor:
        """Stationary diagonal preconditioner, [D].

        Args:
            values: hyperparameters.
            mean_square: of the gradient over N, [D].
        """
        return torch.ones_like(mean_square)

    def traveling_steps(
        self, values: Values, distance: Tensor, gradient: Tensor, scale: Tensor
    ) -> Tensor:
        """Steps from a start to the mode that the kernel needs besides `relaxation_steps`, 0-d.

        Args:
            values: hyperparameters.
            distance: from the start to the mode, in units where the metric is 1: root mean square
                over elements, 0-d.
            gradient: of the log joint over N at the start, in the same way.
            scale: of an element in which that metric's length is 1, in the same way.
        """
        return torch.zeros_like(distance)

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        """The kernel without its adaptation, on a Gaussian in units where its metric is 1.

        Args:
            kernel: of this theory.
            values: hyperparameters.
            gradient_noise: variance of the minibatch gradient over N, [D].
        """
        return Linearized(kernel, values, gradient_noise)
