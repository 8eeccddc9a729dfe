"""Checks of counts and flags that users pass, and evenly spaced choices among many."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Final, Literal

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError

#: What is to be chosen.
AUTO: Final[Literal["auto"]] = "auto"
_MOST = 2**53


def is_auto(value: Any) -> bool:
    """Whether a value is to be chosen: other values, such as tensors, may refuse comparison."""
    return isinstance(value, str) and value == AUTO


def as_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """The value as an int.

    Raises:
        ArgumentError: no whole number, less than `least`, or beyond 2^53, up to which float64 has
            all of them; it names the argument.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        if int(value) > _MOST:
            raise ArgumentError(f"{name}={value!r}: pass an int of at most 2^53")
        return int(value)
    told = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    raise ArgumentError(f"{name}={told}: pass an int >= {least}{hint}")


def as_flag(name: str, value: object) -> bool:
    """The value, which is True or False.

    Raises:
        ArgumentError: anything else, such as "no", which Python takes for true.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r}: pass True or False")
    return value


def evenly(total: int, count: int) -> Tensor:
    """At most `count` of the places 0, 1, ..., total - 1, evenly spread from the first to the
    last."""
    places = torch.linspace(0, total - 1, min(total, count), dtype=torch.float64)
    return places.round().long()
