"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.schedules import initial, map_schedule
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.langevin import PhaseState, Underdamped, drift


@dataclass(frozen=True, kw_only=True)
class SGHMC(Underdamped):
    """Stochastic gradient Hamiltonian Monte Carlo (Chen et al. 2014; the paper's B.2).

        p'     = p + lr g(theta) - lr friction p + sqrt(2 lr friction m T) zeta
        theta' = theta + lr p' / m,                      g = gradient of log joint / N

    with N the number of rows of the data, T the temperature divided by N, so that `temperature=1`
    samples the posterior, and zeta standard normal. The position moves with the new momentum, as in
    Chen et al. In the paper's text both move from the old state, which costs the same and has 40
    times the bias. On a Gaussian whose precision divided by N is L, the stationary variance is T (4
    m - 2 lr friction m) / (L D), D = 4 m - 2 lr friction m - lr^2 L, stable while D > 0. At
    temperature 0 it is `torch.optim.SGD` with learning rate lr^2 / m and momentum 1 - lr friction
    (the paper's equation 10 is of the other discretization).

    Args:
        lr: the step size (of time, the square root of SGD's), a float or a schedule, or a dict
            of them by site.
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
        spread = torch.sqrt(2 * lr * friction * mass * temperature)
        momentum = (1 - lr * friction) * momentum + lr * gradient + spread * noise[0]
        return PhaseState(drift(position, momentum, mass, lr), momentum), evaluation

    @classmethod
    def from_sgd(cls, lr: Hyper, momentum: float) -> dict[str, Hyper]:
        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum={momentum!r}: SGHMC needs one inside [0, 1)")
        step = math.sqrt(initial(lr))  # a schedule of lr becomes one of the mass
        mass = map_schedule(lambda rate: step**2 / rate, lr)
        return {"lr": step, "friction": (1 - momentum) / step, "mass": mass}
