"""The posterior's modes in many dimensions, with Gaussians of independent elements."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Diagonal
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.tuning.modes import Check, Mode, Modes, each_once, in_order
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.policy import SEARCH

#: Passes of a search by L-BFGS, about.
_LBFGS_PASSES = 100
#: Places on the way from one mode to another at which the log density is looked at.
_BETWEEN = 9


def find_diagonal_modes(
    density: FullDataDensity,
    starts: Tensor,
    temperature: float,
    check: Check | None = None,
    ranks: Ranks = ALONE,
    most: float = math.inf,
) -> Modes:
    """The same in many dimensions: by L-BFGS, and with Gaussians of independent elements.

    Where no search leads to a mode, their ends stand for one: warm-up goes on from there.
    """
    look, device = partial(_search_diagonal, density, most), starts.device
    found, passes = in_order(look, list(starts), check, ranks, device)
    ends = [(search, end) for search, end in enumerate(found) if end is not None]
    if not ends:
        raise ArgumentError(
            f"no mode could be reached from {len(starts)} starts{what_to_try(density, starts[0])}",
            code="not-finite",
        )
    reached = [(search, end) for search, end in ends if end.is_mode]
    modes = list[Mode]()
    for search, end in reached or ends:
        gaussian = Diagonal.from_precision(end.position.double(), end.precision / temperature)
        evidence = end.value / temperature + float(gaussian.log_det) / 2
        modes.append(Mode(gaussian, evidence, (search,)))
    distinct = each_once(
        modes, lambda one, other: _are_one(density, one, other, temperature, starts)
    )
    return Modes(tuple(distinct), bool(reached), len(starts), math.nan, math.ceil(passes))


class _End(NamedTuple):
    """Where L-BFGS ended.

    Attributes:
        position: the end, [D].
        precision: the diagonal of minus the Hessian there, of its size, in nats, [D].
        value: the log joint there, in nats.
        is_mode: whether no element is far from where its own curvature says that its mode is.
    """

    position: Tensor
    precision: Tensor
    value: float
    is_mode: bool


def _search_diagonal(
    density: FullDataDensity, most: float, start: Tensor, check: Check | None
) -> tuple[_End | None, float]:
    """(Where L-BFGS ends, or None if it does not, the passes that it took), from a start, or from
    nearer to 0 where it leads to no mode: a scale that falls to 0 before what it multiplies has
    the right sign is on a plateau, which L-BFGS does not leave."""
    best, passes, num_data = None, 0, density.log_posterior.num_data
    for shrinkage in SEARCH.shrinkages:
        if check is not None:
            check(passes)
        if passes and passes >= most:
            break
        passes += 2 * _LBFGS_PASSES
        with contextlib.suppress(ArgumentError, DataError):
            run = density.lbfgs(start * shrinkage, "")
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


def _are_one(
    density: FullDataDensity, one: Mode, other: Mode, temperature: float, like: Tensor
) -> bool:
    """Whether the log density does not fall between two places."""
    way = other.gaussian.mean - one.gaussian.mean
    parts = torch.linspace(0, 1, _BETWEEN, dtype=way.dtype)[:, None].to(way.device)
    places = (one.gaussian.mean + parts * way).to(like)
    values = density.values(places).double() * density.log_posterior.num_data / temperature
    return float(values.min()) > min(float(values[0]), float(values[-1])) - SEARCH.same_nats
