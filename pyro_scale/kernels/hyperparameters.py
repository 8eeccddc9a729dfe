"""Hyperparameters of a method, as fields: numbers, schedules, or dicts of them by site."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical, Falling
from pyro_scale.core.validation import as_count
from pyro_scale.errors import ArgumentError

#: A hyperparameter as users pass it: a float, a schedule, or a dict of them (or of tensors) by
#: site.
Hyper: TypeAlias = Any
#: The smallest positive number.
_LEAST = 5e-324
#: Hyperparameters at a step by name: tensors, 0-d or, with a value for each element, [D].
Values: TypeAlias = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Base of dataclasses whose fields are hyperparameters and settings of a method.

    A hyperparameter is a float, a schedule (function from a step's number to a number) or, for
    fields in `per_site`, a dict of these by site. A setting, such as an optimizer, is the same at
    all steps.
    """

    #: Fields that may have a value for each site.
    per_site: ClassVar[tuple[str, ...]] = ()
    #: Fields whose values may be zero.
    may_be_zero: ClassVar[tuple[str, ...]] = ("temperature",)
    #: Fields that are settings, not hyperparameters.
    settings: ClassVar[tuple[str, ...]] = ()

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
                        f"{label}: Cyclical cannot be set per site, because it also controls the "
                        "temperature: pass it as lr"
                    )

    def hyperparameters(self) -> dict[str, Hyper]:
        """The hyperparameters as the user passed them: a dict from the field's name to a number, a
        schedule, or a dict of these by site. Settings, such as an optimizer, are left out.
        """
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in self.settings}

    def check(self, name: str, value: object, label: str, when: str = "") -> None:
        """Raises an error for a number that a hyperparameter may not have.

        Args:
            name: name of the field.
            value: a number; for an entry of a dict by site, also a tensor.
            label: name of the value in messages: that of the field, or `field['site']`.
            when: addition to the message, such as " at step 3".

        Raises:
            ArgumentError: the value is no finite number, is negative, or is zero in a field that
                must be positive.
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

    def at(self, step: int, num_data: int) -> dict[str, Tensor]:
        """A dict from the name of each hyperparameter to its value at a step, as `init` and
        `update` take them: float64, the temperature divided by N. To move a chain by hand.

        Args:
            step: number of the step, from 0.
            num_data: N, the number of rows of data.

        Raises:
            ArgumentError: a schedule returns a value out of range at this step, or N is no count.
        """
        return self.per_datum(self.values(step), as_count("num_data", num_data))

    @staticmethod
    def per_datum(values: Values, num_data: int) -> dict[str, Tensor]:
        """The hyperparameters in the units in which `init` and `update` take them: a copy of a dict
        from names to tensors, in which `temperature`, if there is one, is divided by N.
        """
        return {k: v / num_data if k == "temperature" else v for k, v in values.items()}

    def values(self, step: int) -> dict[str, Tensor]:
        """The value of each hyperparameter at a step, a dict of tensors by name: float64, 0-d, or
        `[entries]` for a hyperparameter that is a dict by site.

        The temperature is not divided by N, the number of rows of the data: 1 samples the
        posterior. An entry of a dict that is a tensor (factors for a site's elements) counts as 1
        here.

        Raises:
            ArgumentError: a schedule returns a value out of range at this step.
        """
        return {name: column[-1] for name, column in self._columns(range(step, step + 1)).items()}

    def columns(self, num_steps: int) -> dict[str, Tensor]:
        """A dict from the name of each hyperparameter to its values at steps 0, ..., num_steps - 1,
        `[num_steps]`, or `[num_steps, entries]` for a dict by site; units as in `values`. `Falling`
        schedules reach 0 after the last of these steps."""
        columns = self.over(num_steps)._columns(range(num_steps))
        return {
            name: column.expand(num_steps, *column.shape[1:]) for name, column in columns.items()
        }

    def over(self, num_steps: int) -> Self:
        """A copy for a run of known length: hyperparameters that are `Falling` schedules reach 0
        after `num_steps` steps.
        """
        falling = {
            name: hyper.over(num_steps)
            for name, hyper in self.hyperparameters().items()
            if isinstance(hyper, Falling)
        }
        return dataclasses.replace(self, **falling) if falling else self

    def _columns(self, steps: range) -> dict[str, Tensor]:
        """The values of all hyperparameters at some steps: a dict from name to a tensor `[steps,
        ...]`, or `[1, ...]` if the hyperparameter does not change.
        """
        columns = {}
        for name, hyper in self.hyperparameters().items():
            entries = _entries(name, hyper).items()
            parts = [self._column(name, value, label, steps) for label, value in entries]
            if isinstance(hyper, Mapping):
                columns[name] = torch.stack(torch.broadcast_tensors(*parts), dim=1)
            else:
                columns[name] = parts[0]
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


def _entries(name: str, hyper: Hyper) -> dict[str, Any]:
    """The parts of a hyperparameter that are checked and evaluated one by one: a dict from a label
    for messages to a number, schedule or tensor. There is one entry for each site, labeled
    `name['site']`, if the hyperparameter is a dict by site; otherwise one entry, labeled `name`.
    """
    if isinstance(hyper, Mapping):
        return {f"{name}[{site!r}]": value for site, value in hyper.items()}
    return {name: hyper}
