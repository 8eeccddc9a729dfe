"""Checks of counts and flags that users pass, and evenly spaced choices among the numbers 0, ...,
total - 1.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Final, Literal

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError

#: Value of arguments that the library is to choose.
AUTO: Final[Literal["auto"]] = "auto"
#: Largest count: float64 represents all integers up to it.
_MOST_COUNT = 2**53


def is_auto(value: Any) -> bool:
    """Whether an argument is the string "auto"; works for tensors, too, which cannot be compared
    with a string."""
    return isinstance(value, str) and value == AUTO


def as_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """The argument as an int, if it is a whole number of at least `least`.

    Args:
        name: name of the argument, for the message.
        value: what the user passed.
        least: smallest number that is allowed.
        hint: addition to the message, such as ", or None for all rows".

    Raises:
        ArgumentError: `value` is no whole number, below `least`, or above 2^53; the message names
            the argument.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        if int(value) > _MOST_COUNT:
            raise ArgumentError(f"{name}={value!r}: pass an int of at most 2^53")
        return int(value)
    shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    raise ArgumentError(f"{name}={shown}: pass an int >= {least}{hint}")


def as_flag(name: str, value: object) -> bool:
    """The argument itself, if it is True or False.

    Args:
        name: name of the argument, for the message.
        value: what the user passed.

    Raises:
        ArgumentError: `value` is something else, such as "no", which counts as true in Python.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r}: pass True or False")
    return value


def evenly(total: int, count: int) -> Tensor:
    """Indices that pick at most `count` of `total` items, evenly spaced from the first to the last:
    sorted int64 numbers from 0 to total - 1. All of them if `count` is not below `total`.
    """
    places = torch.linspace(0, total - 1, min(total, count), dtype=torch.float64)
    return places.round().long()
