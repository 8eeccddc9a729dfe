"""Modes of posteriors given many rows, from few passes through them."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.gauss_newton import with_gauss_newton
from pyro_scale.curvature.modes import NEAR, newton_refine
from pyro_scale.curvature.newton import Ascent, ascend
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.tuning.modes import (
    Check,
    Mode,
    Modes,
    best_on_the_way,
    find_modes,
    further,
    in_order,
    merged,
    mode_at,
    some_places,
)
from pyro_scale.tuning.policy import MANY_ROWS, ManyRows

#: Newton steps of a stage, at most.
_STAGE_STEPS = 20


def find_modes_of_many_rows(
    whole: FullDataDensity,
    starts: Tensor,
    temperature: float,
    seed: int,
    check: Check | None = None,
    ranks: Ranks = ALONE,
    most: float = math.inf,
    policy: ManyRows = MANY_ROWS,
) -> Modes:
    """The modes given all rows: searched for by some that stand for all, then followed as rows are
    added.

    Rows grow sixteenfold at a time, so that each mode is near the one before.  Steps through all of
    them take their gradients alone, with the curvature of the stage before; theirs is taken where
    those end.

    Args:
        whole: the log density given all rows.
        starts: where searches begin, `[searches, D]`.
        temperature: of the posterior.
        seed: draws the rows.
        check: is told of the passes through the data, and may end the search by raising.
        ranks: the processes, which share searches out.
        most: passes through the data that each search may take.
        policy: how rows are added.

    Raises:
        ArgumentError: there is neither a mode nor a Gaussian.
    """
    num_data, size = whole.log_posterior.num_data, starts.shape[1]
    num_rows = min(policy.most_rows, max(policy.least_rows, policy.rows_each * size))
    whole = with_gauss_newton(whole)
    few = whole.of_some_rows(num_rows, seed)
    part = num_rows / num_data
    modes = find_modes(few, starts, temperature, seed, further(check, 0, part), ranks, most / part)
    passes = modes.evaluations * part
    followed, found = list(modes.modes), modes.found
    while num_rows < num_data:
        is_last = policy.growth * num_rows > num_data
        num_rows = num_data if is_last else policy.growth * num_rows
        near = NEAR / 2 if is_last else policy.near_nats
        density = whole.of_some_rows(num_rows, seed)
        refines, part = is_last and found, num_rows / num_data
        follow = partial(_follow, whole, density, near * size, temperature, refines, part, starts)
        ascents, passes = in_order(follow, followed, check, ranks, starts.device, passes)
        if not any(ascent.is_mode for ascent in ascents):
            # the ways up lead into a funnel: their ends do not stand for the posterior
            before = torch.stack([mode.gaussian.mean.to(starts) for mode in followed])
            places = torch.cat([before, some_places(ascents)])
            passes += len(places) * density.passes * num_rows / num_data
            stand_in = best_on_the_way(density, places, temperature, seed, ranks)
            if stand_in is not None:
                searches = tuple(each for mode in followed for each in mode.searches)
                followed = [Mode(stand_in[1], stand_in[0], searches)]
            found = False
            continue
        found = all(ascent.is_mode for ascent in ascents)
        pairs = zip(ascents, followed, strict=True)
        followed = merged([mode_at(end, temperature, mode.searches) for end, mode in pairs])
    return dataclasses.replace(
        modes, modes=tuple(followed), found=found, evaluations=math.ceil(passes)
    )


def _follow(
    whole: FullDataDensity,
    density: FullDataDensity,
    near: float,
    temperature: float,
    refines: bool,
    part: float,
    like: Tensor,
    mode: Mode,
    check: Check | None,
) -> tuple[Ascent, float]:
    """(Where a mode is given more rows, the passes through all of them that it took).

    Args:
        whole: the log density given all rows.
        density: given more rows.
        near: the gain that is still promised, in nats, where it ends.
        temperature: of the posterior.
        refines: whether more rows are all, and steps take their gradients alone first.
        part: more rows, as a part of all.
        like: of a position's dtype.
        mode: given fewer rows.
        check: is told of passes.
    """
    position, passes = mode.gaussian.mean.to(like), 0
    if refines:
        square = 2 * near  # of the distance at which so many nats are left
        position, end, passes = _refine(whole, mode, position, temperature, square)
        if end is not None:
            return end, passes
    checked = further(check, passes, part)
    ascent = ascend(density, position, near, _STAGE_STEPS, checked)
    return ascent, passes + density.passes * part * len(ascent.path)


def _refine(
    whole: FullDataDensity, mode: Mode, position: Tensor, temperature: float, near: float
) -> tuple[Tensor, Ascent | None, int]:
    """(A position nearer to the mode of all rows, the end there if it is one, the passes that it
    took), by the curvature of the mode of some of them."""
    assert isinstance(mode.gaussian, Dense)
    num_data, passes = whole.log_posterior.num_data, 1
    matrix = (mode.gaussian.precision * temperature).to(position) / num_data

    def precision(_: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return matrix

    places = torch.arange(len(position))
    refined = newton_refine(whole, position, precision, places, near)
    position = refined.position
    if not refined.distance <= near:
        return position, None, passes
    passes += whole.passes - 1
    curvature = -num_data * whole.hessian(position).double()
    if not bool(torch.isfinite(curvature).all()) or float(torch.linalg.eigvalsh(curvature)[0]) <= 0:
        return position, None, passes
    return (
        position,
        Ascent(position, num_data * refined.value, curvature, True, position[None]),
        passes,
    )
