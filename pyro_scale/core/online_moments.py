"""Means, standard deviations, quantiles, R-hat and ESS of chains, without storing the draws.

In shapes, "size" is the number of elements of a draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.tdigest import QuantileSketch

#: R-hat above which the standard error of the mean is estimated from the means of chains, too.
_MAX_R_HAT = 1.05
#: Smallest number of draws in a batch for estimating that standard error from the means of batches.
_MIN_BATCH = 10
#: Number of batches of each chain.
_BATCHES = 25


class Moments(NamedTuple):
    """Posterior mean, sd, quantiles, R-hat and ESS of every element.

    Attributes:
        mean: means, `[...]`.
        sd: standard deviations, `[...]`.
        quantiles: quantiles, `[levels, ...]`.
        r_hat: split R-hat (Gelman et al. 2013, 11.4), not rank-normalized, `[...]`.
        ess: effective draws for the mean, `[...]`, from the variance of the means of 25 batches per
            chain, and of the means of chains if these disagree; NaN for fewer than 250 draws per
            chain. Up to two thirds too large if the autocorrelation time is as long as a batch.
    """

    mean: Tensor
    sd: Tensor
    quantiles: Tensor
    r_hat: Tensor
    ess: Tensor


class Sums(NamedTuple):
    """Number, mean and sum of squared deviations of the draws of each chain, from which variances
    follow.

    Attributes:
        number: number of draws, `[chains, 1]`.
        mean: mean of the draws, `[chains, size]`.
        squares: sum of squared deviations from the mean, `[chains, size]`.
    """

    number: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def none(cls, num_chains: int, size: int) -> Sums:
        """The sums of chains without draws, to add others to: zeros of the shapes for `num_chains`
        chains and draws of `size` elements.
        """
        zeros = torch.zeros(num_chains, size, dtype=torch.float64)
        return cls(torch.zeros(num_chains, 1, dtype=torch.long), zeros, zeros)

    @classmethod
    def from_draws(cls, numbers: Tensor) -> Sums:
        """The number, mean and sum of squared deviations of draws `[chains, n, size]`, chain by
        chain, in float64.
        """
        numbers = numbers.double()
        mean = numbers.mean(1)
        number = torch.full((len(numbers), 1), numbers.shape[1])
        return cls(number, mean, (numbers - mean[:, None]).square().sum(1))

    def __or__(self, other: Sums) -> Sums:
        """The number, mean and sum of squared deviations of the draws of both together, chain by
        chain (Chan, Golub and LeVeque 1983).
        """
        count = self.number + other.number
        part, gap = other.number / count.clamp(min=1).double(), other.mean - self.mean
        squares = self.squares + other.squares + gap.square() * (self.number * part)
        return Sums(count, self.mean + gap * part, squares)

    def pool(self) -> Sums:
        """The number, mean and sum of squared deviations of the draws of all chains together, as if
        they were one chain: `number` `[1, 1]`, the others `[1, size]`.
        """
        number = self.number.sum(0, keepdim=True)
        mean = (self.number * self.mean).sum(0, keepdim=True) / number
        squares = self.squares + self.number * (self.mean - mean).square()
        return Sums(number, mean, squares.sum(0, keepdim=True))

    @property
    def variance(self) -> Tensor:
        """Unbiased variance of the draws of each chain, `[chains, size]`; NaN for fewer than two
        draws."""
        return torch.where(self.number > 1, self.squares / (self.number - 1), math.nan)


class Totals(NamedTuple):
    """Statistics of finished chains from which `moments` computes means, sds, quantiles, R-hat and
    ESS.

    Attributes:
        halves: sums of the first and of the second half of each chain.
        batches: sums of the means of each chain's batches of consecutive draws.
        batch: number of draws in a batch.
        sketch: quantiles of all chains' draws together.
    """

    halves: tuple[Sums, Sums]
    batches: Sums
    batch: int
    sketch: QuantileSketch

    @classmethod
    def from_parts(
        cls, parts: Sequence[OnlineMoments], chains: Sequence[tuple[int, int]]
    ) -> Totals:
        """The totals of chains whose moments were collected by several `OnlineMoments`, each for
        some of the chains.

        Args:
            parts: moments of different chains.
            chains: for every chain, (index of its part, index of the chain in the part).
        """

        def select(sums: Sequence[Sums]) -> Sums:
            of_chains = [[field[place] for field in sums[part]] for part, place in chains]
            return Sums(*(torch.stack(fields) for fields in zip(*of_chains, strict=True)))

        first, second = zip(*(part.halves for part in parts), strict=True)
        return cls(
            (select(first), select(second)),
            select([part.batches for part in parts]),
            parts[0].batch,
            QuantileSketch.merge([parts[part].sketch_of(place) for part, place in chains]),
        )

    def moments(self, levels: Sequence[float]) -> Moments:
        """The posterior mean, sd, quantiles, R-hat and ESS of every element, over the draws of all
        chains: tensors `[size]`.

        Args:
            levels: levels of the quantiles, in [0, 1].
        """
        halves = [half for half in self.halves if (half.number > 1).all()]
        of_chains = self.halves[0] | self.halves[1]
        total, batches = of_chains.pool(), self.batches.pool()
        unknown = torch.full_like(total.mean[0], math.nan)
        is_enough = batches.number > 0 and self.batch >= _MIN_BATCH
        error = batches.variance[0] / batches.number[0] if is_enough else unknown
        within = torch.cat([half.variance for half in halves]).mean(0) if halves else unknown
        means = torch.cat([half.mean for half in halves]) if halves else total.mean
        length = min((int(half.number.min()) for half in halves), default=1)
        between = means.var(0) if len(means) > 1 else unknown
        r_hat = ((length - 1) / length + between / within).sqrt()
        if len(of_chains.mean) > 1:
            by_chain = of_chains.mean.var(0) / len(of_chains.mean)
            error = torch.where(r_hat > _MAX_R_HAT, torch.maximum(error, by_chain), error)
        variance = total.variance[0]
        quantiles = self.sketch.quantiles(levels)
        return Moments(total.mean[0], variance.sqrt(), quantiles, r_hat, variance / error)

    def state(self) -> dict[str, Any]:
        """The statistics as a dict of tensors and plain objects, to save in a file; `from_state`
        restores them.
        """
        return {
            "halves": [list(half) for half in self.halves],
            "batches": list(self.batches),
            "batch": self.batch,
            "sketch": dict(vars(self.sketch)),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Totals:
        """The statistics that were saved as `state`, a dict that the method `state` returned."""
        first, second = (Sums(*half) for half in state["halves"])
        sketch = QuantileSketch(0)
        vars(sketch).update(state["sketch"])
        return cls((first, second), Sums(*state["batches"]), state["batch"], sketch)


class OnlineMoments:
    """Collects the moments of chains, draw by draw, without storing the draws.

    Args:
        num_chains: number of chains.
        size: number of elements of a draw.
        num_draws: number of draws of each chain that will be added, which determines halves and
            batches.

    Attributes:
        halves: sums of the first and of the second half of each chain.
        batches: sums of the means of each chain's batches of consecutive draws.
        batch: number of draws in a batch.
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
        """Number of draws of each chain that were added so far."""
        return sum(int(half.number[0]) for half in self.halves)

    def add(self, draws: Tensor) -> None:
        """Adds the next n draws of every chain, `[chains, n, size]`; those of stopped chains are
        NaN."""
        # quantiles of stopped chains are not used
        self._sketch.add(draws.nan_to_num(0, 0, 0).transpose(0, 1).flatten(1))
        while draws.shape[1]:
            to_half = self._half - self.count if self.count < self._half else draws.shape[1]
            most = min(to_half, self.batch - int(self._partial.number[0]))
            self._add(draws[:, :most])
            draws = draws[:, most:]

    def sketch_of(self, chain: int) -> QuantileSketch:
        """The quantile sketch of one chain's draws, from which quantiles of each element follow;
        `chain` is the chain's index.
        """
        size = self._shape[1]
        return self._sketch.streams(slice(chain * size, (chain + 1) * size))

    def totals(self, chains: Sequence[int]) -> Totals:
        """The totals of the chains with these indices, from which `Totals.moments` computes means,
        sds, quantiles, R-hat and ESS.
        """
        return Totals.from_parts([self], [(0, chain) for chain in chains])

    def state(self) -> dict[str, Any]:
        """The moments collected so far, as a dict of tensors `[chains, ...]` for a checkpoint;
        `go_on_from` continues from it.
        """
        sketch = {name: x.unflatten(0, self._shape) for name, x in vars(self._sketch).items()}
        return {
            "halves": [list(half) for half in self.halves],
            "batches": list(self.batches),
            "partial": list(self._partial),
            "sketch": sketch,
        }

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Continues an earlier collection of draws, after a run is resumed. Everything collected
        here so far is discarded.

        Args:
            state: what the property or method `state` of the earlier collection returned.
        """
        first, second = (Sums(*half) for half in state["halves"])
        self.halves = first, second
        self.batches, self._partial = Sums(*state["batches"]), Sums(*state["partial"])
        sketch = {name: x.flatten(0, 1) for name, x in state["sketch"].items()}
        vars(self._sketch).update(sketch)

    def _add(self, draws: Tensor) -> None:
        """Adds draws `[chains, n, size]` that all belong to the same half and to the same batch."""
        new = Sums.from_draws(draws)
        first, second = self.halves
        halves = (first | new, second) if self.count < self._half else (first, second | new)
        partial, batches = self._partial | new, self.batches
        if int(partial.number[0]) == self.batch:
            one = Sums(torch.ones_like(partial.number), partial.mean, torch.zeros_like(new.mean))
            batches, partial = batches | one, Sums.none(*self._shape)
        self.halves, self.batches, self._partial = halves, batches, partial
