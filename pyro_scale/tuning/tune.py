"""Tuning at the mode before a run: the step size, control variates and known noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.core.warn import warn
from pyro_scale.data.batches import batches_from
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import ArgumentError, BiasWarning, ModelError, SiteError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.precision import expansion_at
from pyro_scale.model.control_variates import AnchorCurvature, ControlVariates
from pyro_scale.model.curvature.observations import Exact
from pyro_scale.model.curvature.observed import observe
from pyro_scale.model.curvature.prior_hessian import prior_precision
from pyro_scale.run.problem import Problem, position_of
from pyro_scale.tuning import step_size
from pyro_scale.tuning.choice import Asked
from pyro_scale.tuning.gradient_noise import gradient_variance, row_gradients
from pyro_scale.tuning.policy import NOISE, STEP_SIZE

#: What to do where there is no mode.
_WITHOUT_MODE = "pass a number for lr, and control_variates as a dict of values"


def tune(
    problem: Problem, asked: Asked, steps: Steps, sampling: Sampling
) -> tuple[Problem, dict[str, str]]:
    """(The problem with step size, control variates and known noise, the reason of the step size).

    Raises:
        ArgumentError: the model has no mode that can be found, or is too large.
        DataError: the data do not hold all N rows.
    """
    if not (asked.lr or asked.anchor or asked.subtract_noise):
        return problem, {}
    if asked.lr:
        step_size.check(problem)
    density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    mode, choice = _mode(problem, density, asked.anchor), {}
    if asked.anchor:
        problem = with_control_variates(problem, density, mode)
    if asked.subtract_noise:
        problem = with_known_noise(problem, mode, sampling)
    if asked.lr:
        chosen = step_size.choose(problem, density, mode, steps, sampling)
        _warn_of_a_large_error(chosen, bool(asked.anchor))
        problem = problem.with_lr(chosen.lr)
        choice = {"lr_choice": chosen.reason}
    if asked.subtract_noise:
        _warn_of_what_is_left(problem)
    return problem, choice


def _warn_of_a_large_error(chosen: step_size.StepSize, control_variates: bool) -> None:
    if chosen.error > STEP_SIZE.large_error:
        others = "" if control_variates else ", control_variates=True,"
        warn(
            BiasWarning,
            f"lr='auto': with these steps, even the best step size is predicted to leave an error "
            f"of {chosen.error:.2g} posterior sds ({chosen.reason}): take more steps or larger "
            f"batches{others} or bring the sites to one scale (standardized data, mass by site)",
            code="step-size",
        )


def _mode(
    problem: Problem, density: FullDataDensity, anchor: bool | Mapping[str, Tensor]
) -> Tensor:
    if isinstance(anchor, Mapping):
        return position_of(problem, anchor, "control_variates")
    return density.mode(problem.positions[0], _WITHOUT_MODE)


def with_control_variates(problem: Problem, density: FullDataDensity, anchor: Tensor) -> Problem:
    """The problem with control variates at an anchor, [D]."""
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    _, gradient = density.grad(anchor)
    total = {
        name: part * log_posterior.num_data for name, part in layout.unflatten(gradient).items()
    }
    return problem.with_engine(
        density=ControlVariates(log_posterior, layout.unflatten(anchor), total)
    )


def with_curvature(problem: Problem, density: FullDataDensity) -> Problem | None:
    """The problem whose control variates have the likelihood's curvature at their anchor, too;
    None where the model has none that single batches give as well."""
    log_posterior, first = problem.log_posterior, problem.data.first()
    first_order = problem.engine.density
    assert isinstance(first_order, ControlVariates)
    anchor, names = first_order.anchor, density.layout.names
    try:
        leaves = {name: value.detach().requires_grad_() for name, value in anchor.items()}
        observed = observe(log_posterior, leaves, first, None, "ggn", 1).observations
        exact = tuple(each for each in observed if isinstance(each, Exact))
        if len(exact) < len(observed) or log_posterior.model_info.own_plate is not None:
            return None
        position = density.layout.flatten(anchor)
        total = expansion_at(density, position, names, "ggn", dense=True).precision
        total = total - prior_precision(log_posterior, anchor, first, None, dense=True)
        curved = dataclasses.replace(first_order, curvature=AnchorCurvature(total, exact))
        curved.grad(anchor, first)
    except (ModelError, SiteError, RuntimeError, NotImplementedError):
        return None
    return problem.with_engine(density=curved)


def with_known_noise(problem: Problem, mode: Tensor, sampling: Sampling) -> Problem:
    """The problem with the noise of minibatches at the mode known."""
    log_posterior, engine = problem.log_posterior, problem.engine
    size = problem.data.batch_size
    if size is None:
        raise ArgumentError("subtract_noise: the whole data at every step has no noise")
    batches = problem.batches(1, sampling)
    run_batches = batches_from(batches, 0, -(-NOISE.rows // size))
    rows = row_gradients(
        problem, log_posterior, mode[None], [[batch.of_chain(0) for batch in run_batches]]
    )
    if rows is None:
        raise ArgumentError(
            "subtract_noise needs the gradient of single rows, which this model does not give: "
            "leave it out and lower lr"
        )
    if engine.whitening is not None:
        rows = engine.whitening.pull_back(rows)
    variance = gradient_variance(rows, size, log_posterior.num_data, sampling)
    return problem.with_engine(known_noise=engine.pad(variance))


def _warn_of_what_is_left(problem: Problem) -> None:
    """Warns where minibatches bring more noise than the step injects: subtracting stops at none."""
    engine, kernel = problem.engine, problem.engine.kernel
    values = engine.kernel_values(kernel.values(0))
    added = kernel.theory.added_temperature(values, engine.known_noise)[: engine.num_latents]
    injected = values["temperature"].expand(engine.layout.size)[: engine.num_latents]
    over = added > injected
    if bool(over.any()):
        first = int(torch.nonzero(over)[0])
        warn(
            BiasWarning,
            f"subtract_noise: minibatch noise exceeds the injected noise at {int(over.sum())} of "
            f"{len(over)} elements (site '{engine.layout.site_at(first)}'), so their temperature "
            f"stays up to {float((added / injected).max()):.3g} times too high: multiply lr by "
            f"less than {float((injected / added).min()):.2g}, or raise batch_size",
        )
