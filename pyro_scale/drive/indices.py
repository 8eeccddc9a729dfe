"""Which rows each chain takes at each step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pyro_scale.core.randomness import Purpose, generator
from pyro_scale.errors import ArgumentError

Sampling = Literal["shuffle", "replacement"]

#: Steps whose indices are drawn together when drawing with replacement.
_BLOCK_STEPS = 256
#: Bytes of permutations that are held at most.
_MOST_BYTES = 4 * 2**30


def check_sampling(sampling: object) -> None:
    """Refuses a way of sampling rows that there is not."""
    if sampling not in ("shuffle", "replacement"):
        raise ArgumentError(f"sampling={sampling!r}: pass 'shuffle' or 'replacement'")


class RowIndices:
    """One stream of row indices a chain, a function of (seed, chain) alone.

    `"shuffle"` goes through all rows in a new order each epoch; a batch that the epoch's end
    cuts is filled up from the next epoch, so that every row counts equally.  `"replacement"`
    draws every row anew.

    Args:
        seed: the run's seed.
        num_chains: how many streams.
        num_rows: the range of the indices.
        batch_size: indices a step.
        sampling: how they are drawn.

    Raises:
        ArgumentError: an unknown `sampling`; permutations that would not fit in memory.
    """

    def __init__(
        self, seed: int, num_chains: int, num_rows: int, batch_size: int, sampling: Sampling
    ):
        check_sampling(sampling)
        if sampling == "shuffle" and 16 * num_chains * num_rows > _MOST_BYTES:
            raise ArgumentError(
                f"sampling='shuffle' would hold {num_chains} orders of {num_rows} rows "
                f"({16 * num_chains * num_rows / 2**30:.0f} GiB): pass sampling='replacement'"
            )
        self._seed, self._num_chains = seed, num_chains
        self._num_rows, self._batch_size = num_rows, batch_size
        self._draw = self._shuffled if sampling == "shuffle" else self._replaced
        self._blocks: dict[int, Tensor] = {}

    def at(self, step: int) -> Tensor:
        """The indices of one step, `[num_chains, batch_size]`."""
        return self._draw(step)

    def _shuffled(self, step: int) -> Tensor:
        start = step * self._batch_size
        places = torch.arange(start, start + self._batch_size)
        first, last = start // self._num_rows, int(places[-1]) // self._num_rows
        orders = [self._block(epoch, first, self._order) for epoch in range(first, last + 1)]
        joined = torch.cat(orders, dim=1) if len(orders) > 1 else orders[0]
        offset = start - first * self._num_rows
        return joined[:, offset : offset + self._batch_size]

    def _replaced(self, step: int) -> Tensor:
        block, place = divmod(step, _BLOCK_STEPS)
        return self._block(block, block, self._fresh)[:, place]

    def _block(self, block: int, oldest: int, draw: object) -> Tensor:
        """A block of all chains' streams; blocks before the oldest in use are forgotten."""
        for old in [kept for kept in self._blocks if kept < oldest]:
            del self._blocks[old]
        if block not in self._blocks:
            sources = (
                generator(self._seed, chain, Purpose.BATCHES, block)
                for chain in range(self._num_chains)
            )
            self._blocks[block] = torch.stack([draw(source) for source in sources])  # type: ignore[operator]
        return self._blocks[block]

    def _order(self, source: torch.Generator) -> Tensor:
        return torch.randperm(self._num_rows, generator=source)

    def _fresh(self, source: torch.Generator) -> Tensor:
        size = (_BLOCK_STEPS, self._batch_size)
        return torch.randint(self._num_rows, size, generator=source)
