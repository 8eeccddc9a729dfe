"""BAOA: Langevin dynamics split into kick, drift, noise, drift."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.schedules import initial, map_schedule
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.langevin import PhaseState, Underdamped, drift, kick, ornstein_uhlenbeck


@dataclass(frozen=True, kw_only=True)
class BAOA(Underdamped):
    """Underdamped Langevin dynamics by the splitting kick, drift, noise, drift.

        B  p1     = p + lr g(theta),                     g = gradient of log joint / N
        A  theta1 = theta + lr/2 p1 / m
        O  p'     = c p1 + sqrt((1 - c^2) m T) zeta,     c = exp(-lr friction)
        A  theta' = theta1 + lr/2 p' / m

    with N the number of rows of the data, T the temperature divided by N, so that `temperature=1`
    samples the posterior, and zeta standard normal. It is Leimkuhler and Matthews' BAOAB (2013)
    with its two half kicks combined: one gradient and one normal per step. On a Gaussian whose
    precision divided by N is L, the stationary variance is exactly T / L at any stable step, lr^2 L
    < 4 m. At temperature 0 it is SGD with momentum c and learning rate lr^2 (1 + c) / (2 m).

    Args:
        lr: the step size (of time, about the square root of SGD's), a float or a schedule, or
            a dict of them by site.
        friction: the rate at which momentum decays; may be a dict by site.
        mass: mass of the momentum; may be a dict by site, of numbers or of tensors of the site's
            unconstrained shape.
        temperature: 1 samples the posterior, 0 is SGD with momentum.
    """

    def update(
        self, state: PhaseState, target: Target, values: Values, noise: Tensor
    ) -> tuple[PhaseState, Evaluation]:
        lr, friction = values["lr"], values["friction"]
        mass, temperature = values["mass"], values["temperature"]
        position, momentum = state
        gradient, evaluation = target.grad(position)
        momentum = kick(momentum, gradient, lr)
        position = drift(position, momentum, mass, lr / 2)
        momentum = ornstein_uhlenbeck(momentum, noise[0], friction, mass * temperature, lr)
        position = drift(position, momentum, mass, lr / 2)
        return PhaseState(position, momentum), evaluation

    @classmethod
    def from_sgd(cls, lr: Hyper, momentum: float) -> dict[str, Hyper]:
        if not 0 < momentum < 1:
            raise ArgumentError(f"momentum={momentum!r}: BAOA needs one inside (0, 1)")
        both = (1 + momentum) / 2
        step = math.sqrt(initial(lr) / both)  # a schedule of lr becomes one of the mass
        mass = map_schedule(lambda rate: step**2 * both / rate, lr)
        return {"lr": step, "friction": -math.log(momentum) / step, "mass": mass}
