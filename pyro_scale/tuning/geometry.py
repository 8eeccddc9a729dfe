"""The whitened coordinates in which chains move (their geometry), and the chains' starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian, as_structure
from pyro_scale.core.whitening import DiagonalWhitening, whiten
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.gauss_newton import anchored
from pyro_scale.curvature.modes import lbfgs
from pyro_scale.curvature.precision import CurvatureSpec
from pyro_scale.curvature.row_gaussians import kronecker_at
from pyro_scale.errors import ArgumentError
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.choice import Precondition, Settings
from pyro_scale.tuning.diagonal_modes import are_connected, find_diagonal_modes
from pyro_scale.tuning.low_rank import with_axes
from pyro_scale.tuning.many_rows import find_modes_of_many_rows
from pyro_scale.tuning.modes import Mode, Modes, SearchLimits, find_modes, merge, merge_by
from pyro_scale.tuning.policy import GEOMETRY, SEARCH
from pyro_scale.tuning.search_starts import search_starts

#: Forms of coordinates; "fit" has the form of the given Gaussian.
_Form: TypeAlias = Literal["dense", "kron", "low_rank", "diag", "fit"]


def with_geometry(
    problem: Problem, settings: Settings, full_data: FullDataDensity, budget: Budget
) -> tuple[Problem, Modes | None, FullDataDensity]:
    """Finds modes, and starts chains around them in coordinates that are whitened by a Gaussian.

    Args:
        problem: chains at the user's or the library's starts.
        settings: settings of the sampler, which say in which coordinates chains move.
        full_data: log density of all rows.
        budget: gradients of rows and seconds that tuning may take.

    Returns:
        The problem in whitened coordinates; the modes, None if the user passed a Gaussian to whiten
        by; the log density for frequent evaluations of the curvature.

    Raises:
        ArgumentError: there is nowhere to start, or the time is over before a start is found.
    """
    size = full_data.layout.size
    affordable, few = (max(GEOMETRY.least_rows, work // size) for work in GEOMETRY.work)
    density, row_work = full_data, problem.log_posterior.model_info.row_work
    if problem.log_posterior.num_data * row_work > min(GEOMETRY.most_rows, affordable):
        most_rows = max(GEOMETRY.least_rows, min(GEOMETRY.most_rows, few) // row_work)
        density = full_data.of_some_rows(most_rows, problem.seed)
    modes, gaussian = None, settings.precondition
    form = _form(gaussian, problem.positions.shape[1])
    temperature = float(problem.engine.kernel.values(0)["temperature"])
    if isinstance(gaussian, str):
        find = partial(_find_modes, problem, form, full_data, density, budget)
        if settings.starts:
            modes = find(search_starts(problem, density))
        else:
            modes = find(problem.positions[: SEARCH.most])
            modes = _with_elsewhere(modes, problem, form, density, find)
        gaussian = modes.best.gaussian
    assert gaussian is not None
    if form == "kron":
        sites, mode = problem.log_posterior.latents, gaussian.mean.to(problem.positions)
        factors = kronecker_at(density, CurvatureSpec(mode, sites, "ggn", problem.seed)).double()
        gaussian = factors.temper(temperature)
    elif form == "diag":
        gaussian = as_structure(gaussian, dense=False)
    problem = whitened_by(problem, gaussian)
    whitening = problem.engine.whitening
    if form == "low_rank" and isinstance(whitening, DiagonalWhitening):
        problem = problem.with_engine(whitening=with_axes(whitening, density, temperature))
    if settings.starts:
        problem = dataclasses.replace(problem, positions=_starts(problem, density, modes, gaussian))
    if modes is not None and isinstance(modes.best.gaussian, Dense) and density is not full_data:
        mean, precision = modes.best.gaussian.mean, modes.best.gaussian.precision
        density = anchored(density, mean.to(problem.positions), precision * temperature)
    return problem, modes, density


def _with_elsewhere(
    modes: Modes,
    problem: Problem,
    form: _Form,
    density: FullDataDensity,
    find: Callable[..., Modes],
) -> Modes:
    """The modes that searches from the user's starts found, with those that searches from elsewhere
    find (`Modes.elsewhere`). These change nothing in how chains move; the report judges by them
    whether draws are in all modes.

    Args:
        modes: modes that searches from the user's starts found.
        problem: chains at the user's starts.
        form: how the coordinates are whitened.
        density: log density of all rows, or of rows that represent them.
        find: function that searches from starts `[searches, D]`, after `spent` passes.
    """
    if not modes.are_modes:
        return modes
    try:
        starts = search_starts(problem, density, elsewhere=True)
        others = find(starts, spent=modes.evaluations)
    except Exception as error:  # of the model, where the user does not start; or no search succeeds
        raise_if_from_handler(error)
        return modes
    modes = dataclasses.replace(modes, evaluations=modes.evaluations + others.evaluations)
    if not others.are_modes:
        return modes
    first = modes.searches
    later = [m._replace(searches=tuple(first + i for i in m.searches)) for m in others.modes]
    every = [*modes.modes, *later]
    if form == "dense":
        distinct = merge(every)
    else:
        temperature = float(problem.engine.kernel.values(0)["temperature"])
        distinct = merge_by(every, partial(are_connected, density, temperature, starts))
    elsewhere = [mode for mode in distinct if min(mode.searches) >= first]
    return dataclasses.replace(modes, elsewhere=tuple(elsewhere))


def _find_modes(
    problem: Problem,
    form: _Form,
    full_data: FullDataDensity,
    density: FullDataDensity,
    budget: Budget,
    starts: Tensor,
    spent: float = 0.0,
) -> Modes:
    """Searches for the modes of the posterior given all rows; searches through many rows begin with
    a sample of them.

    Args:
        problem: chains at their starts.
        form: how the coordinates are whitened; "dense" searches by Newton's method, others by
            L-BFGS.
        full_data: log density of all rows.
        density: log density of all rows, or of rows that represent them.
        budget: gradients of rows and seconds that tuning may take.
        starts: where searches begin, `[searches, D]`.
        spent: passes through the data that earlier searches took.
    """
    like, num_data = problem.positions, problem.log_posterior.num_data
    temperature = float(problem.engine.kernel.values(0)["temperature"])
    budget = budget.until("searches")
    most = SEARCH.fraction * budget.most_rows(problem) / num_data
    passes = max(0.0, most - spent) / len(starts)
    map = partial(problem.map, what="searches for modes")
    limits = SearchLimits(passes, lambda: budget.is_over, map)
    if form == "dense":
        find = find_modes if density is full_data else find_modes_of_many_rows
        return find(full_data, starts, temperature, problem.seed, limits)
    modes = find_diagonal_modes(density, starts, temperature, limits)
    if density is full_data:
        return modes

    def mean_given_all(mode: Mode) -> Tensor:
        return lbfgs(full_data, mode.gaussian.mean.to(like), "").position.double()

    means = problem.map(mean_given_all, modes.modes, "modes given all rows")
    refined = [
        mode._replace(gaussian=Diagonal(mean, mode.gaussian.sd))
        for mode, mean in zip(modes.modes, means, strict=True)
        if isinstance(mode.gaussian, Diagonal)
    ]
    return dataclasses.replace(modes, modes=tuple(refined))


def whitened_by(problem: Problem, gaussian: Gaussian) -> Problem:
    """The problem in coordinates z, params = center + S z, in which the Gaussian over the latents
    has the covariance 1/N times the identity: steps of one length then suit all directions.

    Raises:
        ArgumentError: the Gaussian has another number of elements than the model's latents.
    """
    elements, latents = len(gaussian.mean), problem.engine.num_latents
    if elements != latents:
        raise ArgumentError(
            f"precondition: the fit has {elements:,} elements, the model's latent sites have "
            f"{latents:,}: pass a fit of this model"
        )
    num_data = problem.log_posterior.num_data
    return problem.with_engine(whitening=whiten(gaussian, num_data, problem.positions))


def _form(precondition: Precondition, size: int) -> _Form:
    """The structure of the chains' whitened coordinates: "dense" (a matrix), "kron" (Kronecker
    factors), "low_rank" (elements and a few directions), "diag" (elements), or "fit", that of the
    Gaussian that the user passed.

    Args:
        precondition: what the user asked for, or the Gaussian of a fit; "auto" and a dense Gaussian
            are resolved by the number of dimensions.
        size: number of dimensions.
    """
    if precondition == "auto":
        return "dense" if size <= GEOMETRY.dense else "low_rank"
    if isinstance(precondition, str):
        return precondition
    if isinstance(precondition, Dense):
        return "dense" if size <= GEOMETRY.dense else "diag"
    return "fit"


def _starts(
    problem: Problem, density: FullDataDensity, modes: Modes | None, gaussian: Gaussian
) -> Tensor:
    """Overdispersed starts of the chains around their modes, as unconstrained params `[chains, D]`.
    Without modes, all chains start around the Gaussian.

    Args:
        problem: model and chains.
        density: log density; no start is too far below that of its mode.
        modes: modes of the posterior, among which chains are divided; None if there are none.
        gaussian: the Gaussian for chains without modes.
    """
    positions, num_data = problem.positions, problem.log_posterior.num_data
    gaussians = modes.starting_points(len(positions)) if modes else [gaussian] * len(positions)
    size = len(gaussian.mean)
    centers = torch.stack([one.mean.to(positions) for one in gaussians])
    lowest = density.values(centers) - GEOMETRY.depth(size) / num_data
    noise = [standard_normal(problem.seed, chain, size) for chain in range(len(gaussians))]
    draws = [one.sample(z) - one.mean for one, z in zip(gaussians, noise, strict=True)]

    def is_deep(away: Tensor) -> Tensor:
        values, slopes = density.grads(centers + away)
        return ~((values > lowest) & slopes.isfinite().all(1))

    return centers + disperse(torch.stack(draws).to(positions), is_deep)


def standard_normal(seed: int, chain: int, size: int) -> Tensor:
    """Standard normal numbers `[size]` in float64 from which a chain's start is drawn: the same for
    the same seed and number of the chain, on any process."""
    source = generator(seed, chain, Purpose.INIT, 1)
    return torch.randn(size, generator=source, dtype=torch.float64)


def disperse(draws: Tensor, is_deep: Callable[[Tensor], Tensor]) -> Tensor:
    """Starts of the chains relative to their modes, `[chains, D]`, more spread out than the
    posterior: twice the draws, halved until the log joint is not too far below that at the mode.

    Args:
        draws: draws of the Gaussian at each chain's mode, relative to the mode, `[chains, D]`.
        is_deep: (starts relative to the mode) -> whether the log joint is too far below the mode,
            `[chains]`.
    """
    away = GEOMETRY.dispersion * draws
    for _ in range(GEOMETRY.halvings):
        deep = is_deep(away)
        if not bool(deep.any()):
            break
        away = torch.where(deep[:, None], away / 2, away)
    return away
