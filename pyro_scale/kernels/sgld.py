"""Stochastic gradient Langevin dynamics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Kernel, Target, Theory
from pyro_scale.kernels.langevin import OverdampedTheory


class SGLDState(NamedTuple):
    """State of an SGLD chain: its position (unconstrained parameters), `[D]`."""

    position: Tensor


@dataclass(frozen=True, kw_only=True)
class SGLD(Kernel):
    """Stochastic gradient Langevin dynamics (Welling and Teh 2011; the paper's B.1).

        theta' = theta + lr g(theta) + sqrt(2 lr T) zeta,    g = gradient of log joint / N

    with N the number of rows of the data, T the temperature divided by N, so that `temperature=1`
    samples the posterior, and zeta standard normal. On a Gaussian whose precision divided by N is
    L, the stationary variance is T / (L (1 - lr L / 2)): the bias is first order in lr, and chains
    are stable while lr L < 2. At temperature 0 it is gradient ascent, SGD without momentum.

    Args:
        lr: the step size, a float or a schedule, or a dict of them by site.
        temperature: 1 samples the posterior, 0 is SGD.
    """

    theory: ClassVar[Theory | None] = OverdampedTheory()

    def init(self, position: Tensor, values: Values, noise: Tensor) -> SGLDState:
        return SGLDState(position)

    def update(
        self, state: SGLDState, target: Target, values: Values, noise: Tensor
    ) -> tuple[SGLDState, Evaluation]:
        lr, temperature = values["lr"], values["temperature"]
        (position,) = state
        gradient, evaluation = target.grad(position)
        spread = torch.sqrt(2 * lr * temperature)
        return SGLDState(position + lr * gradient + spread * noise[0]), evaluation
