"""Numbers that tell a model and its data from others of the same sites and shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params

#: How far the second point is from the first, by element, in unconstrained space.
_BESIDE = 0.1


def evaluations(
    log_posterior: LogPosterior, params: Params, arguments: Arguments, indices: Tensor | None = None
) -> list[float]:
    """Log prior and log likelihood of a batch, without N/B, at params and at a point beside them;
    NaN where they cannot be had.

    Params are often where much of a model does not show: at weights of zero, whatever covariates
    are.  Each element of the second point is off by another number, so that orders show too.

    Args:
        log_posterior: the model.
        params: unconstrained tensors.
        arguments: some rows.
        indices: of rows, for a model that subsamples by itself.
    """
    beside, place = {}, 1
    for name, value in params.items():
        places = torch.arange(place, place + value.numel(), dtype=torch.float64).view(value.shape)
        beside[name] = value + _BESIDE * places.sin().to(value)
        place += value.numel()
    numbers = []
    for point in (params, beside):
        try:
            with torch.no_grad():
                found = log_posterior(point, arguments, indices)
        except (RuntimeError, ValueError):  # a matrix without a factor, a value off its support
            numbers += [math.nan, math.nan]
        else:
            numbers += [float(found.log_prior), float(found.log_lik.double().sum())]
    return numbers


def are_same(then: Sequence[float], now: Sequence[float], tolerance: float) -> bool:
    """Whether two lists of numbers are, but for rounding: other machines, devices and numbers of
    threads add up in another order.

    Args:
        then, now: the numbers.
        tolerance: relative; absolute below 1.
    """
    return len(then) == len(now) and all(
        math.isclose(was, here, rel_tol=tolerance, abs_tol=tolerance)
        or (math.isnan(was) and math.isnan(here))
        for was, here in zip(then, now, strict=True)
    )
