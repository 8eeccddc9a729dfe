"""What warm-up moves: chains in groups.

The chains of a group sample one posterior, and share its geometry and step size.  A run is one
group of several chains (`one_group.py`), a calibration many groups of one chain each
(`calibration/stacked_groups.py`).  R-hat, autocorrelation, geometry, bias and acceptance are those
of a group; the lengths of windows and pilots are common to all groups.
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
    """Draws of a window, and how well they mix.

    Attributes:
        places: some of them, at which the curvature is looked at, `[groups, places, D]`.
        z: in whitened coordinates, `[groups, chains, draws, d]`.
        times: draws per independent one, `[groups, d]`.
        r_hat: the largest of a group, `[groups]`.
        usable: the groups to learn from, `[groups]`.
    """

    places: Tensor
    z: Tensor
    times: Tensor
    r_hat: Tensor
    usable: Tensor

    @property
    def counts(self) -> Tensor:
        """How many independent draws each group's are worth, `[groups]`."""
        return self.z.shape[1] * self.z.shape[2] / self.times.mean(1)


class Groups(Protocol):
    """Chains in groups, and the density that they sample."""

    @property
    def learns(self) -> bool:
        """Whether windows change geometry and step size."""

    @property
    def num_latents(self) -> int:
        """The dimension of a posterior."""

    @property
    def lr(self) -> Tensor:
        """The step size of each group, `[groups]`, float64."""

    def with_lr(self, lr: Tensor) -> Self:
        """The same with other step sizes, `[groups]`."""

    def run(self, steps: Steps, purpose: Purpose, number: int, halved: bool = False) -> Draws:
        """Takes steps from where the chains are.

        Args:
            steps: how many, and which are kept.
            purpose: of the steps, from which their seeds are derived.
            number: of the window or pilot, likewise.
            halved: whether to take twice as many steps of half the size, on the same noise.

        Raises:
            Exception: what ended the steps before their time.
        """

    def are_sound(self, draws: Draws) -> Tensor:
        """Which chains have neither broken nor left the posterior, `[groups, chains]`."""

    def moved_to(self, draws: Draws, sound: Tensor) -> Self:
        """The same with sound chains at their last draws; the others start again."""

    def kept(self, draws: Draws, sound: Tensor) -> Tensor:
        """The draws of sound chains, `[groups, chains, draws, D]`."""

    def whitened(self, kept: Tensor) -> Tensor:
        """Such draws of latents in whitened coordinates, in float64; latents themselves where
        there are none."""

    def learn(self, draws: WindowDraws) -> tuple[Self, Tensor, Tensor]:
        """(The same chains in the geometry that the draws have; the largest factor by which a
        direction's sd changes beyond chance, `[groups]`; the largest curvatures over N at the
        places, in whitened coordinates, `[groups, places]`)."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the stages, which are common to all groups.

    Attributes:
        windows: of warm-up.
        pilots: of the step size.
        pilot: steps of one pilot.
        thinning: steps from one draw to the next.
    """

    windows: int = 0
    pilots: int = 0
    pilot: int = PILOTS.least
    thinning: int = 1


@dataclass(frozen=True)
class Limit:
    """How long windows and pilots may take.

    Attributes:
        steps: of each chain.
        is_over: whether the time is.
        lengths: of the stages, where other groups have shown them; None has these groups decide.
    """

    steps: float
    is_over: Callable[[], bool]
    lengths: Lengths | None = None

    def is_passed(self, steps: float) -> bool:
        """Whether there is no time for so many steps."""
        return steps > self.steps or self.is_over()


def steps_at_half(kernel: Kernel, steps: Steps) -> tuple[Steps, dict[str, Tensor]]:
    """(As many draws from twice the steps, the hyperparameters' values at half the step size)."""
    twice = Steps(steps.num_samples, 0, 2 * steps.thinning)
    columns: dict[str, Tensor] = dict(kernel.columns(twice.total))
    return twice, {**columns, "lr": columns["lr"] / 2}


def are_most(groups: Tensor) -> bool:
    """Whether enough groups are among these, `[groups]` of booleans, to end a stage."""
    return float(groups.double().mean()) >= WARM_UP.most_groups


def times_of(draws: Tensor, center: Tensor | float) -> Tensor:
    """Draws per independent one, of elements or of their squares about a center, `[groups,
    elements]`, from draws `[groups, chains, draws, elements]`."""
    squares = (draws - center).square()
    return torch.maximum(*(by_group(autocorrelation_time, each) for each in (draws, squares)))


def times_about_mean(draws: Tensor) -> Tensor:
    """The same about each group's mean, of the slowest element, `[groups]`."""
    return times_of(draws, draws.mean((1, 2), keepdim=True)).amax(1)


def slow_time(times: Tensor) -> float:
    """The time of a group that is among the slowest, from all groups' own, `[groups]`."""
    return float(times.quantile(_SLOW_GROUP))


def have_left(log_joint: Tensor, size: int) -> Tensor:
    """Which chains have fallen to where the posterior is not, `[chains]`, from the log joint of
    their draws, `[chains, draws]`, of a posterior of so many dimensions."""
    drop = (log_joint.cummax(1).values - log_joint)[:, int(WARM_UP.left_out * log_joint.shape[1]) :]
    return ~(drop.amax(1) < WARM_UP.depth(size))
