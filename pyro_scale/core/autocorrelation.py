"""Autocorrelation times and R-hat of many elements at once.

ArviZ judges results; it takes milliseconds for each element, and tuning looks at all of them again
and again.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Variances below this part of the square of what varies are rounding.
_NONE = 1e-24


def autocorrelation_time(draws: Tensor) -> Tensor:
    """Draws per independent one, `[elements]`, at least 1 over the number of draws.

    The sum of autocorrelations of all chains together, about their common mean, over Geyer's
    initial monotone sequence (Geyer 1992; Vehtari et al. 2021, without the ranks).

    Args:
        draws: `[chains, draws, elements]`, four draws a chain or more.
    """
    chains, count, _ = draws.shape
    centered = draws.double() - draws.double().mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centered, n=2 * count, dim=1)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * count, dim=1)[:, :count] / count
    within = covariance.mean(0)  # [lags, elements]
    between = draws.double().mean(1).var(0) if chains > 1 else torch.zeros_like(within[0])
    total = within[0] * (count - 1) / count + between
    still = total <= _NONE * draws.double().square().mean((0, 1))
    correlation = 1 - (within[0] - within) / torch.where(still, 1.0, total)
    pairs = correlation[: count // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    pairs = torch.cummin(pairs, 0).values.clamp(min=0)
    return torch.where(still, 1.0, (2 * pairs.sum(0) - 1).clamp(min=1 / count))


def split_r_hat(draws: Tensor) -> Tensor:
    """Split R-hat (Gelman et al. 2013), `[elements]`.

    Args:
        draws: `[chains, draws, elements]`, four draws a chain or more.
    """
    half = draws.shape[1] // 2
    halves = torch.cat([draws[:, :half], draws[:, -half:]]).double()
    within = halves.var(1).mean(0)
    between = halves.mean(1).var(0)
    still = within <= _NONE * halves.square().mean((0, 1))
    ratio = between / torch.where(still, 1.0, within)
    return torch.where(still & (between == 0), 1.0, ((half - 1) / half + ratio).sqrt())


def rank_normalized(draws: Tensor) -> Tensor:
    """Normal scores of all chains' ranks together (Vehtari et al. 2021), of each element.

    Args:
        draws: `[chains, draws, elements]`.
    """
    flat = draws.double().flatten(0, 1)
    order = flat.argsort(0)
    ranks = torch.empty_like(flat)
    places = torch.arange(1.0, len(flat) + 1, dtype=torch.float64, device=flat.device)
    ranks.scatter_(0, order, places[:, None].expand_as(flat))
    ranks = _shared_by_ties(flat, order, ranks)
    scores = torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25))
    return scores.reshape(draws.shape)


def mixing_of(draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Rank-normalized split R-hat, bulk and tail effective draws), each `[elements]`, as ArviZ has
    them (Vehtari et al. 2021).

    Args:
        draws: `[chains, draws, elements]`, eight draws a chain or more.
    """
    flat = draws.double().flatten(0, 1)
    folded = (draws.double() - flat.median(0).values).abs()
    r_hat = torch.maximum(split_r_hat(rank_normalized(draws)), split_r_hat(rank_normalized(folded)))
    tails = flat.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64, device=flat.device), 0)
    tail = torch.stack([_effective((draws.double() <= tail).double()) for tail in tails]).amin(0)
    return r_hat, _effective(rank_normalized(draws)), tail


def _effective(draws: Tensor) -> Tensor:
    """Effective draws of chains in halves, `[elements]`."""
    half = draws.shape[1] // 2
    halves = torch.cat([draws[:, :half], draws[:, -half:]])
    return halves.shape[0] * half / autocorrelation_time(halves)


def _shared_by_ties(flat: Tensor, order: Tensor, ranks: Tensor) -> Tensor:
    """Ranks where equal values have the mean of theirs, `[draws, elements]`."""
    ordered = flat.gather(0, order)
    if not bool((ordered[1:] == ordered[:-1]).any()):
        return ranks
    columns = []
    for column in flat.unbind(1):
        _, inverse, counts = column.unique(return_inverse=True, return_counts=True)
        ends = counts.cumsum(0).double()
        columns.append((ends - (counts - 1) / 2)[inverse])
    return torch.stack(columns, 1)
