"""The columns of the table: each element's scores, from its ranks and posterior moments."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.metrics.uniformity import ecdf_counts, holm, rank_coverage, uniformity_p_values

#: Intervals whose coverage is shown.
_COVERAGE_LEVELS = 0.5, 0.8, 0.95


def scores(
    ranks: Tensor, num_draws: int, true: Tensor, mean: Tensor, sd: Tensor, is_of_data: Tensor
) -> dict[str, Tensor]:
    """By column, `[elements]`; see `SBC.summary`.

    Args:
        ranks: of the true values, integers `[S, elements]`.
        num_draws: L, the draws that each rank is among.
        true: the values that data were simulated from, `[S, elements]`.
        mean: of the draws, `[S, elements]`.
        sd: of the draws, `[S, elements]`.
        is_of_data: which elements are functions of the data, `[elements]`.
    """
    places = torch.arange(1, num_draws + 1).double()[:, None] / (num_draws + 1)
    ecdf = ecdf_counts(ranks, num_draws).double() / len(ranks)
    p_values = uniformity_p_values(ranks, num_draws)
    z_scores = _finite((mean - true) / sd)
    z_score = z_scores.nanmean(0)
    contraction = _finite(1 - sd.square() / true.var(0)).nanmedian(0).values
    columns = {
        "ecdf_deviation": (ecdf - places).abs().amax(0),
        "p_value": p_values,
        "p_holm": holm(p_values),
        "z_score": z_score,
        "z_score_sd": (z_scores - z_score).square().nanmean(0).sqrt(),
        "contraction": contraction.masked_fill(is_of_data, torch.nan),
    }
    for level in _COVERAGE_LEVELS:
        columns[f"coverage_{100 * level:.0f}"] = rank_coverage(ranks, num_draws, level)
    return columns


def _finite(values: Tensor) -> Tensor:
    return values.where(values.isfinite(), torch.nan)
