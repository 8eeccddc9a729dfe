"""Streams of random numbers: each number is a function of the seed, the chain's number, the purpose
and the number's index in the stream.

The random numbers of a step can be drawn without those of earlier steps, and do not depend on other
chains. So runs with more chains, resumed runs and runs on several machines have the same random
numbers and minibatches.
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
    """Fills `out`, `[chains, n]`, with the standard normal numbers that have the indices first,
    first + 1, ... in each chain's stream.

    The numbers are the same bits on every machine and device.  Dtypes other than float64 are drawn
    in float32 and rounded.

    Args:
        streams: a stream for each chain.
        first: index in the stream of the first number.
        out: tensor to write over.
    """
    if out.dtype in philox.PER_COUNTER:
        _source(out).normals(streams, first, out)
        return
    drawn = out.new_empty(out.shape, dtype=torch.float32)
    fill_normals(streams, first, drawn)
    out.copy_(drawn)


def fill_integers(streams: Streams, first: int, bound: int, out: Tensor) -> None:
    """Fills `out`, int64 `[chains, n]`, with integers from 0 to bound - 1, equally likely: those
    with the indices first, first + 1, ... in each chain's stream.
    """
    _source(out).integers(streams, first, bound, out)


def fill_permutations(streams: Streams, index: int, out: Tensor) -> None:
    """Fills `out`, int32 `[chains, size]`, with a random permutation of 0, ..., size - 1 for each
    chain: the one with number `index` in the chain's stream.
    """
    if out.device.type == "cpu":
        _source(out).permutations(streams, index, out)
        return
    orders = torch.empty(out.shape, dtype=torch.int32)
    fill_permutations(streams, index, orders)
    out.copy_(orders)


def fill_epochs(
    streams: Streams, first: int, mirrored: int, held: int, orders: Tensor, out: Tensor
) -> int:
    """Fills `out`, int64 `[chains, n]` on any device, with indices of rows of data: numbers first,
    first + 1, ... of an endless sequence of epochs, each of which visits all rows in random order.

    Args:
        streams: a stream for each chain.
        first: number, in the endless sequence, of the first row index to write.
        mirrored: 0 for plain epochs; otherwise the number of rows of a minibatch: an epoch then
            consists of its permutation's complete minibatches, first forwards and then backwards.
        held: number of the epoch whose permutations `orders` contains; -1 for none.
        orders: memory for the permutations of one epoch, int32 `[chains, rows]` in main memory; is
            written over.
        out: tensor to write over.

    Returns:
        The number of the epoch whose permutations `orders` now contains, that of the last index.
    """
    if out.device.type == "cpu":
        return _source(out).epochs(streams, first, mirrored, held, orders, out)
    indices = torch.empty(out.shape, dtype=out.dtype)
    epoch = fill_epochs(streams, first, mirrored, held, orders, indices)
    out.copy_(indices)
    return epoch


def _source(out: Tensor) -> Native:
    """The fastest functions that can fill the tensor `out` with random numbers: those in C++ if it
    is on the CPU and contiguous and there is a compiler; otherwise the module `philox`, in torch.
    Both give the same bits.
    """
    on_processor = out.device.type == "cpu" and out.is_contiguous()
    return (native() if on_processor else None) or philox  # type: ignore[return-value]


class NoiseStream:
    """Standard normal numbers for every step of every chain: functions of seed, chain and step
    alone, so that a run can be repeated or continued from any step.

    Args:
        seed: the run's seed, or a sequence with one for each chain.
        chains: numbers of the chains.
        shape: shape of what one step of one chain uses, `[normals, D]`.
        dtype: dtype of the numbers.
        device: device of the numbers.
        purpose: use of the numbers; streams of different purposes are independent.
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
        """The standard normal numbers of one step, `[chains, *shape]`."""
        return self.span(step, step + 1)[:, 0]

    def span(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """The standard normal numbers of steps start, ..., stop - 1, `[chains, stop - start,
        *shape]`.

        Args:
            start: first step.
            stop: step after the last.
            out: an earlier result for as many steps, to write over: new memory, which the system
                clears first, can take longer than drawing. None for new memory.
        """
        if out is None:
            chains = len(self._streams.chains)
            out = self._like.new_empty(chains, stop - start, *self._shape)
        first = start * math.prod(self._shape)
        fill_normals(self._streams, first, out.view(len(out), -1))
        return out


class RefinedNoise(NoiseStream):
    """Standard normal numbers for steps half as long, on the same Brownian path as a `NoiseStream`:
    to measure the bias of the step size.

    Each normal z of a `NoiseStream` becomes two, (z + w)/sqrt 2 and (z - w)/sqrt 2, with another
    normal w (Levy's construction of Brownian motion).  They are standard normal and independent,
    and move a chain in two steps by as much as z in one.

    Args:
        seed: the run's seed, or a sequence with one for each chain.
        chains: numbers of the chains.
        shape: shape of what one step of one chain uses, `[normals, D]`.
        dtype: dtype of the numbers.
        device: device of the numbers.
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
        """The standard normal numbers of half steps start, ..., stop - 1, `[chains, stop - start,
        *shape]`; half steps 2 k and 2 k + 1 are on the path of a `NoiseStream`'s step k."""
        first, last = start // 2, -(-stop // 2)
        along, apart = super().span(first, last), self._between.span(first, last)
        halves = torch.stack([along + apart, along - apart], dim=2) / math.sqrt(2)
        noise = halves.flatten(1, 2)[:, start - 2 * first : stop - 2 * first]
        return noise.contiguous() if out is None else out.copy_(noise)


class ShardNoise:
    """Standard normal numbers for those elements of one chain that this process has, where
    processes divide the elements among themselves. They are the numbers of these elements in a
    `NoiseStream` of the whole chain, however elements are distributed.

    Args:
        seed: the run's seed.
        shape: shape of what one step of the whole chain uses, `[normals, D]`.
        places: (index of the first element in the vector [D], number of elements) of each range of
            elements that this process has.
        dtype: dtype of the numbers.
        device: device of the numbers.
        purpose: use of the numbers; streams of different purposes are independent.
        chain: number of the chain.
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
        """The standard normal numbers of one step, `[normals, elements of this process]`."""
        (normals, size), counts = self._shape, [count for _, count in self._places]
        out = self._like.new_empty(normals, sum(counts))
        for number, row in enumerate(out):
            before = (step * normals + number) * size
            for (first, _), part in zip(self._places, row.split(counts), strict=True):
                fill_normals(self._streams, before + first, part[None])
        return out
