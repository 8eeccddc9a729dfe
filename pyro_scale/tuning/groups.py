"""Groups of chains, which warm-up and pilots move.

The chains of a group sample one posterior and share a geometry and a step size.  A run is one group
of several chains (`one_group.py`).  A calibration has many groups of one chain each
(`calibration/stacked_chains.py`).  R-hat, autocorrelation, geometry, bias and acceptance rate are
computed for each group.  All groups have windows and pilots of the same lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from pyro_scale.core.autocorrelation import autocorrelation_time, by_group
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.rng.seeds import Purpose
from pyro_scale.tuning.policy import PILOTS, WARM_UP

#: Quantile of the groups' autocorrelation times that lengths are chosen by.
_SLOW_GROUP = 0.95


class WindowDraws(NamedTuple):
    """Draws of a window, with their autocorrelation times and R-hat.

    Attributes:
        places: a few of the draws, where the curvature is evaluated, `[groups, places, D]`.
        z: the draws in whitened coordinates, `[groups, chains, draws, d]`.
        times: autocorrelation times in draws, `[groups, d]`.
        r_hat: the largest R-hat of each group, `[groups]`.
        usable: whether a group's chains are sound, so that its geometry is updated, `[groups]`.
    """

    places: Tensor
    z: Tensor
    times: Tensor
    r_hat: Tensor
    usable: Tensor

    @property
    def counts(self) -> Tensor:
        """Effective number of draws of each group, `[groups]`."""
        return self.z.shape[1] * self.z.shape[2] / self.times.mean(1)


class Groups(Protocol):
    """Groups of chains, with their positions, geometries and step sizes."""

    @property
    def learns(self) -> bool:
        """Whether windows update the geometry and the step size."""

    @property
    def num_latents(self) -> int:
        """Dimension of each posterior."""

    @property
    def lr(self) -> Tensor:
        """Step size of each group, `[groups]`, float64."""

    def with_lr(self, lr: Tensor) -> Self:
        """The groups with other step sizes, `[groups]`."""

    def run(self, steps: Steps, purpose: Purpose, number: int, halved: bool = False) -> Draws:
        """Runs all chains from their positions and returns the draws.

        Args:
            steps: how many steps to take, and which draws to keep.
            purpose: window or pilot; seeds depend on it.
            number: number of the window or pilot; seeds depend on it.
            halved: whether to take twice as many steps of half the size, on the same noise path.

        Raises:
            Exception: what ended the steps before their time.
        """

    def are_sound(self, draws: Draws) -> Tensor:
        """Whether each chain is finite and has not left the posterior, `[groups, chains]`."""

    def moved_to(self, draws: Draws, sound: Tensor) -> Self:
        """The groups with sound chains at their last draws, and the other chains restarted."""

    def sound_draws(self, draws: Draws, sound: Tensor) -> Tensor:
        """Draws of the sound chains, `[groups, chains, draws, D]`."""

    def to_whitened(self, kept: Tensor) -> Tensor:
        """Latents of selected draws in whitened coordinates, in float64; unchanged if the groups
        have no geometry."""

    def learn(self, draws: WindowDraws) -> tuple[Self, Tensor, Tensor]:
        """Updates the geometry to that of the draws.

        Returns:
            The groups with the new geometry; the largest factor by which the sd of a direction
            changes beyond chance, `[groups]`; the largest curvature over N at each place, in
            whitened coordinates, `[groups, places]`.
        """


@dataclass(frozen=True)
class Lengths:
    """Lengths of the stages of a calibration, the same for all groups.

    Attributes:
        windows: number of warm-up windows.
        pilots: number of pilots.
        pilot: steps of one pilot.
        thinning: steps from one draw to the next.
    """

    windows: int = 0
    pilots: int = 0
    pilot: int = PILOTS.least
    thinning: int = 1


@dataclass(frozen=True)
class Limit:
    """Limits of windows and pilots.

    Attributes:
        steps: most steps of each chain.
        is_over: whether the run's time is over.
        lengths: lengths that earlier groups have determined; None lets these groups determine them.
    """

    steps: float
    is_over: Callable[[], bool]
    lengths: Lengths | None = None

    def is_passed(self, steps: float) -> bool:
        """Whether this number of steps is beyond the limit, or the time is over."""
        return steps > self.steps or self.is_over()


def halve_step_size(kernel: Kernel, steps: Steps) -> tuple[Steps, dict[str, Tensor]]:
    """Steps and hyperparameter values of a coupled run: twice the steps, half the step size."""
    twice = Steps(steps.num_samples, 0, 2 * steps.thinning)
    columns: dict[str, Tensor] = dict(kernel.columns(twice.total))
    return twice, {**columns, "lr": columns["lr"] / 2}


def are_most(groups: Tensor) -> bool:
    """Whether enough groups agree to end a stage, from one boolean per group."""
    return float(groups.double().mean()) >= WARM_UP.most_groups


def times_of(draws: Tensor, center: Tensor | float) -> Tensor:
    """Autocorrelation times in draws, `[groups, elements]`: the larger of an element's and of its
    square's about a center.  Draws are `[groups, chains, draws, elements]`."""
    squares = (draws - center).square()
    return torch.maximum(*(by_group(autocorrelation_time, series) for series in (draws, squares)))


def times_about_mean(draws: Tensor) -> Tensor:
    """Autocorrelation time of each group's slowest element, squares about the mean, `[groups]`."""
    return times_of(draws, draws.mean((1, 2), keepdim=True)).amax(1)


def slow_time(times: Tensor) -> float:
    """Autocorrelation time by which lengths are chosen: the 95% quantile over groups."""
    return float(times.quantile(_SLOW_GROUP))


def have_left(log_joint: Tensor, size: int) -> Tensor:
    """Whether each chain has left the posterior, `[chains]`: its log joint `[chains, draws]` has
    fallen too far below its best draw.  `size` is the posterior's dimension."""
    drop = (log_joint.cummax(1).values - log_joint)[:, int(WARM_UP.left_out * log_joint.shape[1]) :]
    return ~(drop.amax(1) < WARM_UP.depth(size))
