"""Seeds, and one stream per chain and purpose.

A stream is a pure function of (seed, chain, purpose, block): block k of a chain's noise can be
drawn without drawing those before it, whatever the other chains do.  That is what makes a run
with more chains, or a resumed one, repeat the same noise and batches.
"""

from __future__ import annotations

import math
from enum import IntEnum
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError

#: Numbers in one chain's block of noise, at most: half a megabyte of float64.
_BLOCK_NUMBERS = 2**16
#: Steps in one block of noise, at most.
_BLOCK_STEPS = 1024


class Purpose(IntEnum):
    """What a stream is for; the numbers are part of what a seed means, so never change them."""

    INIT = 0
    NOISE = 1
    BATCHES = 2
    MOMENTUM = 3
    DATA_LOADER = 4


def choose_seed(seed: int | None) -> int:
    """`seed` itself, or one from torch's generator, so that `pyro.set_rng_seed` rules it.

    Raises:
        ArgumentError: `seed` is not an int in [0, 2^63).
    """
    if seed is None:
        return int(torch.randint(2**31, ()).item())
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise ArgumentError(f"seed={seed!r}: pass an int in [0, 2**63), or None to have one drawn")
    return int(seed)


def derived_seed(seed: int, chain: int, purpose: Purpose, block: int = 0) -> int:
    """The 63-bit seed of one block of one stream."""
    sequence = np.random.SeedSequence([seed, chain, int(purpose), block])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(
    seed: int, chain: int, purpose: Purpose, block: int = 0, device: torch.device | None = None
) -> torch.Generator:
    """A torch generator at the start of one block of one stream."""
    source = torch.Generator(device or torch.device("cpu"))
    return source.manual_seed(derived_seed(seed, chain, purpose, block))


class NoiseTape:
    """Standard normals for every step of every chain, drawn a block of steps at a time.

    The block's length depends on the shape of one step's noise alone, never on the number of
    chains, because torch's normals depend on the size of the tensor that they are drawn into.

    Args:
        seed: the run's seed.
        num_chains: how many chains.
        shape: the noise of one step of one chain, `[normals, D]`.
        dtype: of the noise.
        device: where it is drawn and stays.
    """

    def __init__(
        self,
        seed: int,
        num_chains: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_steps = max(1, min(_BLOCK_STEPS, _BLOCK_NUMBERS // max(1, math.prod(shape))))
        self._seed, self._num_chains, self._shape = seed, num_chains, shape
        self._dtype, self._device = dtype, device
        self._blocks: dict[int, Tensor] = {}

    def at(self, step: int) -> Tensor:
        """The noise of one step, `[num_chains, *shape]`."""
        return self.span(step, step + 1)[:, 0]

    def span(self, start: int, stop: int) -> Tensor:
        """The noise of steps start ... stop - 1, `[num_chains, stop - start, *shape]`."""
        first, last = start // self.block_steps, (stop - 1) // self.block_steps
        for old in [block for block in self._blocks if block < first]:
            del self._blocks[old]
        blocks = [self._block(block) for block in range(first, last + 1)]
        joined = torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0]
        offset = start - first * self.block_steps
        return joined[:, offset : offset + stop - start]

    def _block(self, block: int) -> Tensor:
        if block not in self._blocks:
            draws = [self._draw(chain, block) for chain in range(self._num_chains)]
            self._blocks[block] = torch.stack(draws)
        return self._blocks[block]

    def _draw(self, chain: int, block: int) -> Tensor:
        source = generator(self._seed, chain, Purpose.NOISE, block, self._device)
        size = (self.block_steps, *self._shape)
        return torch.randn(size, generator=source, dtype=self._dtype, device=self._device)
