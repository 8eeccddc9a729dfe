"""Starts of the searches for modes: half of them close to zero, half where the log joint is largest
among draws of the prior and places further out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.errors import PyroScaleError
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.policy import SEARCH


def search_starts(
    problem: Problem,
    density: FullDataDensity,
    elsewhere: bool = False,
    most_places: int = SEARCH.places,
) -> Tensor:
    """Unconstrained params at which the searches for modes start, `[searches, D]`: half of them
    close to zero, half at the best of many random points.

    Starts of chains are within (-2, 2), unconstrained, whatever the prior, and lead only to modes
    close to zero. The other searches begin at the best of some draws of the prior, and of points up
    to sixteen times as far out.

    Args:
        problem: chains at their starts.
        density: log density of all rows, or of rows that represent them.
        elsewhere: whether to leave out the chains' own starts, from which there are searches
            already.
        most_places: number of prior draws, and of places further out, that are compared.
    """
    if problem.anchor is not None:  # nodes are right around their anchor
        return problem.positions[: SEARCH.fewest]
    own = [] if elsewhere else list(problem.positions)
    searches = min(SEARCH.most, max(SEARCH.fewest, len(own)))
    near = _near_zero(problem, own[:searches], searches)
    if not problem.engine.vectorized:
        most_places = min(most_places, SEARCH.places_one_by_one)
    density = density.of_some_rows(SEARCH.rows, problem.seed)
    best = _best_places(problem, density, most_places, searches // 2)
    return torch.cat([near[: searches - len(best)], best])


def _near_zero(problem: Problem, own: list[Tensor], searches: int) -> Tensor:
    """Unconstrained params `[searches, D]` at which the first searches start: the chains' `own`
    starts, and random ones if there are fewer chains than searches. Every second one is replaced by
    the negative of the one before."""
    starts, log_posterior = list(own), problem.log_posterior
    first = problem.data.first()
    for chain in range(len(own), searches):
        init = log_posterior.default_init(chain)
        params = log_posterior.start(first, problem.seed, chain, init)
        starts.append(problem.engine.layout.flatten(params))
    # uniform starts are symmetric about 0; the opposite side has other modes
    return torch.stack([-starts[i - 1] if i % 2 else start for i, start in enumerate(starts)])


def _best_places(problem: Problem, density: FullDataDensity, size: int, count: int) -> Tensor:
    """The `count` points with the largest log joint among `size` draws of the prior and as many
    random points further out, as unconstrained params `[count, D]`; fewer if the log joint is
    finite at fewer of them."""
    places = torch.cat([_further_out(problem, size), _prior_draws(problem, size)])
    values = torch.cat([density.values(block) for block in places.split(SEARCH.at_once)])
    values = values.nan_to_num(-math.inf, -math.inf, -math.inf)
    order = values.argsort(descending=True)[:count]
    return places[order[values[order].isfinite()]]


def _further_out(problem: Problem, size: int) -> Tensor:
    """Random points for the searches, as unconstrained params `[size, D]`: each uniform on a cube
    around 0, the cubes growing from (-2, 2) to `SEARCH.furthest` times that."""
    like = problem.positions
    source = generator(problem.seed, 0, Purpose.SEARCH, 2)
    unit = torch.rand(size, like.shape[1], generator=source, dtype=torch.float64)
    stretch = SEARCH.furthest ** torch.linspace(0, 1, size, dtype=torch.float64)
    return ((4 * unit - 2) * stretch[:, None]).to(like)


def _prior_draws(problem: Problem, size: int) -> Tensor:
    """Draws of the prior, as unconstrained params `[size, D]`; `[0, D]` if the prior cannot be
    sampled."""
    layout, like = problem.engine.layout, problem.positions
    try:
        with without_vmap_warnings():
            draws = problem.log_posterior.prior_draws(problem.data.first(), size, problem.seed)
    except (PyroScaleError, NotImplementedError, RuntimeError, ValueError):  # an improper prior
        return like[:0]
    points = layout.unflatten(like[0])
    params = [points | {name: value[i] for name, value in draws.items()} for i in range(size)]
    return torch.stack([layout.flatten(one) for one in params]).to(like)
