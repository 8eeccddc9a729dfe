"""Tests of uniform ranks: simultaneous band of the ECDF, exact p-values, Holm's method, coverage.

A rank is the number of draws below a value; with L draws, ranks are from 0 to L.  The ECDF of S
ranks is evaluated where it can jump, at z = i / (L + 1) for i = 1 to L.  There the number of ranks
below i is binomial if ranks are uniform, and along i these numbers are a Markov chain.  So the
probability that all of them lie inside a band is a sum over paths, without simulation (Saeilynoja,
Buerkner and Vehtari 2022, section 2.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError

#: p-value below which Bonferroni's bound is used, because 1 - P loses its digits.
_EXACT = 1e-9
#: Relative difference of tail probabilities that is rounding.
_ROUNDING = 1e-9
#: Number of bands whose probabilities are computed together.
_TOGETHER = 256


def ecdf_counts(ranks: Tensor, num_draws: int) -> Tensor:
    """The number of ranks below i, for i = 1 to L: S times the ranks' ECDF at i / (L + 1).

    Args:
        ranks: integers from 0 to `num_draws`, `[S, ...]`.
        num_draws: L, the number of draws behind each rank.

    Returns:
        The counts, int64 `[L, ...]`.

    Raises:
        ArgumentError: no ranks, ranks that are not integers, or out of range.

    Examples:
        >>> import torch
        >>> ecdf_counts(torch.tensor([0, 0, 2, 3]), num_draws=3)
        tensor([2, 2, 3])
    """
    _check(ranks, num_draws)
    flat = ranks.long().cpu().reshape(len(ranks), -1)
    counts = torch.zeros(num_draws + 1, flat.shape[1], dtype=torch.int64)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return counts.cumsum(0)[:-1].reshape(num_draws, *ranks.shape[1:])


def ecdf_band(num_simulations: int, num_draws: int, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """The simultaneous band of the ECDF of uniform ranks.

    It consists of central binomial intervals at every i, all of the same level, such that the whole
    ECDF stays inside with probability `level`.  Counts are discrete, so it is the band with the
    smallest probability that is at least `level`.  The ECDF leaves it if and only if
    `uniformity_p_values` is at most 1 - level.

    Args:
        num_simulations: S, the number of ranks.
        num_draws: L, the number of draws behind each rank.
        level: probability that the ECDF of uniform ranks stays inside.

    Returns:
        (The lowest, the highest ECDF inside of the band) at i / (L + 1), for i = 1 to L, float64
        `[L]` each.

    Raises:
        ArgumentError: numbers below 1, or a level out of (0, 1).

    Examples:
        Two draws and one rank.  At 1/3 and at 2/3 the ECDF is 0 or 1, and neither is unlikely:

        >>> ecdf_band(1, 2)
        (tensor([0., 0.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))

        Three draws and a thousand ranks:

        >>> lower, upper = ecdf_band(1000, 3)
        >>> lower.tolist(), upper.tolist()
        ([0.219, 0.463, 0.718], [0.282, 0.537, 0.781])
    """
    if min(num_simulations, num_draws) < 1:
        raise ArgumentError(
            f"num_simulations={num_simulations}, num_draws={num_draws}: pass numbers from 1 on"
        )
    _check_level(level)
    levels = _pointwise_levels(num_simulations, num_draws)
    values = levels.unique()  # in order; a band leaves out levels up to one of them
    low, high = -1, len(values) - 1  # a band that leaves all levels out is too narrow
    while high - low > 1:
        middle = (low + high) // 2
        outside = float(_probability_of(values[middle, None], levels))
        low, high = (middle, high) if outside <= 1 - level + _ROUNDING else (low, middle)
    inside = torch.ones_like(levels, dtype=torch.bool)
    if low >= 0:
        inside = levels > values[low] * (1 + _ROUNDING)
    lowest = inside.long().argmax(1)
    highest = lowest + inside.sum(1) - 1
    return lowest.double() / num_simulations, highest.double() / num_simulations


def uniformity_p_values(ranks: Tensor, num_draws: int, is_doubtful: Tensor | None = None) -> Tensor:
    """Exact p-values of the hypothesis that ranks are uniform, by the least likely value of their
    ECDF.

    The statistic is the minimum over i of 2 min(P(R <= r), P(R >= r)), where r is the number of
    ranks below i and R is binomial.  The p-value is the probability that S uniform ranks have no
    greater statistic.  Below 1e-9 it is Bonferroni's bound, L times the statistic.

    Args:
        ranks: integers from 0 to `num_draws`, `[S, ...]`.
        num_draws: L, the number of draws behind each rank.
        is_doubtful: whether a rank is not reliable, such as that of a broken run, booleans `[S]`.
            These ranks are replaced by the most favorable ones, so a small p-value holds whatever
            the true ranks are.  None if all are reliable.

    Returns:
        The p-values, float64, of the ranks' shape without their first dimension.

    Raises:
        ArgumentError: as `ecdf_counts`.

    Examples:
        All of ten ranks are 0 of 1, which has a probability of 1/1,024, as have ten ranks of 1:

        >>> import torch
        >>> p = uniformity_p_values(torch.zeros(10, dtype=torch.int64), num_draws=1)
        >>> round(float(p) * 1024, 6)
        2.0
    """
    counts = ecdf_counts(ranks, num_draws)
    size, shape = len(ranks), counts.shape[1:]
    levels = _pointwise_levels(size, num_draws)
    if is_doubtful is not None and bool(is_doubtful.any()):
        keep = ~is_doubtful.cpu()
        lowest = torch.zeros_like(counts)
        if bool(keep.any()):
            lowest = ecdf_counts(ranks.cpu()[keep], num_draws)
        likeliest = levels.argmax(1).reshape(-1, *[1] * len(shape))
        counts = likeliest.maximum(lowest).minimum(lowest + (size - int(keep.sum())))
    statistics = levels.gather(1, counts.reshape(num_draws, -1)).amin(0)
    unique, places = statistics.unique(return_inverse=True)
    p_values = torch.cat([_probability_of(part, levels) for part in unique.split(_TOGETHER)])
    return p_values[places].reshape(shape)


def holm(p_values: Tensor) -> Tensor:
    """p-values adjusted for their number by Holm's method (1979).

    If hypotheses with adjusted p-values of at most `level` are rejected, the probability that a
    true one is among them is at most `level`, however the p-values depend on each other.

    Args:
        p_values: p-values of n hypotheses, `[n]`.

    Returns:
        Adjusted p-values, `[n]`: the k-th smallest times n + 1 - k, but not below the adjusted ones
        of smaller p-values, and at most 1.

    Examples:
        >>> import torch
        >>> holm(torch.tensor([0.01, 0.04, 0.03]))
        tensor([0.0300, 0.0600, 0.0600])
    """
    ordered, places = p_values.sort()
    factors = torch.arange(len(ordered), 0, -1).to(ordered)
    adjusted = (factors * ordered).cummax(0).values if len(ordered) else ordered
    return torch.empty_like(adjusted).scatter_(0, places, adjusted.clamp(max=1))


def rank_coverage(ranks: Tensor, num_draws: int, level: float) -> Tensor:
    """The coverage of the draws' central interval: the fraction of true values inside, from the
    ranks of these values among their draws.

    A rank r stands for the cell from r / (L + 1) to (r + 1) / (L + 1).  It counts by the fraction
    of the cell between (1 - level) / 2 and (1 + level) / 2.  For uniform ranks the expectation is
    `level`, for any number of draws.

    Args:
        ranks: integers from 0 to `num_draws`, `[S, ...]`.
        num_draws: L, the number of draws behind each rank.
        level: probability of the interval, in (0, 1).

    Returns:
        Means over the ranks, float64, of the ranks' shape without their first dimension.

    Raises:
        ArgumentError: as `ecdf_counts`, or a level out of (0, 1).

    Examples:
        The interval from 1/4 to 3/4 contains the middle one of three cells, and a quarter of each
        of the others:

        >>> import torch
        >>> rank_coverage(torch.tensor([0, 1, 1, 2]), num_draws=2, level=0.5)
        tensor(0.6250, dtype=torch.float64)
    """
    _check(ranks, num_draws)
    _check_level(level)
    cells = ranks.double()
    inside = (cells + 1).clamp(max=(1 + level) / 2 * (num_draws + 1)) - cells.clamp(
        min=(1 - level) / 2 * (num_draws + 1)
    )
    return inside.clamp(min=0).mean(0)


def _pointwise_levels(num_simulations: int, num_draws: int) -> Tensor:
    """How unlikely each value of the ECDF is by itself, as a two-sided tail probability, float64
    `[L, S + 1]`: 2 min(P(R <= r), P(R >= r)) for i = 1 to L and r = 0 to S, where R is the number
    of S uniform ranks that are below i. The values may exceed 1."""
    size = num_simulations
    counts = torch.arange(size + 1, dtype=torch.float64)
    z = torch.arange(1, num_draws + 1, dtype=torch.float64)[:, None] / (num_draws + 1)
    ways = math.lgamma(size + 1) - torch.lgamma(counts + 1) - torch.lgamma(size - counts + 1)
    # z.flip is 1 - z; bit for bit, so that the two tails are exact mirror images
    log_pmf = ways + counts * z.log() + (size - counts) * z.flip(0).log()
    below = log_pmf.exp().cumsum(1)
    return 2 * below.minimum(below.flip(0, 1))


def _probability_of(statistics: Tensor, levels: Tensor) -> Tensor:
    """The p-value of each statistic, `[n]`: the probability that the smallest pointwise level of S
    uniform ranks is at most the statistic.

    The increments of the counts are independent Poisson numbers, given that their sum is S.  So the
    same matrix of Poisson probabilities leads from each i to the next.

    Args:
        statistics: smallest pointwise levels, in increasing order, `[n]`.
        levels: pointwise levels of all counts, `[L, S + 1]`, from `_pointwise_levels`.
    """
    num_draws, size = levels.shape[0], levels.shape[1] - 1
    bound = statistics * num_draws
    limits = (statistics.clamp(min=_EXACT / num_draws) * (1 + _ROUNDING))[:, None]
    poisson = torch.zeros(2 * size + 1, dtype=torch.float64)  # from -S on
    poisson[size:] = _poisson(size, size / (num_draws + 1))
    first, mass = 0, torch.ones(len(statistics), 1, dtype=torch.float64)
    for level in levels:
        places = (level > limits[0]).nonzero()  # of the widest band
        if not len(places):
            return torch.ones_like(statistics)
        start, end = int(places[0]), int(places[-1]) + 1
        width = mass.shape[1]
        offset = size + start - first - width + 1
        steps = poisson[offset : offset + width + end - start - 1].unfold(0, end - start, 1)
        mass = (mass.flip(1) @ steps) * (level[start:end] > limits)
        first = start
    last_step = poisson[2 * size - first - mass.shape[1] + 1 : 2 * size - first + 1].flip(0)
    outside = 1 - mass @ last_step / _poisson(size, size)[-1]
    return torch.where(bound < _EXACT, bound, outside.clamp(0, 1))


def _poisson(largest: int, rate: float) -> Tensor:
    """Poisson probabilities of 0, ..., `largest` at a rate, float64 `[largest + 1]`."""
    counts = torch.arange(largest + 1, dtype=torch.float64)
    return (counts * math.log(rate) - rate - torch.lgamma(counts + 1)).exp()


def _check(ranks: Tensor, num_draws: int) -> None:
    """Raises an error unless ranks are integers from 0 to `num_draws`, and at least one.

    Raises:
        ArgumentError: there are no ranks, or they are not integers or out of range.
    """
    if not isinstance(ranks, Tensor) or ranks.is_floating_point() or ranks.dtype == torch.bool:
        kind = ranks.dtype if isinstance(ranks, Tensor) else type(ranks).__name__
        raise ArgumentError(f"ranks is {kind}: pass a tensor of integers, ranks.long()")
    if ranks.dim() < 1 or ranks.numel() == 0:
        raise ArgumentError(f"ranks has shape {list(ranks.shape)}: pass [simulations, ...]")
    low, high = int(ranks.min()), int(ranks.max())
    if low < 0 or high > num_draws:
        raise ArgumentError(
            f"ranks lie in [{low}, {high}]: with num_draws={num_draws} they are 0 to {num_draws}"
        )


def _check_level(level: float) -> None:
    """Raises an error unless a level is in (0, 1).

    Raises:
        ArgumentError: the level is out of (0, 1).
    """
    if not 0 < level < 1:
        raise ArgumentError(f"level={level}: pass a probability in (0, 1)")
