"""Numbers that tell a model and its data from others of the same sites and shapes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params

#: How far the second point is from the first, by element, in unconstrained space.
_BESIDE = 0.1


def evaluations(
    log_posterior: LogPosterior,
    params: Params,
    arguments: Arguments,
    indices: Tensor | None = None,
    where: str = "at the start",
) -> dict[str, float]:
    """Log prior and log likelihood of a batch, without N/B, at params and at a point beside them;
    NaN where they cannot be had.  Keys say what each is, in words.

    Params are often where much of a model does not show: at weights of zero, whatever covariates
    are.  Each element of the second point is off by another number, so that orders show too.

    Args:
        log_posterior: the model.
        params: unconstrained tensors.
        arguments: some rows.
        indices: of rows, for a model that subsamples by itself.
        where: what params and rows are, in words.
    """
    beside, place = dict[str, Tensor](), 1
    for name, value in params.items():
        places = torch.arange(place, place + value.numel(), dtype=torch.float64).view(value.shape)
        beside[name] = value + _BESIDE * places.sin().to(value)
        place += value.numel()
    numbers: dict[str, float] = {}
    for point, at in ((params, where), (beside, f"beside it, {where}")):
        log_prior = log_lik = math.nan
        # a matrix without a factor, a value off its support
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):
            found = log_posterior(point, arguments, indices)
            log_prior, log_lik = float(found.log_prior), float(found.log_lik.double().sum())
        numbers |= {f"log prior {at}": log_prior, f"log likelihood {at}": log_lik}
    return numbers


def first_difference(
    then: Mapping[str, float], now: Mapping[str, float], tolerance: float
) -> str | None:
    """The first number that is another one, in words; None where they differ by rounding at most:
    other machines, devices and numbers of threads add up in another order.

    Args:
        then, now: numbers by name.
        tolerance: relative; absolute below 1.
    """
    for name in dict.fromkeys([*then, *now]):
        was, here = then.get(name, math.inf), now.get(name, math.inf)
        is_close = math.isclose(was, here, rel_tol=tolerance, abs_tol=tolerance)
        if not is_close and not (math.isnan(was) and math.isnan(here)):
            return f"the {name} was {was:.8g}, is {here:.8g}"
    return None
