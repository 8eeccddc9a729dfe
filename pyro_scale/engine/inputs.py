"""Step inputs: everything that changes from step to step, drawn in blocks of many steps.

A step is a function of the chains' state, the minibatch, standard normal numbers ("noise") and the
hyperparameters' values. All of these but the state are prepared for blocks of many steps at once,
by a thread that works some blocks ahead of the steps.
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
    """A block of consecutive steps: their hyperparameters, random numbers and minibatches. With the
    chains' state, this is all that the steps depend on.

    Attributes:
        start: number of the first step.
        values: dict from the name of a hyperparameter to its value at every step, `[steps, ...]`.
        noise: standard normal numbers, `[chains, steps, normals, latents]`.
        changing: tensors of the minibatches that change from step to step, such as row indices: a
            pytree of `[chains, steps, ...]`, or `[1, steps, ...]` if all chains have one minibatch.
    """

    start: int
    values: Mapping[str, Tensor]
    noise: Tensor
    changing: Any

    def __len__(self) -> int:
        return self.noise.shape[1]

    @property
    def stop(self) -> int:
        """Number of the step after the block's last."""
        return self.start + len(self)

    def at(self, place: int) -> tuple[dict[str, Tensor], Tensor, Any]:
        """The inputs of one step: (hyperparameters by name; standard normal numbers, of which each
        chain takes some for every latent, `[chains, normals of a step, latents]`; the tensors of
        the minibatch that differ from step to step, a pytree). `place` is the index of the step in
        the block, counted from 0.
        """
        values = {name: column[place] for name, column in self.values.items()}
        changing = pytree.tree_map(lambda leaf: leaf[:, place], self.changing)
        return values, self.noise[:, place], changing

    def part(self, first: int, last: int) -> StepInputs:
        """A shorter block: the steps `first`, ..., `last - 1` of this one, where this block's first
        step has number 0. Its tensors are views.
        """
        values = {name: column[first:last] for name, column in self.values.items()}
        changing = pytree.tree_map(lambda leaf: leaf[:, first:last], self.changing)
        return StepInputs(self.start + first, values, self.noise[:, first:last], changing)

    def parts(self, steps: int | None) -> Iterator[StepInputs]:
        """Yields the block in parts of at most `steps` consecutive steps, in order; the whole block
        at once if `steps` is None.
        """
        size = steps or len(self)
        return (self.part(i, min(i + size, len(self))) for i in range(0, len(self), size))

    def of_chains(self, chains: slice) -> StepInputs:
        """A block of the same steps for some of the chains: those in the slice `chains`. Its
        tensors are views.
        """
        changing = pytree.tree_map(
            lambda leaf: leaf[chains] if len(leaf) > 1 else leaf, self.changing
        )
        return StepInputs(self.start, self.values, self.noise[chains], changing)

    def copied(self) -> StepInputs:
        """A copy of the block, safe to hold: the memory of the original is reused for later
        blocks."""
        changing = pytree.tree_map(lambda leaf: leaf.clone(), self.changing)
        return StepInputs(self.start, self.values, self.noise.clone(), changing)


@dataclass(frozen=True)
class Inputs:
    """The inputs of all steps of a run (hyperparameters, random numbers, minibatches), of which
    `block` and `blocks` prepare some consecutive steps at a time.

    Attributes:
        values: dict from the name of a hyperparameter to its value at every step, `[all steps,
            ...]`.
        noise: stream of the chains' standard normal numbers.
        batches: the minibatches of the chains.
    """

    values: Mapping[str, Tensor]
    noise: NoiseStream
    batches: Batches

    def block(self, start: int, stop: int, spent: StepInputs | None = None) -> StepInputs:
        """A `StepInputs` with everything that steps start, ..., stop - 1 depend on besides the
        chains' state: hyperparameters, standard normal numbers and minibatches. Each call must
        begin where the last one ended.

        Args:
            start: number of the first step.
            stop: number of the step after the last.
            spent: result of an earlier call that is not needed any more; if it has as many steps,
                its memory is overwritten. None for new memory.
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
        """Yields the inputs of steps start, ..., stop - 1, a `StepInputs`, for each pair (start,
        stop) of step numbers in `spans`, in order. A thread prepares the next ones while steps are
        taken.

        The memory of a block may be overwritten as soon as the next block is asked for. Close the
        generator to end its thread.
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
    """A thread that makes the submitted calls one after another, in the background.

    A data loader forks its workers from this thread. `ThreadPoolExecutor` cannot be used: in a fork
    of one of its threads, the exit handler waits for the thread that it runs on, which is an error.
    """

    def __init__(self, name: str):
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._is_ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queues a call `function(*args)`. Returns a future with the call's result or error."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def end(self) -> None:
        """Ends the thread after the call that is running; calls that are still queued are not
        made."""
        self._is_ended = True
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_ended:
            call()


def steps_within_budget(block: StepInputs, kept_bytes: int = 0) -> int:
    """The largest length of a block of steps, a power of two and at least 1, for which the block's
    inputs and draws take no more than 32 MiB.

    Args:
        block: any block of the run, from which the bytes of a step are computed.
        kept_bytes: bytes of draws that each step adds, on average.
    """
    leaves = [block.noise, *pytree.tree_leaves(block.changing)]
    step_bytes = sum(leaf[:, 0].numel() * leaf.element_size() for leaf in leaves)
    affordable = max(1, _BUDGET // max(1, step_bytes + kept_bytes))
    return min(_LONGEST, 1 << (affordable.bit_length() - 1))
