"""Autocorrelation times, R-hat and effective sample sizes of many elements at once.

ArviZ takes milliseconds for each element; tuning needs these numbers often, and a network's
diagnostics for hundreds of elements. `mixing_of` has ArviZ's numbers, to rounding. Elements are
processed in groups that fit into the cache, with the draws of an element contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Variances below this fraction of the mean square are rounding.
_ROUNDING_SHARE = 1e-24
#: Effective draws of half a chain below which a test of its mean gives false alarms (simulated:
#: three times too many).
_FEWEST_IN_HALF = 12
#: Probability that chance makes some element of a correct run fail a check.
FAMILY_WISE = 0.01
#: Number of numbers that are processed at once.
_GROUP_NUMBERS = 2**15


def autocorrelation_time(draws: Tensor) -> Tensor:
    """Integrated autocorrelation time of each element, `[elements]`: how many draws are worth one
    independent draw. 1 for constant elements, and at least 1 / log10(all draws).

    ArviZ's, of whole chains and without ranks: twice the sum of the autocorrelations about the
    common mean of all chains, over Geyer's initial monotone sequence (Geyer 1992; Vehtari et al.
    2021). Number of draws of all chains divided by it: effective sample size.

    Args:
        draws: draws, `[chains, draws, elements]`, four draws a chain or more.
    """
    return _by_element(_autocorrelation_time, draws)


def split_r_hat(draws: Tensor) -> Tensor:
    """Split R-hat of each element (Gelman et al. 2013), `[elements]`; 1 for constant elements. With
    an odd number of draws, the middle one is left out.

    Args:
        draws: draws, `[chains, draws, elements]`, four draws a chain or more.
    """
    return _by_element(_split_r_hat, draws)


def by_group(statistic: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """Applies a statistic to each of many groups of chains, and returns its results, `[groups,
    elements]`.

    Args:
        statistic: function from draws `[chains, draws, elements]` to `[elements]`.
        draws: draws of all groups, `[groups, chains, draws, elements]`.
    """
    groups, chains, count, size = draws.shape
    side_by_side = draws.permute(1, 2, 0, 3).reshape(chains, count, groups * size)
    return statistic(side_by_side).view(groups, size)


def mixing_of(draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Rank-normalized split R-hat, bulk ESS, tail ESS), each `[elements]`, as in ArviZ (Vehtari et
    al. 2021); NaN for elements that are constant or have a NaN among their draws, and if there are
    fewer than four draws a chain. R-hat of one chain is NaN.

    Args:
        draws: draws, `[chains, draws, elements]`.
    """
    r_hat, bulk, tail = _of_ranks(lambda ranks: torch.stack(ranks.mixing()), draws, 3)
    return r_hat, bulk, tail


def mixing_and_chance(draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(Rank-normalized split R-hat, bulk ESS, tail ESS, as of `mixing_of`; chance of disagreement),
    each `[elements]`. Both need ranks, which are computed once.

    The chance is the probability that the half chains of a stationary run differ as much as these
    do: a p-value, small where chains disagree. 1 for constant elements; NaN where it cannot be
    judged: half chains of fewer than 12 effective draws, fewer than four draws a chain, or a NaN
    among the draws.

    It is of an F test: the variance between the means of the half chains over the variance that the
    autocorrelations within half chains imply. The common mean is not used, as the effective draws
    about it fall if chains disagree. The test is of ranks' normal scores and of folded ones, as
    R-hat is (Vehtari et al. 2021), with Bonferroni's factor of 2.

    Args:
        draws: draws, `[chains, draws, elements]`.
    """
    r_hat, bulk, tail, chance = _of_ranks(
        lambda ranks: torch.stack([*ranks.mixing(), ranks.chance_of_disagreement()]), draws, 4
    )
    return r_hat, bulk, tail, chance


def effective_draws(draws: Tensor) -> Tensor:
    """Effective sample size of the mean of each element, `[elements]`, as in ArviZ; all draws for
    constant elements, and NaN with fewer than four draws a chain.

    Args:
        draws: draws, `[chains, draws, elements]`.
    """
    if draws.shape[1] < 4 or not draws.shape[2]:
        return torch.full(draws.shape[2:], math.nan, dtype=torch.float64)
    return _by_element(lambda group: _effective(_halves(group)), draws.cpu())


def standard_error_of_mean(draws: Tensor) -> Tensor:
    """Monte Carlo standard error of the mean of each element, `[elements]`, in its unit, as in
    ArviZ; NaN with fewer than four draws a chain.

    Args:
        draws: draws, `[chains, draws, elements]`.
    """
    effective = effective_draws(draws)
    if draws.shape[1] < 4:  # torch warns of the sd of a single draw
        return effective
    return draws.cpu().double().flatten(0, 1).std(0) / effective.sqrt()


def standard_error_of_sd(draws: Tensor) -> Tensor:
    """Monte Carlo standard error of the sd of each element, `[elements]`, in its unit, as in ArviZ;
    NaN for constant elements and with fewer than four draws a chain.

    It is that of the mean of squared deviations, over twice the sd.

    Args:
        draws: draws, `[chains, draws, elements]`.
    """
    draws = draws.cpu().double()
    squares = (draws - draws.mean((0, 1))).square()
    variance = squares.mean((0, 1))
    constant = variance <= _ROUNDING_SHARE * draws.square().mean((0, 1))
    of_variance = squares.var((0, 1), correction=0) / effective_draws(squares)
    return (of_variance / variance / 4).sqrt().masked_fill(constant, math.nan)


def sort(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(The numbers of each row in ascending order, NaN last; their indices in the row), `[rows, n]`
    each. Equal numbers are in no particular order."""
    order = torch.from_numpy(np.argsort(numbers.numpy(), 1))  # faster than torch's by AVX-512
    return numbers.gather(1, order), order


# ------------------------------------------------------------------ elements [elements, chains, n]


def _by_element(function: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """Applies a function of draws `[group, chains, draws]` (float64), with results `[..., group]`,
    to all elements of draws `[chains, draws, elements]`, a group of elements at a time; returns
    `[..., elements]`."""
    chains, count, _ = draws.shape
    blocks = draws.split(max(1, _GROUP_NUMBERS // (chains * count)), dim=2)
    parts = [function(block.permute(2, 0, 1).double().contiguous()) for block in blocks]
    return torch.cat(parts, -1)


def _of_ranks(function: Callable[[_Ranks], Tensor], draws: Tensor, count: int) -> Tensor:
    """Applies a function of ranks, with results `[count, group]`, to all elements of draws
    `[chains, draws, elements]`; returns `[count, elements]`, NaN with fewer than four draws a
    chain."""
    if draws.shape[1] < 4 or not draws.shape[2]:
        return torch.full((count, draws.shape[2]), math.nan, dtype=torch.float64)
    return _by_element(lambda group: function(_Ranks(group)), draws.cpu())


def _autocovariances(draws: Tensor) -> tuple[Tensor, Tensor]:
    """(The chains' means, `[elements, chains]`; the autocovariances about them, averaged over
    chains, `[elements, lags]`) of draws `[elements, chains, draws]`."""
    count, means = draws.shape[2], draws.mean(2, keepdim=True)
    squares = torch.view_as_real(torch.fft.rfft(draws - means, n=2 * count)).square_()
    power = (squares[..., 0] + squares[..., 1]).mean(1)  # sum(-1) is many times slower
    return means[..., 0], torch.fft.irfft(power, n=2 * count)[:, :count] / count


def _autocorrelation_time(draws: Tensor) -> Tensor:
    """Draws per effective draw, `[elements]`, from draws `[elements, chains, draws]`: twice the sum
    of the autocorrelations about the chains' common mean, over the initial monotone sequence and
    its last, positive term (Geyer 1992; Vehtari et al. 2021)."""
    _, chains, count = draws.shape
    means, covariance = _autocovariances(draws)
    between = means.var(1) if chains > 1 else torch.zeros_like(covariance[:, 0])
    within, total = covariance[:, :1] * count / (count - 1), covariance[:, 0] + between
    still = total <= _ROUNDING_SHARE * draws.square().mean((1, 2))
    correlation = 1 - (within - covariance) / torch.where(still, 1.0, total)[:, None]
    correlation[:, 0] = 1

    even = correlation[:, 0 : max(1, (count - 3) // 2 * 2 + 1) : 2]
    pairs = even + correlation[:, 1 : 2 * even.shape[1] : 2]
    is_positive = (pairs > 0).cumprod(1)
    is_positive[:, -1] = 0  # the last pair is only looked at
    last = is_positive.sum(1, keepdim=True)
    last_even, last_pair = even.gather(1, last)[:, 0], pairs.gather(1, last)[:, 0]
    last_even = torch.where(last_pair >= 0, last_even, last_even.clamp(min=0))
    monotone = torch.cummin(pairs, 1).values * is_positive
    time = 2 * monotone.sum(1) - 1 + last_even
    return torch.where(still, 1.0, time.clamp(min=1 / math.log10(chains * count)))


def _halves(draws: Tensor) -> Tensor:
    """Chains `[elements, chains, draws]` split in halves, `[elements, 2 chains, draws / 2]`; the
    middle draw of an odd number is left out."""
    half = draws.shape[2] // 2
    return torch.cat([draws[..., :half], draws[..., -half:]], 1)


def _split_r_hat(draws: Tensor) -> Tensor:
    r_hat = _r_hat(_halves(draws))
    return torch.where(r_hat.isnan() & draws.isfinite().all(2).all(1), 1.0, r_hat)


def _r_hat(halves: Tensor) -> Tensor:
    """R-hat of each element, `[elements]`, from draws `[elements, half chains, draws]`: NaN for
    constant elements, infinite if only chains differ."""
    half = halves.shape[2]
    means = halves.mean(2, keepdim=True)
    # torch's own var is many times slower
    within = (halves - means).square_().sum(2).mean(1) / (half - 1)
    between = means[..., 0].var(1)
    rounding = _ROUNDING_SHARE * halves.square().mean((1, 2))
    within, between = (torch.where(part <= rounding, 0.0, part) for part in (within, between))
    return ((half - 1) / half + between / within).sqrt()


@dataclass(frozen=True)
class _Ranks:
    """Draws, and what follows from their ranks.

    Attributes:
        draws: draws `[elements, chains, draws]`.
    """

    draws: Tensor

    @functools.cached_property
    def halves(self) -> Tensor:
        """The draws of half chains, `[elements, half chains, draws]`."""
        return _halves(self.draws)

    @functools.cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        return sort(self.halves.flatten(1))

    @functools.cached_property
    def scores(self) -> Tensor:
        """Normal scores of the half chains' draws, in the shape of `halves`."""
        return _normal_scores(*self._sorted).view_as(self.halves)

    @functools.cached_property
    def folded_scores(self) -> Tensor:
        """Normal scores of draws' distances from the median, which differ where chains differ in
        scale, in the shape of `halves`."""
        ordered, _ = self._sorted
        middle = ordered[:, (ordered.shape[1] - 1) // 2] / 2 + ordered[:, ordered.shape[1] // 2] / 2
        folded = (self.halves - middle[:, None, None]).abs()
        return _normal_scores(*sort(folded.flatten(1))).view_as(folded)

    def mixing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rank-normalized split R-hat, bulk ESS and tail ESS, `[elements]` each."""
        ordered, _ = self._sorted
        everything = sort(self.draws.flatten(1))[0] if self.draws.shape[2] % 2 else ordered
        r_hat = torch.full_like(ordered[:, 0], math.nan)
        if self.draws.shape[1] > 1:
            r_hat = torch.fmax(_r_hat(self.scores), _r_hat(self.folded_scores))
        quantiles = (_quantile(everything, part)[:, None, None] for part in (0.05, 0.95))
        tail = torch.minimum(*(_effective((self.halves <= q).double()) for q in quantiles))
        has_none = (everything[:, 0] == everything[:, -1]) | everything[:, -1].isnan()
        numbers = (r_hat, _effective(self.scores), tail)
        r_hat, bulk, tail = (number.masked_fill(has_none, math.nan) for number in numbers)
        return r_hat, bulk, tail

    def chance_of_disagreement(self) -> Tensor:
        """The chance of `mixing_and_chance`, `[elements]`."""
        of_scores, of_folded = map(_chance_of_means, (self.scores, self.folded_scores))
        chance = (2 * torch.fmin(of_scores, of_folded)).clamp(max=1.0)
        ordered, _ = self._sorted
        return chance.masked_fill(of_scores.isnan() | ordered[:, -1].isnan(), math.nan)


def _chance_of_means(halves: Tensor) -> Tensor:
    """Probability that means of stationary half chains scatter as much, `[elements]`, of draws
    `[elements, half chains, draws]`; NaN if these have fewer than 12 effective draws.

    The variance of a mean is the sum of the autocovariances about each half's own mean, over
    Geyer's initial positive sequence of w lags. (His monotone sequence is for reversible chains,
    and a momentum makes chains oscillate.) Such a sum is too small by w / draws, and has about
    2 / (half chains * draws / w) of its square as variance (Sokal 1997, section 3), as a variance
    from that many degrees of freedom. If the variance by batch means is larger, as the sequence
    stops early at a zero of the autocovariances, it is that; the degrees of freedom are the fewer
    of both.
    """
    from scipy.special import fdtrc

    elements, chains, count = halves.shape
    if count < _FEWEST_IN_HALF:
        return torch.full((elements,), math.nan, dtype=torch.float64)
    means, covariance = _autocovariances(halves)
    pairs = covariance[:, 0 : count // 2 * 2 : 2] + covariance[:, 1::2]
    is_positive = (pairs > 0).cumprod(1)
    lags = (4 * is_positive.sum(1) - 1).clamp(min=1)
    total = 2 * (pairs * is_positive).sum(1) - covariance[:, 0]
    total = total.clamp(min=covariance[:, 0] / math.log10(chains * count))  # of antithetic draws
    between = means.var(1)
    is_short = total * _FEWEST_IN_HALF > covariance[:, 0] * count
    variance = total / count / (1 - lags / count).clamp(min=1 / count)
    length = round(count ** (2 / 3))
    batches = halves[..., : count // length * length].unflatten(2, (-1, length)).mean(3)
    variance = torch.maximum(variance, batches.var(2).mean(1) * length / count)
    freedom = (chains * count / lags).clamp(max=chains * (batches.shape[2] - 1)).numpy()
    chance = torch.from_numpy(fdtrc(chains - 1, freedom, (between / variance).numpy()))
    return torch.where(between == 0, 1.0, chance.masked_fill(is_short, math.nan))


def _effective(halves: Tensor) -> Tensor:
    """Effective draws of each element, `[elements]`, of draws `[elements, half chains, draws]`."""
    return halves.shape[1] * halves.shape[2] / _autocorrelation_time(halves)


def _quantile(ordered: Tensor, part: float) -> Tensor:
    """The quantile at level `part` of sorted numbers `[elements, n]`, by linear interpolation,
    `[elements]`, in the order of SciPy's operations: where it is a draw, rounding decides whether
    that draw is below it."""
    count = ordered.shape[1]
    place = count * part + (1 - part)
    low = min(max(int(place), 1), count - 1)
    weight = min(max(place - low, 0.0), 1.0)
    return (1 - weight) * ordered[:, low - 1] + weight * ordered[:, low]


def _normal_scores(ordered: Tensor, order: Tensor) -> Tensor:
    """Normal scores of numbers, `[elements, n]`, in the numbers' original order: the standard
    normal quantiles of their ranks (Vehtari et al. 2021). Equal numbers have their mean rank.

    Args:
        ordered: numbers sorted along each element, `[elements, n]`.
        order: index of each sorted number in the original order, `[elements, n]`.
    """
    count, rises = ordered.shape[1], ordered[:, 1:] != ordered[:, :-1]
    are_different = bool(rises.all())
    # mean ranks of equal numbers are multiples of 1/2
    ranks = torch.arange(2, 2 * count + 1, 2 if are_different else 1).double() / 2
    scores = torch.special.ndtri((ranks - 0.375) / (count + 0.25))
    if are_different:
        return torch.empty_like(ordered).scatter_(1, order, scores.expand_as(ordered))
    first = torch.arange(count).repeat(len(ordered), 1)
    last = first.clone()
    first[:, 1:] *= rises  # 0 within equal values, whose first place is the largest so far
    last[:, :-1] = last[:, :-1].where(rises, count - 1)
    last = last.flip(1).cummin(1).values.flip(1)
    return torch.empty_like(ordered).scatter_(1, order, scores[first.cummax(1).values + last])
