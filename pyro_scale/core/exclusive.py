"""What is the whole process's, used by one thread at a time: Pyro's stack of handlers, its param
store and validation flag, torch's generator, its switches and module hooks, filters of warnings.

Whoever changes or reads one of them holds the lock, briefly: never across steps, and never while
it waits for another thread.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Held by the thread that uses any of them; one that has it may take it again.
exclusive = threading.RLock()


@contextmanager
def own_generator(seed: int | None = None) -> Iterator[None]:
    """torch's generator for this thread alone, seeded if so told, and left as it was."""
    with exclusive, torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        yield


class Ignored:
    """Warnings that are not shown while any thread is inside; it is not held up by others.

    `warnings.catch_warnings` puts back the filters that were there when it began, those of other
    threads among them, so it is not for what takes long.

    Args:
        message: how they begin, a regular expression.
    """

    def __init__(self, message: str):
        self._message, self._inside = message, 0
        self._filter: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Goes inside."""
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
        if self._filter in warnings.filters:  # else who catches warnings has put others in place
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        self._filter = None
