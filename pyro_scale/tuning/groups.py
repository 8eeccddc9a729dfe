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

from pyro_scale.core.mixing import autocorrelation_time, by_group
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.rng.seeds import Purpose
from pyro_scale.tuning.policy import PILOTS, WARM_UP

#: Quantile of the groups' autocorrelation times that lengths are chosen by.
_SLOW_GROUP = 0.95


class WindowDraws(NamedTuple):
    """Draws of a window of warm-up (the steps between two updates of the geometry, the whitened
    coordinates), with their autocorrelation times and R-hat.

    Attributes:
        places: a few of the draws as unconstrained params, at which the curvature is evaluated,
            `[groups, places, D]`.
        z: the draws in whitened coordinates, `[groups, chains, draws, d]`.
        times: autocorrelation times, in draws, `[groups, d]`.
        r_hat: the largest R-hat of each group, `[groups]`.
        usable: whether a group's chains are finite and have not left the posterior, `[groups]`;
            only then is its geometry updated.
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
    """Groups of chains, with their current params, geometries (whitened coordinates) and step
    sizes. The chains of a group sample one posterior."""

    @property
    def learns(self) -> bool:
        """Whether geometry and step size are updated after each window of warm-up; False if the
        user set them."""

    @property
    def num_latents(self) -> int:
        """The number of latent dimensions of each group's posterior."""

    @property
    def lr(self) -> Tensor:
        """Step size of each group, `[groups]`, float64."""

    def with_lr(self, lr: Tensor) -> Self:
        """The groups with other step sizes, `[groups]`."""

    def run(self, steps: Steps, purpose: Purpose, number: int, halved: bool = False) -> Draws:
        """Runs all chains from where they are, and returns the draws; the groups do not change.

        Args:
            steps: how many steps to take, and which draws to keep.
            purpose: `Purpose.WINDOW` for a window of warm-up, or `Purpose.PILOT` for a short run
                that measures the step size's error; seeds depend on it.
            number: number of the window or pilot, from 0; seeds depend on it.
            halved: whether to take twice as many steps of half the size, driven by the same
                Brownian path.

        Raises:
            Exception: the error that ended the steps early.
        """

    def are_sound(self, draws: Draws) -> Tensor:
        """Whether each chain's draws are finite and have not left the posterior, `[groups,
        chains]`."""

    def moved_to(self, draws: Draws, sound: Tensor) -> Self:
        """The groups with each sound chain at its last draw. Other chains restart at a sound chain
        of their group or halfway to the geometry's center; they stay if nothing is learned.

        Args:
            draws: draws of all chains.
            sound: which chains have finite draws that stay in the posterior (`are_sound`),
                `[groups, chains]`.
        """

    def sound_draws(self, draws: Draws, sound: Tensor) -> Tensor:
        """Draws of the sound chains (finite, and not outside of the posterior; `sound` is what
        `are_sound` returned), `[groups, chains, draws, D]`."""

    def to_whitened(self, kept: Tensor) -> Tensor:
        """The latents of some draws in whitened coordinates, in float64; unconstrained params as
        they are if chains are not whitened.

        Args:
            kept: draws as unconstrained params, `[groups, chains, draws, D]`.
        """

    def learn(self, draws: WindowDraws) -> tuple[Self, Tensor, Tensor]:
        """Updates each group's geometry (the whitened coordinates in which chains move) to the
        spread of a window's draws.

        Returns:
            The groups with the new geometry; the largest factor by which the sd of a direction
            changes beyond what chance explains, `[groups]`; the largest curvature of the negative
            log density divided by N, in the new whitened coordinates, at some of the window's draws
            (`draws.places`), `[groups, places]`.
        """


@dataclass(frozen=True)
class Lengths:
    """Lengths of the stages of a calibration, the same for all groups.

    Attributes:
        windows: number of warm-up windows.
        pilots: number of pilots (short runs that measure the step size's error).
        pilot: steps of one pilot.
        thinning: steps from one draw to the next.
    """

    windows: int = 0
    pilots: int = 0
    pilot: int = PILOTS.least
    thinning: int = 1


@dataclass(frozen=True)
class Limit:
    """Limits of a stage of warm-up: its windows, or its pilots (short runs that measure the step
    size's error).

    Attributes:
        steps: most steps of each chain.
        is_over: whether the run's time is over.
        lengths: lengths that earlier groups have determined; None lets these groups determine them.
    """

    steps: float
    is_over: Callable[[], bool]
    lengths: Lengths | None = None

    def is_passed(self, steps: float) -> bool:
        """Whether a stage of this many steps of each chain would exceed the limit, or the run's
        time is over."""
        return steps > self.steps or self.is_over()


def halve_step_size(kernel: Kernel, steps: Steps) -> tuple[Steps, dict[str, Tensor]]:
    """The steps and the hyperparameters by name (a value for each step) of a coupled run: twice as
    many steps as in `steps`, at half the kernel's step size."""
    twice = Steps(steps.num_samples, 0, 2 * steps.thinning)
    columns: dict[str, Tensor] = dict(kernel.columns(twice.total))
    return twice, {**columns, "lr": columns["lr"] / 2}


def are_most(groups: Tensor) -> bool:
    """Whether enough groups agree to end a stage; `groups` has one boolean for each group."""
    return float(groups.double().mean()) >= WARM_UP.most_groups


def times_of(draws: Tensor, center: Tensor | float) -> Tensor:
    """Autocorrelation times in draws, `[groups, elements]`: the larger of an element's time and the
    time of its squared distance from a center.

    Args:
        draws: draws of all chains, `[groups, chains, draws, elements]`.
        center: center of the squares, which broadcasts against the draws.
    """
    squares = (draws - center).square()
    return torch.maximum(*(by_group(autocorrelation_time, series) for series in (draws, squares)))


def times_about_mean(draws: Tensor) -> Tensor:
    """The autocorrelation time of each group's slowest element, in draws, `[groups]`; squares are
    about the group's mean. Draws are `[groups, chains, draws, elements]`."""
    return times_of(draws, draws.mean((1, 2), keepdim=True)).amax(1)


def slow_time(times: Tensor) -> float:
    """The autocorrelation time by which lengths of windows and pilots are chosen: the 95% quantile
    of the groups' times, `[groups]`."""
    return float(times.quantile(_SLOW_GROUP))


def have_left(log_joint: Tensor, size: int) -> Tensor:
    """Whether each chain has left the posterior, `[chains]`: its log joint `[chains, draws]` has
    fallen too far below its best draw.  `size` is the posterior's dimension."""
    drop = (log_joint.cummax(1).values - log_joint)[:, int(WARM_UP.left_out * log_joint.shape[1]) :]
    return ~(drop.amax(1) < WARM_UP.depth(size))
