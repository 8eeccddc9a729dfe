"""Step inputs: everything that changes from step to step, drawn in blocks of many steps.

A step is a function of its state, its batch, its noise and its hyperparameters' values.  The last
three are drawn in bulk.  A thread draws the next blocks while one is used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.data.batches import Batches
from pyro_scale.rng.streams import NoiseStream

#: Bytes of one block, unless one step has more; and steps, which leave its bytes in the cache.
_BUDGET, _LONGEST = 2**25, 2**14
#: Blocks that are drawn ahead: noise and indices come many at a time.
_AHEAD = 3


@dataclass(frozen=True)
class StepInputs:
    """What some steps need besides the state.

    Attributes:
        start: the number of the first step.
        values: every hyperparameter's, `[steps]`.
        noise: standard normals, `[chains, steps, normals, latents]`.
        changing: what changes of the batches, tensors `[chains, steps, ...]`, or `[1, steps, ...]`
            of chains that have one batch.
    """

    start: int
    values: Mapping[str, Tensor]
    noise: Tensor
    changing: Any

    def __len__(self) -> int:
        return self.noise.shape[1]

    @property
    def stop(self) -> int:
        """The number of the step after the last."""
        return self.start + len(self)

    def at(self, place: int) -> tuple[dict[str, Tensor], Tensor, Any]:
        """(Values, noise, changing) of one step; place counts from this block's first."""
        values = {name: column[place] for name, column in self.values.items()}
        changing = pytree.tree_map(lambda leaf: leaf[:, place], self.changing)
        return values, self.noise[:, place], changing

    def part(self, first: int, last: int) -> StepInputs:
        """The steps at places first ... last - 1."""
        values = {name: column[first:last] for name, column in self.values.items()}
        changing = pytree.tree_map(lambda leaf: leaf[:, first:last], self.changing)
        return StepInputs(self.start + first, values, self.noise[:, first:last], changing)

    def parts(self, steps: int | None) -> Iterator[StepInputs]:
        """The block in parts of at most so many steps; None leaves it whole."""
        size = steps or len(self)
        return (self.part(i, min(i + size, len(self))) for i in range(0, len(self), size))

    def of(self, chains: slice) -> StepInputs:
        """The block of some of the chains, which may all have one batch."""
        changing = pytree.tree_map(
            lambda leaf: leaf[chains] if len(leaf) > 1 else leaf, self.changing
        )
        return StepInputs(self.start, self.values, self.noise[chains], changing)

    def copied(self) -> StepInputs:
        """The block in memory of its own, which is not written over."""
        changing = pytree.tree_map(lambda leaf: leaf.clone(), self.changing)
        return StepInputs(self.start, self.values, self.noise.clone(), changing)


@dataclass(frozen=True)
class Inputs:
    """What all steps of a run take.

    Attributes:
        values: every hyperparameter's, `[all steps]`.
        noise: the chains' noise.
        batches: the chains' batches.
    """

    values: Mapping[str, Tensor]
    noise: NoiseStream
    batches: Batches

    def block(self, start: int, stop: int, spent: StepInputs | None = None) -> StepInputs:
        """The block of steps start ... stop - 1; each begins where the last one ended.

        The memory of a spent block, if it is as long, is written over.
        """
        values = {name: column[start:stop] for name, column in self.values.items()}
        if spent is None or len(spent) != stop - start:
            return StepInputs(
                start, values, self.noise.span(start, stop), self.batches.take(start, stop)
            )
        noise = self.noise.span(start, stop, spent.noise)
        return StepInputs(start, values, noise, self.batches.take(start, stop, spent.changing))

    def blocks(self, spans: Iterable[tuple[int, int]]) -> Generator[StepInputs]:
        """The blocks of some spans of steps, the next ones drawn while one is used.

        A block is spent when the next one is asked for.  Close it to end its thread.
        """
        thread = _Thread("pyro_scale-block")
        try:
            drawn: deque[Future[StepInputs]] = deque()
            spent: StepInputs | None = None
            for span in spans:
                drawn.append(thread.submit(self.block, *span, spent))
                spent = None
                if len(drawn) > _AHEAD:
                    spent = drawn.popleft().result()
                    yield spent
            while drawn:
                yield drawn.popleft().result()
        finally:
            thread.end()


class _Thread:
    """A thread that makes one call after another.

    A loader forks its workers from it.  A fork of a `ThreadPoolExecutor`'s thread ends in an error,
    as on its way out it waits for the thread that it runs on.
    """

    def __init__(self, name: str):
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._is_ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """What a call will return, or raise."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def end(self) -> None:
        """Waits for the call that is being made, and makes no other."""
        self._is_ended = True
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_ended:
            call()


def bytes_per_step(block: StepInputs) -> int:
    """What one step of all chains takes on a block."""
    leaves = [block.noise, *pytree.tree_leaves(block.changing)]
    return sum(leaf[:, 0].numel() * leaf.element_size() for leaf in leaves)


def steps_within_budget(block: StepInputs, kept_bytes: int = 0) -> int:
    """How many steps a block like this one may have, where each also leaves so many bytes: a power
    of two."""
    affordable = max(1, _BUDGET // max(1, bytes_per_step(block) + kept_bytes))
    return min(_LONGEST, 1 << (affordable.bit_length() - 1))
