"""Modes of a posterior in many dimensions, with Gaussians of independent elements."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import NamedTuple

from torch import Tensor

from pyro_scale.core.gaussian import Diagonal
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.modes import lbfgs
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.tuning.modes import (
    NO_LIMITS,
    Mode,
    Modes,
    SearchLimits,
    has_dip,
    merge_by,
    run_searches,
)
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.policy import SEARCH

#: Passes of a search by L-BFGS, roughly.
_LBFGS_PASSES = 100


def find_diagonal_modes(
    density: FullDataDensity,
    starts: Tensor,
    temperature: float,
    limits: SearchLimits = NO_LIMITS,
) -> Modes:
    """Searches for modes of log joint / temperature by L-BFGS from every start; each mode has a
    Gaussian of independent elements.

    If no search leads to a mode, the ends of the searches replace modes (`are_modes` is False);
    warm-up goes on from them.

    Args:
        density: log density of all rows, or of rows that represent them.
        starts: unconstrained params where searches begin, `[searches, D]`.
        temperature: temperature of the posterior.
        limits: limits of the searches.

    Raises:
        ArgumentError: L-BFGS fails from every start.
    """
    results, passes = run_searches(partial(_search, density), list(starts), limits)
    ends = [(number, end) for number, end in enumerate(results) if end is not None]
    if not ends:
        raise ArgumentError(
            f"no mode could be reached from {len(starts)} starts{what_to_try(density, starts[0])}",
            code="not-finite",
        )
    at_modes = [(number, end) for number, end in ends if end.is_mode]
    modes = list[Mode]()
    for number, end in at_modes or ends:
        gaussian = Diagonal.from_precision(end.position.double(), end.precision / temperature)
        evidence = end.value / temperature + float(gaussian.log_det) / 2
        modes.append(Mode(gaussian, evidence, (number,)))
    are_same = partial(are_connected, density, temperature, starts)
    distinct = tuple(merge_by(modes, are_same))
    return Modes(distinct, bool(at_modes), len(starts), math.nan, math.ceil(passes))


class _End(NamedTuple):
    """The end of a search by L-BFGS.

    Attributes:
        position: unconstrained params at the end, `[D]`.
        precision: absolute diagonal of the Hessian of the log joint there, in nats, `[D]`.
        value: log joint there, in nats.
        is_mode: whether every element is close to its mode, judged by its own curvature.
    """

    position: Tensor
    precision: Tensor
    value: float
    is_mode: bool


def _search(
    density: FullDataDensity, start: Tensor, limits: SearchLimits
) -> tuple[_End | None, float]:
    """Runs L-BFGS from a start, and returns its end and the passes through the data that it took;
    in place of the end, None if L-BFGS fails.

    If the end is no mode, the search is repeated from closer to 0: a scale that falls to 0 before
    the effects that it multiplies have the right sign leaves L-BFGS on a plateau. Without a mode,
    the end with the largest log joint is returned.

    Args:
        density: log density of all rows, or of rows that represent them.
        start: unconstrained params `[D]`.
        limits: passes and time after which the search is not repeated.
    """
    best, passes, num_data = None, 0, density.log_posterior.num_data
    for shrinkage in SEARCH.shrinkages:
        if passes and (passes >= limits.passes or limits.is_over()):
            break
        passes += 2 * _LBFGS_PASSES
        with contextlib.suppress(ArgumentError, DataError):
            run = lbfgs(density, start * shrinkage, "")
            curvature = -num_data * density.hessian_diagonal(run.position).double()
            passes += len(start)
            least = SEARCH.flattest * float(curvature.abs().max())
            slope, far = num_data * run.slope.double(), SEARCH.same_sds**2
            near = slope.square() <= far * curvature.clamp(min=least)
            precision = curvature.abs().clamp(min=least)
            value = num_data * float(density.values(run.position[None])[0])
            end = _End(run.position, precision, value, bool(near.all()))
            if end.is_mode:
                return end, passes
            if best is None or end.value > best.value:
                best = end
    return best, passes


def are_connected(
    density: FullDataDensity, temperature: float, like: Tensor, one: Mode, other: Mode
) -> bool:
    """Whether two modes count as the same: the log density does not fall by more than a tolerance
    on the straight line between them.

    Args:
        density: log density of all rows, or of rows that represent them.
        temperature: temperature of the posterior.
        like: a tensor with dtype and device of the params.
        one: the first mode.
        other: the second mode.
    """
    means = one.gaussian.mean.to(like), other.gaussian.mean.to(like)
    return not has_dip(density, *means, temperature)
