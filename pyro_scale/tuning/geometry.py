"""Where chains start, and the coordinates that they move in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian, as_structure
from pyro_scale.core.whitening import DiagonalWhitening, whiten
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.gauss_newton import anchored
from pyro_scale.curvature.modes import lbfgs
from pyro_scale.curvature.precision import CurvatureSpec
from pyro_scale.curvature.row_gaussians import kronecker_at
from pyro_scale.distributed.ranks import ALONE
from pyro_scale.errors import ArgumentError
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.choice import Asked, Precondition
from pyro_scale.tuning.diagonal_modes import find_diagonal_modes
from pyro_scale.tuning.low_rank import with_axes
from pyro_scale.tuning.many_rows import find_modes_of_many_rows
from pyro_scale.tuning.modes import Modes, find_modes
from pyro_scale.tuning.policy import GEOMETRY, SEARCH
from pyro_scale.tuning.search_starts import search_starts


def with_geometry(
    problem: Problem, asked: Asked, whole: FullDataDensity, budget: Budget
) -> tuple[Problem, Modes | None, FullDataDensity]:
    """(Chains at their starts, in whitened coordinates; the modes, if they were looked for; the
    density whose curvature can be looked at often).

    Args:
        problem: chains where the user, or the library, would have them start.
        asked: for what.
        whole: the log density of all rows.
        budget: of the run.

    Raises:
        ArgumentError: there is nowhere to start, or the time is over before it is found.
    """
    size = whole.layout.size
    affordable, few = (max(GEOMETRY.least_rows, work // size) for work in GEOMETRY.work)
    density, num_data = whole, problem.log_posterior.num_data
    if num_data > min(GEOMETRY.most_rows, affordable):
        density = whole.of_some_rows(min(GEOMETRY.most_rows, few), problem.seed)
    like = problem.positions
    modes, gaussian = None, asked.precondition
    temperature = float(problem.engine.kernel.values(0)["temperature"])
    if isinstance(gaussian, str):
        ranks = problem.ranks
        own_clock = dataclasses.replace(budget, ranks=ALONE)  # searches differ in length

        starts = search_starts(problem, density) if asked.starts else like[: SEARCH.most]
        most = SEARCH.fraction * budget.most_rows(problem) / num_data / len(starts)
        own = own_clock.check, ranks, most
        if _kind(gaussian, len(like[0])) == "dense":
            find = find_modes if density is whole else find_modes_of_many_rows
            modes = find(whole, starts, temperature, problem.seed, *own)
        else:
            modes = find_diagonal_modes(density, starts, temperature, *own)
            if density is not whole:
                ends = [_on_all_rows(m.gaussian, whole, like) for m in ranks.share.of(modes.modes)]
                means = ranks.in_turn(ends, "modes given all rows", like.device)
                refined = [
                    mode._replace(gaussian=Diagonal(mean, mode.gaussian.sd))
                    for mode, mean in zip(modes.modes, means, strict=True)
                    if isinstance(mode.gaussian, Diagonal)
                ]
                modes = dataclasses.replace(modes, modes=tuple(refined))
        gaussian = modes.best.gaussian
    assert gaussian is not None
    kind = _kind(asked.precondition, len(gaussian.mean))
    if kind == "kron":
        sites, mode = problem.log_posterior.latents, gaussian.mean.to(like)
        factors = kronecker_at(density, CurvatureSpec(mode, sites, "ggn", problem.seed)).double()
        gaussian = factors.temper(temperature)
    elif kind == "diag":
        gaussian = as_structure(gaussian, dense=False)
    problem = whitened_by(problem, gaussian)
    whitening = problem.engine.whitening
    if kind == "low_rank" and isinstance(whitening, DiagonalWhitening):
        problem = problem.with_engine(whitening=with_axes(whitening, density, temperature))
    if asked.starts:
        problem = dataclasses.replace(problem, positions=_starts(problem, density, modes, gaussian))
    if modes is not None and isinstance(modes.best.gaussian, Dense) and density is not whole:
        mean, precision = modes.best.gaussian.mean, modes.best.gaussian.precision
        density = anchored(density, mean.to(like), precision * temperature)
    return problem, modes, density


def whitened_by(problem: Problem, gaussian: Gaussian) -> Problem:
    """The problem in coordinates in which a Gaussian over its latents is isotropic.

    Raises:
        ArgumentError: it has another number of elements.
    """
    elements, latents = len(gaussian.mean), problem.engine.num_latents
    if elements != latents:
        raise ArgumentError(
            f"precondition: the fit has {elements:,} elements, the model's latent sites have "
            f"{latents:,}: pass a fit of this model"
        )
    num_data = problem.log_posterior.num_data
    return problem.with_engine(whitening=whiten(gaussian, num_data, problem.positions))


def _kind(asked: Precondition, size: int) -> str:
    """The form of the geometry, of so many dimensions."""
    if asked == "auto":
        return "dense" if size <= GEOMETRY.dense else "low_rank"
    if isinstance(asked, str):
        return asked
    if isinstance(asked, Dense):
        return "dense" if size <= GEOMETRY.dense else "diag"
    return "as it is"


def _on_all_rows(gaussian: Gaussian, whole: FullDataDensity, like: Tensor) -> Tensor:
    """The mode of all rows, which is near."""
    return lbfgs(whole, gaussian.mean.to(like), "").position.double()


def _starts(
    problem: Problem, density: FullDataDensity, modes: Modes | None, gaussian: Gaussian
) -> Tensor:
    """Starts around each chain's own mode, `[chains, D]`."""
    positions, num_data = problem.positions, problem.log_posterior.num_data
    found = modes.starting_points(len(positions)) if modes else [gaussian] * len(positions)
    size = len(gaussian.mean)
    centers = torch.stack([own.mean.to(positions) for own in found])
    lowest = density.values(centers) - GEOMETRY.depth(size) / num_data
    noise = [standard_normal(problem.seed, chain, size) for chain in range(len(found))]
    draws = [own.sample(z) - own.mean for own, z in zip(found, noise, strict=True)]

    def is_deep(away: Tensor) -> Tensor:
        values, slopes = density.grads(centers + away)
        return ~((values > lowest) & slopes.isfinite().all(1))

    return centers + disperse(torch.stack(draws).to(positions), is_deep)


def standard_normal(seed: int, chain: int, size: int) -> Tensor:
    """Standard normal noise of a chain's start, `[size]`, float64."""
    source = generator(seed, chain, Purpose.INIT, 1)
    return torch.randn(size, generator=source, dtype=torch.float64)


def disperse(draws: Tensor, is_deep: Callable[[Tensor], Tensor]) -> Tensor:
    """Overdispersed starts, as distances from each chain's mode, `[chains, D]`: twice as far as the
    draws, halved until the log joint is not too far below the mode.

    Args:
        draws: draws of the Gaussian around each chain's mode, as distances from it, `[chains, D]`.
        is_deep: distances -> whether the log joint there is too far below the mode, `[chains]`.
    """
    away = GEOMETRY.dispersion * draws
    for _ in range(GEOMETRY.halvings):
        deep = is_deep(away)
        if not bool(deep.any()):
            break
        away = torch.where(deep[:, None], away / 2, away)
    return away
