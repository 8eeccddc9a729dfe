"""Which rows each chain takes at each step."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from pyro_scale.core.rng import Blocks, Purpose, generator
from pyro_scale.errors import ArgumentError

Sampling = Literal["shuffle", "replacement", "symmetric"]

#: Indices of a chain that are drawn together, about.
_BLOCK_NUMBERS = 2**14
#: Bytes of permutations that are held at most.
_MOST_BYTES = 4 * 2**30


def check_sampling(sampling: object) -> None:
    """Refuses a way of sampling rows that there is not."""
    if sampling not in get_args(Sampling):
        raise ArgumentError(f"sampling={sampling!r}: pass one of {get_args(Sampling)}")


class RowIndices(Blocks):
    """One stream of row indices a chain, a function of (seed, chain) alone.

    `"shuffle"` goes through all rows in a new order each epoch; a batch that the epoch's end
    cuts is filled up from the next epoch, so that every row counts equally.  `"replacement"`
    draws every row anew.  `"symmetric"` goes through whole batches in a new order and then
    through the same batches backwards (Paulin et al. 2024); rows that do not fill a batch sit
    the two epochs out.

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
        if sampling != "replacement" and 16 * num_chains * num_rows > _MOST_BYTES:
            raise ArgumentError(
                f"sampling='{sampling}' would hold {num_chains} orders of {num_rows} rows "
                f"({16 * num_chains * num_rows / 2**30:.0f} GiB): pass sampling='replacement'"
            )
        full = num_rows // batch_size * batch_size
        period = {"shuffle": num_rows, "replacement": batch_size, "symmetric": 2 * full}[sampling]
        parts = max(1, _BLOCK_NUMBERS // period)

        def draw(chain: int, block: int, out: Tensor) -> None:
            source = generator(seed, chain, Purpose.BATCHES, block, device)
            if sampling == "replacement":
                torch.randint(num_rows, out.shape, generator=source, out=out)
                return
            for part in out.split(period):
                if sampling == "shuffle":
                    torch.randperm(num_rows, generator=source, out=part)
                    continue
                order = torch.randperm(num_rows, generator=source, device=device)[:full]
                part[:full] = order
                part[full:] = order.view(-1, batch_size).flip(0).flatten()

        super().__init__(num_chains, (batch_size,), parts * period, torch.long, device, draw)
