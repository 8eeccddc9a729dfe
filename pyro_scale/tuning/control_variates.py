"""Control variates of minibatch gradients, at the center of the geometry or at a given anchor."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from pyro_scale.curvature.control_variates import AnchorCurvature, ControlVariates
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.ggn import Curvature
from pyro_scale.curvature.observations import Exact
from pyro_scale.curvature.precision import CurvatureSpec, expand
from pyro_scale.curvature.prior_hessian import prior_precision
from pyro_scale.errors import ModelError, SiteError
from pyro_scale.run.problem import Problem


def with_anchor(problem: Problem, anchor: bool | Tensor, full_data: FullDataDensity) -> Problem:
    """The problem with control variates, which correct minibatch gradients by the gradient of all
    rows at an anchor; unchanged if steps take all rows, or `anchor` is False. If the problem had
    control variates of second order, so have the new ones, where that is possible.

    Args:
        problem: model and chains, in whitened coordinates.
        anchor: unconstrained params `[D]`; True for the center of the geometry; False for no
            control variates.
        full_data: log density of all rows.
    """
    if problem.data.batch_size is None or anchor is False:
        return problem
    before, position = problem.engine.density, center_of(problem) if anchor is True else anchor
    problem = with_control_variates(problem, full_data, position)
    if isinstance(before, ControlVariates) and before.curvature is not None:
        return with_curvature(problem, full_data) or problem
    return problem


def center_of(problem: Problem) -> Tensor:
    """The center of the whitened coordinates in which the problem's chains move, as unconstrained
    params `[D]`: at first a mode, later the mean of warm-up's draws. The problem must have whitened
    coordinates."""
    whitening = problem.engine.whitening
    assert whitening is not None
    return whitening.tensors[0]


def with_control_variates(problem: Problem, full_data: FullDataDensity, anchor: Tensor) -> Problem:
    """The problem with control variates of first order: minibatch gradients are corrected by the
    gradient of all rows at an anchor, which is computed here.

    Args:
        problem: model and chains.
        full_data: log density of all rows.
        anchor: unconstrained params `[D]`.
    """
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    _, gradient = full_data.grad(anchor)
    total = {
        name: part * log_posterior.num_data for name, part in layout.unflatten(gradient).items()
    }
    return problem.with_engine(
        density=ControlVariates(log_posterior, layout.unflatten(anchor), total)
    )


def with_curvature(problem: Problem, full_data: FullDataDensity) -> Problem | None:
    """The problem with control variates of second order, at the anchor of its control variates of
    first order. None if the likelihood's curvature cannot be computed exactly on single batches.

    Args:
        problem: model and chains, with control variates of first order.
        full_data: log density of all rows.
    """
    log_posterior, first = problem.log_posterior, problem.data.first()
    first_order = problem.engine.density
    assert isinstance(first_order, ControlVariates)
    anchor, names = first_order.anchor, full_data.layout.names
    if log_posterior.model_info.own_plate is not None:
        return None
    try:
        observations = Curvature(log_posterior).observe(anchor, first).observations
        exact = tuple(one for one in observations if isinstance(one, Exact))
        if len(exact) < len(observations):
            return None
        position = full_data.layout.flatten(anchor)
        total = expand(full_data, CurvatureSpec(position, names, "ggn"), dense=True).precision
        total = total - prior_precision(log_posterior, anchor, first, None, dense=True)
        curved = dataclasses.replace(first_order, curvature=AnchorCurvature(total, exact))
        curved.grad(anchor, first)
    except (ModelError, SiteError, RuntimeError, NotImplementedError):
        return None
    return problem.with_engine(density=curved)
