"""The noise of minibatches: control variates against it, and a step size that it hardly heats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.rng import Purpose, generator
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.model.control_variates import ControlVariates
from pyro_scale.run.budget import rows_a_step
from pyro_scale.run.problem import Problem, position_of
from pyro_scale.tuning.choice import Asked
from pyro_scale.tuning.gradient_noise import most_noise
from pyro_scale.tuning.tune import with_control_variates, with_curvature

#: What minibatches may add to the temperature, in the direction where they add most.
_MOST_HEAT = 0.04
#: Draws at which the noise of minibatches is looked at.
_PLACES = 64
#: Dimensions up to which the likelihood's curvature is held as a matrix.
_DENSE = 500


def center_of(problem: Problem) -> Tensor:
    """The center of the geometry, as a position."""
    whitening = problem.engine.whitening
    assert whitening is not None
    return whitening.tensors[0]


def typical_places(problem: Problem) -> Tensor:
    """Places that are as far from the center as draws are, along every axis of the geometry,
    `[few, D]`.

    Not draws themselves: a group of one row would be noisy or not by the luck of one number.  With
    random signs z its noise is what it is on average, where gradients are off by z (to first
    order).  Where they are off by z^2, E z^4 = 3 is that of signs times 3^(1/4).
    """
    engine, positions = problem.engine, problem.positions
    assert engine.whitening is not None
    source = generator(problem.seed, 0, Purpose.SEARCH, 1)
    signs = (
        2.0 * torch.randint(2, (_PLACES, len(engine.whitening.tensors[0])), generator=source) - 1
    )
    is_curved = isinstance(engine.density, ControlVariates) and engine.density.curvature is not None
    length = (3**0.25 if is_curved else 1.0) / problem.log_posterior.num_data**0.5
    return engine.whitening.to_params((length * signs).to(positions))


def with_anchor(problem: Problem, asked: Asked, whole: FullDataDensity) -> Problem:
    """With control variates at the center of the geometry, or where they were asked for."""
    if problem.data.batch_size is None or asked.anchor is False:
        return problem
    if isinstance(asked.anchor, Mapping):
        return with_control_variates(
            problem, whole, position_of(problem, asked.anchor, "control_variates")
        )
    before = problem.engine.density
    problem = with_control_variates(problem, whole, center_of(problem))
    if isinstance(before, ControlVariates) and before.curvature is not None:
        return with_curvature(problem, whole) or problem
    return problem


class Cooled(NamedTuple):
    """A problem whose step size minibatches hardly heat.

    Attributes:
        problem: with that step size.
        passes: through the data that it took.
        heat: what minibatches add to the temperature there, over it, in the direction where they
            add most; None where that is not known.
    """

    problem: Problem
    passes: float
    heat: float | None


def cool(problem: Problem, sampling: Sampling, whole: FullDataDensity) -> Cooled:
    """With a step size at which minibatches hardly heat, and with control variates of second order
    where that allows longer steps, for all that they cost."""
    theory = problem.engine.kernel.theory
    if problem.data.batch_size is None or theory is None or not theory.heated:
        return Cooled(problem, 0.0, None)
    heat, passes = _heat(problem, sampling), _gradients_a_row(problem)
    share = _share(heat)
    if share < 1 and isinstance(problem.engine.density, ControlVariates):
        curved = None
        if problem.engine.layout.size <= _DENSE and problem.engine.density.curvature is None:
            curved = with_curvature(problem, whole)
        if curved is not None:
            of_curved = _heat(curved, sampling)
            passes += 1 + _gradients_a_row(curved)
            if _share(of_curved) / rows_a_step(curved) > share / rows_a_step(problem):
                problem, heat, share = curved, of_curved, _share(of_curved)
    kernel = problem.engine.kernel
    kernel = dataclasses.replace(kernel, lr=float(kernel.lr) * share)
    return Cooled(
        problem.with_engine(kernel=kernel), passes, None if heat is None else heat * share
    )


def _gradients_a_row(problem: Problem) -> int:
    """Gradients that a row takes."""
    return rows_a_step(problem) // (problem.data.batch_size or problem.log_posterior.num_data)


def _share(heat: float | None) -> float:
    """The part of a step size at which minibatches heat no more than they may; heat goes as it
    does."""
    return 1.0 if heat is None else min(1.0, _MOST_HEAT / max(heat, 1e-300))


def _heat(problem: Problem, sampling: Sampling) -> float | None:
    """What minibatches add to the temperature at the kernel's step size, over it."""
    kernel, noise = problem.engine.kernel, most_noise(problem, typical_places(problem), sampling)
    if noise is None:
        return None
    values = problem.engine.kernel_values(kernel.values(0))
    assert kernel.theory is not None
    added = kernel.theory.added_temperature(values, torch.tensor(noise, dtype=torch.float64))
    return float((added / values["temperature"]).max())
