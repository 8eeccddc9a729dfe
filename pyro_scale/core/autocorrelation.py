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
    ordered, order = flat.sort(0)
    ranks = torch.empty_like(flat).scatter_(0, order, _shared_ranks(ordered))
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
    scores = rank_normalized(draws)
    r_hat = torch.maximum(split_r_hat(scores), split_r_hat(rank_normalized(folded)))
    tails = flat.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64, device=flat.device), 0)
    tail = torch.stack([_effective((draws.double() <= tail).double()) for tail in tails]).amin(0)
    return r_hat, _effective(scores), tail


def _effective(draws: Tensor) -> Tensor:
    """Effective draws of chains in halves, `[elements]`."""
    half = draws.shape[1] // 2
    halves = torch.cat([draws[:, :half], draws[:, -half:]])
    return halves.shape[0] * half / autocorrelation_time(halves)


def _shared_ranks(ordered: Tensor) -> Tensor:
    """Ranks of values in order, `[draws, elements]`; equal ones have the mean of theirs."""
    places = torch.arange(len(ordered), device=ordered.device)[:, None].expand_as(ordered)
    rises = ordered[1:] != ordered[:-1]
    if bool(rises.all()):
        return places.double() + 1
    first, last = places.clone(), places.clone()
    first[1:] *= rises  # 0 within a group, whose first place is the largest until then
    last[:-1] = last[:-1].where(rises, len(ordered) - 1)
    last = last.flip(0).cummin(0).values.flip(0)
    return (first.cummax(0).values + last).double() / 2 + 1
