"""Where an extended Kalman filter starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pyro_scale.core.gaussian import Gaussian, as_structure
from pyro_scale.core.memory import check_fits
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.infer.approximation import fit_of
from pyro_scale.infer.method import Starts
from pyro_scale.model.curvature.gaussian_prior import gaussian_prior
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
