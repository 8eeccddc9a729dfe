"""Langevin dynamics: the parts of a step, their theory, and the base of samplers with a momentum.

Underdamped dynamics have a position theta and a momentum p of mass m, damped by friction f; g is
the gradient of the log joint divided by N, the number of rows of the data, T the temperature
divided by N, w a Brownian motion:

    d theta = p/m dt,    dp = g dt - f p dt + sqrt(2 f m T) dw

Overdamped dynamics have only a position:

    d theta = g dt + sqrt(2 T) dw
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Kernel, Linearized, Theory


def kick(momentum: Tensor, gradient: Tensor, time: Tensor) -> Tensor:
    """The momentum `[D]` after the force `gradient` `[D]` has acted for a time: momentum + time *
    gradient. It is the part B of a splitting step, which solves dp = g dt exactly.
    """
    return momentum + time * gradient


def drift(position: Tensor, momentum: Tensor, mass: Tensor, time: Tensor) -> Tensor:
    """The position `[D]` after motion with a constant momentum `[D]` for a time: position + time *
    momentum / mass. It is the part A of a splitting step, which solves d theta = p/m dt exactly.
    """
    return position + time / mass * momentum


def ornstein_uhlenbeck(
    momentum: Tensor, noise: Tensor, friction: Tensor, variance: Tensor, time: Tensor
) -> Tensor:
    """The momentum `[D]` after friction and noise have acted for a time: the part O of a splitting
    step, which solves dp = -f p dt + sqrt(2 f variance) dw exactly.

    Args:
        momentum: momentum before, `[D]`.
        noise: standard normal numbers, `[D]`.
        friction: f, the rate at which momentum decays.
        variance: stationary variance of the momentum, m T.
        time: duration.
    """
    decay = torch.exp(-time * friction)
    return decay * momentum + torch.sqrt((1 - decay * decay) * variance) * noise


class OverdampedTheory(Theory):
    """Theory of overdamped Langevin dynamics, d theta = g dt + sqrt(2 T) dw, in steps of lr, with g
    the gradient of the log joint divided by N, the number of rows of the data, and T the
    temperature divided by N.
    """

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        return 1 / (values["lr"] * precision)

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return values["lr"] * gradient_noise / 2


class UnderdampedTheory(Theory):
    """Theory of underdamped Langevin dynamics (a position and a momentum with friction) in steps of
    lr."""

    order: ClassVar[int] = 2

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        lr, friction = values["lr"], values["friction"]
        overdamped = friction * values["mass"] / (lr * precision)
        return torch.maximum(overdamped, 2 / (lr * friction))

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return values["lr"] * gradient_noise / (2 * values["friction"] * values["mass"])

    def metric(self, values: Values, mean_square: Tensor) -> Tensor:
        return (1 / values["mass"]).expand_as(mean_square)

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        return Linearized(kernel, {**values, "mass": torch.ones(())}, gradient_noise)


class PhaseState(NamedTuple):
    """A chain's position (unconstrained parameters) and momentum, each `[D]`."""

    position: Tensor
    momentum: Tensor


@dataclass(frozen=True, kw_only=True)
class Underdamped(Kernel):
    """Base of samplers of underdamped Langevin dynamics.

        d theta = p/m dt,    dp = g dt - f p dt + sqrt(2 f m T) dw

    (the paper's B.2, where friction is f m), with momentum p, mass m, friction f, g the gradient of
    the log joint divided by N, the number of rows of the data, and T the temperature divided by N.
    As f is a rate, all momenta relax equally fast, whatever their masses. Momenta start from their
    stationary N(0, m T): at rest at temperature 0.
    """

    friction: Hyper = 1.0
    mass: Hyper = 1.0

    per_site: ClassVar[tuple[str, ...]] = ("lr", "friction", "mass")
    theory: ClassVar[Theory | None] = UnderdampedTheory()

    def init(self, position: Tensor, values: Values, noise: Tensor) -> Any:
        thermal = torch.sqrt(values["mass"] * values["temperature"])
        return PhaseState(position, thermal * noise)
