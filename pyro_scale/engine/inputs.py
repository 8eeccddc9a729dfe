"""Step inputs: everything that changes from step to step, drawn in blocks of many steps.

A step is a function of its state, its batch, its noise and its hyperparameters' values.  The last
three are drawn for many steps at once, by a thread that works some blocks ahead.
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

#: Largest size of a block in bytes, unless a single step has more, and its largest number of
#: steps, which keeps a block of small steps in the processor's cache.
_BUDGET, _LONGEST = 2**25, 2**14
#: Blocks that are drawn ahead.
_AHEAD = 3


@dataclass(frozen=True)
class StepInputs:
    """A block: what consecutive steps need besides the state.

    Attributes:
        start: number of the first step.
        values: every hyperparameter's values, `[steps]`.
        noise: standard normals, `[chains, steps, normals, latents]`.
        changing: the changing part of the batches, a pytree of tensors `[chains, steps, ...]`, or
            `[1, steps, ...]` if all chains have one batch.
    """

    start: int
    values: Mapping[str, Tensor]
    noise: Tensor
    changing: Any

    def __len__(self) -> int:
        return self.noise.shape[1]

    @property
    def stop(self) -> int:
        """Number of the step after the last."""
        return self.start + len(self)

    def at(self, place: int) -> tuple[dict[str, Tensor], Tensor, Any]:
        """(Values, noise, changing) of one step; `place` counts from the block's first step."""
        values = {name: column[place] for name, column in self.values.items()}
        changing = pytree.tree_map(lambda leaf: leaf[:, place], self.changing)
        return values, self.noise[:, place], changing

    def part(self, first: int, last: int) -> StepInputs:
        """The block of steps `first`, ..., `last - 1`, counted from the block's first step."""
        values = {name: column[first:last] for name, column in self.values.items()}
        changing = pytree.tree_map(lambda leaf: leaf[:, first:last], self.changing)
        return StepInputs(self.start + first, values, self.noise[:, first:last], changing)

    def parts(self, steps: int | None) -> Iterator[StepInputs]:
        """Blocks of at most `steps` steps each, in order; the whole block if None."""
        size = steps or len(self)
        return (self.part(i, min(i + size, len(self))) for i in range(0, len(self), size))

    def of_chains(self, chains: slice) -> StepInputs:
        """The block of these chains alone."""
        changing = pytree.tree_map(
            lambda leaf: leaf[chains] if len(leaf) > 1 else leaf, self.changing
        )
        return StepInputs(self.start, self.values, self.noise[chains], changing)

    def copied(self) -> StepInputs:
        """A copy whose memory is not reused for later blocks."""
        changing = pytree.tree_map(lambda leaf: leaf.clone(), self.changing)
        return StepInputs(self.start, self.values, self.noise.clone(), changing)


@dataclass(frozen=True)
class Inputs:
    """The inputs of all steps of a run.

    Attributes:
        values: every hyperparameter's values, `[all steps]`.
        noise: of the chains.
        batches: of the chains.
    """

    values: Mapping[str, Tensor]
    noise: NoiseStream
    batches: Batches

    def block(self, start: int, stop: int, spent: StepInputs | None = None) -> StepInputs:
        """The block of steps start, ..., stop - 1.  Each call begins where the last one ended.

        Args:
            start: first step.
            stop: step after the last.
            spent: a block that is not needed any more; if it has as many steps, its memory is
                written over.
        """
        if spent is None or len(spent) != stop - start:
            old_noise = old_changing = None
        else:
            old_noise, old_changing = spent.noise, spent.changing
        return StepInputs(
            start,
            {name: column[start:stop] for name, column in self.values.items()},
            self.noise.span(start, stop, old_noise),
            self.batches.take(start, stop, old_changing),
        )

    def blocks(self, spans: Iterable[tuple[int, int]]) -> Generator[StepInputs]:
        """Blocks of these (start, stop), in order, drawn ahead by a thread.

        A block may be written over when the next one is asked for.  Close the generator to end its
        thread.
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

    A loader forks its workers from it.  `ThreadPoolExecutor` cannot be used: in a fork of one of
    its threads, the exit handler waits for the thread that it runs on, which is an error.
    """

    def __init__(self, name: str):
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._is_ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """The future result of a call, or its error."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def end(self) -> None:
        """Waits for the call that is running, and makes no other."""
        self._is_ended = True
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_ended:
            call()


def steps_within_budget(block: StepInputs, kept_bytes: int = 0) -> int:
    """The largest number of steps, a power of two, of blocks like this one.

    Args:
        block: any block of the run, which says how many bytes a step has.
        kept_bytes: bytes of draws that each step leaves, on average.
    """
    leaves = [block.noise, *pytree.tree_leaves(block.changing)]
    step_bytes = sum(leaf[:, 0].numel() * leaf.element_size() for leaf in leaves)
    affordable = max(1, _BUDGET // max(1, step_bytes + kept_bytes))
    return min(_LONGEST, 1 << (affordable.bit_length() - 1))
