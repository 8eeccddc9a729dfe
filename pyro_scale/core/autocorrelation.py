"""Autocorrelation times and R-hat of many elements at once.

Reports use ArviZ, which takes milliseconds for each element; tuning needs these numbers often, for
all elements, and computes them here. Here elements are processed in groups that fit into the cache,
with the draws of an element contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: Variances below this fraction of the mean square are rounding.
_ROUNDING_SHARE = 1e-24
#: Number of numbers that are processed at once.
_GROUP_NUMBERS = 2**15


def autocorrelation_time(draws: Tensor) -> Tensor:
    """Integrated autocorrelation time of each element, `[elements]`: how many draws are worth one
    independent draw. At least 1 / draws; 1 for constant elements.

    Computed from the autocorrelations of all chains about their common mean, summed over Geyer's
    initial monotone sequence (Geyer 1992; Vehtari et al. 2021, without ranks). Number of draws of
    all chains divided by it: effective sample size.

    The sum of the autocorrelations of all chains about their common mean, over Geyer's initial
    monotone sequence (Geyer 1992; Vehtari et al. 2021, without ranks), at least 1 / draws.

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
    al. 2021); NaN for constant elements.

    Args:
        draws: draws, `[chains, draws, elements]`, eight draws a chain or more.
    """
    r_hat, bulk, tail = _by_element(_mixing_of, draws)
    return r_hat, bulk, tail


# ------------------------------------------------------------------ elements [elements, chains, n]


def _by_element(function: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """Applies a function of draws `[group, chains, draws]` (float64), with results `[..., group]`,
    to all elements of draws `[chains, draws, elements]`, a group of elements at a time; returns
    `[..., elements]`."""
    chains, count, _ = draws.shape
    blocks = draws.split(max(1, _GROUP_NUMBERS // (chains * count)), dim=2)
    parts = [function(block.permute(2, 0, 1).double().contiguous()) for block in blocks]
    return torch.cat(parts, -1)


def _autocorrelation_time(draws: Tensor) -> Tensor:
    _, chains, count = draws.shape
    means = draws.mean(2, keepdim=True)
    squares = torch.view_as_real(torch.fft.rfft(draws - means, n=2 * count)).square_()
    power = (squares[..., 0] + squares[..., 1]).mean(1)  # sum(-1) is many times slower
    within = torch.fft.irfft(power, n=2 * count)[:, :count] / count  # [elements, lags]
    between = means[..., 0].var(1) if chains > 1 else torch.zeros_like(within[:, 0])
    total = within[:, 0] * (count - 1) / count + between
    still = total <= _ROUNDING_SHARE * draws.square().mean((1, 2))
    correlation = 1 - (within[:, :1] - within) / torch.where(still, 1.0, total)[:, None]
    pairs = correlation[:, : count // 2 * 2 : 2] + correlation[:, 1::2]
    pairs = torch.cummin(pairs, 1).values.clamp(min=0)
    return torch.where(still, 1.0, (2 * pairs.sum(1) - 1).clamp(min=1 / count))


def _halves(draws: Tensor) -> Tensor:
    """Chains `[elements, chains, draws]` split in halves, `[elements, 2 chains, draws / 2]`; the
    middle draw of an odd number is left out."""
    half = draws.shape[2] // 2
    return torch.cat([draws[..., :half], draws[..., -half:]], 1)


def _split_r_hat(draws: Tensor) -> Tensor:
    halves = _halves(draws)
    half = halves.shape[2]
    means = halves.mean(2, keepdim=True)
    # torch's own var is many times slower
    within = (halves - means).square_().sum(2).mean(1) / (half - 1)
    between = means[..., 0].var(1)
    still = within <= _ROUNDING_SHARE * halves.square().mean((1, 2))
    ratio = between / torch.where(still, 1.0, within)
    return torch.where(still & (between == 0), 1.0, ((half - 1) / half + ratio).sqrt())


def _mixing_of(draws: Tensor) -> Tensor:
    """Rank-normalized split R-hat, bulk ESS and tail ESS, `[3, elements]`, of draws `[elements,
    chains, draws]`."""
    ordered, order = draws.flatten(1).sort(1)
    middle = ordered[:, (ordered.shape[1] - 1) // 2]
    scores = _normal_scores(ordered, order).view_as(draws)
    folded = (draws - middle[:, None, None]).abs()
    folded_scores = _normal_scores(*folded.flatten(1).sort(1)).view_as(draws)
    r_hat = torch.maximum(_split_r_hat(scores), _split_r_hat(folded_scores))
    below = [draws <= _quantile(ordered, part)[:, None, None] for part in (0.05, 0.95)]
    tail = torch.minimum(*(_effective(is_below.double()) for is_below in below))
    mixing = torch.stack([r_hat, _effective(scores), tail])
    return mixing.masked_fill(ordered[:, 0] == ordered[:, -1], math.nan)


def _effective(draws: Tensor) -> Tensor:
    """Effective draws of each element, `[elements]`, with chains split in halves, from draws
    `[elements, chains, draws]`."""
    halves = _halves(draws)
    return halves.shape[1] * halves.shape[2] / _autocorrelation_time(halves)


def _quantile(ordered: Tensor, part: float) -> Tensor:
    """The quantiles of each element's numbers, `[elements]`, by linear interpolation. `ordered` has
    the numbers sorted, `[elements, n]`; `part` is the level, in [0, 1].
    """
    place = part * (ordered.shape[1] - 1)
    low = ordered[:, int(place)]
    high = ordered[:, min(int(place) + 1, ordered.shape[1] - 1)]
    return torch.lerp(low, high, place - int(place))


def _normal_scores(ordered: Tensor, order: Tensor) -> Tensor:
    """Normal scores of numbers, `[elements, n]`, in the numbers' original order: the standard
    normal quantiles of their ranks (Vehtari et al. 2021). Equal numbers have their mean rank.

    Args:
        ordered: numbers sorted along each element, `[elements, n]`.
        order: index of each sorted number in the original order, `[elements, n]`.
    """
    count = ordered.shape[1]
    halves = torch.arange(2, 2 * count + 1, device=ordered.device).double() / 2  # 1, 1.5, 2, ...
    scores = torch.special.ndtri((halves - 0.375) / (count + 0.25))
    rises = ordered[:, 1:] != ordered[:, :-1]
    if bool(rises.all()):
        return torch.empty_like(ordered).scatter_(1, order, scores[::2].expand_as(ordered))
    first = torch.arange(count, device=ordered.device).repeat(len(ordered), 1)
    last = first.clone()
    first[:, 1:] *= rises  # 0 within equal values, whose first place is the largest so far
    last[:, :-1] = last[:, :-1].where(rises, count - 1)
    last = last.flip(1).cummin(1).values.flip(1)
    return torch.empty_like(ordered).scatter_(1, order, scores[first.cummax(1).values + last])
