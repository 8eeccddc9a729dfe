"""Counts: those that users pass, whole numbers from a least one on; and some of many."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError


def as_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """The value as an int.

    Raises:
        ArgumentError: no whole number, or less than `least`; it names the argument.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        return int(value)
    raise ArgumentError(f"{name}={value!r}: pass an int >= {least}{hint}")


def evenly(total: int, some: int) -> Tensor:
    """At most `some` of the places 0, 1, ..., total - 1, evenly spread from the first to the
    last."""
    places = torch.linspace(0, total - 1, min(total, some), dtype=torch.float64)
    return places.round().long()
