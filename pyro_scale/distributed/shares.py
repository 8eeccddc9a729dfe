"""What a process takes of work that is shared out: rows of a batch, or every world-th item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed as dist

T = TypeVar("T")


class Rows(NamedTuple):
    """Which part of a batch a rank takes, of those that move the same chains.

    Attributes:
        rank: among those.
        world: how many there are.
        group: torch's group of them.
        device: the type of device whose tensors it sums.
        share: what part of all rows this rank has been given, if its data are its own; None where
            every rank has all, and takes a part of each batch.
    """

    rank: int
    world: int
    group: Any
    device: str
    share: float | None = None

    def of(self, size: int) -> slice:
        """This rank's rows of so many that it is given; where there are more ranks than rows, one
        that others have, too."""
        if self.share is not None:
            return slice(None)
        own = self._of(size)
        return own if own.stop > own.start else slice(0, 1)

    def weight(self, size: int) -> float:
        """What part of the likelihood this rank's rows of a batch stand for: that of its rows, of
        so many that no other rank has."""
        if self.share is not None:
            return self.share
        own = self._of(size)
        return (own.stop - own.start) / size

    def agree(self, holds: bool) -> bool:
        """Whether something holds on all of those ranks."""
        failed = torch.tensor(float(not holds), device=self.device)
        dist.all_reduce(failed, group=self.group)
        return not bool(failed)

    def _of(self, size: int) -> slice:
        """Parts differ by one row at most."""
        return slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)


class Share(NamedTuple):
    """Which of some items a rank takes: every world-th, beginning at its own number.

    Attributes:
        rank: of this process.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    def of(self, items: Iterable[T]) -> Iterator[T]:
        """This rank's items."""
        return islice(items, self.rank, None, self.world)

    def size(self, most: int, total: int) -> int:
        """How many rows to take together, at most so many, for chunks that divide evenly among
        ranks."""
        rounds = -(-total // (most * self.world))
        return max(1, -(-total // (rounds * self.world))) if total else most


#: Everything.
WHOLE = Share()
