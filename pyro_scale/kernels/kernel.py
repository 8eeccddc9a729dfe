"""What a kernel is: hyperparameters and two pure functions.

A kernel moves one chain by one step.  It is written with arithmetic on vectors alone, so that
the driver may vmap it over chains and compile it.  It has no step counter, no device, no
randomness of its own and writes nothing in place: the step's noise, batch (inside the target)
and hyperparameter values come in.
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
        """(Gradient of the log joint over N at the position [D], the log joint's evaluation)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kernel(Hyperparameters):
    """A sampler: hyperparameters as fields, `init` and `update` as pure functions of their values
    at a step.

    Gradients are of the log joint over N, and so is the temperature that `init` and `update` take:
    `at(step, num_data)` gives values in these units.

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

    #: Standard-normal vectors [D] that one step uses.
    normals: ClassVar[int] = 1
    #: Fields that may differ from site to site.
    per_site: ClassVar[tuple[str, ...]] = ("lr",)
    #: How rows are drawn unless the user says otherwise.
    sampling: ClassVar[Literal["shuffle", "replacement"]] = "shuffle"
    #: Whether it may move in whitened coordinates: it has no preconditioner of its own.
    whitens: ClassVar[bool] = True
    #: Whether proposals are accepted or rejected, so that no step size biases the draws.  A step
    #: then takes all rows, and the state counts the `accepted` proposals.
    adjusted: ClassVar[bool] = False
    #: What is known of the method without running it, if anything.
    theory: ClassVar[Theory | None] = None

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

    def init(self, position: Tensor, values: Values, noise: Tensor) -> Any:
        """The state of a chain that starts at a position.

        Args:
            position: [D].
            values: the hyperparameters' at step 0, each 0-d or [D], the temperature over N.
            noise: standard normals, [D].
        """
        raise NotImplementedError

    def update(self, state: Any, target: Target, values: Values, noise: Tensor) -> tuple[Any, Any]:
        """(The next state, the target's evaluation).

        Args:
            state: the chain's.
            target: the log posterior of the step's batch.
            values: the hyperparameters' at this step, each 0-d or [D], the temperature over N.
            noise: standard normals, `[normals, D]`.
        """
        raise NotImplementedError


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
