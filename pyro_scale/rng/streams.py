"""One stream per chain and purpose, a function of (seed, chain, purpose) and the place in it.

Step k of a chain's noise can be drawn without the steps before it, whatever the other chains do.
That is what makes a run with more chains, a resumed one, or one on many machines repeat the same
noise and batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_scale.rng import philox
from pyro_scale.rng.native import Native, native
from pyro_scale.rng.philox import Streams
from pyro_scale.rng.seeds import Purpose


def fill_normals(streams: Streams, first: int, out: Tensor) -> None:
    """Writes standard normals number first, first + 1, ... of streams, `[chains, numbers]`.

    The same bits on every processor and device; those of another dtype than float64 are drawn in
    float32 and rounded.
    """
    if out.dtype in philox.PER_COUNTER:
        _source(out).normals(streams, first, out)
        return
    drawn = out.new_empty(out.shape, dtype=torch.float32)
    fill_normals(streams, first, drawn)
    out.copy_(drawn)


def fill_integers(streams: Streams, first: int, bound: int, out: Tensor) -> None:
    """Writes integers below a bound, number first, first + 1, ... of streams, `[chains, n]`."""
    _source(out).integers(streams, first, bound, out)


def fill_permutations(streams: Streams, index: int, out: Tensor) -> None:
    """Writes the index-th permutation of every stream, int32 `[chains, size]`."""
    if out.device.type == "cpu":
        _source(out).permutations(streams, index, out)
        return
    orders = torch.empty(out.shape, dtype=torch.int32)
    fill_permutations(streams, index, orders)
    out.copy_(orders)


def _source(out: Tensor) -> Native:
    """What fills a tensor."""
    on_processor = out.device.type == "cpu" and out.is_contiguous()
    return (native() if on_processor else None) or philox  # type: ignore[return-value]


class NoiseStream:
    """Standard normals for every step of every chain.

    Args:
        seed: the run's seed, or each chain's own.
        chains: the chains' numbers.
        shape: the noise of one step of one chain, `[normals, D]`.
        dtype: of the noise.
        device: where it is drawn and stays.
        purpose: which stream.
    """

    def __init__(
        self,
        seed: int | Sequence[int],
        chains: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        purpose: Purpose = Purpose.NOISE,
    ):
        self._streams = Streams.from_seed(seed, chains, purpose)
        self._shape, self._like = shape, torch.empty(0, dtype=dtype, device=device)

    def at(self, step: int) -> Tensor:
        """The noise of one step, `[chains, *shape]`."""
        return self.span(step, step + 1)[:, 0]

    def span(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """The noise of steps start ... stop - 1, `[chains, stop - start, *shape]`.

        Args:
            start: the first step.
            stop: the step after the last.
            out: an earlier span as long as this one, to write over; new memory, whose pages the
                system has to clear first, can take longer than drawing.
        """
        if out is None:
            chains = len(self._streams.chains)
            out = self._like.new_empty(chains, stop - start, *self._shape)
        first = start * math.prod(self._shape)
        fill_normals(self._streams, first, out.view(len(out), -1))
        return out


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
        seed: int | Sequence[int],
        chains: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(seed, chains, shape, dtype, device)
        self._between = NoiseStream(seed, chains, shape, dtype, device, Purpose.SHADOW)

    def span(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """As for a `NoiseStream`; steps 2 k and 2 k + 1 are the halves of its step k."""
        first, last = start // 2, -(-stop // 2)
        along, apart = super().span(first, last), self._between.span(first, last)
        halves = torch.stack([along + apart, along - apart], dim=2) / math.sqrt(2)
        wanted = halves.flatten(1, 2)[:, start - 2 * first : stop - 2 * first]
        return wanted.contiguous() if out is None else out.copy_(wanted)


class ShardNoise:
    """The noise of one chain of which every process has some elements: what a `NoiseStream` of the
    whole chain has there, however they are shared out.

    Args:
        seed: the run's seed.
        shape: the noise of one step of the whole chain, `[normals, D]`.
        places: (the first, how many) of the elements, for each piece in which they lie.
        dtype: of the noise.
        device: where it is drawn and stays.
        purpose: which stream.
        chain: its number.
    """

    def __init__(
        self,
        seed: int,
        shape: tuple[int, int],
        places: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        purpose: Purpose = Purpose.NOISE,
        chain: int = 0,
    ):
        self._streams = Streams.from_seed(seed, [chain], purpose)
        self._shape, self._places = shape, places
        self._like = torch.empty(0, dtype=dtype, device=device)

    def at(self, step: int) -> Tensor:
        """The noise of one step, `[normals, elements here]`."""
        (normals, size), counts = self._shape, [count for _, count in self._places]
        out = self._like.new_empty(normals, sum(counts))
        for number, row in enumerate(out):
            before = (step * normals + number) * size
            for (first, _), part in zip(self._places, row.split(counts), strict=True):
                fill_normals(self._streams, before + first, part[None])
        return out
