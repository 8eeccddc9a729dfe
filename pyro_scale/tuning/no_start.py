"""What to say where chains have nowhere to start."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.model.diagnose import improper_latents

#: Curvatures below this part of the largest are those of a flat direction.
_FLAT_CURVATURE = 1e-6
#: Dimensions up to which a flat direction is looked for.
_MOST_LOOKED_AT = 2_000


def what_to_try(density: FullDataDensity, position: Tensor) -> str:
    """What to try where chains have nowhere to start, after what was seen at a position: it speaks
    of priors only where they may be the cause."""
    params, first = density.layout.unflatten(position), density.data.first()
    try:
        improper = improper_latents(density.log_posterior, params, first)
    except (RuntimeError, ValueError):  # the model cannot be run there
        improper = []
    flat = _flat_direction(density, position)
    if flat or improper:
        return f"{flat}: " + (
            f"give site '{improper[0]}' a proper prior, or start elsewhere (init_strategy=)"
            if improper
            else "give the sites tighter priors that curve (Normal), or take ps.NUTS(model), which "
            "needs no mode"
        )
    if unclean := density.to_clean():
        return f": {unclean}"
    return ": start elsewhere (init_strategy=), or take ps.NUTS(model), which needs no mode"


def _flat_direction(density: FullDataDensity, position: Tensor) -> str:
    """The site along which the log density hardly curves, in words; none if there is none, or if
    there are too many dimensions to look."""
    if len(position) > _MOST_LOOKED_AT:
        return ""
    precision = -density.hessian(position).double()
    if not bool(torch.isfinite(precision).all()):
        return ""
    if not bool(precision.any()):
        return " (the log density has no curvature: it is made of straight pieces, as a Laplace's)"
    scale = precision.diagonal().abs().rsqrt().clamp(max=1e150)
    lengths, axes = torch.linalg.eigh(scale[:, None] * precision * scale)
    flattest = int(lengths.abs().argmin())
    if float(lengths[flattest].abs()) > _FLAT_CURVATURE * float(lengths.abs().max()):
        return ""
    site = density.layout.site_at(int(axes[:, flattest].abs().argmax()))
    return f" (the log density hardly curves in a direction of site '{site}')"
