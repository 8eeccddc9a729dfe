"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.underdamped import PhaseState, Underdamped


@dataclass(frozen=True, kw_only=True)
class SGHMC(Underdamped):
    """Stochastic gradient Hamiltonian Monte Carlo (Chen et al. 2014; the paper's B.2), mass 1.

        p'     = p + lr g(theta) - lr friction p + sqrt(2 lr friction T) zeta
        theta' = theta + lr p',                          g = gradient of log joint / N

    with T the temperature over N, so that `temperature=1` samples the posterior, and zeta
    standard normal.  The position moves with the new momentum, as in Chen et al. and unlike
    the paper's text, whose both-from-the-old-state costs the same and is 40 times as biased.
    On a Gaussian of precision L (over N) the stationary variance is
    T (4 - 2 lr friction) / (L D), D = 4 - 2 lr friction - lr^2 L, stable while D > 0.
    At temperature 0 it is `torch.optim.SGD` with learning rate lr^2 and momentum
    1 - lr friction (the paper's equation 10 is of the other discretisation).

    Args:
        lr: the step size (of time, the square root of SGD's), a float or a schedule.
        friction: the rate at which momentum decays.
        temperature: 1 is the posterior, 0 is SGD with momentum.
    """

    def update(self, state: PhaseState, target: Target, noise: Tensor) -> tuple[PhaseState, Any]:
        position, momentum = state
        gradient, evaluation = target.grad(position)
        spread = torch.sqrt(2 * self.lr * self.friction * self.temperature)
        decay = 1 - self.lr * self.friction
        momentum = decay * momentum + self.lr * gradient + spread * noise[0]
        return PhaseState(position + self.lr * momentum, momentum), evaluation
