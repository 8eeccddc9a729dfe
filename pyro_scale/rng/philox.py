"""Philox 4x32-10, and normals, integers and permutations from it, in torch: on any device, without
a compiler.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a bijection of 128-bit
counters for each 64-bit key.  Here the key is the seed and the counter is

    words 0 and 1: the place in the stream;  word 2: the chain;  word 3: the purpose

so no two numbers of a run share a counter, and any number can be computed without those before it.
`native.py` computes the same bits in C++: both use only +, -, *, / and square roots, which round in
the same way everywhere, and sum series for logarithms, sines and cosines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Philox's multipliers, the increments of its key, and its number of rounds.
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
#: Numbers of terms of the series, whose remainders are below rounding: of log around 1 in the
#: square of (m - 1)/(m + 1) < .1716, of sine and cosine on (-pi/4, pi/4).
LOG_TERMS = {torch.float32: 5, torch.float64: 11}
SINE_TERMS = {torch.float32: 5, torch.float64: 8}
#: Number of normals that the words of one counter give.
PER_COUNTER = {torch.float32: 4, torch.float64: 2}

_MASK = 0xFFFFFFFF


class Streams(NamedTuple):
    """Streams of random numbers, one for each chain; a number is a function of the stream and of
    its index in the stream.

    Attributes:
        seeds: the seed of each chain, which is Philox's key, int64 `[chains]` in main memory.
        chains: numbers of the chains, int64 `[chains]` in main memory, below 2^32.
        purpose: what the numbers are for, one of `seeds.Purpose`.
    """

    seeds: Tensor
    chains: Tensor
    purpose: int

    @classmethod
    def from_seed(cls, seed: int | Sequence[int], chains: Sequence[int], purpose: int) -> Streams:
        """One stream of random numbers for each of the chains with these numbers, all for the same
        `purpose`. `seed` is the seed of all chains, or a sequence with one seed for each chain.
        """
        numbers = torch.tensor(chains, dtype=torch.int64)
        seeds = torch.tensor(seed, dtype=torch.int64).expand(len(numbers)).contiguous()
        return cls(seeds, numbers, purpose)


def philox(key: int | Tensor, counters: list[Tensor]) -> list[Tensor]:
    """Philox's random function: four random 32-bit words for each counter, as a list of four int64
    tensors of numbers below 2^32, of the counters' shape. The same key and counter give the same
    words.

    Args:
        key: 64 bits, or an int64 tensor of keys, which broadcasts with the counters.
        counters: the four words of the counters, int64 tensors of numbers below 2^32.
    """
    a, b, c, d = counters
    low, high = key & _MASK, key >> 32
    for _ in range(ROUNDS):
        x, y = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = _high(y) ^ b ^ low, y & _MASK, _high(x) ^ d ^ high, x & _MASK
        low, high = (low + WEYL[0]) & _MASK, (high + WEYL[1]) & _MASK
    return [a, b, c, d]


def words(
    streams: Streams, first: int, count: int, device: torch.device | None = None
) -> list[Tensor]:
    """The four random 32-bit words that belong to each of `count` indices in each stream, beginning
    with index `first`: a list of four int64 tensors `[chains, count]`, from which other random
    numbers are made.
    """
    places = torch.arange(first, first + count, device=device).expand(len(streams.chains), -1)
    like = torch.zeros_like(places)
    chains = like + streams.chains.to(places.device)[:, None]
    keys = streams.seeds.to(places.device)[:, None]
    return philox(keys, [places & _MASK, _high(places), chains, like + streams.purpose])


def normals(streams: Streams, first: int, out: Tensor) -> None:
    """Fills `out`, `[chains, n]` in float32 or float64, with standard normal numbers.

    Uses the Box-Muller transform: two uniforms are the radius and the angle of two normals.

    Args:
        streams: a stream for each chain.
        first: index in the stream of the first number.
        out: tensor to write over.
    """
    per, count = PER_COUNTER[out.dtype], out.shape[1]
    start, stop = first // per, -(-(first + count) // per)
    a, b, c, d = words(streams, start, stop - start, out.device)
    if out.dtype == torch.float32:
        pairs = [*_pair32(a, b), *_pair32(c, d)]
    else:
        pairs = [*_pair64((b << 20) | (a >> 12), d, c)]
    offset = first - start * per
    out.copy_(torch.stack(pairs, -1).flatten(1)[:, offset : offset + count])


def integers(streams: Streams, first: int, bound: int, out: Tensor) -> None:
    """Fills `out`, int64 `[chains, n]`, with integers from 0 to bound - 1, equally likely.

    An integer is the upper half of the bound's product with 64 random bits, so that probabilities
    differ by at most bound/2^64, relatively.

    Args:
        streams: a stream for each chain.
        first: index in the stream of the first integer.
        bound: number above the largest integer, at most 2^32.
        out: tensor to write over.
    """
    count = out.shape[1]
    start, stop = first // 2, -(-(first + count) // 2)
    a, b, c, d = words(streams, start, stop - start, out.device)
    drawn = torch.stack([_below(bound, a, b), _below(bound, c, d)], -1).flatten(1)
    offset = first - 2 * start
    out.copy_(drawn[:, offset : offset + count])


def permutations(streams: Streams, index: int, out: Tensor) -> None:
    """Fills `out`, int32 `[chains, size]`, with a random permutation of 0, ..., size - 1 for each
    chain: the one with number `index` in the chain's stream.

    Uses the Fisher-Yates shuffle: each entry is swapped with a random one at the same index or
    after it.
    """
    size = out.shape[1]
    per = -(-size // 2)
    a, b, c, d = (word.cpu() for word in words(streams, index * per, per))
    remaining = size - torch.arange(2 * per).clamp(max=size - 1).view(-1, 2)
    steps = torch.stack([_below(remaining[:, 0], a, b), _below(remaining[:, 1], c, d)], -1)
    orders = []
    for swaps in steps.flatten(1)[:, :size].tolist():
        order = list(range(size))
        for i, step in enumerate(swaps):
            order[i], order[i + step] = order[i + step], order[i]
        orders.append(order)
    out.copy_(torch.tensor(orders))


def epochs(
    streams: Streams, first: int, mirrored: int, held: int, orders: Tensor, out: Tensor
) -> int:
    """Fills `out`, int64 `[chains, n]`, with indices of rows of data: numbers first, first + 1, ...
    of an endless sequence of epochs.

    An epoch visits all rows in the order of its permutation.

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
    rows, end, place = orders.shape[1], first + out.shape[1], first
    length = rows // mirrored * mirrored if mirrored else rows
    period = 2 * length if mirrored else length
    while place < end:
        if held != place // period:
            held = place // period
            permutations(streams, held, orders)
        epoch = orders[:, :length]
        if mirrored:
            backwards = epoch.unflatten(1, (-1, mirrored)).flip(1).flatten(1)
            epoch = torch.cat([epoch, backwards], 1)
        part = epoch[:, place % period :][:, : end - place]
        out[:, place - first :][:, : part.shape[1]].copy_(part)
        place += part.shape[1]
    return held


def _high(product: Tensor) -> Tensor:
    """The upper 32 bits of each 64-bit number, an int64 tensor of numbers below 2^32 of the same
    shape.
    """
    return (product >> 32) & _MASK


def _below(bound: int | Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Random integers from 0 to bound - 1, from 64 random bits each, given as two tensors of 32-bit
    numbers: floor(bound (2^32 high + low) / 2^64).
    """
    return _high(high * bound + _high(low * bound))


def _pair32(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of independent standard normal numbers in float32, made from random 32-bit
    numbers (int64 tensors of the same shape): `u` gives the radius and `v` the angle of each pair.
    """
    uniform = (u.to(torch.float32) + 0.5) * 2.0**-32
    centered = (v & 0x3FFFFFFF) - 0x20000000
    angle = (centered.to(torch.float32) + 0.5) * _rounded(2.0**-31 * math.pi, torch.float32)
    return _box_muller(uniform, v >> 30, angle)


def _pair64(u: Tensor, v_high: Tensor, v_low: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of independent standard normal numbers in float64, from 52 random bits for the
    radius and 54 (of the 64 passed) for the angle of each pair.
    """
    uniform = (u.to(torch.float64) + 0.5) * 2.0**-52
    centered = (((v_high & 0x3FFFFFFF) << 22) | (v_low >> 10)) - (1 << 51)
    angle = (centered.to(torch.float64) + 0.5) * (2.0**-53 * math.pi)
    return _box_muller(uniform, v_high >> 30, angle)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


def _box_muller(uniform: Tensor, quadrant: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of independent standard normal numbers, from a uniform number in (0, 1] for the
    radius, and a quadrant (0 to 3) and an angle in (-pi/4, pi/4) relative to that quadrant.
    """
    radius = _sqrt(-2.0 * _log(uniform))
    radius = torch.where((quadrant & 2) > 0, -radius, radius)
    sine, cosine = _sine_and_cosine(angle)
    odd = (quadrant & 1) > 0
    return radius * torch.where(odd, -sine, cosine), radius * torch.where(odd, cosine, sine)


def _sqrt(x: Tensor) -> Tensor:
    """The square root, correctly rounded; torch's own on CPUs is not always."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else torch.sqrt(x)


def _log(u: Tensor) -> Tensor:
    """The natural logarithm, in the same bits as the C++: log u = e log 2 + 2 artanh s, with u = m
    2^e, m in [sqrt(1/2), sqrt 2), s = (m-1)/(m+1)."""
    mantissa, exponent = torch.frexp(u)
    low = mantissa < _rounded(math.sqrt(0.5), u.dtype)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = exponent - low.to(exponent.dtype)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 1.0 / (2 * LOG_TERMS[u.dtype] - 1))
    for k in range(LOG_TERMS[u.dtype] - 2, -1, -1):
        series = series * square + 1.0 / (2 * k + 1)
    return exponent.to(u.dtype) * math.log(2.0) + (2.0 * s) * series


def _sine_and_cosine(t: Tensor) -> tuple[Tensor, Tensor]:
    """(Sine, cosine) of an angle in (-pi/4, pi/4), by Taylor series, in the same bits as the
    C++."""
    square = t * t
    terms = SINE_TERMS[t.dtype]
    sine = torch.full_like(t, _coefficient(2 * terms - 1))
    cosine = torch.full_like(t, _coefficient(2 * terms))
    for k in range(terms - 2, -1, -1):
        sine = sine * square + _coefficient(2 * k + 1)
    for k in range(terms - 1, -1, -1):
        cosine = cosine * square + _coefficient(2 * k)
    return sine * t, cosine


def _coefficient(n: int) -> float:
    """The coefficient of t^n in the Taylor series of the sine (for odd n) or the cosine (for even
    n): 1/n! with the series' sign.
    """
    return (-1.0) ** (n // 2) / math.factorial(n)
