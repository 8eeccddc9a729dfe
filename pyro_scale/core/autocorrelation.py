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
