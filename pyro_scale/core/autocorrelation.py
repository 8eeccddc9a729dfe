"""Autocorrelation times and R-hat of many elements at once.

ArviZ judges results; it takes milliseconds for each element, and tuning looks at all of them again
and again.  Here some elements at a time are worked on, as many as stay in the cache, each of which
has its chains in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: Variances below this part of the square of what varies are rounding.
_NONE = 1e-24
#: Numbers that are worked on at a time.
_AT_ONCE = 2**15


def autocorrelation_time(draws: Tensor) -> Tensor:
    """Draws per independent one, `[elements]`, at least 1 over the number of draws.

    The sum of autocorrelations of all chains together, about their common mean, over Geyer's
    initial monotone sequence (Geyer 1992; Vehtari et al. 2021, without the ranks).

    Args:
        draws: `[chains, draws, elements]`, four draws a chain or more.
    """
    return _by_element(_autocorrelation_time, draws)


def split_r_hat(draws: Tensor) -> Tensor:
    """Split R-hat (Gelman et al. 2013), `[elements]`.

    Args:
        draws: `[chains, draws, elements]`, four draws a chain or more.
    """
    return _by_element(_split_r_hat, draws)


def by_group(statistic: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """Applies a statistic `[chains, draws, elements]` -> `[elements]` to every group of draws
    `[groups, chains, draws, elements]`.  Returns `[groups, elements]`."""
    groups, chains, count, size = draws.shape
    side_by_side = draws.permute(1, 2, 0, 3).reshape(chains, count, groups * size)
    return statistic(side_by_side).view(groups, size)


def mixing_of(draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Rank-normalized split R-hat, bulk and tail effective draws), each `[elements]`, as ArviZ has
    them (Vehtari et al. 2021); NaN of constants, which have not been seen to mix.

    Args:
        draws: `[chains, draws, elements]`, eight draws a chain or more.
    """
    r_hat, bulk, tail = _by_element(_mixing_of, draws)
    return r_hat, bulk, tail


# ------------------------------------------------------------------ elements [elements, chains, n]


def _by_element(function: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """A function of `[some elements, chains, draws]`, `[..., some elements]`, of all of them."""
    chains, count, _ = draws.shape
    blocks = draws.split(max(1, _AT_ONCE // (chains * count)), dim=2)
    parts = [function(block.permute(2, 0, 1).double().contiguous()) for block in blocks]
    return torch.cat(parts, -1)


def _autocorrelation_time(draws: Tensor) -> Tensor:
    _, chains, count = draws.shape
    means = draws.mean(2, keepdim=True)
    spectrum = torch.view_as_real(torch.fft.rfft(draws - means, n=2 * count))
    power = spectrum.square_().sum(-1).mean(1)
    within = torch.fft.irfft(power, n=2 * count)[:, :count] / count  # [elements, lags]
    between = means[..., 0].var(1) if chains > 1 else torch.zeros_like(within[:, 0])
    total = within[:, 0] * (count - 1) / count + between
    still = total <= _NONE * draws.square().mean((1, 2))
    correlation = 1 - (within[:, :1] - within) / torch.where(still, 1.0, total)[:, None]
    pairs = correlation[:, : count // 2 * 2].unflatten(1, (-1, 2)).sum(2)
    pairs = torch.cummin(pairs, 1).values.clamp(min=0)
    return torch.where(still, 1.0, (2 * pairs.sum(1) - 1).clamp(min=1 / count))


def _halves(draws: Tensor) -> Tensor:
    """Every chain as two, `[elements, 2 chains, half of the draws]`."""
    half = draws.shape[2] // 2
    return torch.cat([draws[..., :half], draws[..., -half:]], 1)


def _split_r_hat(draws: Tensor) -> Tensor:
    halves = _halves(draws)
    half = halves.shape[2]
    means = halves.mean(2, keepdim=True)
    # torch's own var is many times slower
    within = (halves - means).square_().sum(2).mean(1) / (half - 1)
    between = means[..., 0].var(1)
    still = within <= _NONE * halves.square().mean((1, 2))
    ratio = between / torch.where(still, 1.0, within)
    return torch.where(still & (between == 0), 1.0, ((half - 1) / half + ratio).sqrt())


def _mixing_of(draws: Tensor) -> Tensor:
    """The three numbers of each element, `[3, elements]`."""
    ordered, order = draws.flatten(1).sort(1)
    middle = ordered[:, (ordered.shape[1] - 1) // 2]
    scores = _normal_scores(ordered, order).view_as(draws)
    folded = (draws - middle[:, None, None]).abs()
    of_folded = _normal_scores(*folded.flatten(1).sort(1)).view_as(draws)
    r_hat = torch.maximum(_split_r_hat(scores), _split_r_hat(of_folded))
    below = [draws <= _quantile(ordered, part)[:, None, None] for part in (0.05, 0.95)]
    tail = torch.minimum(*(_effective(each.double()) for each in below))
    mixing = torch.stack([r_hat, _effective(scores), tail])
    return mixing.masked_fill(ordered[:, 0] == ordered[:, -1], math.nan)


def _effective(draws: Tensor) -> Tensor:
    """Effective draws of chains in halves."""
    halves = _halves(draws)
    return halves.shape[1] * halves.shape[2] / _autocorrelation_time(halves)


def _quantile(ordered: Tensor, part: float) -> Tensor:
    """Of values in order, `[elements, values]`, with the values between two of them on a line."""
    place = part * (ordered.shape[1] - 1)
    low = ordered[:, int(place)]
    high = ordered[:, min(int(place) + 1, ordered.shape[1] - 1)]
    return torch.lerp(low, high, place - int(place))


def _normal_scores(ordered: Tensor, order: Tensor) -> Tensor:
    """Normal scores of the ranks of values (Vehtari et al. 2021), `[elements, values]`; equal ones
    have the mean of their ranks.

    Args:
        ordered: the values in order.
        order: their places.
    """
    count = ordered.shape[1]
    halves = torch.arange(2, 2 * count + 1, device=ordered.device).double() / 2  # 1, 1.5, 2, ...
    scores = torch.special.ndtri((halves - 0.375) / (count + 0.25))
    rises = ordered[:, 1:] != ordered[:, :-1]
    if bool(rises.all()):
        return torch.empty_like(ordered).scatter_(1, order, scores[::2].expand_as(ordered))
    first = torch.arange(count, device=ordered.device).repeat(len(ordered), 1)
    last = first.clone()
    first[:, 1:] *= rises  # 0 within a group, whose first place is the largest until then
    last[:, :-1] = last[:, :-1].where(rises, count - 1)
    last = last.flip(1).cummin(1).values.flip(1)
    return torch.empty_like(ordered).scatter_(1, order, scores[first.cummax(1).values + last])
