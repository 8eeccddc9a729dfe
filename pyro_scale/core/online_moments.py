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


class Moments(NamedTuple):
    """What many draws come to, by element.

    Attributes:
        mean: `[...]`.
        sd: the standard deviation, `[...]`.
        quantiles: `[levels, ...]`.
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
    """How many numbers there were of each chain, `[chains, 1]`, their mean, and the sum of squares
    about it, `[chains, size]`."""

    number: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def none(cls, num_chains: int, size: int) -> Sums:
        """Of no numbers."""
        zeros = torch.zeros(num_chains, size, dtype=torch.float64)
        return cls(torch.zeros(num_chains, 1, dtype=torch.long), zeros, zeros)

    @classmethod
    def of(cls, numbers: Tensor) -> Sums:
        """Those of `[chains, n, size]`, in double precision."""
        numbers = numbers.double()
        mean = numbers.mean(1)
        number = torch.full((len(numbers), 1), numbers.shape[1])
        return cls(number, mean, (numbers - mean[:, None]).square().sum(1))

    def __or__(self, other: Sums) -> Sums:
        """Both together (Chan, Golub and LeVeque 1983)."""
        count = self.number + other.number
        part, gap = other.number / count.clamp(min=1).double(), other.mean - self.mean
        squares = self.squares + other.squares + gap.square() * (self.number * part)
        return Sums(count, self.mean + gap * part, squares)

    def together(self) -> Sums:
        """Of all chains as one, `[1, size]`."""
        number = self.number.sum(0, keepdim=True)
        mean = (self.number * self.mean).sum(0, keepdim=True) / number
        squares = self.squares + self.number * (self.mean - mean).square()
        return Sums(number, mean, squares.sum(0, keepdim=True))

    @property
    def variance(self) -> Tensor:
        """Unbiased; NaN of fewer than two numbers."""
        return torch.where(self.number > 1, self.squares / (self.number - 1), math.nan)


class Totals(NamedTuple):
    """What draws of some chains have come to.

    Attributes:
        halves: of the first and of the second half of each chain.
        batches: of the means of each chain's batches.
        batch: draws in one of these.
        sketch: of all chains' draws.
    """

    halves: tuple[Sums, Sums]
    batches: Sums
    batch: int
    sketch: QuantileSketch

    @classmethod
    def of(cls, sums: Sequence[OnlineMoments], chains: Sequence[tuple[int, int]]) -> Totals:
        """Of chains that were added up in parts.

        Args:
            sums: of the parts.
            chains: each one's part, and its place there.
        """

        def of_chains(parts: Sequence[Sums]) -> Sums:
            own = [[each[place] for each in parts[part]] for part, place in chains]
            return Sums(*(torch.stack(each) for each in zip(*own, strict=True)))

        first, second = zip(*(each.halves for each in sums), strict=True)
        return cls(
            (of_chains(first), of_chains(second)),
            of_chains([each.batches for each in sums]),
            sums[0].batch,
            QuantileSketch.of([sums[part].sketch_of(place) for part, place in chains]),
        )

    def moments(self, levels: Sequence[float]) -> Moments:
        """By element, `[size]`."""
        halves = [half for half in self.halves if (half.number > 1).all()]
        of_chains = self.halves[0] | self.halves[1]
        total, batches = of_chains.together(), self.batches.together()
        unknown = torch.full_like(total.mean[0], math.nan)
        says = batches.number > 0 and self.batch >= _SHORT
        error = batches.variance[0] / batches.number[0] if says else unknown
        within = torch.cat([half.variance for half in halves]).mean(0) if halves else unknown
        means = torch.cat([half.mean for half in halves]) if halves else total.mean
        length = min((int(half.number.min()) for half in halves), default=1)
        between = means.var(0) if len(means) > 1 else unknown
        r_hat = ((length - 1) / length + between / within).sqrt()
        if len(of_chains.mean) > 1:
            apart = of_chains.mean.var(0) / len(of_chains.mean)
            error = torch.where(r_hat > _DISAGREE, torch.maximum(error, apart), error)
        variance = total.variance[0]
        quantiles = self.sketch.quantiles(levels)
        return Moments(total.mean[0], variance.sqrt(), quantiles, r_hat, variance / error)

    def state(self) -> dict[str, Any]:
        """All that it holds, as tensors and plain values."""
        return {
            "halves": [list(half) for half in self.halves],
            "batches": list(self.batches),
            "batch": self.batch,
            "sketch": dict(vars(self.sketch)),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Totals:
        """One that holds what another one did."""
        first, second = (Sums(*half) for half in state["halves"])
        sketch = QuantileSketch(0)
        vars(sketch).update(state["sketch"])
        return cls((first, second), Sums(*state["batches"]), state["batch"], sketch)


class OnlineMoments:
    """Adds up the draws of chains.

    Args:
        num_chains: how many chains.
        size: elements of a draw.
        num_draws: draws of each chain that are to come, which decides what a half is.

    Attributes:
        halves: of the first and of the second half of each chain.
        batches: of the means of each chain's batches.
        batch: draws in one of these.
    """

    def __init__(self, num_chains: int, size: int, num_draws: int):
        self._shape, self._half = (num_chains, size), num_draws // 2
        self.batch = max(1, num_draws // _BATCHES)
        none = Sums.none(*self._shape)
        self.halves = none, none
        self.batches = self._partial = none
        self._sketch = QuantileSketch(num_chains * size)

    @property
    def count(self) -> int:
        """Draws of each chain until now."""
        return sum(int(half.number[0]) for half in self.halves)

    def add(self, draws: Tensor) -> None:
        """Takes the next draws, `[chains, n, size]`; those of chains that broke are NaN."""
        # of chains that broke quantiles are not asked for
        self._sketch.add(draws.nan_to_num(0, 0, 0).transpose(0, 1).flatten(1))
        while draws.shape[1]:
            to_half = self._half - self.count if self.count < self._half else draws.shape[1]
            most = min(to_half, self.batch - int(self._partial.number[0]))
            self._add(draws[:, :most])
            draws = draws[:, most:]

    def sketch_of(self, chain: int) -> QuantileSketch:
        """Of the draws of one chain, by its place."""
        size = self._shape[1]
        return self._sketch.streams(slice(chain * size, (chain + 1) * size))

    def totals(self, chains: Sequence[int]) -> Totals:
        """Of some chains, by their places."""
        return Totals.of([self], [(0, chain) for chain in chains])

    def state(self) -> dict[str, Any]:
        """All that it holds, as tensors of chains first."""
        sketch = {name: each.unflatten(0, self._shape) for name, each in vars(self._sketch).items()}
        return {
            "halves": [list(half) for half in self.halves],
            "batches": list(self.batches),
            "partial": list(self._partial),
            "sketch": sketch,
        }

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Takes up where another one was."""
        first, second = (Sums(*half) for half in state["halves"])
        self.halves = first, second
        self.batches, self._partial = Sums(*state["batches"]), Sums(*state["partial"])
        held = {name: each.flatten(0, 1) for name, each in state["sketch"].items()}
        vars(self._sketch).update(held)

    def _add(self, draws: Tensor) -> None:
        """Takes draws that are of one half and of one batch."""
        new = Sums.of(draws)
        first, second = self.halves
        halves = (first | new, second) if self.count < self._half else (first, second | new)
        partial, batches = self._partial | new, self.batches
        if int(partial.number[0]) == self.batch:
            one = Sums(torch.ones_like(partial.number), partial.mean, torch.zeros_like(new.mean))
            batches, partial = batches | one, Sums.none(*self._shape)
        self.halves, self.batches, self._partial = halves, batches, partial
