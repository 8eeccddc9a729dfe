"""Numbers that distinguish a model and its data from others with the same sites and shapes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Largest distance of an element of the second point from the first, in unconstrained space.
_DISTANCE = 0.1


def model_fingerprint(
    log_posterior: LogPosterior,
    params: Params,
    arguments: Arguments,
    indices: Tensor | None = None,
    where: str = "at the start",
) -> dict[str, float]:
    """Four numbers that tell this model and these rows from others with the same sites and shapes:
    log prior and log likelihood of the rows, in nats and without N/B, at params and at a nearby
    point. The keys of the dict describe them in words; a number is NaN where it cannot be
    evaluated.

    The second point is needed since params are often at special values: with weights of zero,
    covariates have no effect. Its elements move by different distances, so that a different order
    of elements is detected, too.

    Args:
        log_posterior: the model.
        params: unconstrained values by site.
        arguments: some rows of data, as the model's arguments.
        indices: indices of the rows, for a model that subsamples by itself.
        where: where params and rows are from, in words, for the keys.
    """
    nearby, place = dict[str, Tensor](), 1
    for name, value in params.items():
        places = torch.arange(place, place + value.numel(), dtype=torch.float64).view(value.shape)
        nearby[name] = value + _DISTANCE * places.sin().to(value)
        place += value.numel()
    numbers: dict[str, float] = {}
    for point, at in ((params, where), (nearby, f"beside it, {where}")):
        log_prior = log_lik = math.nan
        # a matrix without a factor, a value off its support
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):
            evaluation = log_posterior(point, arguments, indices)
            log_prior = float(evaluation.log_prior)
            log_lik = float(evaluation.log_lik.double().sum())
        numbers |= {f"log prior {at}": log_prior, f"log likelihood {at}": log_lik}
    return numbers


def first_difference(
    old: Mapping[str, float], new: Mapping[str, float], tolerance: float
) -> str | None:
    """A phrase about the first number that differs between two fingerprints; None if all agree
    within the tolerance: machines, devices and numbers of threads differ in the order of sums.

    Args:
        old: fingerprint of the earlier run.
        new: fingerprint of this run.
        tolerance: largest difference that counts as equal, relative to the number, and absolute
            below 1. A number that only one fingerprint has counts as a difference; NaN equals NaN.
    """
    for name in dict.fromkeys([*old, *new]):
        before, now = old.get(name, math.inf), new.get(name, math.inf)
        is_close = math.isclose(before, now, rel_tol=tolerance, abs_tol=tolerance)
        if not is_close and not (math.isnan(before) and math.isnan(now)):
            return f"the {name} was {before:.8g}, is {now:.8g}"
    return None
