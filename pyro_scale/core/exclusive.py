"""State that belongs to the whole process, and the lock that guards that state.

The state is Pyro's handler stack, param store and validation flag, torch's random generator,
switches and module hooks, and Python's warning filters. Code that reads or changes any of it holds
the lock, and only briefly: never across steps of a sampler, and never while waiting for another
thread.
"""

from __future__ import annotations

import functools
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: The lock.  A thread that holds it may take it again.
exclusive = threading.RLock()


@contextmanager
def own_generator(seed: int | None = None) -> Iterator[None]:
    """Context in which only this thread uses torch's random generator, seeded with `seed`; not
    seeded if None. Afterwards the generator's state is restored.
    """
    with exclusive, torch.random.fork_rng():
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available():  # unlike this, torch.manual_seed keeps a traceback alive
                torch.cuda.manual_seed_all(seed)
        yield


class Ignored:
    """A factory of contexts that hide some warnings, in all threads, while any thread is inside
    such a context.

    `warnings.catch_warnings` restores all filters that were there when it began, those of other
    threads among them, so it cannot be used around code that takes long.

    Args:
        message: regular expression that matches the beginning of the warnings' texts.
    """

    def __init__(self, message: str):
        self._message, self._inside = message, 0
        self._filter: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the warnings are hidden, in all threads."""
        with exclusive:
            self._enter()
        try:
            yield
        finally:
            with exclusive:
                self._inside -= 1
                if not self._inside:
                    self._leave()

    def _enter(self) -> None:
        self._inside += 1
        if self._filter is None or self._filter not in warnings.filters:
            warnings.filterwarnings("ignore", message=self._message)
            self._filter = warnings.filters[0]

    def _leave(self) -> None:
        if self._filter in warnings.filters:  # unless a catch_warnings replaced the filters
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        self._filter = None


@contextmanager
def without_onednn() -> Iterator[None]:
    """Context in which torch does not use oneDNN, whose recurrent layers cannot be traced; holds
    the process's lock."""
    with exclusive, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


class PlainLSTM(TorchFunctionMode):
    """Context in which torch computes LSTMs without oneDNN, whose LSTM has no forward derivative.
    Other operations, such as convolutions, still use oneDNN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.lstm:
            return func(*args, **(kwargs or {}))
        with without_onednn():
            return func(*args, **(kwargs or {}))


def raise_if_from_handler(error: BaseException) -> None:
    """Raises an exception again if a signal handler raised it, such as a time limit of the user's;
    otherwise does nothing.

    Call this in an `except Exception` that treats errors of a model or a compiler as a reason to do
    something else.  An exception of a signal handler is no such reason: it has to end the run.
    """
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and handlers:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def _code(handler: Any) -> CodeType | None:
    """The code object of a Python signal handler, which identifies its frames in a traceback; None
    if the handler is not written in Python, such as the system's default.
    """
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, type(handler).__call__ if callable(handler) else None):
        code = getattr(function, "__code__", None)  # a method returns its function's code
        if code is not None:
            return code
    return None
