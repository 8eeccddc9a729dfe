"""Where batches come from.

Three kinds: tensors in memory; a loader over a data set that is read by index; and a stream,
any other loader.  The first two are read by our own indices, so that every chain has its own
minibatches, whatever the number of chains, the sampler's order or the number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import data as torch_data

from pyro_scale.core import rows
from pyro_scale.core.randomness import Purpose, derived_seed, generator
from pyro_scale.core.rows import Arguments
from pyro_scale.drive.batches import (
    Batches,
    GatheredRows,
    OwnIndices,
    ReadBatches,
    WholeData,
    different_shapes,
)
from pyro_scale.drive.indices import RowIndices, Sampling
from pyro_scale.errors import ArgumentError, DataError

#: Steps, or an epoch if that is longer, after which a loader is read afresh.
_SECTION_STEPS = 1024


class Data(Protocol):
    """Data that batches are taken from.

    Attributes:
        num_data: N; None where only the model can tell.
        batch_size: B; None for the whole data.
    """

    @property
    def num_data(self) -> int | None: ...

    @property
    def batch_size(self) -> int | None: ...

    def first(self) -> Arguments:
        """One batch, for the model's preflight."""
        ...

    def batches(self, seed: int, num_chains: int, sampling: Sampling) -> Batches:
        """An endless stream of batches, one a step."""
        ...

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        """All rows once, in the data's order."""
        ...


@dataclass
class TensorData:
    """The model's own arguments: tensors in memory, or none at all."""

    arguments: Arguments
    num_data: int | None
    batch_size: int | None = None

    def first(self) -> Arguments:
        if self.batch_size is None:
            return self.arguments
        return rows.take(self.arguments, slice(0, self.batch_size))

    def batches(self, seed: int, num_chains: int, sampling: Sampling) -> Batches:
        if self.batch_size is None:
            return WholeData(self.arguments)
        num_rows, device = rows.count(self.arguments) or 0, rows.device(self.arguments)
        indices = RowIndices(seed, num_chains, num_rows, self.batch_size, sampling, device)
        # rows are gathered at every step, from memory in which each lies in one piece
        table = rows.map_rows(lambda tensor: tensor.contiguous(), self.arguments)
        return GatheredRows(table, indices)

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        num_rows = rows.count(self.arguments)
        size = batch_size or self.batch_size
        if num_rows is None or size is None:
            yield self.arguments
            return
        for start in range(0, num_rows, size):
            yield rows.take(self.arguments, slice(start, start + size))


@dataclass
class OwnSubsamples:
    """The whole data for a model that subsamples by itself: it is given indices alone."""

    arguments: Arguments
    num_data: int
    batch_size: int

    def first(self) -> Arguments:
        return self.arguments

    def batches(self, seed: int, num_chains: int, sampling: Sampling) -> Batches:
        device = rows.device(self.arguments)
        indices = RowIndices(seed, num_chains, self.num_data, self.batch_size, sampling, device)
        return OwnIndices(self.arguments, indices)

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        yield self.arguments


@dataclass
class IndexedData:
    """A loader over a data set that is read by index: its rows are collated as it would."""

    loader: torch_data.DataLoader[Any]
    subset: Tensor
    num_data: int
    batch_size: int
    device: torch.device | None

    def first(self) -> Arguments:
        return next(self.read([self.subset[: self.batch_size].tolist()], seed=0))

    def batches(self, seed: int, num_chains: int, sampling: Sampling) -> Batches:
        indices = RowIndices(seed, num_chains, len(self.subset), self.batch_size, sampling)
        return ReadBatches(ByIndex(self, indices, seed, num_chains), self.first())

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        chunks = self.subset.split(batch_size or self.batch_size)
        return self.read((chunk.tolist() for chunk in chunks), seed=0)

    def read(self, order: Iterable[list[int]], seed: int, section: int = 0) -> Iterator[Arguments]:
        """The batches of some rows each, with randomness of (seed, section)."""
        return _read_by_index(self.loader, order, seed, section, self.device)


@dataclass
class ByIndex:
    """Batches read by our own indices.

    Data sets may draw augmentations, so what a batch holds depends on those before it: reading
    begins afresh at every section of some steps, and to go on from within one, it is read from
    its beginning.
    """

    data: IndexedData
    indices: RowIndices
    seed: int
    num_chains: int

    def steps(self, start: int, position: Any) -> Iterator[tuple[list[Arguments], Any]]:
        epoch = -(-len(self.data.subset) // self.data.batch_size)
        length = max(epoch, _SECTION_STEPS)
        for section in itertools.count(start // length):
            steps = range(section * length, (section + 1) * length)
            order = (
                self.data.subset[index].tolist()
                for step in steps
                for index in self.indices.at(step)
            )
            read = self.data.read(order, self.seed, section)
            for step in steps:
                batches = [next(read) for _ in range(self.num_chains)]
                if step >= start:
                    yield batches, None


@dataclass
class StreamData:
    """Any other loader: its batches in its order, cut anew into batches of one size.

    Each chain takes batches of its own, `num_chains` of them a step; a ragged tail is carried
    into the next epoch.
    """

    loader: Iterable[Any]
    num_data: int | None
    device: torch.device | None
    batch_size: int | None = None

    def first(self) -> Arguments:
        batch = next(self.epoch(seed=0, epoch=0), None)
        if batch is None:
            raise DataError("the loader yields no batch: the data are empty")
        self.batch_size = rows.count(batch)
        if self.batch_size is None:
            raise DataError("the loader's batches hold no tensor: each must hold rows")
        return batch

    def batches(self, seed: int, num_chains: int, sampling: Sampling) -> Batches:
        if sampling != "shuffle":
            raise ArgumentError(
                f"sampling='{sampling}' needs data that can be read by index: pass the tensors, or "
                "a DataLoader over a map-style data set without a sampler of its own, or "
                "sampling='shuffle' to take the batches as they come"
            )
        first = self.first()
        return ReadBatches(Dealt(self, seed, num_chains), first)

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        """The data set's order where it can be read by index; else the loader's own."""
        loader = self.loader
        if not isinstance(loader, torch_data.DataLoader) or is_iterable_style(loader):
            return self.epoch(seed=0, epoch=0)
        dataset: Any = loader.dataset
        order = torch.arange(len(dataset)).split(batch_size or self.batch_size or 1)
        return _read_by_index(loader, (part.tolist() for part in order), 0, 0, self.device)

    def epoch(self, seed: int, epoch: int) -> Iterator[Arguments]:
        """The loader's batches of one epoch, with randomness of its own."""
        own = derived_seed(seed, 0, Purpose.DATA_LOADER, epoch)
        return (_received(batch, self.device) for batch in _isolated(self.loader, own))


@dataclass
class Dealt:
    """A loader's rows, one epoch after another, in pieces of exactly B, dealt to the chains."""

    data: StreamData
    seed: int
    num_chains: int

    def steps(self, start: int, position: Any) -> Iterator[tuple[list[Arguments], Any]]:
        pieces = self._pieces(position)
        for step in itertools.count(start):
            dealt = [next(pieces) for _ in range(self.num_chains)]
            # at random: dealt in turn, a chain could get the same part of the data for ever
            source = generator(self.seed, 0, Purpose.BATCHES, step)
            order = torch.randperm(self.num_chains, generator=source)
            yield [dealt[place][0] for place in order], dealt[-1][1]

    def _pieces(self, position: Any) -> Iterator[tuple[Arguments, Any]]:
        """(A piece, the position after it): the epoch, its batches before the one that the piece
        ends in, the rows left over by those, and the pieces taken since."""
        size = self.data.batch_size or 1
        first, passed, left, taken = position or (0, 0, [], 0)
        for epoch in itertools.count(first):
            place = -1
            for place, batch in enumerate(self.data.epoch(self.seed, epoch)):
                if place < passed:
                    continue
                joined = _joined(left, batch)
                total = rows.count(joined) or 0
                whole = range(0, total - size + 1, size)
                for count, begin in enumerate(whole[taken:], taken + 1):
                    piece = rows.take(joined, slice(begin, begin + size))
                    yield piece, (epoch, place, left, count)
                rest = total % size
                left = [rows.take(joined, slice(total - rest, total))] if rest else []
                taken = 0
            if place < 0:
                raise DataError(
                    f"the loader yielded nothing in epoch {epoch}: it must be iterable again and "
                    "again; pass a DataLoader, not a generator"
                )
            passed = 0


def is_iterable_style(loader: Any) -> bool:
    """Whether it is a DataLoader whose data set cannot be read by index."""
    return isinstance(loader, torch_data.DataLoader) and isinstance(
        loader.dataset, torch_data.IterableDataset
    )


def _read_by_index(
    loader: torch_data.DataLoader[Any],
    order: Iterable[list[int]],
    seed: int,
    section: int,
    device: torch.device | None,
) -> Iterator[Arguments]:
    """The user's loader with our indices in place of its sampler."""
    workers = {}
    if loader.num_workers > 0:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": loader.worker_init_fn,
        }
    reloader = torch_data.DataLoader(
        loader.dataset,
        batch_sampler=order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        **workers,
    )
    own = derived_seed(seed, 0, Purpose.DATA_LOADER, section)
    return (_received(batch, device) for batch in _isolated(reloader, own))


def _isolated(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterates with a state of torch's generator that is seeded here and shared with nobody.

    Samplers, and data sets that draw augmentations, read torch's generator.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loaded = iter(loader)
        state = torch.random.get_rng_state()
    while True:
        with torch.random.fork_rng():
            torch.random.set_rng_state(state)
            try:
                batch = next(loaded)
            except StopIteration:
                return
            state = torch.random.get_rng_state()
        yield batch


def _received(batch: Any, device: torch.device | None) -> Arguments:
    """A loader's batch as the model's arguments, on the model's device."""
    arguments = rows.as_arguments(batch)
    refuse_arrays(arguments)
    return to_device(arguments, device)


def _joined(left: list[Arguments], batch: Arguments) -> Arguments:
    """What an epoch left over, and the batch after it."""
    try:
        return rows.concatenate([*left, batch]) if left else batch
    except RuntimeError as error:
        raise different_shapes(error, "or make all batches of one size") from error


def refuse_arrays(arguments: Arguments) -> None:
    """Refuses NumPy arrays and the like, which would pass as constants instead of rows.

    Raises:
        DataError: it names the argument.
    """
    for name, leaf in rows.named_leaves(arguments):
        if not isinstance(leaf, Tensor) and getattr(leaf, "ndim", 0) > 0:
            raise DataError(
                f"argument {name} is a {type(leaf).__name__}, not a tensor, so its rows would not "
                "be taken by minibatch: pass torch.as_tensor of it"
            )


def to_device(arguments: Arguments, device: torch.device | None) -> Arguments:
    """The arguments with their rows on a device, where they are if None; nothing left to do in
    them, such as a sign to change when they are read."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device or tensor.device).resolve_conj().resolve_neg()

    return rows.map_rows(moved, arguments)
