"""Which rows each chain takes at each step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pyro_scale.core.randomness import Purpose, generator
from pyro_scale.errors import ArgumentError

Sampling = Literal["shuffle", "replacement"]

#: Indices of a chain that are drawn together, about.
_BLOCK_NUMBERS = 2**14
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
        device: where they are drawn and stay.

    Raises:
        ArgumentError: an unknown `sampling`; permutations that would not fit in memory.
    """

    def __init__(
        self,
        seed: int,
        num_chains: int,
        num_rows: int,
        batch_size: int,
        sampling: Sampling,
        device: torch.device | None = None,
    ):
        check_sampling(sampling)
        if sampling == "shuffle" and 16 * num_chains * num_rows > _MOST_BYTES:
            raise ArgumentError(
                f"sampling='shuffle' would hold {num_chains} orders of {num_rows} rows "
                f"({16 * num_chains * num_rows / 2**30:.0f} GiB): pass sampling='replacement'"
            )
        self._seed, self._num_chains, self._device = seed, num_chains, device
        self._num_rows, self._batch_size = num_rows, batch_size
        whole = num_rows if sampling == "shuffle" else batch_size  # epochs, or steps
        self._draw = self._orders if sampling == "shuffle" else self._fresh
        self._block_size = max(1, _BLOCK_NUMBERS // whole) * whole
        self._blocks: dict[int, Tensor] = {}

    def at(self, step: int) -> Tensor:
        """The indices of one step, `[num_chains, batch_size]`."""
        return self.span(step, step + 1)[:, 0]

    def span(self, start: int, stop: int) -> Tensor:
        """The indices of steps start ... stop - 1, `[num_chains, stop - start, batch_size]`."""
        begin, end = start * self._batch_size, stop * self._batch_size
        first, last = begin // self._block_size, (end - 1) // self._block_size
        for old in [block for block in self._blocks if block < first]:
            del self._blocks[old]
        blocks = [self._block(block) for block in range(first, last + 1)]
        joined = torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0]
        offset = begin - first * self._block_size
        places = joined[:, offset : offset + end - begin]
        return places.unflatten(1, (stop - start, self._batch_size))

    def _block(self, block: int) -> Tensor:
        """All chains' indices of one block, `[chains, numbers]`."""
        if block not in self._blocks:
            sources = (
                generator(self._seed, chain, Purpose.BATCHES, block, self._device)
                for chain in range(self._num_chains)
            )
            self._blocks[block] = torch.stack([self._draw(source) for source in sources])
        return self._blocks[block]

    def _orders(self, source: torch.Generator) -> Tensor:
        epochs = range(self._block_size // self._num_rows)
        return torch.cat(
            [torch.randperm(self._num_rows, generator=source, device=self._device) for _ in epochs]
        )

    def _fresh(self, source: torch.Generator) -> Tensor:
        size = (self._block_size,)
        return torch.randint(self._num_rows, size, generator=source, device=self._device)
