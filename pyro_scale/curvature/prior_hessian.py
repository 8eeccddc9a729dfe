"""The exact Hessian of the log prior, and of every other term that counts once."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.core.gaussian import matrix_or_diagonal
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.model.derivatives import hessian, hessian_diagonal
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Roundings by which two ways to compute the same number may differ.
_ROUNDINGS = 100


def prior_product(
    log_posterior: LogPosterior,
    params: Params,
    batch: Arguments,
    vector: Params,
    held: Params | None = None,
) -> dict[str, Tensor]:
    """The prior's precision (minus the Hessian of the log prior) times a vector, by site.

    Args:
        log_posterior: the model's log posterior.
        params: unconstrained values of the sites with respect to which the Hessian is taken.
        batch: the model's arguments, on which the model is run.
        vector: the vector, as a dict like `params`.
        held: unconstrained values of the other latent sites; None if there are none.
    """
    layout, (log_prior, leaves) = (
        Layout.from_tensors(params),
        _log_prior(log_posterior, params, batch, held),
    )
    slope = _slope(log_prior, leaves)
    return layout.unflatten(_product(slope, leaves, layout.flatten(vector)))


def prior_precision(
    log_posterior: LogPosterior, params: Params, batch: Arguments, held: Params | None, dense: bool
) -> Tensor:
    """The prior's precision: minus the Hessian of the log prior with respect to `params`, in their
    order, [D, D]; or its diagonal, [D], if not `dense`. `held` has the unconstrained values of the
    other latent sites, None if there are none; the model is run on `batch`."""
    return precision_of_prior(log_posterior, *_log_prior(log_posterior, params, batch, held), dense)


def precision_of_prior(
    log_posterior: LogPosterior, log_prior: Tensor, leaves: Params, dense: bool
) -> Tensor:
    """The prior's precision, minus the Hessian of the log prior with respect to the params, as a
    matrix or its diagonal, from a log prior that has been computed already.

    Args:
        log_posterior: the model's log posterior.
        log_prior: the log prior, a scalar with an autograd graph.
        leaves: the params by site, as leaves of that graph.
        dense: whether to return a matrix [D, D]; otherwise its diagonal [D].
    """
    layout = Layout.from_tensors(leaves)
    if log_posterior.gaussian_prior is not None and layout.names == log_posterior.latents:
        prior = log_posterior.gaussian_prior
        return matrix_or_diagonal(prior.precision, dense) if dense else prior.precision_diagonal
    slope = _slope(log_prior, leaves)
    diagonal = _diagonal_if_all(slope, leaves, slice(None))
    if diagonal is not None:
        return matrix_or_diagonal(diagonal, dense)
    return -(hessian if dense else hessian_diagonal)(slope, *leaves.values())


def correlated_sites(
    log_posterior: LogPosterior, params: Params, batch: Arguments, held: Params | None
) -> set[str]:
    """Names of the sites among `params` whose prior correlates elements of the same site: their
    block of the prior's precision is not diagonal. `held` has the unconstrained values of the other
    latent sites, None if there are none; the model is run on `batch`."""
    if log_posterior.gaussian_prior is not None:  # its elements are independent
        return set()
    log_prior, leaves = _log_prior(log_posterior, params, batch, held)
    slope, slices = _slope(log_prior, leaves), Layout.from_tensors(params).slices()
    return {name for name, at in slices.items() if _diagonal_if_all(slope, leaves, at) is None}


def _log_prior(
    log_posterior: LogPosterior, params: Params, batch: Arguments, held: Params | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(The log prior, a scalar with an autograd graph; the params by site, as leaves of the
    graph)."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        return log_posterior({**(held or {}), **leaves}, batch).log_prior, leaves


def _diagonal_if_all(slope: Tensor, leaves: Params, place: slice) -> Tensor | None:
    """The diagonal of a block of minus the log prior's Hessian; None if the block is not diagonal.

    One product with a vector without zeros gives the diagonal if the block is diagonal, and a
    second, random one confirms that it is.

    Args:
        slope: gradient of the log prior, [D], with an autograd graph.
        leaves: the params that it was computed from, by site.
        place: elements of the block.
    """
    random = torch.Generator().manual_seed(0)
    probe, check = 1 + torch.rand(2, len(slope[place]), generator=random).to(slope)

    def product(of_block: Tensor) -> Tensor:
        vector = torch.zeros_like(slope)
        vector[place] = of_block
        return _product(slope, leaves, vector)[place]

    diagonal = product(probe) / probe
    rounding = _ROUNDINGS * torch.finfo(slope.dtype).eps * diagonal.abs() * check
    is_all = bool(((product(check) - diagonal * check).abs() <= rounding).all())
    return diagonal if is_all else None


def _slope(log_prior: Tensor, leaves: Params) -> Tensor:
    """The gradient of the log prior with respect to the leaves, flat, [D], with an autograd graph;
    zeros if the log prior does not depend on them."""
    layout = Layout.from_tensors(leaves)
    with torch.enable_grad():
        zeros = 0 * layout.flatten(leaves)  # gives second derivatives to flat and linear priors
        if not log_prior.requires_grad:
            return zeros
        slopes = torch.autograd.grad(
            log_prior, list(leaves.values()), create_graph=True, materialize_grads=True
        )
        return layout.flatten(dict(zip(leaves, slopes, strict=True))) + zeros


def _product(slope: Tensor, leaves: Params, vector: Tensor) -> Tensor:
    """Minus the Hessian of the log prior times a vector [D]: a vector [D]. `slope` is the log
    prior's gradient [D] with an autograd graph, and `leaves` the params that it was computed from.
    """
    parts = torch.autograd.grad(slope, list(leaves.values()), vector, retain_graph=True)
    return -Layout.from_tensors(leaves).flatten(dict(zip(leaves, parts, strict=True)))
