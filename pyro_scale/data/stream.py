"""Batches of a loader that cannot be read by index: in its order, cut to one size."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.data.batches import Batches, ReadBatches
from pyro_scale.data.loaders import is_iterable_style, isolate, read_by_index, receive
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.rng.philox import Streams
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.rng.streams import fill_permutations


@dataclass
class StreamData:
    """Data of a loader that cannot be read by index. Its rows are cut into batches of one size,
    that of its first batch.

    A step uses as many batches as there are chains; rows left over at the end of an epoch begin the
    next one.

    Attributes:
        loader: the user's loader, which can be iterated again and again.
        num_data: N, the number of rows; None if only the model knows it.
        device: device to which batches are moved; None to leave them where they are.
        batch_size: B, known once the first batch is read.
    """

    loader: Iterable[Any]
    num_data: int | None
    device: torch.device | None
    batch_size: int | None = None

    def first(self) -> Arguments:
        batch = self._first  # read once: a data set may remember its place
        self.batch_size = rows.count(batch)
        if self.batch_size is None:
            raise DataError("the loader's batches hold no tensor: each must hold rows")
        return batch

    @cached_property
    def _first(self) -> Arguments:
        batch = next(self.epoch(seed=0, epoch=0), None)
        if batch is None:
            raise DataError("the loader yields no batch: the data are empty")
        return batch

    def batches(
        self, seed: int, num_chains: int, sampling: Sampling, chains: Sequence[int] | None = None
    ) -> Batches:
        if sampling != "shuffle":
            raise ArgumentError(
                f"sampling='{sampling}' needs data that can be read by index: pass the tensors, or "
                "a DataLoader over a map-style data set without a sampler of its own, or "
                "sampling='shuffle' to take the batches as they come"
            )
        first = self.first()
        return ReadBatches(DealtBatches(self, seed, chains or range(num_chains), num_chains), first)

    def in_order(self, batch_size: int | None = None) -> Iterator[Arguments]:
        """Yields all rows once, in batches, in the data set's order if it can be read by index,
        otherwise the loader's.

        Args:
            batch_size: rows of a batch if the data set can be read by index; None for B.

        Raises:
            DataError: the loader yields more than N rows, so that it may never end.
        """
        loader = self.loader
        if not isinstance(loader, torch_data.DataLoader) or is_iterable_style(loader):
            return self._read_to_the_end()
        dataset: Any = loader.dataset
        order = torch.arange(len(dataset)).split(batch_size or self.batch_size or 1)
        return read_by_index(loader, (part.tolist() for part in order), 0, self.device)

    def _read_to_the_end(self) -> Iterator[Arguments]:
        """Yields the batches of one epoch, as the model's arguments, until the loader ends.

        Raises:
            DataError: the loader yields more than N rows.
        """
        count, num_data = 0, self.num_data
        for batch in self.epoch(seed=0, epoch=0):
            count += rows.count(batch) or 0
            if num_data is not None and count > num_data:
                raise DataError(
                    f"the loader has given {count:,} rows in one pass, more than N = {num_data:,}, "
                    "and what needs all rows (a mode, its curvature, lr='auto') reads to the end: "
                    "let the loader end after N rows, pass the right num_data=, or pass a number "
                    "for lr",
                    code="no-length",
                )
            yield batch

    def spread(self, count: int) -> list[tuple[Arguments, Tensor | None]]:
        return []

    def epoch(self, seed: int, epoch: int) -> Iterator[Arguments]:
        """Yields the loader's batches of one epoch, as the model's arguments. Random numbers of the
        loader are a function of (seed, epoch)."""
        return (batch for batch, _ in self.with_states(seed, epoch, None))

    def with_states(self, seed: int, epoch: int, state: Any) -> Iterator[tuple[Arguments, Any]]:
        """Yields (batch as the model's arguments, loader's state before the batch) for one epoch.

        Args:
            seed: seed of the run.
            epoch: number of the epoch; random numbers of the loader are a function of (seed,
                epoch).
            state: loader's state from which to continue; None for the epoch's beginning. Loaders
                without states yield None.
        """
        loader_seed = derived_seed(seed, 0, Purpose.DATA_LOADER, epoch)
        for batch, before in isolate(self.loader, loader_seed, state):
            yield receive(batch, self.device), before


@dataclass
class DealtBatches:
    """A stream of minibatches from a loader that cannot be read by index: cuts the loader's rows,
    epoch after epoch, into pieces of exactly B rows. At each step every chain gets one piece, in
    random order.

    Attributes:
        data: the loader's data.
        seed: seed of the run.
        chains: numbers of the chains of this process.
        num_chains: number of all chains.
        part: slice of each piece's rows that is used, for processes that divide the rows of each
            minibatch among themselves.
    """

    data: StreamData
    seed: int
    chains: Sequence[int]
    num_chains: int
    part: slice = field(default_factory=lambda: slice(None))

    def of_rows(self, part: slice) -> DealtBatches:
        return dataclasses.replace(self, part=part)

    def steps(self, start: int, position: Any) -> Iterator[tuple[list[Arguments], Any]]:
        pieces, order = self._pieces(position), torch.empty(1, self.num_chains, dtype=torch.int32)
        streams = Streams.from_seed(self.seed, [0], Purpose.BATCHES)
        for step in itertools.count(start):
            dealt = [next(pieces) for _ in range(self.num_chains)]
            # at random, because in a fixed order a chain might always get the same part of the data
            fill_permutations(streams, step, order)
            batches = [rows.take(dealt[order[0, chain]][0], self.part) for chain in self.chains]
            yield batches, dealt[-1][1]

    def _pieces(self, position: Any) -> Iterator[tuple[Arguments, Any]]:
        """Yields (piece of B rows, position in the stream after the piece), without end.

        A position is (epoch, number of batches before the one that the piece ends in, rows left
        over from earlier batches, pieces cut since, loader's state before that batch). A loader
        without states is read again from the epoch's beginning.

        Args:
            position: position after an earlier piece, to continue from; None for the beginning.
        """
        size = self.data.batch_size or 1
        first, passed, left, num_dealt, state = position or (0, 0, [], 0, None)
        for epoch in itertools.count(first):
            place, begin = -1, 0 if state is None else passed
            batches = self.data.with_states(self.seed, epoch, state)
            for place, (batch, before) in enumerate(batches, begin):
                if place < passed:
                    continue
                joined = rows.concatenate([*left, batch]) if left else batch
                total = rows.count(joined) or 0
                starts = range(0, total - size + 1, size)
                for count, start in enumerate(starts[num_dealt:], num_dealt + 1):
                    piece = rows.take(joined, slice(start, start + size))
                    yield piece, (epoch, place, left, count, before)
                over = total % size
                left = [rows.take(joined, slice(total - over, total))] if over else []
                num_dealt = 0
            if place < 0:
                again = "pass a DataLoader, not a generator"
                if isinstance(self.data.loader, torch_data.DataLoader):
                    again = "its data set's __iter__ has to begin anew at each call"
                raise DataError(
                    f"the loader yielded nothing in epoch {epoch}: it must be iterable again and "
                    f"again; {again}"
                )
            passed, state = 0, None
