"""Checks of counts and flags that users pass, and evenly spaced choices among many."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Final, Literal

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError

#: Value of arguments that are to be chosen.
AUTO: Final[Literal["auto"]] = "auto"
#: Largest count: float64 represents all integers up to it.
_MOST_COUNT = 2**53


def is_auto(value: Any) -> bool:
    """Whether a value is "auto"; tensors, which cannot be compared with a string, are not."""
    return isinstance(value, str) and value == AUTO


def as_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """The value as an int.

    Raises:
        ArgumentError: it is no whole number, below `least`, or above 2^53; the message names the
            argument.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        if int(value) > _MOST_COUNT:
            raise ArgumentError(f"{name}={value!r}: pass an int of at most 2^53")
        return int(value)
    shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    raise ArgumentError(f"{name}={shown}: pass an int >= {least}{hint}")


def as_flag(name: str, value: object) -> bool:
    """The value, if it is True or False.

    Raises:
        ArgumentError: it is something else, such as "no", which counts as true in Python.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r}: pass True or False")
    return value


def evenly(total: int, count: int) -> Tensor:
    """At most `count` of the numbers 0, ..., total - 1, evenly spaced from first to last."""
    places = torch.linspace(0, total - 1, min(total, count), dtype=torch.float64)
    return places.round().long()
