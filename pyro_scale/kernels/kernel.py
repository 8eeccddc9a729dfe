"""What a kernel is: hyperparameters and two pure functions.

A kernel moves one chain by one step.  It is written with arithmetic on vectors alone, so that
the driver may vmap it over chains and compile it.  It has no step counter, no device, no
randomness of its own and writes nothing in place: the step's noise, batch (inside the target)
and hyperparameter values come in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError

#: A hyperparameter as the user gives it: a float, a schedule, or a dict of them (or of tensors)
#: by site.  Once bound it is a tensor, 0-d or a value for each element of the position, [D].
Hyper: TypeAlias = Any


class Target(Protocol):
    """The log posterior of one batch, as a kernel sees it."""

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        """(Gradient of the log joint over N at the position [D], the log joint's evaluation)."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Hyperparameters as fields, `init` and `update` as pure functions of them.

    A field is a float, a schedule or, where that makes sense, a dict of them by site; `bind`
    puts a step's values in their place, as the tensors that `init` and `update` expect.
    """

    lr: Hyper
    temperature: Hyper = 1.0

    #: Standard-normal vectors [D] that one step uses.
    normals: ClassVar[int] = 1
    #: Fields that may differ from site to site.
    per_site: ClassVar[tuple[str, ...]] = ("lr",)
    #: Fields whose values may be zero.
    may_be_zero: ClassVar[tuple[str, ...]] = ("temperature",)
    #: Whether gradient noise heats, and by `added_temperature` exactly to first order.
    heated: ClassVar[bool] = True
    #: The largest lr that makes sense for any posterior, where the method has a clock of its own.
    largest_lr: ClassVar[float] = math.inf
    #: How rows are drawn unless the user says otherwise.
    sampling: ClassVar[Literal["shuffle", "replacement"]] = "shuffle"

    def __post_init__(self) -> None:
        for name, hyper in self.hyperparameters().items():
            if isinstance(hyper, Mapping) and name not in self.per_site:
                raise ArgumentError(
                    f"{name} is one number for all sites of {type(self).__name__}, not a dict; "
                    f"by site: {', '.join(self.per_site)}"
                )
            entries = _entries(name, hyper)
            if not entries:
                raise ArgumentError(f"{name}={{}}: pass a value for each site, or one for all")
            for label, value in entries.items():
                if not callable(value):
                    self.check(name, value, label)
                if isinstance(value, Cyclical) and label != "lr":
                    raise ArgumentError(
                        f"{label}: pass a Cyclical as lr itself, for it rules all sites' noise"
                    )

    def hyperparameters(self) -> dict[str, Hyper]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check(self, name: str, value: object, label: str, when: str = "") -> None:
        """Refuses a hyperparameter's value out of its range.

        Raises:
            ArgumentError: not a finite number; below zero; or zero where that has no meaning.
        """
        least, bound = (0.0, ">= 0") if name in self.may_be_zero else (_LEAST, "> 0")
        by_site = label != name
        if by_site and isinstance(value, Tensor) and value.is_floating_point():
            if bool(((value >= least) & value.isfinite()).all()):
                return
            value = "tensor with other elements"
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if is_number and least <= float(value) < float("inf"):  # type: ignore[arg-type]
            return
        kinds = "a number, or a tensor of numbers," if by_site else "a number"
        raise ArgumentError(
            f"{label}={value!r}{when}: pass {kinds} {bound}, or a schedule (step -> number)"
        )

    def values(self, step: int) -> dict[str, Tensor]:
        """Every hyperparameter's value at a step in float64: 0-d, or `[entries]` of a dict.

        An entry that is a tensor counts as 1 here.

        Raises:
            ArgumentError: a schedule gives a value out of range; it names the step.
        """
        return {name: column[-1] for name, column in self._columns(range(step, step + 1)).items()}

    def tape(self, num_steps: int) -> dict[str, Tensor]:
        """Every hyperparameter's values at steps 0 ... num_steps - 1 in float64: `[num_steps]`,
        or `[num_steps, entries]` of a dict; as for `values`."""
        columns = self._columns(range(num_steps))
        return {
            name: column.expand(num_steps, *column.shape[1:]) for name, column in columns.items()
        }

    def _columns(self, steps: range) -> dict[str, Tensor]:
        """`[steps, ...]` by name, or `[1, ...]` where all steps have the same."""
        columns = {}
        for name, hyper in self.hyperparameters().items():
            entries = _entries(name, hyper).items()
            parts = [self._column(name, value, label, steps) for label, value in entries]
            if isinstance(hyper, Mapping):
                columns[name] = torch.stack(torch.broadcast_tensors(*parts), dim=1)
            else:
                columns[name] = parts[0]
        if isinstance(self.lr, Cyclical):
            explores = torch.tensor([self.lr.explores(step) for step in steps])
            columns["temperature"] = torch.where(explores, 0.0, columns["temperature"])
        return columns

    def _column(self, name: str, value: Any, label: str, steps: range) -> Tensor:
        if isinstance(value, Tensor):
            return torch.ones(1, dtype=torch.float64)
        try:
            column = [float(value(step)) for step in steps] if callable(value) else [float(value)]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"{label}: the schedule must give numbers ({error})") from error
        for step, number in zip(steps, column, strict=False):
            self.check(name, number, label, f" at step {step}")
        return torch.tensor(column, dtype=torch.float64)

    def bind(self, values: Mapping[str, Tensor]) -> Self:
        """The kernel with these values, tensors, in place of its floats and schedules."""
        return type(self).of_tensors(**{name: values[name] for name in self.hyperparameters()})

    @classmethod
    def of_tensors(cls, **values: Tensor) -> Self:
        """A bound kernel with these values, of all hyperparameters."""
        bound = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(bound, name, value)
        return bound

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
        """By what a bound kernel multiplies gradients besides lr, in the long run, [D].

        Args:
            mean_square: of the gradient over N, [D].
        """
        return torch.ones_like(mean_square)

    def travelling_steps(self, distance: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
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


#: The smallest positive number.
_LEAST = 5e-324


def _entries(name: str, hyper: Hyper) -> dict[str, Any]:
    """A hyperparameter's values by what to call them: itself, or those of its sites."""
    if isinstance(hyper, Mapping):
        return {f"{name}[{site!r}]": value for site, value in hyper.items()}
    return {name: hyper}
