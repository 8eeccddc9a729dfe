"""Which latents have a prior that does not integrate to one."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch

from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.partial import element_mask
from pyro_scale.model.sites import Site


def improper_latents(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> list[str]:
    """Latents with an `ImproperUniform`, or with a prior that a mask leaves out, of some elements
    or of all.

    A prior that `pyro.factor` makes is not looked at.

    Args:
        log_posterior: the model, understood.
        params: unconstrained values of all latents.
        arguments: a batch.
    """
    with torch.no_grad():
        sites = log_posterior.run(params, arguments, log_posterior.first_indices()).sites
    kept = log_posterior.model_info.kept
    return [n for n in log_posterior.latents if n not in kept and _is_improper(sites[n])]


def _is_improper(site: Site) -> bool:
    fn: Any = site.fn
    mask = element_mask(site)
    if site.mask is False or (mask is not None and not bool(mask.all())):
        return True
    while fn is not None:
        if isinstance(fn, dist.ImproperUniform) or getattr(fn, "_mask", None) is False:
            return True
        fn = getattr(fn, "base_dist", None)
    return False
