"""Quantiles of streams of numbers that are not kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Bins of a histogram, and the share of the numbers that may lie outside of it.
_BINS, _OUTSIDE = 128, 0.005
#: Numbers that may lie outside in any case.
_FEW = 5
#: Numbers of a stream that are held before the first bins are chosen.
_HELD = 64


class QuantileSketch:
    """Quantiles of many streams that are as long as each other, from a histogram of each.

    The first numbers, which are held, say where the bins are.  Where more than half a percent of
    a stream comes to lie outside, its bins are made twice as wide, two at a time into one.  So a
    quantile is right to within half a percent of rank and a bin, of which there are 128.

    Args:
        num_streams: how many streams.

    Example:
        >>> sketch = QuantileSketch(2)
        >>> sketch.add(torch.arange(10.0).reshape(5, 2))
        >>> sketch.quantiles([0.0, 0.5])
        tensor([[0., 1.],
                [4., 5.]], dtype=torch.float64)
    """

    def __init__(self, num_streams: int):
        self.held = torch.empty(0, num_streams)
        self.counts = torch.zeros(num_streams, 0, dtype=torch.int32)
        self.low = torch.zeros(num_streams, dtype=torch.float64)
        self.width = torch.zeros(num_streams, dtype=torch.float64)

    def add(self, numbers: Tensor) -> None:
        """Takes the next numbers of every stream, `[n, streams]`, all of them finite."""
        if not self.counts.numel():
            self.held = torch.cat([self.held.to(numbers.dtype), numbers])
            if len(self.held) < _HELD:
                return
            numbers, self.held = self.held, self.held[:0]
            self.low, self.width = _bins_around(numbers)
            self.counts = self.counts.new_zeros(len(self.low), _BINS)
        if len(numbers):
            self._widen(numbers)
            self._count(numbers)

    def quantiles(self, shares: Sequence[float]) -> Tensor:
        """Of every stream, `[shares, streams]`."""
        wanted = torch.tensor(shares, dtype=torch.float64)
        if not self.counts.numel():
            return self.held.double().quantile(wanted, dim=0)
        below = self.counts.cumsum(1).double()
        ranks = (wanted * below[0, -1]).expand(len(below), -1).contiguous()
        bins = torch.searchsorted(below, ranks).clamp(max=_BINS - 1)
        here = self.counts.gather(1, bins)
        part = (ranks - (below.gather(1, bins) - here)) / here.clamp(min=1)
        return (self.low[:, None] + self.width[:, None] * (bins + part)).T

    def _widen(self, numbers: Tensor) -> None:
        """Makes bins wider until few of the numbers lie outside."""
        most = max(_FEW, _OUTSIDE * (int(self.counts[0].sum()) + len(numbers)))
        columns = numbers.T.double()
        low, width, counts = self.low, self.width, self.counts
        while True:
            high = low + _BINS * width
            under = counts[:, 0] + (columns < low[:, None]).sum(1)
            over = counts[:, -1] + (columns > high[:, None]).sum(1)
            down = (under > most) & (columns.amin(1) < low)
            up = (over > most) & (columns.amax(1) > high) & ~down
            if not bool((down | up).any()):
                break
            pairs, none = (
                counts.unflatten(1, (-1, 2)).sum(2, dtype=counts.dtype),
                counts[:, ::2] * 0,
            )
            counts = torch.where(up[:, None], torch.cat([pairs, none], 1), counts)
            counts = torch.where(down[:, None], torch.cat([none, pairs], 1), counts)
            low = torch.where(down, low - _BINS * width, low)
            width = torch.where(down | up, 2 * width, width)
        self.low, self.width, self.counts = low, width, counts

    def _count(self, numbers: Tensor) -> None:
        bins = ((numbers.T - self.low[:, None]) / self.width[:, None]).floor()
        bins = bins.clamp(0, _BINS - 1).long()
        ones = self.counts.new_ones(()).expand_as(bins)
        self.counts = self.counts.scatter_add(1, bins, ones)


def _bins_around(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(Where bins begin, how wide they are), for the first numbers of every stream."""
    ordered = numbers.double().sort(0).values
    tenth = len(ordered) // 10
    low, high = ordered[tenth], ordered[-1 - tenth]  # outliers shall not make bins wide
    smallest = torch.finfo(numbers.dtype).eps * torch.maximum(low.abs(), high.abs()).clamp(min=1)
    spread = torch.maximum(high - low, smallest)
    return low - 1.5 * spread, 4 * spread / _BINS
