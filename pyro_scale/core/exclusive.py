"""One lock for state that belongs to the whole process.

That state is Pyro's handler stack, param store and validation flag, torch's generator, switches
and module hooks, and Python's warning filters.  Code that reads or changes any of it holds the
lock, and only briefly: never across steps, and never while waiting for another thread.
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
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available():  # torch.manual_seed keeps a traceback where it is not
                torch.cuda.manual_seed_all(seed)
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
