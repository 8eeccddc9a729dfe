"""The part of the work that one process does: some of the rows of every minibatch, or every n-th
item of a sequence, with n processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")


class Rows(NamedTuple):
    """The part of every minibatch that this rank computes, where several ranks move the same chains
    and divide the rows of each minibatch among themselves.

    Attributes:
        rank: this rank's number among these ranks.
        world: number of these ranks.
        group: torch process group of these ranks.
        device: type of the device on which these ranks add tensors up, such as "cuda".
        share: the fraction of all rows that this rank was called with, if the data of ranks differ
            (`rows_by_rank=True`); None where every rank has all rows and takes a part of each
            minibatch.
    """

    rank: int
    world: int
    group: Any
    device: str
    share: float | None = None

    def of(self, size: int) -> slice:
        """The slice of a minibatch of `size` rows that this rank computes; all rows if ranks have
        data of their own.

        With more ranks than rows, ranks that would have none get the first row, which another rank
        has, too: its weight is 0.
        """
        if self.share is not None:
            return slice(None)
        part = self.part_of(size)
        return part if part.stop > part.start else slice(0, 1)

    def weight(self, size: int) -> float:
        """This rank's weight in sums over ranks: the fraction of the rows of a minibatch of `size`
        rows that this rank computes; 0 if it only computes a row of another rank. If each rank has
        data of its own: its fraction of all rows.
        """
        if self.share is not None:
            return self.share
        part = self.part_of(size)
        return (part.stop - part.start) / size

    def part_of(self, size: int) -> slice:
        """The slice of a minibatch of `size` rows that belongs to this rank, possibly empty.
        Numbers of rows of two ranks differ by one at most."""
        return slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the ranks that move the same chains, the same on each of them,
        on the tensor's own device. All of them must call this at the same time.
        """
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def agree(self, holds: bool) -> bool:
        """Whether a condition is true on all ranks that move the same chains: True if each of them
        passes `holds=True`. All of them must call this at the same time.
        """
        return not bool(self.sum(torch.tensor(float(not holds))))


class Share(NamedTuple):
    """The part of a sequence of items that one process works on: every `step`-th item.

    Attributes:
        first: index of the first of these items in the sequence.
        step: number of processes, each of which has such a part.
    """

    first: int = 0
    step: int = 1

    def of(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items of a sequence that this process works on: every `step`-th, beginning
        with number `first`.
        """
        return islice(items, self.first, None, self.step)

    def number(self, place: int) -> int:
        """The index in the whole sequence of one of this process's items.

        Args:
            place: the item's index among the items of this process, counted from 0.
        """
        return self.first + place * self.step

    def size(self, most: int, total: int) -> int:
        """The number of rows in a chunk, at most `most`, for `total` rows of data whose chunks are
        divided among the processes: chosen so that every process gets the same number of chunks.
        `most` if there are no rows.
        """
        rounds = -(-total // (most * self.step))
        return max(1, -(-total // (rounds * self.step))) if total else most


#: All items: the share of a process that works alone.
WHOLE = Share()
