"""Seeds, and one stream per chain and purpose.

A stream is a pure function of (seed, chain, purpose, block): block k of a chain's noise can be
drawn without drawing those before it, whatever the other chains do.  That is what makes a run
with more chains, or a resumed one, repeat the same noise and batches.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from enum import IntEnum
from numbers import Integral

import torch
from torch import Tensor

from pyro_scale.core.exclusive import exclusive
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
    STEP_SIZE = 5
    CURVATURE = 6
    APPROXIMATION = 7
    SHADOW = 8
    SEARCH = 9
    WINDOW = 10
    PILOT = 11


def choose_seed(seed: int | None) -> int:
    """`seed` itself, or one from torch's generator, so that `pyro.set_rng_seed` rules it.

    Raises:
        ArgumentError: `seed` is not an int in [0, 2^63).
    """
    if seed is None:
        with exclusive:
            return int(torch.randint(2**31, ()).item())
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise ArgumentError(f"seed={seed!r}: pass an int in [0, 2**63), or None to have one drawn")
    return int(seed)


def derived_seed(seed: int, chain: int, purpose: Purpose, block: int = 0) -> int:
    """The 63-bit seed of one block of one stream.

    torch's generator for the processor uses 32 of them: of 10^6 blocks about a hundred pairs
    are alike, which repeats 0.02% of the noise, mostly at other times.
    """
    key = struct.pack("<4Q", seed, chain, purpose, block)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(
    seed: int, chain: int, purpose: Purpose, block: int = 0, device: torch.device | None = None
) -> torch.Generator:
    """A torch generator at the start of one block of one stream."""
    source = torch.Generator(device or torch.device("cpu"))
    return source.manual_seed(derived_seed(seed, chain, purpose, block))


class Blocks:
    """All chains' streams of numbers, drawn a block at a time and read step by step.

    Args:
        num_chains: how many streams.
        shape: of one step's numbers.
        size: numbers in a block, which need not be whole steps.
        dtype: of the numbers.
        device: where they are drawn and stay.
        draw: (chain, block, out `[size]`) fills a block.
    """

    def __init__(
        self,
        num_chains: int,
        shape: tuple[int, ...],
        size: int,
        dtype: torch.dtype,
        device: torch.device | None,
        draw: Callable[[int, int, Tensor], object],
    ):
        self._num_chains, self._shape, self._size, self._draw = num_chains, shape, size, draw
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._block, self._held = -1, self._like

    def at(self, step: int) -> Tensor:
        """The numbers of one step, `[num_chains, *shape]`."""
        return self.span(step, step + 1)[:, 0]

    def span(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """The numbers of steps start ... stop - 1, `[num_chains, stop - start, *shape]`.

        Args:
            start: the first step.
            stop: the step after the last.
            out: an earlier span as long as this one, to write over; new memory, whose pages the
                system has to clear first, can take longer than drawing.
        """
        if out is None:
            out = self._like.new_empty(self._num_chains, stop - start, *self._shape)
        width = math.prod(self._shape)
        numbers = out.view(self._num_chains, (stop - start) * width)  # never a copy
        self._write(start * width, stop * width, numbers)
        return out

    def _write(self, begin: int, end: int, out: Tensor) -> None:
        """The numbers begin ... end - 1 of every stream, to `[num_chains, end - begin]`."""
        place = begin
        while place < end:
            block, offset = divmod(place, self._size)
            count = min(end - place, self._size - offset)
            part = out[:, place - begin : place - begin + count]
            if count == self._size:
                self._fill(block, part)
            else:
                part.copy_(self._hold(block)[:, offset : offset + count])
            place += count

    def _hold(self, block: int) -> Tensor:
        """One block, which is held until another one is."""
        if self._block != block:
            if self._held.dim() == 1:
                self._held = self._like.new_empty(self._num_chains, self._size)
            self._fill(block, self._held)
            self._block = block
        return self._held

    def _fill(self, block: int, out: Tensor) -> None:
        for chain in range(self._num_chains):
            self._draw(chain, block, out[chain])


class NoiseStream(Blocks):
    """Standard normals for every step of every chain, drawn a block of steps at a time.

    The block's length depends on the shape of one step's noise alone, never on the number of
    chains, because torch's normals depend on the size of the tensor that they are drawn into.

    Args:
        seed: the run's seed.
        num_chains: how many chains.
        shape: the noise of one step of one chain, `[normals, D]`.
        dtype: of the noise.
        device: where it is drawn and stays.
        purpose: which stream.
    """

    def __init__(
        self,
        seed: int,
        num_chains: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        purpose: Purpose = Purpose.NOISE,
    ):
        def draw(chain: int, block: int, out: Tensor) -> None:
            source = generator(seed, chain, purpose, block, device)
            torch.randn(out.shape, generator=source, out=out)

        width = math.prod(shape)
        self.block_steps = max(1, min(_BLOCK_STEPS, _BLOCK_NUMBERS // max(1, width)))
        size = max(1, self.block_steps * width)
        super().__init__(num_chains, shape, size, dtype, device, draw)


class RefinedNoise(NoiseStream):
    """The noise of a run in steps half as long, on the path of the run with a `NoiseStream`.

    Each of that one's normals z becomes two, (z + w)/sqrt 2 and (z - w)/sqrt 2 with w a normal of
    its own (Levy's construction of Brownian motion): standard normal and independent, and what
    they add over two steps is what z adds over one.

    Args:
        as for a `NoiseStream`.
    """

    def __init__(
        self,
        seed: int,
        num_chains: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(seed, num_chains, shape, dtype, device)
        self._between = NoiseStream(seed, num_chains, shape, dtype, device, Purpose.SHADOW)

    def span(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """As for `Blocks`; steps 2 k and 2 k + 1 are the halves of the other run's step k."""
        first, last = start // 2, -(-stop // 2)
        along, apart = super().span(first, last), self._between.span(first, last)
        halves = torch.stack([along + apart, along - apart], dim=2) / math.sqrt(2)
        wanted = halves.flatten(1, 2)[:, start - 2 * first : stop - 2 * first]
        return wanted.contiguous() if out is None else out.copy_(wanted)
