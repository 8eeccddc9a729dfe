"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

from pyro_scale.core.exclusive import Ignored
from pyro_scale.errors import Code, PyroScaleWarning

_OURS = str(Path(__file__).parents[1])


def warn(category: type[PyroScaleWarning], message: str, code: Code | None = None) -> None:
    """Warns where the user's code calls ours, however deep in ours that is found out.

    Args:
        category: the kind of warning.
        message: what it says.
        code: the section on it of the page of symptoms; the category's by default.
    """
    frame: FrameType | None = sys._getframe()
    level = outermost = 0
    while frame is not None:
        level += 1
        if frame.f_code.co_filename.startswith(_OURS):
            outermost = level
        frame = frame.f_back
    warnings.warn(category(message, code=code), stacklevel=outermost + 1)


#: Without torch's words on operations that vmap takes one by one, which nobody can act on.
without_vmap_warnings = Ignored("There is a performance drop")
