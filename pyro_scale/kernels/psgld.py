"""Preconditioned stochastic gradient Langevin dynamics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.schedules import polynomial_decay
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Kernel, Linearized, Target, Theory
from pyro_scale.kernels.sgld import SGLD

#: The default `forgetting`: a schedule that starts at 0.5 and falls.
_FALLING = polynomial_decay(0.5, power=0.7)


class PSGLDState(NamedTuple):
    """State of a pSGLD chain: position (unconstrained parameters), and running mean of the squared
    gradients of the log joint divided by N, the number of rows of the data, each `[D]`.
    """

    position: Tensor
    square: Tensor


class _Preconditioned(Theory):
    """Theory of RMSprop with noise, whose preconditioner is 1 / (damping + sqrt(v)), v the mean
    square of the gradient g. v is at least T L (T the temperature and L the posterior's precision,
    both divided by N, the number of rows of the data) and at least V, the variance of g caused by
    minibatches.
    """

    heated: ClassVar[bool] = False

    def relaxation_steps(self, values: Values, precision: Tensor) -> Tensor:
        root = torch.sqrt(values["temperature"] * precision)
        return (values["damping"] + root) / (values["lr"] * precision)

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return (
            values["lr"] * gradient_noise / (2 * (values["damping"] + torch.sqrt(gradient_noise)))
        )

    def traveling_steps(
        self, values: Values, distance: Tensor, gradient: Tensor, scale: Tensor
    ) -> Tensor:
        return distance * scale / values["lr"]  # as G g is about 1 on the way

    def metric(self, values: Values, mean_square: Tensor) -> Tensor:
        return 1 / (values["damping"] + torch.sqrt(mean_square))

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        settled = {name: values[name] for name in ("lr", "temperature")}
        return Linearized(SGLD(lr=kernel.lr), settled, gradient_noise)


@dataclass(frozen=True, kw_only=True)
class pSGLD(Kernel):
    """Preconditioned stochastic gradient Langevin dynamics (Li et al. 2016), RMSprop with noise.

        v'     = v + forgetting (g^2 - v),               g = gradient of log joint / N
        G      = 1 / (damping + sqrt(v'))
        theta' = theta + lr G g(theta) + sqrt(2 lr G T) zeta

    with N the number of rows of the data, T the temperature divided by N, so that `temperature=1`
    samples the posterior, and zeta standard normal. v starts at T, as if the precision divided by N
    were 1: otherwise G would be huge at a start near the mode, where g is nearly 0.

    As G depends on theta, the drift lacks the term lr T Gamma, Gamma = dG/dtheta =
    -G^2 forgetting g (dg/dtheta) / sqrt(v'), which needs second derivatives.  With or without this
    term, a constant forgetting (0.01 as published) causes a larger bias: v follows g^2, and for
    small lr draws are from a density proportional to posterior / G, whose variance on a Gaussian is
    up to twice as large.  By default forgetting falls to zero, so that G converges, Gamma vanishes,
    and SGLD's bias at the step size lr G remains, which is of first order in lr.

    Args:
        lr: the step size in units of sqrt(v), a float or a schedule, or a dict of them by site.
        temperature: 1 samples the posterior, 0 is RMSprop.
        forgetting: the weight of the newest gradient in v, at most 1; (1 + step)^-0.7 / 2 by
            default, which forgets the start in a few hundred steps.
        damping: positive number that keeps G finite where gradients vanish, as published.
    """

    forgetting: Hyper = _FALLING
    damping: Hyper = 1e-5

    whitens: ClassVar[bool] = False
    may_be_zero: ClassVar[tuple[str, ...]] = ("temperature", "forgetting")
    theory: ClassVar[Theory | None] = _Preconditioned()

    def check(self, name: str, value: object, label: str, when: str = "") -> None:
        super().check(name, value, label, when)
        if name == "forgetting" and float(value) > 1:  # type: ignore[arg-type]
            raise ArgumentError(f"forgetting={value!r}{when}: it is a weight, at most 1")

    def init(self, position: Tensor, values: Values, noise: Tensor) -> PSGLDState:
        return PSGLDState(position, values["temperature"].to(position.dtype).expand_as(position))

    def update(
        self, state: PSGLDState, target: Target, values: Values, noise: Tensor
    ) -> tuple[PSGLDState, Evaluation]:
        position, square = state
        gradient, evaluation = target.grad(position)
        square = square + values["forgetting"] * (gradient * gradient - square)
        step = values["lr"] / (values["damping"] + torch.sqrt(square))
        spread = torch.sqrt(2 * step * values["temperature"])
        return PSGLDState(position + step * gradient + spread * noise[0], square), evaluation
