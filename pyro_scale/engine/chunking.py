"""How many steps are drawn and moved together: the lengths of blocks."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence

from pyro_scale.engine.inputs import StepInputs

#: From when on a run should show its progress and can be interrupted.
_NOTICED_SECONDS = 0.05
#: Steps of a block where no clock is looked at.
_STEADY_STEPS = 64


class Pace:
    """Lets blocks grow twice as long each time, until one takes long enough to be noticed; one
    ends at each of `ends`, which ascend.

    What is drawn does not depend on it.

    Args:
        first: block.
        num_steps: of the run.
        most: steps of a block.
        ends: steps at which a block ends.
        by_clock: False lets blocks have the same lengths on every machine.
    """

    def __init__(
        self,
        first: StepInputs,
        num_steps: int,
        most: int,
        ends: Sequence[int] = (),
        by_clock: bool = True,
    ):
        self._most = most if by_clock else min(most, _STEADY_STEPS)
        self._first, self._num_steps, self._quick = first, num_steps, True
        self._ends, self._by_clock = ends, by_clock

    def opening(self) -> Iterator[tuple[int, int]]:
        """The first block's steps."""
        start = self._first.start
        while start < self._first.stop:
            stop = min(self._first.stop, self._next_end(start))
            yield start, stop
            start = stop

    def _next_end(self, start: int) -> int:
        place = bisect.bisect_right(self._ends, start)
        return self._ends[place] if place < len(self._ends) else self._num_steps

    def spans(self) -> Iterator[tuple[int, int]]:
        """Steps after the first block's."""
        start, size = self._first.stop, min(len(self._first), self._most)
        while start < self._num_steps:
            stop = min(start + size, self._next_end(start))
            yield start, stop
            start = stop
            if self._quick and 2 * size <= self._most:
                size *= 2

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        quick = time.perf_counter() - self._begun < _NOTICED_SECONDS
        self._quick = quick or not self._by_clock
