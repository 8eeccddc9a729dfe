"""The prior as a Gaussian in unconstrained space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian, as_structure, matrix_or_diagonal
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ModelError
from pyro_scale.model.curvature.fisher import NoInformation, base_of, own_arguments
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.sites import Site

#: Prior draws whose moments are taken: means are off by a hundredth of an sd.
_DRAWS = 10_000
#: The least of their variance, relative to the largest, that is not rounding.
_LEAST = 1e-12


def gaussian_prior(
    log_posterior: LogPosterior, arguments: Arguments, dense: bool, seed: int = 0
) -> Gaussian:
    """A Gaussian with the prior's mean and covariance over all latents, in their order.

    Exact for Gaussian sites whose parameters are constants, and log-normal ones; the others'
    moments are of prior draws, and if any of them depends on another site, so is all of a dense
    covariance.

    Raises:
        ModelError: the prior has no variance that draws could show.
    """
    if log_posterior.gaussian_prior is not None:
        return as_structure(log_posterior.gaussian_prior, dense)
    _check_sites(log_posterior)
    layout, sites = log_posterior.layout, _sites_with_history(log_posterior, arguments)
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
            here = (place, place) if dense else place
            own = covariance[here].clone()
            if name in moments:
                mean[place] = moments[name][0].reshape(-1).to(mean)
                own = matrix_or_diagonal(moments[name][1], dense).to(mean)
            covariance[place] = 0
            if dense:
                covariance[:, place] = 0
            covariance[here] = own
    return Dense.from_covariance(mean, covariance) if dense else Diagonal(mean, covariance.sqrt())


def _moments_of_draws(
    log_posterior: LogPosterior, arguments: Arguments, dense: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """(The prior's mean, [D], its covariance, [D, D] or the diagonal [D]), of draws."""
    try:
        draws = log_posterior.prior_draws(arguments, _DRAWS, seed)
    except NotImplementedError as error:
        raise ModelError(
            "a prior without draws (an improper one?) gives EKF no start: pass init_strategy=, a "
            "fitted Laplace or VI"
        ) from error
    layout = log_posterior.layout
    flat = torch.cat([draws[name].reshape(_DRAWS, -1) for name in layout.names], dim=1)
    flat = flat.to(layout.dtype)
    mean, centered = flat.mean(0), flat - flat.mean(0)
    variance = centered.square().mean(0)
    if not bool((torch.isfinite(variance) & (variance > _LEAST * variance.max())).all()):
        worst = int((variance / variance.max()).nan_to_num(0).argmin())
        raise ModelError(
            f"site '{layout.site_at(worst)}': its prior has no variance that {_DRAWS:,} draws "
            "could show, so EKF cannot start from it: pass init_strategy=, a fitted Laplace or VI"
        )
    return mean, centered.T @ centered / len(flat) if dense else variance


def _may_depend(site: Site) -> bool:
    """Whether a site's distribution may depend on another latent."""
    try:
        arguments = own_arguments(base_of(site.fn))
    except NoInformation:
        return True
    return not arguments or any(value.requires_grad for value in arguments.values())


def _sites_with_history(log_posterior: LogPosterior, arguments: Arguments) -> list[Site]:
    """The latents of a run that knows what depends on what."""
    info = log_posterior.model_info
    params = {name: _unconstrain(info.sites[name]) for name in log_posterior.latents}
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        sites = log_posterior.run(leaves, arguments, log_posterior.first_indices()).sites
    return [sites[name] for name in log_posterior.latents]


def _check_sites(log_posterior: LogPosterior) -> None:
    """Refuses a log prior that is more than the latents' own densities."""
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


def exact_moments(
    log_posterior: LogPosterior, arguments: Arguments
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """(Mean, covariance [d, d] or its diagonal [d]) of the sites whose prior is Gaussian in
    unconstrained space."""
    return _exact(_sites_with_history(log_posterior, arguments))


def _exact(sites: list[Site]) -> dict[str, tuple[Tensor, Tensor]]:
    moments = {site.name: _moments(site) for site in sites}
    return {n: (each[0].detach(), each[1].detach()) for n, each in moments.items() if each}


def _moments(site: Site) -> tuple[Tensor, Tensor] | None:
    fn: Any = site.fn
    if _is_weighted(site):
        return None
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    if isinstance(fn, dist.LogNormal):
        fn = fn.base_dist
    if not isinstance(fn, torch.distributions.Normal | torch.distributions.MultivariateNormal):
        return None
    try:
        if any(value.requires_grad for value in own_arguments(fn).values()):
            return None
    except NoInformation:
        return None
    if isinstance(fn, torch.distributions.MultivariateNormal):
        size = fn.event_shape[0]
        blocks = fn.covariance_matrix.expand(*fn.batch_shape, size, size).reshape(-1, size, size)
        return fn.mean, torch.block_diag(*blocks)
    return fn.mean, fn.variance.expand(fn.batch_shape).reshape(-1)


def _unconstrain(site: Site) -> Tensor:
    assert site.unconstrained is not None  # latents have it
    return site.unconstrained
