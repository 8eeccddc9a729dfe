"""What a kernel is: hyperparameters and two pure functions.

A kernel moves one chain by one step.  It is written with arithmetic on vectors alone, so that
the driver may vmap it over chains and compile it.  It has no step counter, no device, no
randomness of its own and writes nothing in place: the step's noise, batch (inside the target)
and hyperparameter values come in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError

#: A hyperparameter: a float or a schedule as the user gives it, a 0-d tensor once bound.
Hyper: TypeAlias = Any


class Target(Protocol):
    """The log posterior of one batch, as a kernel sees it."""

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        """(Gradient of the log joint over N at the position [D], the log joint's evaluation)."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Hyperparameters as fields, `init` and `update` as pure functions of them.

    A field is a float or a schedule; `bind` puts a step's values in their place, as the 0-d
    tensors that `init` and `update` expect.
    """

    lr: Hyper
    temperature: Hyper = 1.0

    #: Standard-normal vectors [D] that one step uses.
    normals: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name, hyper in self.hyperparameters().items():
            if not callable(hyper):
                self.check(name, hyper)

    def hyperparameters(self) -> dict[str, Hyper]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check(self, name: str, value: object, where: str = "") -> None:
        """Refuses a hyperparameter's value out of its range.

        Raises:
            ArgumentError: not a finite number; below zero; or zero, but for the temperature.
        """
        may_be_zero = name == "temperature"
        bound = ">= 0" if may_be_zero else "> 0"
        if isinstance(value, Real) and not isinstance(value, bool):
            number = float(value)
            if 0 < number < float("inf") or (may_be_zero and number == 0):
                return
        raise ArgumentError(
            f"{name}={value!r}{where}: pass a number {bound}, or a schedule (step -> number)"
        )

    def values(self, step: int) -> dict[str, Tensor]:
        """Every hyperparameter's value at a step, 0-d in float64.

        Raises:
            ArgumentError: a schedule gives a value out of range; it names the step.
        """
        return {
            name: torch.tensor(self._value(name, hyper, step), dtype=torch.float64)
            for name, hyper in self.hyperparameters().items()
        }

    def tape(self, num_steps: int) -> dict[str, Tensor]:
        """Every hyperparameter's values at steps 0 ... num_steps - 1, `[num_steps]` in float64."""
        tape = {}
        for name, hyper in self.hyperparameters().items():
            steps = range(num_steps if callable(hyper) else 1)
            column = [self._value(name, hyper, step) for step in steps]
            tape[name] = torch.tensor(column, dtype=torch.float64).expand(num_steps)
        return tape

    def _value(self, name: str, hyper: Hyper, step: int) -> float:
        value = float(hyper(step)) if callable(hyper) else float(hyper)
        self.check(name, value, f" at step {step}")
        return value

    def bind(self, values: Mapping[str, Tensor]) -> Self:
        """The kernel with these values, 0-d tensors, in place of its floats and schedules."""
        bound = object.__new__(type(self))
        for name in self.hyperparameters():
            object.__setattr__(bound, name, values[name])
        return bound

    def init(self, position: Tensor, noise: Tensor) -> Any:
        """The state of a chain that starts at a position [D]; noise [D] is standard normal."""
        raise NotImplementedError

    def update(self, state: Any, target: Target, noise: Tensor) -> tuple[Any, Any]:
        """(The next state, the target's evaluation at this one); noise is [normals, D]."""
        raise NotImplementedError

    def relaxation_steps(self, precision: Tensor) -> Tensor:
        """About how many steps a chain needs to forget its start.

        Args:
            precision: the posterior's precision over N, L in the formulas.
        """
        raise NotImplementedError

    def added_temperature(self, gradient_noise: Tensor) -> Tensor:
        """What minibatches add to the temperature, to first order in lr.

        Args:
            gradient_noise: the variance of the minibatch gradient of the log joint, over N.
        """
        raise NotImplementedError
