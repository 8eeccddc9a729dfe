"""Quantiles of a stream of numbers that are not kept: t-digests (Dunning and Ertl 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

#: Clusters of a stream, and numbers that are held until they are merged into those.
_CLUSTERS, _HELD = 128, 128
#: Streams that are worked on at once, which bounds what that needs besides.
_STREAMS = 2**11


class QuantileSketch:
    """Quantiles of many streams that are as long as each other, from clusters of neighbors.

    A cluster holds how many numbers it is of, and their mean.  The k-th is of the ranks between
    (1 + sin((k/K - 1/2) pi))/2 and the same of k + 1, of K = 128: few at the ends, where quantiles
    are asked for, and 1.2% of all in the middle.  What is known of a number is its rank, so that
    neither scales nor tails matter: a quantile q is right to within sqrt(q(1 - q)) pi/K of rank, or
    twice that at worst; of up to 127 numbers it is exact, as the least and the most always are.

    Args:
        num_streams: how many streams.

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
        """Takes the next numbers of every stream, `[n, streams]`, all of them finite."""
        held = torch.cat([self.held.to(numbers.dtype), numbers.T], 1)
        num_full = held.shape[1] - held.shape[1] % _HELD
        for block in held[:, :num_full].split(_HELD, 1) if num_full else ():
            self._merge(block)
        self.held = held[:, num_full:].clone()

    @classmethod
    def of(cls, sketches: Sequence[QuantileSketch]) -> Self:
        """One of the numbers of all, stream by stream."""
        one = cls(len(sketches[0].held))
        parts = []
        for here in one._blocks():
            means = torch.cat([each for s in sketches for each in (s.means[here], s.held[here])], 1)
            counts = (each for s in sketches for each in (s.sizes[here], _ones(s.held[here])))
            sizes = torch.cat([*counts], 1)
            clusters = _in_order(means, sizes)
            parts.append(clusters if means.shape[1] <= _CLUSTERS else _clustered(*clusters))
        one.means, one.sizes = (torch.cat(each) for each in zip(*parts, strict=True))
        one.held = one.held.to(one.means)
        return one

    def streams(self, places: slice) -> QuantileSketch:
        """Some of the streams."""
        part = QuantileSketch(0)
        part.means, part.sizes = self.means[places], self.sizes[places]
        part.held = self.held[places]
        return part

    def quantiles(self, shares: Sequence[float]) -> Tensor:
        """Of every stream, `[shares, streams]`: between neighbors linearly, as
        `torch.quantile`."""
        levels = torch.tensor(shares, dtype=torch.float64)
        parts = [_quantiles(*self._with(self.held, here), levels) for here in self._blocks()]
        return torch.cat(parts).T

    def _merge(self, numbers: Tensor) -> None:
        """Makes clusters anew of those there are and of more numbers, `[streams, n]`."""
        parts = [_clustered(*self._with(numbers, here)) for here in self._blocks()]
        self.means, self.sizes = (torch.cat(each) for each in zip(*parts, strict=True))

    def _with(self, numbers: Tensor, here: slice) -> tuple[Tensor, Tensor]:
        """(Means, sizes) of some streams' clusters and of more numbers `[streams, n]`, in order."""
        means = torch.cat([self.means[here].to(numbers.dtype), numbers[here]], 1)
        return _in_order(means, torch.cat([self.sizes[here], _ones(numbers[here])], 1))

    def _blocks(self) -> Iterator[slice]:
        """Some streams after others."""
        for start in range(0, max(1, len(self.held)), _STREAMS):
            yield slice(start, start + _STREAMS)


def _ones(numbers: Tensor) -> Tensor:
    """The sizes of clusters of one number each."""
    return torch.ones_like(numbers, dtype=torch.int32)


def _in_order(means: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Clusters by their means; empty ones, whose mean is infinite, come last."""
    order = torch.from_numpy(np.argsort(means.numpy(), 1))  # a tenth of torch's time
    return means.gather(1, order), sizes.gather(1, order)


def _clustered(means: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """(Means, sizes) of at most so many clusters as there are, of clusters in order."""
    ends = sizes.cumsum(1)
    total = ends[:, -1:].double()
    centers = ((2 * ends - sizes) / total - 1).asin() / math.pi + 0.5
    cluster = (centers * _CLUSTERS).long().clamp(1, _CLUSTERS - 2)
    cluster[:, 0] = 0  # the least and the most stay alone
    cluster.scatter_(1, _last(sizes), _CLUSTERS - 1)
    parts = torch.where(sizes > 0, means.double() * (sizes / total), 0)
    none = parts.new_zeros(len(parts), _CLUSTERS)
    sums = none.scatter_add(1, cluster, parts)
    merged = none.int().scatter_add(1, cluster, sizes)
    return torch.where(merged > 0, sums * (total / merged), math.inf).to(means), merged


def _quantiles(means: Tensor, sizes: Tensor, levels: Tensor) -> Tensor:
    """Of clusters in order, `[streams, levels]`."""
    means, ends = means.double(), sizes.cumsum(1)
    places = ends - (sizes + 1) / 2  # of the means among the numbers, from 0
    wanted = levels * (ends[:, -1:] - 1)
    above = torch.minimum(torch.searchsorted(places, wanted), _last(sizes))
    below = (above - 1).clamp(min=0)
    low, high = places.gather(1, below), places.gather(1, above)
    part = ((wanted - low) / (high - low).clamp(min=1)).clamp(0, 1)
    return torch.lerp(means.gather(1, below), means.gather(1, above), part)


def _last(sizes: Tensor) -> Tensor:
    """Where the last cluster is that is not empty, `[streams, 1]`."""
    return sizes.count_nonzero(1)[:, None] - 1
