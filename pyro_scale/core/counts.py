"""Counts that users pass: whole numbers from a least one on."""

from __future__ import annotations

from numbers import Integral

from pyro_scale.errors import ArgumentError


def as_count(name: str, value: object, least: int = 1, hint: str = "") -> int:
    """The value as an int.

    Raises:
        ArgumentError: no whole number, or less than `least`; it names the argument.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        return int(value)
    raise ArgumentError(f"{name}={value!r}: pass an int >= {least}{hint}")
