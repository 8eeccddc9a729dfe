"""Warnings that point at the user's line of code."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

from pyro_scale.core.exclusive import Ignored
from pyro_scale.errors import Code, PyroScaleWarning

_PACKAGE = str(Path(__file__).parents[1])


def warn(category: type[PyroScaleWarning], message: str, code: Code | None = None) -> None:
    """Issues a warning that points at the line where the user's code calls the package.

    Args:
        category: class of the warning.
        message: text of the warning.
        code: section of the documentation's page of symptoms to refer to; None for the category's.
    """
    frame: FrameType | None = sys._getframe()
    level = outermost = 0
    while frame is not None:
        level += 1
        if frame.f_code.co_filename.startswith(_PACKAGE):
            outermost = level
        frame = frame.f_back
    warnings.warn(category(message, code=code), stacklevel=outermost + 1)


#: Context manager that hides torch's warning about operations that vmap runs one by one.
without_vmap_warnings = Ignored("There is a performance drop")
