"""Draws the rows of each chain at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.rng.philox import Streams
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import fill_epochs, fill_integers

Sampling = Literal["shuffle", "replacement", "symmetric"]

#: Largest size of the permutations in memory, in bytes.
_MOST_BYTES = 4 * 2**30


def check_sampling(sampling: object) -> None:
    """Checks the user's argument `sampling`, the way in which rows of minibatches are drawn.
    Returns None if it is known.

    Raises:
        ArgumentError: `sampling` is not one of `Sampling`.
    """
    if sampling not in get_args(Sampling):
        raise ArgumentError(f"sampling={sampling!r}: pass one of {get_args(Sampling)}")


class RowIndices:
    """The row indices of every chain's minibatch at every step: functions of seed, chain and step
    alone.

    Args:
        seed: the run's seed, or one for each chain.
        chains: numbers of the chains.
        num_rows: number of rows; indices are below this number, which is at most 2^32.
        batch_size: number of indices of each step and chain.
        sampling: how indices are drawn, see above.
        device: device of the indices; None for the CPU.

    Raises:
        ArgumentError: an unknown `sampling`; permutations that would not fit in memory.
    """

    def __init__(
        self,
        seed: int | Sequence[int],
        chains: Sequence[int],
        num_rows: int,
        batch_size: int,
        sampling: Sampling,
        device: torch.device | None = None,
    ):
        check_sampling(sampling)
        if sampling != "replacement" and 4 * len(chains) * num_rows > _MOST_BYTES:
            raise ArgumentError(
                f"sampling='{sampling}' would hold {len(chains)} orders of {num_rows} rows "
                f"({4 * len(chains) * num_rows / 2**30:.0f} GiB): pass sampling='replacement'",
                code="memory",
            )
        self._streams = Streams.from_seed(seed, chains, Purpose.BATCHES)
        self._num_rows, self._batch_size, self._sampling = num_rows, batch_size, sampling
        self._device = device
        self._mirrored = batch_size if sampling == "symmetric" else 0
        held_rows = 0 if sampling == "replacement" else num_rows
        self._orders = torch.empty(len(chains), held_rows, dtype=torch.int32)
        self._epoch = -1

    def at(self, step: int) -> Tensor:
        """The row indices of every chain's minibatch at one step, int64 `[chains, batch_size]`."""
        return self.span(step, step + 1)[:, 0]

    def span(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """The row indices of steps start, ..., stop - 1, `[chains, stop - start, batch_size]`.

        Args:
            start: first step.
            stop: step after the last.
            out: result of an earlier call for as many steps, which is overwritten; None for a new
                tensor.
        """
        if out is None:
            shape = len(self._streams.chains), stop - start, self._batch_size
            out = torch.empty(shape, dtype=torch.long, device=self._device)
        indices, first = out.view(len(out), -1), start * self._batch_size
        if self._sampling == "replacement":
            fill_integers(self._streams, first, self._num_rows, indices)
        else:
            held = self._epoch, self._orders
            self._epoch = fill_epochs(self._streams, first, self._mirrored, *held, indices)
        return out
