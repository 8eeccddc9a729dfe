"""Where an extended Kalman filter starts, and how its params walk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Gaussian, as_structure
from pyro_scale.core.layout import Layout
from pyro_scale.core.memory import check_fits
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.gaussian_prior import gaussian_prior
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.infer.approximation import fit_of
from pyro_scale.infer.method import Starts
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.run.initialize import check_sites, init_of

#: Matrices that are held at once: precisions before and after, curvature, factor.
_MATRICES = 8


def start_of(
    log_posterior: LogPosterior, arguments: Arguments, init_strategy: Any, dense: bool, seed: int
) -> Gaussian:
    """The Gaussian before the first batch.

    Args:
        log_posterior: the model, understood.
        arguments: a batch.
        init_strategy: a fit, whose Gaussian it is; else it is the prior's, with the mean where one
            of Pyro's strategies or a dict of constrained tensors has it.
        dense: whether elements are correlated.
        seed: of prior draws.

    Raises:
        ModelError: the likelihood is a joint density of all rows.
        ArgumentError: it does not fit into memory; an init strategy of another model.
    """
    if any(rule.whole_data for rule in log_posterior.model_info.scaling.rules.values()):
        raise ModelError(
            "the likelihood is a joint density of all rows, so a filter cannot absorb them "
            "batch by batch: use Laplace or VI"
        )
    layout = log_posterior.layout
    if dense:
        device = log_posterior.model_info.sites[layout.names[0]].value.device
        check_fits(layout.size, layout.dtype, device, _MATRICES, "EKF")
    if isinstance(init_strategy, Starts):
        return _gaussian_of(init_strategy, log_posterior, dense)
    prior = gaussian_prior(log_posterior, arguments, dense, seed)
    if init_strategy is None:
        return prior
    if isinstance(init_strategy, Mapping):
        check_sites(log_posterior, init_strategy)
    init = init_of(log_posterior, init_strategy, 0, 1)
    start = log_posterior.start(arguments, seed, 0, init)
    return dataclasses.replace(prior, mean=layout.flatten(start))


def _gaussian_of(fitted: Any, log_posterior: LogPosterior, dense: bool) -> Gaussian:
    """That of a fit, or of its posterior."""
    fit, layout = fit_of(fitted), log_posterior.layout
    if fit is None:
        raise ArgumentError("init_strategy: it has no Gaussian: pass a Laplace, VI or EKF")
    shapes = dict(zip(fit.layout.names, fit.layout.shapes, strict=True))
    same = [shapes.get(name) for name in fit.sites] == list(layout.shapes)
    if not fit.gaussians:
        raise ArgumentError("init_strategy: it has no Gaussian: pass a Laplace, VI or EKF")
    if fit.sites != layout.names or not same:
        raise ArgumentError(
            f"init_strategy: it has a Gaussian over {fit.sites} of shapes "
            f"{[list(shapes[name]) for name in fit.sites]}, the model has the sites "
            f"{layout.names} of shapes {[list(shape) for shape in layout.shapes]}: fit those"
        )
    return as_structure(fit.at_temperature_1(0), dense)


#: One sd for all params, or one a site: a number, or a tensor of the site's unconstrained shape.
TransitionSd: TypeAlias = float | Mapping[str, float | Tensor]


def check_transition_sd(given: object) -> None:
    """Refuses what is no sd.

    Raises:
        ArgumentError: it is negative or not finite, or neither a number nor a dict of them.
    """
    by_site = given if isinstance(given, Mapping) else {None: given}
    for site, value in by_site.items():
        argument = "transition_sd" if site is None else f"transition_sd['{site}']"
        kinds = "a number" if site is None else "a number or a tensor of them"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_tensor = site is not None and isinstance(value, Tensor) and value.dtype != torch.bool
        if not (is_number or is_tensor) or not _is_sd(torch.as_tensor(value)):
            raise ArgumentError(f"{argument}={value!r}: pass {kinds} >= 0")


def _is_sd(value: Tensor) -> bool:
    return bool((torch.isfinite(value) & (value >= 0)).all())


def does_walk(given: TransitionSd) -> bool:
    """Whether any param does."""
    sds = given.values() if isinstance(given, Mapping) else [given]
    return any(bool(torch.as_tensor(sd).any()) for sd in sds)


def drift_of(given: TransitionSd, layout: Layout) -> Tensor:
    """Each element's variance of the walk before a batch, [D].

    Raises:
        ArgumentError: a site that the model has not, or a tensor of another shape.
    """
    if not isinstance(given, Mapping):
        return torch.full((layout.size,), given, dtype=layout.dtype).square()
    if unknown := sorted(given.keys() - set(layout.names)):
        raise ArgumentError(
            f"transition_sd: {unknown} are no latent sites of the model, which has "
            f"{list(layout.names)}"
        )
    sds = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        sd = torch.as_tensor(given.get(name, 0.0), dtype=layout.dtype)
        if sd.shape not in (shape, torch.Size()):
            raise ArgumentError(
                f"transition_sd['{name}'] has the shape {list(sd.shape)}, the site "
                f"{list(shape)} in unconstrained space: pass a number or a tensor of that shape"
            )
        sds[name] = sd.expand(shape)
    return layout.flatten(sds).square()


def as_plain(given: TransitionSd) -> float | dict[str, object]:
    """The same as numbers and lists, to be written down."""
    if not isinstance(given, Mapping):
        return float(given)
    return {name: torch.as_tensor(value).tolist() for name, value in given.items()}
