"""A report's numbers as they are kept beside its script."""

from __future__ import annotations

from typing import Any


def rounded(value: Any, digits: int = 5) -> Any:
    """Floats to so many digits after the point, all the way down."""
    if isinstance(value, dict):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner, digits) for inner in value]
    return round(value, digits) if isinstance(value, float) else value
