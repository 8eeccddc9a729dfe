"""Which latents have a prior that does not integrate to one."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch

from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params


def improper_latents(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> list[str]:
    """Latents with an `ImproperUniform`, or with a prior that `mask(False)` leaves out.

    A prior that `pyro.factor` makes is not looked at.

    Args:
        log_posterior: the model, understood.
        params: unconstrained values of all latents.
        arguments: a batch.
    """
    with torch.no_grad():
        sites = log_posterior.run(params, arguments, log_posterior.first_indices()).sites
    return [name for name in log_posterior.latents if _is_improper(sites[name].fn)]


def _is_improper(fn: Any) -> bool:
    while fn is not None:
        if isinstance(fn, dist.ImproperUniform) or getattr(fn, "_mask", None) is False:
            return True
        fn = getattr(fn, "base_dist", None)
    return False
