"""Modes of posteriors given many rows, from few passes through them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.gauss_newton import with_gauss_newton
from pyro_scale.curvature.modes import NEAR, newton_refine
from pyro_scale.curvature.newton import Ascent, ascend
from pyro_scale.tuning.modes import (
    NO_LIMITS,
    Mode,
    Modes,
    SearchLimits,
    best_on_the_way,
    find_modes,
    merge,
    mode_at,
    places_on_the_way,
    run_searches,
)
from pyro_scale.tuning.policy import MANY_ROWS, ManyRows

#: Newton steps of a stage, at most.
_STAGE_STEPS = 20


def find_modes_of_many_rows(
    full_data: FullDataDensity,
    starts: Tensor,
    temperature: float,
    seed: int,
    limits: SearchLimits = NO_LIMITS,
    policy: ManyRows = MANY_ROWS,
) -> Modes:
    """Searches for modes given a few representative rows, and follows the modes as rows are added.
    Returns the modes given all rows.

    Each stage has 16 times as many rows, so that each mode is close to the one before. Steps
    through all rows take only gradients, with the curvature of the stage before; the curvature of
    all rows is computed where these steps end.

    Args:
        full_data: log density of all rows.
        starts: unconstrained params where searches begin, `[searches, D]`.
        temperature: temperature of the posterior.
        seed: seed of the rows that are drawn.
        limits: limits of the searches.
        policy: how rows are added.

    Raises:
        ArgumentError: there is neither a mode nor a Gaussian.
    """
    num_data, size = full_data.log_posterior.num_data, starts.shape[1]
    num_rows = min(policy.most_rows, max(policy.least_rows, policy.rows_each * size))
    full_data = with_gauss_newton(full_data)
    share = num_rows / num_data
    few = full_data.of_some_rows(num_rows, seed)
    modes = find_modes(
        few, starts, temperature, seed, dataclasses.replace(limits, passes=limits.passes / share)
    )
    passes = modes.evaluations * share
    followed, are_modes = list(modes.modes), modes.are_modes
    while num_rows < num_data:
        is_last = policy.growth * num_rows > num_data
        num_rows = num_data if is_last else policy.growth * num_rows
        stage = _Stage(
            full_data,
            full_data.of_some_rows(num_rows, seed),
            num_rows,
            (NEAR / 2 if is_last else policy.near_nats) * size,
            temperature,
            starts,
            refines=is_last and are_modes,
        )
        ascents, cost = run_searches(stage.follow, followed, limits)
        passes += cost
        if not any(ascent.is_mode for ascent in ascents):
            # the search paths lead into a funnel, and their ends do not represent the posterior
            stand_in, cost = stage.best_on_the_way(ascents, followed, seed, limits)
            followed, passes = followed if stand_in is None else [stand_in], passes + cost
            are_modes = False
            continue
        are_modes = all(ascent.is_mode for ascent in ascents)
        pairs = zip(ascents, followed, strict=True)
        followed = merge([mode_at(end, temperature, mode.searches) for end, mode in pairs])
    return dataclasses.replace(
        modes, modes=tuple(followed), are_modes=are_modes, evaluations=math.ceil(passes)
    )


@dataclass(frozen=True)
class _Stage:
    """A stage of the search: modes given fewer rows are followed to the modes given more.

    Attributes:
        full_data: log density of all rows.
        density: log density of the rows of this stage.
        num_rows: number of these rows.
        near: distance from the mode, in nats, at which a search ends.
        temperature: temperature of the posterior.
        like: a tensor with the dtype and device of params.
        refines: whether searches begin with gradients of all rows and the curvature of fewer rows.
    """

    full_data: FullDataDensity
    density: FullDataDensity
    num_rows: int
    near: float
    temperature: float
    like: Tensor
    refines: bool

    @property
    def share(self) -> float:
        """The rows of this stage, as a fraction of all rows."""
        return self.num_rows / self.full_data.log_posterior.num_data

    def follow(self, mode: Mode, limits: SearchLimits) -> tuple[Ascent, float]:
        """The end of the search for the mode given more rows, from a mode given fewer; and the
        passes through all rows that the search took."""
        position, passes = mode.gaussian.mean.to(self.like), 0
        if self.refines:
            # a gain of n nats is a squared distance of 2 n sds
            near = 2 * self.near
            position, end, passes = _refine(self.full_data, mode, position, self.temperature, near)
            if end is not None:
                return end, passes
        ascent = ascend(self.density, position, self.near, _STAGE_STEPS, limits.is_over)
        return ascent, passes + self.density.passes * self.share * len(ascent.path)

    def best_on_the_way(
        self, ascents: list[Ascent], followed: list[Mode], seed: int, limits: SearchLimits
    ) -> tuple[Mode | None, float]:
        """(A Gaussian that represents the posterior, in place of modes: the best of those along the
        search paths, None if none fits; the passes through all rows that this took).

        Args:
            ascents: the searches of this stage.
            followed: the modes from which they began.
            seed: seed of the draws by which Gaussians are compared.
            limits: limits of the searches.
        """
        before = torch.stack([mode.gaussian.mean.to(self.like) for mode in followed])
        places = torch.cat([before, places_on_the_way(ascents)])
        num_data = self.full_data.log_posterior.num_data
        cost = len(places) * self.density.passes * self.num_rows / num_data
        stand_in = best_on_the_way(self.density, places, self.temperature, seed, limits.map)
        searches = tuple(search for mode in followed for search in mode.searches)
        return None if stand_in is None else stand_in.as_mode(searches), cost


def _refine(
    full_data: FullDataDensity, mode: Mode, position: Tensor, temperature: float, near: float
) -> tuple[Tensor, Ascent | None, int]:
    """Moves from a mode given fewer rows towards the mode given all rows, with gradients of all
    rows and the curvature of the fewer rows, which costs few passes.

    Args:
        full_data: log density of all rows.
        mode: mode given fewer rows, with its curvature.
        position: mean of that mode's Gaussian, `[D]`.
        temperature: temperature of the posterior.
        near: squared distance from the mode of all rows, in sds, at which steps end.

    Returns:
        The params that were reached, `[D]`; the end of the search, with the curvature of all rows,
        if it is a mode, otherwise None; the number of passes through all rows.
    """
    assert isinstance(mode.gaussian, Dense)
    num_data, passes = full_data.log_posterior.num_data, 1
    matrix = (mode.gaussian.precision * temperature).to(position) / num_data

    def precision(_: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return matrix

    places = torch.arange(len(position))
    refined = newton_refine(full_data, position, precision, places, near)
    position = refined.position
    if not refined.distance <= near:
        return position, None, passes
    passes += full_data.passes - 1
    curvature = -num_data * full_data.hessian(position).double()
    if not bool(torch.isfinite(curvature).all()) or float(torch.linalg.eigvalsh(curvature)[0]) <= 0:
        return position, None, passes
    end = Ascent(position, num_data * refined.value, curvature, True, position[None])
    return position, end, passes
