"""Where searches for modes begin: half of them near zero, half where the prior and places further
out are densest."""

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


def search_starts(problem: Problem, density: FullDataDensity) -> Tensor:
    """Where searches begin, `[searches, D]`.

    Chains' own starts are within (-2, 2), unconstrained, whatever the prior; a mode that is far
    from there has no search that leads to it.  So every second pair of searches begins at the
    densest of some draws of the prior, and of places up to sixteen times as far out.

    Args:
        problem: with chains at starts of their own.
        density: the log joint.
    """
    searches = min(SEARCH.most, max(SEARCH.fewest, len(problem.positions)))
    near = _near_zero(problem, searches)
    best = _densest(problem, density.of_some_rows(SEARCH.rows, problem.seed), searches // 2)
    return torch.cat([near[: searches - len(best)], best])


def _near_zero(problem: Problem, searches: int) -> Tensor:
    """Chains' own starts, or opposite of the one before; and more where chains are few."""
    starts, log_posterior = list(problem.positions[:searches]), problem.log_posterior
    first = problem.data.first()
    for chain in range(len(starts), searches):
        init = log_posterior.default_init(chain)
        params = log_posterior.start(first, problem.seed, chain, init)
        starts.append(problem.engine.layout.flatten(params))
    # uniform starts are symmetric about 0: on the other side, they find other modes
    return torch.stack([-starts[i - 1] if i % 2 else start for i, start in enumerate(starts)])


def _densest(problem: Problem, density: FullDataDensity, count: int) -> Tensor:
    """At most so many of the places further out, those where the log joint is largest."""
    size = SEARCH.places if problem.engine.vectorized else SEARCH.places_one_by_one
    places = torch.cat([_further_out(problem, size), _of_prior(problem, size)])
    values = torch.cat([density.values(some) for some in places.split(SEARCH.at_once)])
    values = values.nan_to_num(-math.inf, -math.inf, -math.inf)
    order = values.argsort(descending=True)[:count]
    return places[order[values[order].isfinite()]]


def _further_out(problem: Problem, size: int) -> Tensor:
    """Uniform in each of growing cubes, `[size, D]`."""
    like = problem.positions
    source = generator(problem.seed, 0, Purpose.SEARCH, 2)
    unit = torch.rand(size, like.shape[1], generator=source, dtype=torch.float64)
    stretch = SEARCH.furthest ** torch.linspace(0, 1, size, dtype=torch.float64)
    return ((4 * unit - 2) * stretch[:, None]).to(like)


def _of_prior(problem: Problem, size: int) -> Tensor:
    """Draws of the prior, `[size, D]`; none where it cannot be drawn from."""
    layout, like = problem.engine.layout, problem.positions
    first, nothing = problem.data.first(), like[:0]
    try:
        with without_vmap_warnings():
            drawn = problem.log_posterior.prior_draws(first, size, problem.seed)
    except (PyroScaleError, NotImplementedError, RuntimeError, ValueError):  # an improper prior
        return nothing
    rest = layout.unflatten(like[0])
    params = [rest | {name: each[i] for name, each in drawn.items()} for i in range(size)]
    return torch.stack([layout.flatten(each) for each in params]).to(like)
