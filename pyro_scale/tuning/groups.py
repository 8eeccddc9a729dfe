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
        """The effective number of draws of each group, all its chains together, `[groups]`: draws
        divided by the autocorrelation time, averaged over elements."""
        return self.z.shape[1] * self.z.shape[2] / self.times.mean(1)


class Groups(Protocol):
    """Several groups of chains that are warmed up side by side, with their current params, whitened
    coordinates (geometries) and step sizes. The chains of one group sample the same posterior: a
    run is one group of all its chains, a calibration has a group of one chain for each data set."""

    @property
    def learns(self) -> bool:
        """Whether warm-up updates the groups' whitened coordinates (geometry) and step sizes after
        each window; False if the user set them."""

    @property
    def num_latents(self) -> int:
        """The number of latent dimensions d of the posterior that the chains of a group sample."""

    @property
    def lr(self) -> Tensor:
        """The step size of each group of chains, `[groups]`, float64."""

    def with_lr(self, lr: Tensor) -> Self:
        """A copy of the groups with other step sizes `lr`, `[groups]`, float64."""

    def run(self, steps: Steps, purpose: Purpose, number: int, halved: bool = False) -> Draws:
        """Runs all chains for some steps from where they are, and returns the draws. The groups do
        not change; `moved_to` takes them to the last draws.

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
        """Whether the draws of each chain can be used, booleans `[groups, chains]`: all are finite,
        and the log joint has not fallen far below where it was, as it does if the step is too long
        and the chain drifts away from the posterior.

        Args:
            draws: a run of all chains, from `run`.
        """

    def moved_to(self, draws: Draws, sound: Tensor) -> Self:
        """The groups with each sound chain at its last draw, for the next window. If geometry and
        step size are learned, other chains restart at a sound chain of their group, or halfway to
        the geometry's center; if not, they stay.

        Args:
            draws: draws of all chains.
            sound: what `are_sound` returned, booleans `[groups, chains]`.
        """

    def sound_draws(self, draws: Draws, sound: Tensor) -> Tensor:
        """The unconstrained draws of those chains whose draws can be used, `[groups, chains, draws,
        D]`.

        Args:
            draws: draws of all chains.
            sound: what `are_sound` returned, booleans `[groups, chains]`.
        """

    def to_values(self, latents: Tensor) -> Tensor:
        """Draws as users read them, of the same shape: an element is constrained if the bijection
        of its site maps elements one by one (a scale is exp of its element), otherwise it stays.

        Args:
            latents: unconstrained draws, `[groups, chains, draws, d]`.
        """

    def to_whitened(self, kept: Tensor) -> Tensor:
        """The latents of some draws in whitened coordinates, `[groups, chains, draws, d]` in
        float64; in unconstrained params if chains are not whitened.

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
    """Numbers and lengths of the stages of a calibration's warm-up, which the first data sets
    determine and all others repeat.

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
        """Whether a stage of warm-up must not take `steps` steps of each chain in all: they exceed
        the limit, or the run's time is over."""
        return steps > self.steps or self.is_over()


def halve_step_size(kernel: Kernel, steps: Steps) -> tuple[Steps, dict[str, Tensor]]:
    """(Twice as many steps as `steps`; hyperparameters at each of these by name, `[steps, ...]`,
    with half the kernel's step size), for a coupled run whose difference from the first shows the
    step size's bias. Both runs last the same time in the dynamics and have the same number of
    draws."""
    twice = Steps(steps.num_samples, 0, 2 * steps.thinning)
    columns: dict[str, Tensor] = dict(kernel.columns(twice.total))
    return twice, {**columns, "lr": columns["lr"] / 2}


def are_most(groups: Tensor) -> bool:
    """Whether a condition holds for enough groups to end a stage of warm-up: for the fraction
    `WARM_UP.most_groups`.

    Args:
        groups: whether the condition holds for each group, booleans `[groups]`.
    """
    return float(groups.double().mean()) >= WARM_UP.most_groups


def times_of(draws: Tensor, center: Tensor | float) -> Tensor:
    """Autocorrelation times of each group's elements, `[groups, elements]`, counted in draws: of
    the element or of its squared distance from a center, whichever is longer, so that slow means
    and slow spreads both show.

    Args:
        draws: draws of all chains, `[groups, chains, draws, elements]`.
        center: center of the squares, which broadcasts against the draws.
    """
    squares = (draws - center).square()
    return torch.maximum(*(by_group(autocorrelation_time, series) for series in (draws, squares)))


def times_about_mean(draws: Tensor) -> Tensor:
    """The autocorrelation time of each group's slowest element, `[groups]`, counted in draws; of
    the element or of its squared distance from the group's mean, whichever is longer.

    Args:
        draws: draws of all chains, `[groups, chains, draws, elements]`.
    """
    return times_of(draws, draws.mean((1, 2), keepdim=True)).amax(1)


def slow_time(times: Tensor) -> float:
    """One autocorrelation time for all groups, from which the lengths of windows and pilots follow:
    the 95% quantile of the groups' times, in the unit of these.

    Args:
        times: autocorrelation time of each group, `[groups]`.
    """
    return float(times.quantile(_SLOW_GROUP))


def have_left(log_joint: Tensor, size: int) -> Tensor:
    """Whether each chain has drifted away from the posterior, booleans `[chains]`: its log joint
    falls, after the first part of the draws, too many nats below the largest value before.

    Args:
        log_joint: log joint at each draw, in nats, `[chains, draws]`.
        size: dimension of the posterior, with which the tolerated fall grows.
    """
    drop = (log_joint.cummax(1).values - log_joint)[:, int(WARM_UP.left_out * log_joint.shape[1]) :]
    return ~(drop.amax(1) < WARM_UP.depth(size))
