"""Batches of every chain, in two parts: one is fixed, the other changes from step to step.

The changing part is drawn for many steps at once, outside of the step.  The fixed part is stored
once.  A pure function, which can be traced and compiled, combines the two at each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, Fixed, Gathered, PerStep, Source
from pyro_scale.data.memory_layout import store_by_column
from pyro_scale.data.row_sampler import RowIndices
from pyro_scale.errors import DataError

#: Number of latest calls of `take` whose end positions are kept: more than are read ahead.
_POSITIONS = 16


@dataclass(frozen=True)
class Batch:
    """The minibatches of all chains at one step.

    Attributes:
        arguments: the model's arguments. Tensors of rows are `[chains, B, ...]` (or `[1, B, ...]`,
            of chains that have one batch) if `per_chain`, otherwise `[B, ...]`.
        per_chain: whether tensors of rows have a dimension of chains.
        indices: indices `[chains, B]` of the rows, for a model that subsamples by itself; None for
            others.
    """

    arguments: Arguments
    per_chain: bool
    indices: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """A list of the tensors that make up the batch: all tensors of rows among the arguments,
        then `indices` if there are any.
        """
        indices = [] if self.indices is None else [self.indices]
        return [*rows.leaves(self.arguments), *indices]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """A copy of the batch with other numbers in its rows: `tensors` replace those that the
        property `tensors` lists, in the same order.
        """
        leaves = iter(tensors)
        arguments = rows.map_rows(lambda _: next(leaves), self.arguments)
        return Batch(arguments, self.per_chain, None if self.indices is None else next(leaves))

    def of_chain(self, chain: int) -> tuple[Arguments, Tensor | None]:
        """(Arguments, indices) of one chain; the indices are None for a model that does not
        subsample by itself."""
        arguments = rows.take(self.arguments, chain) if self.per_chain else self.arguments
        return arguments, None if self.indices is None else self.indices[chain]


class Batches(Protocol):
    """The minibatches of every step and chain, without end, in two parts: tensors that all steps
    share (`fixed`), and tensors that change from step to step (such as row indices)."""

    @property
    def fixed(self) -> Any:
        """The tensors that all steps share, a pytree: such as all rows of the data, from which
        steps gather theirs.
        """
        ...

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        """The tensors that change from step to step, for steps start, ..., stop - 1: a pytree of
        tensors `[chains, stop - start, ...]`, such as row indices. Each call must begin where the
        last one ended.

        Args:
            start: first step.
            stop: step after the last.
            out: result of an earlier call for as many steps, which may be overwritten; None for new
                tensors.
        """
        ...

    def batch(self, fixed: Any, changing: Any) -> Batch:
        """The minibatches of all chains at one step, from the tensors that all steps share and that
        step's changing ones, `[chains, ...]`. A pure function, which can be traced and compiled.
        """
        ...

    def sources(self, changing: Any) -> list[Source]:
        """A list that says for each tensor in `Batch.tensors` how a compiled loop gets it at each
        step of a block: `Fixed` (the same at all steps), `Gathered` (rows of a table by index) or
        `PerStep` (an entry for each step).

        Args:
            changing: changing tensors of the block's steps, as `take` returns them.
        """
        ...

    def position(self, step: int) -> Any:
        """The place in the data that is reached at a step, as a pytree of tensors and plain values
        to save in a checkpoint: pass it to `seek` in order to continue from there. `step` must be
        one at which one of the latest calls of `take` ended. None if batches depend on the step's
        number alone.
        """
        ...

    def seek(self, step: int, position: Any) -> None:
        """Continues at a step: the next call of `take` begins there.

        Args:
            step: number of the step.
            position: what `position(step)` returned in the earlier run.
        """
        ...

    def of_rows(self, part: slice) -> Batches:
        """The same minibatches, each reduced to a slice of its rows; other rows are not read, where
        possible. For processes that divide the rows of each minibatch among themselves.

        Args:
            part: slice of the rows of each minibatch.
        """
        ...


class ByStep:
    """Base class of minibatches that depend on the step's number alone (not on what was read
    before), so that a run can continue at any step: `position` is None, and `seek` does nothing.
    """

    def position(self, step: int) -> Any:
        return None

    def seek(self, step: int, position: Any) -> None:
        pass


@dataclass(frozen=True)
class WholeData(ByStep):
    """Batches that consist of all rows of the data, at every step and for every chain: without
    subsampling.

    Attributes:
        fixed: the model's arguments, with all rows.
    """

    fixed: Arguments

    @functools.cached_property
    def by_column(self) -> WholeData:
        """The same data with narrow matrices (few columns) stored by column, so that operations on
        all rows use the processor's vector instructions.
        """
        return WholeData(store_by_column(self.fixed))

    def of_rows(self, part: slice) -> WholeData:
        return WholeData(rows.take(self.fixed, part))

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        return ()

    def batch(self, fixed: Any, changing: Any) -> Batch:
        return Batch(fixed, per_chain=False)

    def sources(self, changing: Any) -> list[Source]:
        return [Fixed(leaf) for leaf in rows.leaves(self.fixed)]


@dataclass(frozen=True)
class GatheredRows(ByStep):
    """Minibatches that are gathered by index from rows in memory.

    Attributes:
        fixed: the model's arguments, with all rows.
        indices: row indices of each step and chain.
        packed: function that returns the rows as compiled loops read them, one tensor for each of
            `fixed`.
        part: slice of every minibatch that is used; None for all of it.
    """

    fixed: Arguments
    indices: RowIndices
    packed: Callable[[], Sequence[Tensor]]
    part: slice | None = None

    def of_rows(self, part: slice) -> GatheredRows:
        return GatheredRows(self.fixed, self.indices, self.packed, part)

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        if self.part is None:
            return self.indices.span(start, stop, out)
        return self.indices.span(start, stop)[..., self.part].contiguous()

    def batch(self, fixed: Any, changing: Any) -> Batch:
        return Batch(rows.take(fixed, changing), per_chain=True)

    def sources(self, changing: Any) -> list[Source]:
        return [Gathered(leaf, changing) for leaf in self.packed()]


@dataclass(frozen=True)
class OwnIndices(ByStep):
    """For a model that subsamples by itself: all rows, and the indices of each step's subsample.

    Attributes:
        fixed: the model's arguments, with all rows.
        indices: row indices of each step and chain.
    """

    fixed: Arguments
    indices: RowIndices

    def of_rows(self, part: slice) -> Batches:
        raise NotImplementedError("the model takes its rows by itself")

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        return self.indices.span(start, stop, out)

    def batch(self, fixed: Any, changing: Any) -> Batch:
        return Batch(fixed, per_chain=False, indices=changing)

    def sources(self, changing: Any) -> list[Source]:
        return [*(Fixed(leaf) for leaf in rows.leaves(self.fixed)), PerStep(changing)]


class Stream(Protocol):
    """Protocol of a sequence of minibatches of all chains, without end, which can only be read step
    by step.
    """

    def steps(self, start: int, position: Any) -> Iterator[tuple[list[Arguments], Any]]:
        """Yields, for each step, (the model's arguments of every chain, the position in the stream
        after the step).

        Args:
            start: first step.
            position: position in the stream after the step before; None at step 0, and for streams
                without positions.
        """
        ...

    def of_rows(self, part: slice) -> Stream:
        """The same stream with every minibatch reduced to the slice `part` of its rows, for
        processes that divide the rows of each minibatch among themselves.
        """
        ...


class ReadBatches:
    """Minibatches that are read from a loader, step by step, and put together for all chains.

    Only tensors of rows may change from batch to batch; other arguments must equal those of the
    first batch.

    Args:
        stream: yields the minibatches of all chains, step by step.
        first: arguments of a batch, with which others are compared.
    """

    fixed: Any = ()

    def __init__(self, stream: Stream, first: Arguments):
        self._stream, self._steps = stream, stream.steps(0, None)
        self._first = Batch(first, per_chain=True)
        self._positions: dict[int, Any] = {}

    def of_rows(self, part: slice) -> ReadBatches:
        return ReadBatches(self._stream.of_rows(part), rows.take(self._first.arguments, part))

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        steps = []
        for _ in range(start, stop):
            arguments, position = next(self._steps)
            steps.append([self._rows_of(part) for part in arguments])
        self._positions[stop] = position
        for old in sorted(self._positions)[:-_POSITIONS]:
            del self._positions[old]
        by_chain = [step[chain] for chain in range(len(steps[0])) for step in steps]
        try:
            stacked = [torch.stack(column) for column in zip(*by_chain, strict=True)]
        except RuntimeError as error:
            raise rows.different_shapes(error) from error
        return [column.unflatten(0, (-1, len(steps))) for column in stacked]

    def position(self, step: int) -> Any:
        return self._positions.get(step)

    def seek(self, step: int, position: Any) -> None:
        self._steps = self._stream.steps(step, position)

    def batch(self, fixed: Any, changing: Any) -> Batch:
        return self._first.with_tensors(changing)

    def sources(self, changing: Any) -> list[Source]:
        return [PerStep(leaf) for leaf in changing]

    def _rows_of(self, arguments: Arguments) -> list[Tensor]:
        first, expected = pytree.tree_flatten(self._first.arguments)
        structure = pytree.tree_structure(arguments)
        if structure != expected:
            raise DataError(f"a batch is built as {structure}, the first one as {expected}")
        for (name, leaf), like in zip(rows.named_leaves(arguments), first, strict=True):
            if not rows.is_rows(leaf) and not _same(leaf, like):
                raise DataError(
                    f"argument {name} is {leaf!r} in a batch and {like!r} in the first one: what "
                    "changes from batch to batch must be a tensor whose first dimension is rows"
                )
        return rows.leaves(arguments)


@dataclass(frozen=True)
class SharedBatches:
    """Minibatches that all chains share: at each step, all chains get the same batch, which is read
    once.

    Attributes:
        batches: minibatches of the one chain.
        num_chains: number of chains that use them.
    """

    batches: Batches
    num_chains: int

    @property
    def fixed(self) -> Any:
        return self.batches.fixed

    def of_rows(self, part: slice) -> SharedBatches:
        return SharedBatches(self.batches.of_rows(part), self.num_chains)

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        out = None if out is None else pytree.tree_map(lambda leaf: leaf[:1], out)
        return pytree.tree_map(
            lambda leaf: leaf.expand(self.num_chains, *leaf.shape[1:]),
            self.batches.take(start, stop, out),
        )

    def batch(self, fixed: Any, changing: Any) -> Batch:
        return self.batches.batch(fixed, changing)

    def sources(self, changing: Any) -> list[Source]:
        return self.batches.sources(changing)

    def position(self, step: int) -> Any:
        return self.batches.position(step)

    def seek(self, step: int, position: Any) -> None:
        self.batches.seek(step, position)


def batches_from(batches: Batches, step: int, count: int) -> list[Batch]:
    """A list of the minibatches of `count` steps, beginning with number `step`: one `Batch` (of all
    chains) for each step. For use outside of a compiled loop, such as measurements.
    """
    changing = batches.take(step, step + count)
    of_steps = [pytree.tree_map(lambda leaf, i=i: leaf[:, i], changing) for i in range(count)]
    return [batches.batch(batches.fixed, of_step) for of_step in of_steps]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
