"""A Gaussian over the unconstrained params with the prior's mean and covariance."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian, as_structure, matrix_or_diagonal
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.fisher import NoInformation, base_of, own_arguments
from pyro_scale.errors import ModelError
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.sites import Site

#: Prior draws for moments: means are off by a hundredth of an sd.
_NUM_DRAWS = 10_000
#: Variances below this fraction of the largest are rounding.
_LEAST_VARIANCE = 1e-12


def gaussian_prior(
    log_posterior: LogPosterior, arguments: Arguments, dense: bool, seed: int = 0
) -> Gaussian:
    """A Gaussian over all D unconstrained params, in the model's order, with the prior's mean and
    covariance.

    Moments are exact for normal and log-normal sites with constant parameters, and those of prior
    draws for all other sites.  If one of the others depends on another site, the whole of a dense
    covariance is that of draws.

    Args:
        log_posterior: the model's log posterior.
        arguments: the model's arguments, any batch.
        dense: whether the covariance is a matrix; otherwise it is a diagonal.
        seed: seed of the prior draws.

    Raises:
        ModelError: the prior has no draws, no variance, or terms besides the latents' densities.
    """
    if log_posterior.gaussian_prior is not None:
        return as_structure(log_posterior.gaussian_prior, dense)
    _check_sites(log_posterior)
    layout, sites = log_posterior.layout, _sites_with_graph(log_posterior, arguments)
    moments = _exact(sites)
    if len(moments) == len(sites):
        mean = layout.flatten({name: mean for name, (mean, _) in moments.items()})
        covariances = [matrix_or_diagonal(moments[name][1], dense) for name in layout.names]
        if dense:
            return Dense.from_covariance(mean, torch.block_diag(*covariances).to(mean))
        return Diagonal(mean, torch.cat(covariances).to(mean).sqrt())
    mean, covariance = _moments_of_draws(log_posterior, arguments, dense, seed)
    if not dense or not any(map(_may_depend, sites)):
        for name, place in layout.slices().items():
            block = (place, place) if dense else place
            of_site = covariance[block].clone()
            if name in moments:
                mean[place] = moments[name][0].reshape(-1).to(mean)
                of_site = matrix_or_diagonal(moments[name][1], dense).to(mean)
            covariance[place] = 0
            if dense:
                covariance[:, place] = 0
            covariance[block] = of_site
    return Dense.from_covariance(mean, covariance) if dense else Diagonal(mean, covariance.sqrt())


def exact_moments(
    log_posterior: LogPosterior, arguments: Arguments
) -> dict[str, tuple[Tensor, Tensor]]:
    """A dict from each site with a Gaussian prior to (its mean, its covariance [d, d] or the
    covariance's diagonal [d]), in unconstrained space.

    The prior is Gaussian in unconstrained space, with constant parameters; other sites are left
    out.
    """
    return _exact(_sites_with_graph(log_posterior, arguments))


def _moments_of_draws(
    log_posterior: LogPosterior, arguments: Arguments, dense: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Moments of draws from the prior in unconstrained space: (their mean, [D]; their covariance,
    [D, D] if `dense`, otherwise its diagonal, [D]).
    """
    try:
        draws = log_posterior.prior_draws(arguments, _NUM_DRAWS, seed)
    except NotImplementedError as error:
        raise ModelError(
            "a prior without draws (an improper one?) gives EKF no start: pass init_strategy=, a "
            "fitted Laplace or VI"
        ) from error
    layout = log_posterior.layout
    flat = torch.cat([draws[name].reshape(_NUM_DRAWS, -1) for name in layout.names], dim=1)
    flat = flat.to(layout.dtype)
    mean, centered = flat.mean(0), flat - flat.mean(0)
    variance = centered.square().mean(0)
    is_sound = torch.isfinite(variance) & (variance > _LEAST_VARIANCE * variance.max())
    if not bool(is_sound.all()):
        worst = int((variance / variance.max()).nan_to_num(0).argmin())
        raise ModelError(
            f"site '{layout.site_at(worst)}': its prior has no variance that {_NUM_DRAWS:,} draws "
            "could show, so EKF cannot start from it: pass init_strategy=, a fitted Laplace or VI"
        )
    return mean, centered.T @ centered / len(flat) if dense else variance


def _may_depend(site: Site) -> bool:
    """Whether a site's distribution may depend on another latent site; also True if that cannot be
    found out.
    """
    try:
        arguments = own_arguments(base_of(site.fn))
    except NoInformation:
        return True
    return not arguments or any(value.requires_grad for value in arguments.values())


def _sites_with_graph(log_posterior: LogPosterior, arguments: Arguments) -> list[Site]:
    """The latent sites of a run of the model whose latent values require grad: arguments of a
    site's distribution that depend on another latent site then require grad, too."""
    leaves = {}
    for name in log_posterior.latents:
        value = log_posterior.model_info.sites[name].unconstrained
        assert value is not None  # latents have it
        leaves[name] = value.detach().requires_grad_()
    with torch.enable_grad():
        sites = log_posterior.run(leaves, arguments, log_posterior.first_indices()).sites
    return [sites[name] for name in log_posterior.latents]


def _check_sites(log_posterior: LogPosterior) -> None:
    """Raises a ModelError unless the log prior is the sum of the latents' own log densities,
    without factors, scales or masks."""
    info = log_posterior.model_info
    others = [name for name, rule in info.scaling.rules.items() if rule.role == "global"]
    others += [name for name in log_posterior.latents if _is_weighted(info.sites[name])]
    if others:
        raise ModelError(
            f"site '{others[0]}': EKF starts from the latents' own distributions, and the log "
            "prior has more: a global factor, an observation outside of the data's plate, a scale "
            "or a mask. Pass init_strategy= a fitted Laplace, or use Laplace instead"
        )


def _is_weighted(site: Site) -> bool:
    return site.mask is not None or isinstance(site.scale, Tensor) or site.scale != 1


def _exact(sites: list[Site]) -> dict[str, tuple[Tensor, Tensor]]:
    """A dict from each of the sites whose prior is Gaussian in unconstrained space, with constant
    parameters, to (its mean, its covariance [d, d] or the covariance's diagonal [d])."""
    moments = {}
    for site in sites:
        fn = None if _is_weighted(site) else _constant_normal(site.fn)
        if fn is not None:
            mean, covariance = fn.mean, _covariance(fn)
            moments[site.name] = mean.detach(), covariance.detach()
    return moments


def _constant_normal(fn: Any) -> td.Normal | td.MultivariateNormal | None:
    """A site's distribution in unconstrained space if that is normal with constant parameters (a
    normal, or a log-normal's base); otherwise None."""
    while isinstance(fn, td.Independent):
        fn = fn.base_dist
    if isinstance(fn, dist.LogNormal):
        fn = fn.base_dist
    if not isinstance(fn, td.Normal | td.MultivariateNormal):
        return None
    try:
        depends = any(value.requires_grad for value in own_arguments(fn).values())
    except NoInformation:
        return None
    return None if depends else fn


def _covariance(fn: td.Normal | td.MultivariateNormal) -> Tensor:
    """The covariance of all d elements of a batch of distributions: the diagonal [d] for `Normal`,
    the matrix [d, d], block by block, for `MultivariateNormal`."""
    if isinstance(fn, td.Normal):
        return fn.variance.expand(fn.batch_shape).reshape(-1)
    size = fn.event_shape[0]
    blocks = fn.covariance_matrix.expand(*fn.batch_shape, size, size).reshape(-1, size, size)
    return torch.block_diag(*blocks)
