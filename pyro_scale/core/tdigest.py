"""Estimates quantiles of sequences of numbers without storing the numbers: t-digests (Dunning and
Ertl 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

#: Number of clusters of a stream, and of numbers that are held until they are merged into clusters.
_CLUSTERS, _HELD = 128, 128
#: Number of streams that are processed at once, which bounds the memory for intermediate results.
_STREAMS = 2**11


class QuantileSketch:
    """Quantiles of many streams (sequences of numbers of equal length), from clusters of
    neighboring numbers instead of the numbers themselves.

    A cluster stores the number and the mean of its members.  The k-th has the ranks between
    (1 + sin((k/K - 1/2) pi))/2 and the same for k + 1, with K = 128: few numbers at the ends, where
    quantiles are usually asked for, and 1.2% of all in the middle.  Only ranks matter, neither
    scales nor tails: a quantile q is accurate to sqrt(q(1 - q)) pi/K in rank, or twice that at
    worst.  Quantiles are exact for up to 127 numbers; the smallest and largest numbers are always
    exact.

    Args:
        num_streams: number of streams.

    Examples:
        >>> sketch = QuantileSketch(2)
        >>> sketch.add(torch.arange(10.0).reshape(5, 2))
        >>> sketch.quantiles([0.0, 0.5])
        tensor([[0., 1.],
                [4., 5.]], dtype=torch.float64)
    """

    def __init__(self, num_streams: int):
        self.means = torch.empty(num_streams, 0)
        self.sizes = torch.empty(num_streams, 0, dtype=torch.int32)
        self.held = torch.empty(num_streams, 0)

    def add(self, numbers: Tensor) -> None:
        """Adds the next n numbers of every stream, `[n, streams]`, which must be finite."""
        held = torch.cat([self.held.to(numbers.dtype), numbers.T], 1)
        num_full = held.shape[1] - held.shape[1] % _HELD
        for block in held[:, :num_full].split(_HELD, 1) if num_full else ():
            self._merge(block)
        self.held = held[:, num_full:].clone()

    @classmethod
    def merge(cls, sketches: Sequence[QuantileSketch]) -> Self:
        """A sketch of the numbers of several sketches together, stream by stream; all sketches have
        the same number of streams.
        """
        merged = cls(len(sketches[0].held))
        parts = []
        for block in merged._blocks():
            means = torch.cat([x for s in sketches for x in (s.means[block], s.held[block])], 1)
            counts = (n for s in sketches for n in (s.sizes[block], _ones(s.held[block])))
            sizes = torch.cat([*counts], 1)
            clusters = _sort(means, sizes)
            parts.append(clusters if means.shape[1] <= _CLUSTERS else _cluster(*clusters))
        merged.means, merged.sizes = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        merged.held = merged.held.to(merged.means)
        return merged

    def streams(self, places: slice) -> QuantileSketch:
        """A sketch of some of the streams (each stream is one element's sequence of numbers): those
        whose indices are in the slice `places`.
        """
        part = QuantileSketch(0)
        part.means, part.sizes = self.means[places], self.sizes[places]
        part.held = self.held[places]
        return part

    def quantiles(self, shares: Sequence[float]) -> Tensor:
        """Quantiles of every stream, float64 `[levels, streams]`, with linear interpolation as in
        `torch.quantile`.

        Args:
            shares: levels of the quantiles, in [0, 1].
        """
        levels = torch.tensor(shares, dtype=torch.float64)
        parts = [_quantiles(*self._with(self.held, block), levels) for block in self._blocks()]
        return torch.cat(parts).T

    def _merge(self, numbers: Tensor) -> None:
        """Adds the numbers `[streams, n]` to the streams' clusters, in place."""
        parts = [_cluster(*self._with(numbers, block)) for block in self._blocks()]
        self.means, self.sizes = (torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def _with(self, numbers: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        """(Means, sizes) of a block of streams with further numbers added as clusters of one number
        each: both `[streams, clusters + n]`, sorted by mean. `numbers` is `[streams, n]`, and
        `block` the slice of the streams.
        """
        means = torch.cat([self.means[block].to(numbers.dtype), numbers[block]], 1)
        return _sort(means, torch.cat([self.sizes[block], _ones(numbers[block])], 1))

    def _blocks(self) -> Iterator[slice]:
        """Yields slices that split the streams into blocks to process one after another."""
        for start in range(0, max(1, len(self.held)), _STREAMS):
            yield slice(start, start + _STREAMS)


def _ones(numbers: Tensor) -> Tensor:
    """Ones, int32, of the numbers' shape: the sizes of clusters of one number each."""
    return torch.ones_like(numbers, dtype=torch.int32)


def _sort(means: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """(Means, sizes) of clusters `[streams, clusters]`, sorted by mean along each stream; empty
    clusters, whose mean is infinite, come last."""
    order = torch.from_numpy(np.argsort(means.numpy(), 1))  # ten times as fast as torch
    return means.gather(1, order), sizes.gather(1, order)


def _cluster(means: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Merges sorted clusters `[streams, n]` into `_CLUSTERS` ones: (means, sizes), each `[streams,
    128]`; the mean of an empty cluster is infinite."""
    ends = sizes.cumsum(1)
    total = ends[:, -1:].double()
    centers = ((2 * ends - sizes) / total - 1).asin() / math.pi + 0.5
    cluster = (centers * _CLUSTERS).long().clamp(1, _CLUSTERS - 2)
    cluster[:, 0] = 0  # the smallest and the largest stay alone
    cluster.scatter_(1, _last(sizes), _CLUSTERS - 1)
    parts = torch.where(sizes > 0, means.double() * (sizes / total), 0)
    none = parts.new_zeros(len(parts), _CLUSTERS)
    sums = none.scatter_add(1, cluster, parts)
    merged = none.int().scatter_add(1, cluster, sizes)
    return torch.where(merged > 0, sums * (total / merged), math.inf).to(means), merged


def _quantiles(means: Tensor, sizes: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of each stream, `[streams, levels]`, from its clusters.

    Args:
        means: means of the clusters, sorted, `[streams, n]`.
        sizes: numbers of members of the clusters, `[streams, n]`.
        levels: levels of the quantiles, in [0, 1].
    """
    means, ends = means.double(), sizes.cumsum(1)
    places = ends - (sizes + 1) / 2  # of the means among the numbers, from 0
    ranks = levels * (ends[:, -1:] - 1)
    above = torch.minimum(torch.searchsorted(places, ranks), _last(sizes))
    below = (above - 1).clamp(min=0)
    low, high = places.gather(1, below), places.gather(1, above)
    part = ((ranks - low) / (high - low).clamp(min=1)).clamp(0, 1)
    return torch.lerp(means.gather(1, below), means.gather(1, above), part)


def _last(sizes: Tensor) -> Tensor:
    """Index of the last cluster of each stream that is not empty, `[streams, 1]`; empty ones come
    last."""
    return sizes.count_nonzero(1)[:, None] - 1
