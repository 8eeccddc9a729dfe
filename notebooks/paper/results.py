"""A report's numbers as they are kept beside its script."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def mean_and_error(values: Sequence[float]) -> list[float]:
    """A mean and its standard error."""
    return [statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5]


def rounded(value: Any, digits: int = 5) -> Any:
    """Floats to so many digits after the point, all the way down."""
    if isinstance(value, dict):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner, digits) for inner in value]
    return round(value, digits) if isinstance(value, float) else value
