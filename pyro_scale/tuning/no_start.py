"""Advice for error messages if there is no mode, or no stable step size, to start from."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.model.diagnose import improper_latents

#: Curvatures below this fraction of the largest count as flat.
_FLAT_CURVATURE = 1e-6
#: Dimensions up to which the Hessian is searched for a flat direction.
_MOST_DIMENSIONS = 2_000


def what_to_try(density: FullDataDensity, position: Tensor) -> str:
    """The end of an error message, from a colon on, that says what to try if chains have nowhere to
    start: priors that curve if the density is flat or a prior improper, otherwise clean data, other
    starts or NUTS.

    Args:
        density: log density of all rows, or of rows that represent them.
        position: end of a search, or where a chain broke, as unconstrained params `[D]`.
    """
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
    """A remark in parentheses for an error message: the site along which the log density hardly
    curves, or that it does not curve at all. Empty if there is no such site, there are too many
    dimensions to look, or the curvature is not finite.

    Args:
        density: log density of all rows, or of rows that represent them.
        position: unconstrained params `[D]` at which to look.
    """
    if len(position) > _MOST_DIMENSIONS:
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
