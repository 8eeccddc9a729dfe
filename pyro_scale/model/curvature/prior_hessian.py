"""The exact Hessian of the log prior and of every other term that counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.gaussian import matrix_or_diagonal
from pyro_scale.core.layout import Layout
from pyro_scale.model.derivatives import hessian, hessian_diagonal
from pyro_scale.model.log_posterior import LogPosterior, Params

#: By how many roundings two ways of computing the same differ.
_ROUNDINGS = 100


def prior_product(
    log_posterior: LogPosterior,
    params: Params,
    batch: Any,
    vector: Params,
    held: Params | None = None,
) -> dict[str, Tensor]:
    """Minus the Hessian of the log prior times a vector, by site."""
    layout = Layout.of(params)
    slope, here = _slope(log_posterior, layout, layout.flatten(params), batch, held)
    return layout.unflatten(_product(slope, here)(layout.flatten(vector)))


def prior_precision(
    log_posterior: LogPosterior, params: Params, batch: Any, held: Params | None, dense: bool
) -> Tensor:
    """Minus the Hessian of the log prior, in the order of params: [D, D], or its diagonal [D].

    Priors of independent elements have a diagonal Hessian, which one product with a vector of no
    zeros finds, and another one, at random, confirms.
    """
    layout = Layout.of(params)
    position = layout.flatten(params)
    if log_posterior.gaussian_prior is not None and layout.names == log_posterior.latents:
        prior = log_posterior.gaussian_prior
        return matrix_or_diagonal(prior.precision, dense) if dense else prior.precision_diagonal
    slope, here = _slope(log_posterior, layout, position, batch, held)
    times = _product(slope, here)
    probe, check = 1 + torch.rand(2, layout.size, generator=torch.Generator().manual_seed(0)).to(
        position
    )
    diagonal = times(probe) / probe
    rounding = _ROUNDINGS * torch.finfo(position.dtype).eps * diagonal.abs() * check
    if bool(((times(check) - diagonal * check).abs() <= rounding).all()):
        return matrix_or_diagonal(diagonal, dense)
    return -(hessian(slope, here) if dense else hessian_diagonal(slope, here))


def _slope(
    log_posterior: LogPosterior, layout: Layout, position: Tensor, batch: Any, held: Params | None
) -> tuple[Tensor, Tensor]:
    """(The gradient of the log prior with its history, the leaf that it is with respect to)."""
    here = position.detach().requires_grad_()
    with torch.enable_grad():
        params = {**layout.unflatten(here), **(held or {})}
        nothing = 0 * here.square().sum()  # so that a flat or linear prior has derivatives, too
        value = log_posterior(params, batch).log_prior + nothing
        (slope,) = torch.autograd.grad(value, here, create_graph=True)
    return slope, here


def _product(slope: Tensor, here: Tensor) -> Callable[[Tensor], Tensor]:
    """Minus the Hessian times a vector."""

    def times(vector: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(slope, here, vector, retain_graph=True)
        return -product

    return times
