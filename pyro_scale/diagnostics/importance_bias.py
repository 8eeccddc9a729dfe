"""Bias of an approximation's means and sds, estimated with importance weights."""

from __future__ import annotations

from torch import Tensor

from pyro_scale.tuning.pilot import Bias


def importance_bias(draws: Tensor, log_weights: Tensor) -> Bias:
    """Bias of an approximation against its posterior: approximation minus posterior.

    Trustworthy only where Pareto k of the weights is below 0.7.

    Args:
        draws: draws of the approximation, [n, D].
        log_weights: smoothed log importance weights up to a constant, [n].

    Returns:
        Bias of means in posterior sds and of log sds, [D] each, with Monte Carlo standard errors.
        Both means use the same draws, so errors come from their paired influence values.
    """
    weights = len(draws) * log_weights.softmax(0)[:, None]
    center, mean = draws.mean(0), (weights * draws).mean(0)
    variance = draws.var(0, correction=0)
    exact = (weights * (draws - mean) ** 2).mean(0)
    sd = exact.sqrt()
    shift, log_ratio = (center - mean) / sd, (variance / exact).log() / 2
    of_exact_sd = weights * ((draws - mean) ** 2 / exact - 1) / 2
    of_shift = ((draws - center) - weights * (draws - mean)) / sd - shift * of_exact_sd
    of_log_ratio = ((draws - center) ** 2 / variance - 1) / 2 - of_exact_sd
    root = len(draws) ** 0.5
    return Bias(
        shift,
        of_shift.std(0) / root,
        log_ratio,
        of_log_ratio.std(0) / root,
    )
