"""Statistics of ranks, for `SBC.summary`, and descriptions of their shape, for the report."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.metrics.uniformity import ecdf_counts, holm, rank_coverage, uniformity_p_values

#: Probabilities of the central intervals whose coverage is a column.
_COVERAGE_LEVELS = 0.5, 0.8, 0.95
#: Standard errors from which ranks count as shifted, or as too close to the ends or the middle.
_CLEAR = 3.0


def scores(
    ranks: Tensor, num_draws: int, true: Tensor, mean: Tensor, sd: Tensor, is_of_data: Tensor
) -> dict[str, Tensor]:
    """A dict from the columns of `SBC.summary` to their numbers, `[elements]` each.

    Args:
        ranks: ranks of the true values among draws, integers `[S, elements]` for S simulations.
        num_draws: L, the number of draws of a simulation; ranks are 0 to L.
        true: values that data were simulated from, `[S, elements]`.
        mean: posterior means, `[S, elements]`.
        sd: posterior standard deviations, `[S, elements]`.
        is_of_data: True for elements that are functions of the data, `[elements]`; their
            contraction is NaN.
    """
    uniform = torch.arange(1, num_draws + 1).double()[:, None] / (num_draws + 1)
    ecdf = ecdf_counts(ranks, num_draws).double() / len(ranks)
    p_values = uniformity_p_values(ranks, num_draws)
    z_scores = _nan_if_infinite((mean - true) / sd)
    z_score = z_scores.nanmean(0)
    contraction = _nan_if_infinite(1 - sd.square() / true.var(0)).nanmedian(0).values
    columns = {
        "ecdf_deviation": (ecdf - uniform).abs().amax(0),
        "p_value": p_values,
        "p_holm": holm(p_values),
        "z_score": z_score,
        "z_score_sd": (z_scores - z_score).square().nanmean(0).sqrt(),
        "contraction": contraction.masked_fill(is_of_data, torch.nan),
    }
    for level in _COVERAGE_LEVELS:
        columns[f"coverage_{100 * level:.0f}"] = rank_coverage(ranks, num_draws, level)
    return columns


def describe_ranks(ranks: Tensor, num_draws: int) -> str:
    """A phrase that says where ranks pile up, and what that means for the draws.

    The mean and the variance of the ranks are compared with those of uniform ranks.  The one that
    is more standard errors away is described.  Ranks pile up at both ends if true values lie
    outside of their draws too often (Talts et al. 2018, section 4.2).

    Args:
        ranks: ranks of one element, integers in 0 to `num_draws`, `[S]` for S simulations.
        num_draws: L, the number of draws of a simulation.

    Examples:
        >>> import torch
        >>> describe_ranks(torch.arange(100) % 2 * 9, num_draws=9)
        'ranks pile up at both ends: draws are too narrow'
    """
    centered = torch.arange(num_draws + 1).double() - num_draws / 2
    values = centered[ranks]
    shift = _standard_errors(values, centered)
    spread = _standard_errors((values - values.mean()).square(), centered.square())
    if max(abs(shift), abs(spread)) < _CLEAR:
        return "ranks are uneven, neither shifted nor nearer to the ends or the middle"
    if abs(shift) > abs(spread):
        if shift > 0:
            return "ranks are too high: draws are too low"
        return "ranks are too low: draws are too high"
    if spread > 0:
        return "ranks pile up at both ends: draws are too narrow"
    return "ranks pile up in the middle: draws are too wide"


def _standard_errors(values: Tensor, uniform: Tensor) -> float:
    """How many standard errors the mean of `values` is above the mean of `uniform` (negative if
    below), where the standard error is that of a mean of as many independent draws from the numbers
    `uniform`, all equally likely; 0 if those are all equal."""
    error = float(uniform.std(correction=0)) / len(values) ** 0.5
    return float(values.mean() - uniform.mean()) / error if error else 0.0


def _nan_if_infinite(values: Tensor) -> Tensor:
    return values.where(values.isfinite(), torch.nan)
