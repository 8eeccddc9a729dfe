"""UBU: Langevin dynamics split into exact free motion, kick, free motion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.langevin import PhaseState, Underdamped, kick


@dataclass(frozen=True, kw_only=True)
class UBU(Underdamped):
    """Underdamped Langevin dynamics by the splitting free motion, kick, free motion.

        U  free motion, with friction and noise, over lr/2: exact
        B  p = p + lr g(theta),                          g = gradient of log joint / N
        U  once more

    (Sanz-Serna and Zygalakis 2021), with N the number of rows of the data, T the temperature
    divided by N, so that `temperature=1` samples the posterior. Free motion over t is Gaussian:
    with c = exp(-friction t) and zeta two standard normals,

        p'     = c p + s zeta_1,                            s^2 = m T (1 - c^2)
        theta' = theta + (1 - c) p / (friction m) + a zeta_1 + b zeta_2
        a = T (1 - c)^2 / (friction s),   b^2 = 4 T (y - tanh y) / (m friction^2),
        y = friction t / 2

    so that position and momentum have the covariance T (1 - c)^2 / friction.  The bias is of
    second order in lr, like BAOA's in general.  A step uses four normals, BAOA's one; in exchange
    each path is accurate, not only its distribution.  With `run(..., sampling="symmetric")`, which
    goes through the batches forwards and then backwards, it is SMS-UBU (Paulin, Whalley, Chada and
    Leimkuhler 2024): two such epochs are one symmetric step, whose error is of second order in lr.

    Args:
        lr: the step size (of time, about the square root of SGD's), a float or a schedule, or
            a dict of them by site.
        friction: the rate at which momentum decays; may be a dict by site.
        mass: mass of the momentum; may be a dict by site, of numbers or of tensors of the site's
            unconstrained shape.
        temperature: 1 samples the posterior, 0 is without noise.
    """

    normals: ClassVar[int] = 4

    def update(
        self, state: PhaseState, target: Target, values: Values, noise: Tensor
    ) -> tuple[PhaseState, Evaluation]:
        position, momentum = move_freely(state, values, noise[:2])
        gradient, evaluation = target.grad(position)
        momentum = kick(momentum, gradient, values["lr"])
        return move_freely(PhaseState(position, momentum), values, noise[2:]), evaluation


def move_freely(state: PhaseState, values: Values, noise: Tensor) -> PhaseState:
    """The state after free motion over a time of lr/2, with friction and noise but no gradient: the
    part U of a splitting step, exact in distribution.

    Args:
        state: position and momentum before.
        values: hyperparameters of the step by name: `lr`, `friction`, `mass`, `temperature`
            (divided by N, the number of rows of the data).
        noise: standard normal numbers, `[2, D]`.
    """
    lr, friction = values["lr"], values["friction"]
    mass, temperature = values["mass"], values["temperature"]
    position, momentum = state
    angle = friction * lr / 4
    decay, lost = torch.exp(-2 * angle), -torch.expm1(-2 * angle)
    reach = lost / friction
    thermal = torch.sqrt(temperature / mass)
    along = thermal * reach * torch.sqrt(torch.tanh(angle))
    beside = thermal * 2 / friction * torch.sqrt(_less_tanh(angle))
    spread = mass * thermal * torch.sqrt(lost * (1 + decay))
    return PhaseState(
        position + reach / mass * momentum + along * noise[0] + beside * noise[1],
        decay * momentum + spread * noise[0],
    )


def _less_tanh(x: Tensor) -> Tensor:
    """x - tanh(x), elementwise; by its series for small x, where the difference would lose
    digits."""
    square = x * x
    series = x * square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * 62 / 2835)))
    return torch.where(x < 0.05, series, x - torch.tanh(x))
