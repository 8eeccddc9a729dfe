"""Exceptions that a signal handler raised, such as a time limit of the user's."""

from __future__ import annotations

import functools
import signal
from types import CodeType
from typing import Any


def raise_if_from_handler(error: BaseException) -> None:
    """Raises an exception on that a signal handler raised in the middle of other code.

    Call this where any exception of a model or a compiler is taken for a reason to do something
    else.  What a handler raises is none: it has to leave the run as it is.
    """
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and handlers:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def _code_of(handler: Any) -> CodeType | None:
    """A Python handler's code; None of defaults."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, type(handler).__call__ if callable(handler) else None):
        code = getattr(function, "__code__", None)  # a method gives that of its function
        if code is not None:
            return code
    return None
