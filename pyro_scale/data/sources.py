"""Where batches come from.

Tensors in memory, and loaders over a data set that can be read by index, are read at indices from
`row_sampler.py`.  So chains have independent minibatches, which depend neither on the number of
chains or workers nor on the loader's sampler.  Any other loader is a stream (`stream.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import data as torch_data

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.data.batches import Batches, GatheredRows, OwnIndices, ReadBatches, WholeData
from pyro_scale.data.loaders import read_by_index
from pyro_scale.data.memory_layout import pack
from pyro_scale.data.row_sampler import RowIndices, Sampling
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Steps after which reading a loader begins anew; an epoch, if that is longer.
_SECTION_STEPS = 1024


class Data(Protocol):
    """Protocol of a data set from which minibatches are read: tensors in memory, or a loader."""

    @property
    def num_data(self) -> int | None:
        """N, the number of rows of the whole data set; None if the data do not tell, so that the
        model has to declare N.
        """
        ...

    @property
    def batch_size(self) -> int | None:
        """B, the number of rows of a minibatch; None if every step has all rows."""
        ...

    def first(self) -> Arguments:
        """One batch, as the model's arguments, for the model's preflight."""
        ...

    def batches(
        self, seed: int, num_chains: int, sampling: Sampling, chains: Sequence[int] | None = None
    ) -> Batches:
        """The minibatches of every chain at every step, without end: one epoch after another.

        Args:
            seed: seed of the run.
            num_chains: number of all chains.
            sampling: how rows are drawn.
            chains: numbers of the chains that this process moves; None for all.
        """
        ...

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        """Yields all rows once, in the data's order, as batches of at most `batch_size` rows; None
        for the data's own batch size B.
        """
        ...

    def spread(self, count: int) -> list[tuple[Arguments, Tensor | None]]:
        """Batches of random rows to check a model on: at most `count` full batches without common
        rows, the same at each call.

        Returns:
            A list of (arguments, indices). Indices are for a model that subsamples by itself,
            otherwise None. The list is empty if rows cannot be read by index.
        """
        ...


@dataclass
class TensorData:
    """The model's own arguments as data: tensors in memory, or none at all.

    Attributes:
        columns: column names of arguments that were data frames, by the argument's name.
    """

    arguments: Arguments
    num_data: int | None
    batch_size: int | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def first(self) -> Arguments:
        if self.batch_size is None:
            return self.arguments
        return rows.take(self.arguments, slice(0, self.batch_size))

    def batches(
        self, seed: int, num_chains: int, sampling: Sampling, chains: Sequence[int] | None = None
    ) -> Batches:
        if self.batch_size is None:
            return self._whole
        num_rows, device = rows.count(self.arguments) or 0, rows.device(self.arguments)
        indices = RowIndices(
            seed, chains or range(num_chains), num_rows, self.batch_size, sampling, device
        )
        # rows are gathered at every step, from memory in which each lies in one piece
        table = rows.map_rows(lambda tensor: tensor.contiguous(), self.arguments)
        return GatheredRows(table, indices, lambda: self._packed)

    @functools.cached_property
    def _whole(self) -> WholeData:
        return WholeData(self.arguments)

    @functools.cached_property
    def _packed(self) -> list[Tensor]:
        return pack(rows.leaves(self.arguments))

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        num_rows = rows.count(self.arguments)
        size = batch_size or self.batch_size
        if num_rows is None or size is None:
            yield self.arguments
            return
        for start in range(0, num_rows, size):
            yield rows.take(self.arguments, slice(start, start + size))

    def spread(self, count: int) -> list[tuple[Arguments, Tensor | None]]:
        total, device = rows.count(self.arguments) or 0, rows.device(self.arguments)
        chosen = _spread_rows(total, self.batch_size or total, count)
        return [(rows.take(self.arguments, part.to(device)), None) for part in chosen]


@dataclass
class OwnSubsamples:
    """All rows in memory, for a model that subsamples by itself: at each step it receives all rows
    and the indices of its subsample.

    Attributes:
        arguments: the model's arguments, with all rows.
        num_data: N, the number of rows.
        batch_size: B, rows of a subsample.
        columns: column names of arguments that were data frames, by the argument's name.
    """

    arguments: Arguments
    num_data: int
    batch_size: int
    columns: Mapping[str, Sequence[Any]]

    def first(self) -> Arguments:
        return self.arguments

    def batches(
        self, seed: int, num_chains: int, sampling: Sampling, chains: Sequence[int] | None = None
    ) -> Batches:
        numbers, device = chains or range(num_chains), rows.device(self.arguments)
        indices = RowIndices(seed, numbers, self.num_data, self.batch_size, sampling, device)
        return OwnIndices(self.arguments, indices)

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        yield self.arguments

    def spread(self, count: int) -> list[tuple[Arguments, Tensor | None]]:
        chosen = _spread_rows(self.num_data, self.batch_size, count)
        return [(self.arguments, part.to(rows.device(self.arguments))) for part in chosen]


@dataclass
class IndexedData:
    """Data of a loader whose data set is read by index, in our order; the loader's function
    collates the rows.

    Attributes:
        loader: the user's loader.
        subset: indices of the data set's rows that are used.
        num_data: N, the number of rows.
        batch_size: B, rows of a minibatch.
        device: device to which batches are moved; None to leave them where they are.
    """

    loader: torch_data.DataLoader[Any]
    subset: Tensor
    num_data: int
    batch_size: int
    device: torch.device | None

    def first(self) -> Arguments:
        return next(self.read([self.subset[: self.batch_size].tolist()], seed=0))

    def batches(
        self, seed: int, num_chains: int, sampling: Sampling, chains: Sequence[int] | None = None
    ) -> Batches:
        indices = RowIndices(
            seed, chains or range(num_chains), len(self.subset), self.batch_size, sampling
        )
        return ReadBatches(ByIndex(self, indices, seed, chains or range(num_chains)), self.first())

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        chunks = self.subset.split(batch_size or self.batch_size)
        return self.read((chunk.tolist() for chunk in chunks), seed=0)

    def spread(self, count: int) -> list[tuple[Arguments, Tensor | None]]:
        (chosen,) = _spread_rows(len(self.subset), self.batch_size, 1)  # reading rows may be slow
        return [(batch, None) for batch in self.read([self.subset[chosen].tolist()], seed=0)]

    def read(
        self, order: Iterable[list[int]], seed: int, section: int = 0, chain: int = 0
    ) -> Iterator[Arguments]:
        """Yields batches of rows, as the model's arguments. Random numbers of the data set
        (augmentations) are a function of (seed, section, chain).

        Args:
            order: row indices of each batch.
            seed: seed of the run.
            section: number of the section of the run.
            chain: number of the first chain that is read for.
        """
        loader_seed = derived_seed(seed, chain, Purpose.DATA_LOADER, section)
        return read_by_index(self.loader, order, loader_seed, self.device)


@dataclass
class ByIndex:
    """A stream of minibatches of random rows, read by index from a loader's data set.

    Data sets may draw augmentations, so a batch depends on those read before it. Therefore reading
    begins anew at every section of 1024 steps (an epoch, if that is longer); to continue within a
    section, it is read from its beginning.

    Attributes:
        data: the loader's data.
        indices: row indices of each step and chain, within `data.subset`.
        seed: seed of the run.
        chains: numbers of the chains.
        part: slice of each batch's rows that is read.
    """

    data: IndexedData
    indices: RowIndices
    seed: int
    chains: Sequence[int]
    part: slice = field(default_factory=lambda: slice(None))

    def of_rows(self, part: slice) -> ByIndex:
        return dataclasses.replace(self, part=part)

    def steps(self, start: int, position: Any) -> Iterator[tuple[list[Arguments], Any]]:
        epoch = -(-len(self.data.subset) // self.data.batch_size)
        length = max(epoch, _SECTION_STEPS)
        for section in itertools.count(start // length):
            steps = range(section * length, (section + 1) * length)
            order = (
                self.data.subset[index[self.part]].tolist()
                for step in steps
                for index in self.indices.at(step)
            )
            read = self.data.read(order, self.seed, section, self.chains[0])
            for step in steps:
                batches = [next(read) for _ in self.chains]
                if step >= start:
                    yield batches, None


def _spread_rows(total: int, size: int, count: int) -> list[Tensor]:
    """Row indices for batches of different rows: a list of at most `count` tensors `[size]`, with
    indices below `total` and no index in two of them, the same at each call. Shorter if there are
    too few rows.
    """
    places = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    return [part for part in places[: count * size].split(size) if len(part) == size]


def blocks_in_order(data: Data, batch_size: int | None, most: int) -> Iterator[Arguments]:
    """Yields all rows once, in the data's order, as arguments whose tensors are `[batches, B,
    ...]`: at most `most` batches at a time, all of one shape. Tensors in memory are not copied.

    Args:
        data: the data set.
        batch_size: B; None for the data's own, or all rows.
        most: largest number of batches that are yielded together.
    """
    if isinstance(data, TensorData):
        yield from _views(data.arguments, batch_size, most)
        return
    alike: list[Arguments] = []
    for batch in data.in_order(batch_size):
        if len(alike) == most or (alike and not rows.are_alike(batch, alike[0])):
            yield rows.stack(alike)
            alike = []
        alike.append(batch)
    if alike:
        yield rows.stack(alike)


def _views(arguments: Arguments, batch_size: int | None, most: int) -> Iterator[Arguments]:
    total = rows.count(arguments) or 0
    size = min(batch_size or total, total)
    end = total // size * size
    for start in range(0, end, most * size):
        part = rows.take(arguments, slice(start, min(start + most * size, end)))
        yield rows.map_rows(lambda leaf: leaf.unflatten(0, (-1, size)), part)
    if end < total:
        yield rows.map_rows(lambda leaf: leaf[None, end:], arguments)
