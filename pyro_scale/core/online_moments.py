"""Means, standard deviations, quantiles and mixing of chains, without keeping the draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.tdigest import QuantileSketch

#: R-hat from which on chains' own means say how far off the mean of all is; draws in a batch below
#: which batches' means do not say it.
_DISAGREE, _SHORT = 1.05, 10
#: Batches of each chain, whose means say how much is known of the mean.
_BATCHES = 25
#: Elements whose sketches are filled at once, which bounds what that needs besides.
_COLUMNS = 2**11


class Moments(NamedTuple):
    """What many draws come to, by element.

    Attributes:
        mean: `[...]`.
        sd: the standard deviation, `[...]`.
        quantiles: `[levels, ...]`; NaN where draws were not kept (`store=False`) and a chain broke,
            as its draws cannot be told from the others'.
        r_hat: split R-hat of the means (Gelman et al. 2013, 11.4), not rank-normalized.
        ess: effective draws for the mean, by means of 25 batches of each chain, and of chains where
            those do not agree; NaN of fewer than 250 draws a chain.  Up to two thirds too many
            where a chain remembers for as long as a batch: then 25 of them are all that it has.
    """

    mean: Tensor
    sd: Tensor
    quantiles: Tensor
    r_hat: Tensor
    ess: Tensor


class Sums(NamedTuple):
    """How many numbers there were, their mean, and the sum of squares about it."""

    number: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, numbers: Tensor, dim: int) -> Sums:
        """Those along a dimension, in double precision."""
        numbers = numbers.double()
        mean = numbers.mean(dim)
        return cls(numbers.shape[dim], mean, (numbers - mean.unsqueeze(dim)).square().sum(dim))

    def __or__(self, other: Sums) -> Sums:
        """Both together (Chan, Golub and LeVeque 1983)."""
        count = self.number + other.number
        if not self.number or not other.number:
            return self if self.number else other
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap.square() * (self.number * other.number / count)
        return Sums(count, self.mean + gap * (other.number / count), squares)

    def together(self) -> Sums:
        """Of all along the first dimension, each of which has as many numbers."""
        many, mean = len(self.mean), self.mean.mean(0)
        squares = self.squares.sum(0) + self.number * (self.mean - mean).square().sum(0)
        return Sums(many * self.number, mean, squares)

    @property
    def variance(self) -> Tensor:
        """Unbiased; NaN of fewer than two numbers."""
        return self.squares / (self.number - 1) if self.number > 1 else self.squares * math.nan


class OnlineMoments:
    """Adds up the draws of chains.

    Args:
        num_chains: how many chains.
        size: elements of a draw.
        num_draws: draws of each chain that are to come, which decides what a half is.
    """

    def __init__(self, num_chains: int, size: int, num_draws: int):
        self.num_chains, self.num_draws = num_chains, num_draws
        self._half = num_draws // 2
        self._batch = max(1, num_draws // _BATCHES)
        none = torch.zeros(num_chains, size, dtype=torch.float64)
        self._halves = (Sums(0, none, none),) * 2
        self._batches, self._partial = Sums(0, none, none), Sums(0, none, none)
        sizes = [len(columns) for columns in torch.arange(size).split(_COLUMNS)]
        self._sketches = [QuantileSketch(columns) for columns in sizes]

    @property
    def count(self) -> int:
        """Draws of each chain until now."""
        return sum(half.number for half in self._halves)

    def add(self, draws: Tensor) -> None:
        """Takes the next draws, `[chains, n, size]`; those of chains that broke are NaN."""
        sound = draws[torch.isfinite(draws).all(-1).all(-1)]
        columns = sound.flatten(0, 1).split(_COLUMNS, 1)
        for sketch, part in zip(self._sketches, columns, strict=True):
            sketch.add(part)
        while draws.shape[1]:
            to_half = self._half - self.count if self.count < self._half else draws.shape[1]
            most = min(to_half, self._batch - self._partial.number)
            self._add(draws[:, :most])
            draws = draws[:, most:]

    def moments(self, chains: Sequence[int], levels: Sequence[float]) -> Moments:
        """Of some of the chains, by element `[size]`; quantiles of all or none of them."""
        own = list(chains)
        halves = [_of(half, own) for half in self._halves if half.number > 1]
        of_chains = _of(self._halves[0] | self._halves[1], own)
        total, unknown = of_chains.together(), torch.full_like(of_chains.mean[0], math.nan)
        batches = _of(self._batches, own).together()
        says = batches.number and self._batch >= _SHORT
        error = batches.variance / batches.number if says else unknown
        within = torch.cat([half.variance for half in halves]).mean(0) if halves else unknown
        means = torch.cat([half.mean for half in halves]) if halves else total.mean[None]
        length = min((half.number for half in halves), default=1)
        between = means.var(0) if len(means) > 1 else unknown
        r_hat = ((length - 1) / length + between / within).sqrt()
        if len(own) > 1:
            apart = of_chains.mean.var(0) / len(own)
            error = torch.where(r_hat > _DISAGREE, torch.maximum(error, apart), error)
        if len(own) == self.num_chains:
            quantiles = torch.cat([sketch.quantiles(levels) for sketch in self._sketches], 1)
        else:
            quantiles = unknown.expand(len(levels), -1)
        return Moments(
            mean=total.mean,
            sd=total.variance.sqrt(),
            quantiles=quantiles,
            r_hat=r_hat,
            ess=total.variance / error,
        )

    def state(self) -> dict[str, Any]:
        """All that it holds, as tensors and plain values."""
        return {
            "halves": [list(half) for half in self._halves],
            "batches": list(self._batches),
            "partial": list(self._partial),
            "sketches": [dict(vars(sketch)) for sketch in self._sketches],
        }

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Takes up where another one was."""
        first, second = (Sums(*half) for half in state["halves"])
        self._halves = first, second
        self._batches, self._partial = Sums(*state["batches"]), Sums(*state["partial"])
        for sketch, held in zip(self._sketches, state["sketches"], strict=True):
            vars(sketch).update(held)

    def _add(self, draws: Tensor) -> None:
        """Takes draws that are of one half and of one batch."""
        new = Sums.of(draws, 1)
        first, second = self._halves
        halves = (first | new, second) if self.count < self._half else (first, second | new)
        partial, batches = self._partial | new, self._batches
        if partial.number == self._batch:
            batches = batches | Sums(1, partial.mean, torch.zeros_like(partial.mean))
            partial = Sums(0, torch.zeros_like(new.mean), torch.zeros_like(new.mean))
        self._halves, self._batches, self._partial = halves, batches, partial


def _of(sums: Sums, chains: list[int]) -> Sums:
    return Sums(sums.number, sums.mean[chains], sums.squares[chains])
