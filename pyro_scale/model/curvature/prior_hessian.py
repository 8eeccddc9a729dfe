"""The exact Hessian of the log prior and of every other term that counts once."""

from __future__ import annotations

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
    layout, leaves = Layout.from_tensors(params), _leaves(params)
    with torch.enable_grad():
        log_prior = log_posterior({**(held or {}), **leaves}, batch).log_prior
    slope = _slope(log_prior, leaves)
    return layout.unflatten(_product(slope, leaves, layout.flatten(vector)))


def prior_precision(
    log_posterior: LogPosterior, params: Params, batch: Any, held: Params | None, dense: bool
) -> Tensor:
    """Minus the Hessian of the log prior, in the order of params: [D, D], or its diagonal [D]."""
    leaves = _leaves(params)
    with torch.enable_grad():
        log_prior = log_posterior({**(held or {}), **leaves}, batch).log_prior
    return precision_of_prior(log_posterior, log_prior, leaves, dense)


def precision_of_prior(
    log_posterior: LogPosterior, log_prior: Tensor, leaves: Params, dense: bool
) -> Tensor:
    """The same, given the log prior with its history."""
    layout = Layout.from_tensors(leaves)
    if log_posterior.gaussian_prior is not None and layout.names == log_posterior.latents:
        prior = log_posterior.gaussian_prior
        return matrix_or_diagonal(prior.precision, dense) if dense else prior.precision_diagonal
    slope = _slope(log_prior, leaves)
    diagonal = _own_diagonal(slope, leaves, slice(None))
    if diagonal is not None:
        return matrix_or_diagonal(diagonal, dense)
    every = hessian if dense else hessian_diagonal
    return -every(slope, *leaves.values())


def correlated_sites(
    log_posterior: LogPosterior, params: Params, batch: Any, held: Params | None
) -> set[str]:
    """The sites whose own elements the prior correlates, whatever it does between sites."""
    if log_posterior.gaussian_prior is not None:  # one of independent elements, or refused
        return set()
    layout, leaves = Layout.from_tensors(params), _leaves(params)
    with torch.enable_grad():
        log_prior = log_posterior({**(held or {}), **leaves}, batch).log_prior
    slope = _slope(log_prior, leaves)
    apart = {
        name: _own_diagonal(slope, leaves, place) is None for name, place in layout.slices().items()
    }
    return {name for name, is_apart in apart.items() if is_apart}


def _own_diagonal(slope: Tensor, leaves: Params, place: slice) -> Tensor | None:
    """The diagonal of minus the Hessian's block of some elements, if it has nothing else: one
    product with a vector of no zeros finds it, and another one, at random, confirms it."""
    generator = torch.Generator().manual_seed(0)
    probe, check = 1 + torch.rand(2, len(slope[place]), generator=generator).to(slope)

    def product(own: Tensor) -> Tensor:
        vector = torch.zeros_like(slope)
        vector[place] = own
        return _product(slope, leaves, vector)[place]

    diagonal = product(probe) / probe
    rounding = _ROUNDINGS * torch.finfo(slope.dtype).eps * diagonal.abs() * check
    is_all = bool(((product(check) - diagonal * check).abs() <= rounding).all())
    return diagonal if is_all else None


def _leaves(params: Params) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _slope(log_prior: Tensor, leaves: Params) -> Tensor:
    """The gradient of the log prior with its history, [D]."""
    layout = Layout.from_tensors(leaves)
    with torch.enable_grad():
        nothing = 0 * layout.flatten(leaves)  # so that a flat or linear prior has derivatives, too
        if not log_prior.requires_grad:
            return nothing
        slopes = torch.autograd.grad(
            log_prior, list(leaves.values()), create_graph=True, materialize_grads=True
        )
        return layout.flatten(dict(zip(leaves, slopes, strict=True))) + nothing


def _product(slope: Tensor, leaves: Params, vector: Tensor) -> Tensor:
    """Minus the Hessian times a vector, [D]."""
    found = torch.autograd.grad(slope, list(leaves.values()), vector, retain_graph=True)
    return -Layout.from_tensors(leaves).flatten(dict(zip(leaves, found, strict=True)))
