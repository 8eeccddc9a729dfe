"""The coordinates that chains move in, as they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.validation import AUTO, is_auto
from pyro_scale.errors import ArgumentError, NotRunError
from pyro_scale.infer.approximation import fit_of
from pyro_scale.kernels import Kernel
from pyro_scale.tuning.choice import Precondition

#: What has a Gaussian, in words.
A_FIT = "a fit of all sites that has been run (Laplace, VI, EKF)"
#: The kinds of coordinates.
_KINDS = "auto", "dense", "kron", "low_rank", "diag"


def as_precondition(
    asked: Any,
    kernel_class: type[Kernel],
    hyperparameters: Mapping[str, Any],
    chosen: set[str],
) -> Precondition:
    """`"auto"`, a kind of coordinates, a fit's Gaussian, or None for the parameters themselves.

    Args:
        asked: what the user passed.
        kernel_class: the method.
        hyperparameters: that were passed.
        chosen: those that are to be chosen.

    Raises:
        ArgumentError: what is no such thing; coordinates in which other arguments mean nothing.
    """
    by_site = [name for name, value in hyperparameters.items() if isinstance(value, Mapping)]
    has_mass = hyperparameters.get("mass", 1.0) != 1.0 or "mass" in by_site
    if is_auto(asked):
        by_hand = "lr" not in chosen or has_mass or by_site or not kernel_class.whitens
        return None if by_hand else AUTO
    if asked is None:
        return None
    if not kernel_class.whitens:
        raise ArgumentError(
            f"precondition: {kernel_class.__name__} has a preconditioner of its own; leave it out"
        )
    if has_mass or by_site:
        raise ArgumentError(
            f"precondition={asked!r} moves chains in other coordinates than the sites', where "
            f"{'mass' if has_mass else by_site[0]} has no meaning: leave one of them out"
        )
    if asked in _KINDS[1:]:
        return asked
    gaussian = gaussian_of(asked)
    if gaussian is None:
        kinds = ", ".join(map(repr, _KINDS))
        raise ArgumentError(f"precondition={asked!r}: pass {kinds}, None, or {A_FIT}")
    return gaussian


def gaussian_of(asked: Any) -> Gaussian | None:
    """The Gaussian of a fit of all sites, in float64; None of anything else.

    Raises:
        ArgumentError: the fit's temperature is 0.
    """
    fit = None
    with contextlib.suppress(NotRunError):
        fit = fit_of(asked)
    if fit is None or not fit.gaussians:
        return None
    if fit.temperature == 0:
        raise ArgumentError(
            "precondition: at temperature 0 the fit has no spread, hence no scales to move in: "
            "pass fit.at_temperature(1), or a fit at another temperature"
        )
    has_all_sites = fit.sites == tuple(fit.log_posterior.latents)
    return fit.gaussians[0].double() if has_all_sites else None
