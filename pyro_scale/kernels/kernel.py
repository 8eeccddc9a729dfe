"""The interface of samplers: hyperparameters, and two pure functions that move a chain.

A sampler moves one chain by one step.  It consists of arithmetic on vectors, so that it can be
vmapped over chains and compiled.  It has no step counter, no device and no randomness of its own,
and writes nothing in place: standard normal numbers, the batch (inside of the target) and the
hyperparameters of the step are arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper, Hyperparameters, Values


class Target(Protocol):
    """Protocol of the log posterior of one batch of data, as a sampler's step evaluates it."""

    @property
    def num_data(self) -> int:
        """N, the number of rows of the full data set."""
        ...

    def grad(self, position: Tensor) -> tuple[Tensor, Evaluation]:
        """(Gradient `[D]` of the log joint at `position` `[D]`, divided by N, the number of rows of
        the data; the model's evaluation with the log joint, which the sampler's step returns
        unchanged or with another `log_joint`).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Kernel(Hyperparameters):
    """Base of samplers: hyperparameters are fields, and `init` and `update` are pure functions that
    start and move a chain.

    Gradients are of the log joint divided by N, the number of rows of data.  The temperature that
    `init` and `update` take is divided by N, too: `at(step, num_data)` returns the hyperparameters
    of a step in these units.

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
    #: Whether the sampler may move in whitened coordinates, as it has no preconditioner itself.
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
        """A dict of hyperparameters with which the sampler at temperature 0 equals
        `torch.optim.SGD`, step for step, on the negative log joint divided by N, the number of rows
        of the data.

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
            position: unconstrained parameters where the chain starts, `[D]`.
            values: hyperparameters at step 0 by name; tensors, each 0-d or `[D]`, the temperature
                divided by N, the number of rows of the data.
            noise: standard normal numbers, `[D]`, from which momenta are drawn.
        """
        raise NotImplementedError

    def update(self, state: Any, target: Target, values: Values, noise: Tensor) -> tuple[Any, Any]:
        """Moves a chain by one step. Returns (next state of the chain; the model's evaluation with
        the log joint, as `target.grad` returned it).

        Args:
            state: state of the chain, from `init` or the last `update`.
            target: log posterior of the step's batch.
            values: hyperparameters at this step by name; tensors, each 0-d or `[D]`, the
                temperature divided by N, the number of rows of the data.
            noise: standard normal numbers, `[normals, D]`.
        """
        raise NotImplementedError


class Linearized(NamedTuple):
    """A sampler without adaptation that behaves like an adaptive sampler in its limit, on a
    Gaussian in units in which the adaptive sampler's stationary preconditioner is 1.

    Attributes:
        kernel: sampler that does not adapt.
        values: hyperparameters of that sampler by name; tensors, the temperature divided by N.
        gradient_noise: the part of the variance of the minibatch gradient (of the log joint divided
            by N, the number of rows of the data) that heats that sampler, `[D]`.
    """

    kernel: Kernel
    values: Values
    gradient_noise: Tensor


class Theory(Protocol):
    """Predictions of theory about a sampler: the order in lr of its bias, its relaxation time, and
    how much minibatches raise its temperature. N is the number of rows of the data.

    All methods take hyperparameters `values` as `Kernel.update` does: tensors by name, the
    temperature divided by N. A sampler needs no theory. Without one it has no `lr="auto"`, no
    `subtract_noise`, and no diagnostics that compare a run with predictions.
    """

    #: Order in lr of the bias of the stationary distribution, without gradient noise.
    order: ClassVar[int] = 1
    #: Whether gradient noise raises the temperature, by `added_temperature` to first order in lr.
    heated: ClassVar[bool] = True
    #: Largest useful lr on any posterior, for methods with a time scale of their own.
    largest_lr: ClassVar[float] = math.inf

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        """Approximate number of steps in which a chain forgets its start, for each element: a
        tensor of the shape of `precision`. Used to choose lr and warm-up.

        Args:
            values: hyperparameters by name, the temperature divided by N, the number of rows of the
                data.
            precision: the posterior's precision divided by N, L in the samplers' formulas.
        """
        raise NotImplementedError

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        """The rise of the temperature, divided by N, that minibatch noise causes, to first order in
        lr, if minibatches are drawn independently; a tensor of the shape of `gradient_noise`.

        Args:
            values: hyperparameters by name, the temperature divided by N, the number of rows of the
                data.
            gradient_noise: variance of the minibatch gradient of the log joint divided by N.
        """
        raise NotImplementedError

    def metric(self, values: Values, mean_square: Tensor) -> Tensor:
        """The diagonal preconditioner of an adaptive sampler in its stationary state, as a factor
        on gradients, `[D]`; ones for samplers that do not adapt.

        Args:
            values: hyperparameters by name, the temperature divided by N, the number of rows of the
                data.
            mean_square: mean square of the gradient of the log joint divided by N, `[D]`.
        """
        return torch.ones_like(mean_square)

    def traveling_steps(
        self, values: Values, distance: Tensor, gradient: Tensor, scale: Tensor
    ) -> Tensor:
        """Steps that a chain needs from its start to the mode besides `relaxation_steps`, 0-d; 0 by
        default.

        Args:
            values: hyperparameters by name, the temperature divided by N, the number of rows of the
                data.
            distance: root mean square, over elements, of the distance from the start to the mode,
                in units in which the stationary preconditioner (`metric`) is 1; 0-d.
            gradient: root mean square, over elements, of the gradient at the start of the log joint
                divided by N, in these units; 0-d.
            scale: root mean square, over elements, of the change in params that has length 1 in
                these units; 0-d.
        """
        return torch.zeros_like(distance)

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        """A sampler without adaptation that behaves like `kernel` on a Gaussian, in units in which
        the stationary preconditioner (`metric`) is 1; by default `kernel` itself.

        Args:
            kernel: sampler that this theory is of.
            values: hyperparameters of the sampler by name, the temperature divided by N, the number
                of rows of the data.
            gradient_noise: variance, from minibatches, of the gradient of the log joint divided by
                N, `[D]`, in the same units.
        """
        return Linearized(kernel, values, gradient_noise)
