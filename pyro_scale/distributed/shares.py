"""The part of the work that a process does: rows of every batch, or every world-th item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")


class Rows(NamedTuple):
    """This rank's part of every batch, among the ranks that move the same chains.

    Attributes:
        rank: this rank's number among them.
        world: how many they are.
        group: their torch process group.
        device: type of the device on which they add tensors up.
        share: the fraction of all rows that this rank was called with, if the data of ranks differ
            (`rows_by_rank=True`); None where every rank has all rows and takes a part of a batch.
    """

    rank: int
    world: int
    group: Any
    device: str
    share: float | None = None

    def of(self, size: int) -> slice:
        """This rank's rows of a batch of `size` rows.

        With more ranks than rows, ranks that would have none get a row that another rank has,
        too: its weight is 0.
        """
        if self.share is not None:
            return slice(None)
        part = self.part_of(size)
        return part if part.stop > part.start else slice(0, 1)

    def weight(self, size: int) -> float:
        """The fraction of the likelihood of a batch of `size` rows that this rank computes."""
        if self.share is not None:
            return self.share
        part = self.part_of(size)
        return (part.stop - part.start) / size

    def part_of(self, size: int) -> slice:
        """This rank's rows of a batch of `size` rows, which may be none; parts differ by one row
        at most."""
        return slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over these ranks, on the tensor's own device."""
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def agree(self, holds: bool) -> bool:
        """Whether a condition holds on all of these ranks."""
        return not bool(self.sum(torch.tensor(float(not holds))))


class Share(NamedTuple):
    """A share of some items: every step-th, from the first on.

    Attributes:
        first: number of the share's first item.
        step: how many shares there are.
    """

    first: int = 0
    step: int = 1

    def of(self, items: Iterable[T]) -> Iterator[T]:
        """The share's items."""
        return islice(items, self.first, None, self.step)

    def number(self, place: int) -> int:
        """The number, among all items, of the item at a place in the share."""
        return self.first + place * self.step

    def size(self, most: int, total: int) -> int:
        """Rows per chunk, at most `most`, such that all shares have equally many chunks of `total`
        rows."""
        rounds = -(-total // (most * self.step))
        return max(1, -(-total // (rounds * self.step))) if total else most


#: All items: the share of a process that works alone.
WHOLE = Share()
