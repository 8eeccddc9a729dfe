"""Generalized Hamiltonian Monte Carlo with a slice variable that persists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.baoa import BAOA
from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Kernel, Linearized, Target, Theory
from pyro_scale.kernels.langevin import (
    Underdamped,
    UnderdampedTheory,
    drift,
    kick,
    ornstein_uhlenbeck,
)

#: Change of the slice variable in a step.  On six models of benchmarks/exact, 0.03 and 0.1 give
#: about the same number of effective draws per gradient.
_SLICE_STEP = 0.1


class GHMCState(NamedTuple):
    """State of a GHMC chain: position, momentum, and the numbers by which the next proposal is
    accepted or rejected.

    Attributes:
        position: unconstrained parameters, `[D]`.
        momentum: momentum, `[D]`.
        gradient: gradient, at the position, of the log joint divided by N, the number of rows of
            the data, `[D]`; 0 until the first step.
        log_joint: log joint at the position, in nats; -infinity until the first step.
        slice: u, the persistent slice variable in [-1, 1], 0-d.
        accepted: number of proposals accepted so far, 0-d; the first step, which does not move,
            counts.
    """

    position: Tensor
    momentum: Tensor
    gradient: Tensor
    log_joint: Tensor
    slice: Tensor
    accepted: Tensor


class _AdjustedTheory(UnderdampedTheory):
    """Theory of Metropolis-adjusted Langevin dynamics, which has no bias at any step size, as BAOA
    has none on a Gaussian."""

    heated: ClassVar[bool] = False

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return torch.zeros_like(gradient_noise)

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        return Linearized(BAOA(lr=kernel.lr), {**values, "mass": torch.ones(())}, gradient_noise)


@dataclass(frozen=True, kw_only=True)
class GHMC(Underdamped):
    """Generalized Hamiltonian Monte Carlo (Horowitz 1991) by Neal's non-reversible slice (2020).

        O  p1     = c p + sqrt((1 - c^2) m T) zeta,      c = exp(-lr friction)
           u1     = u + 0.1, from 1 on to -1
        B  p2     = p1 + lr/2 g(theta),                  g = gradient of log joint / N
        A  theta1 = theta + lr p2 / m
        B  p3     = p2 + lr/2 g(theta1)
           r      = exp(H(theta, p1) - H(theta1, p3)),   H = (|p|^2 / (2 m) - log joint / N) / T
           theta', p', u' = theta1, p3, u1 / r  if |u1| <= r,  else  theta, -p1, u1

    with N the number of rows of the data, T the temperature divided by N, so that `temperature=1`
    samples the posterior, and zeta standard normal. The stationary distribution is exact at any
    step size: theta, p and u are independent, p is N(0, m T) and |u| is uniform on [0, 1]. This
    needs the log joint of all rows, not of minibatches.

    A rejection reverses the momentum.  With a new uniform number at each step, as in Metropolis et
    al., a rejection rate of one in ten would mean that momenta last for ten steps.  Instead u moves
    slowly, so that rejections come in groups, while |u| is near 1: two of them restore the
    momentum, and between groups there are long runs without rejections.

    The first step does not move, and computes log joint and gradient where the chain starts.

    Args:
        lr: the step size (of time), a float or a schedule, or a dict of them by site.
        friction: the rate at which momentum decays; may be a dict by site.
        mass: mass of the momentum; may be a dict by site, of numbers or of tensors of the site's
            unconstrained shape.
        temperature: a number above 0; 1 samples the posterior.
    """

    friction: Hyper = 0.5

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    adjusted: ClassVar[bool] = True
    theory: ClassVar[Theory | None] = _AdjustedTheory()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lr, Cyclical):
            raise ArgumentError(
                "lr: Cyclical explores at temperature 0, where nothing is accepted or rejected: "
                "pass a number, or use BAOA"
            )

    def init(self, position: Tensor, values: Values, noise: Tensor) -> GHMCState:
        position, momentum = super().init(position, values, noise)
        log_joint = position.new_full((), -torch.inf)
        uniform = torch.erf(noise[0] / 2**0.5)  # on [-1, 1]
        gradient, accepted = torch.zeros_like(position), torch.zeros_like(log_joint)
        return GHMCState(position, momentum, gradient, log_joint, uniform, accepted)

    def update(
        self, state: GHMCState, target: Target, values: Values, noise: Tensor
    ) -> tuple[GHMCState, Evaluation]:
        friction, mass, temperature = values["friction"], values["mass"], values["temperature"]
        has_started = state.log_joint > -torch.inf
        lr = torch.where(has_started, values["lr"], 0.0)
        before = ornstein_uhlenbeck(
            state.momentum, noise[0], friction, mass * temperature, values["lr"]
        )
        u = torch.remainder(state.slice + (1 + _SLICE_STEP), 2) - 1

        momentum = kick(before, state.gradient, lr / 2)
        position = drift(state.position, momentum, mass, lr)
        gradient, evaluation = target.grad(position)
        momentum = kick(momentum, gradient, lr / 2)

        log_joint = evaluation.log_joint
        gained = (log_joint - state.log_joint) / target.num_data
        spent = ((momentum.square() - before.square()) / (2 * mass)).sum()
        log_ratio = torch.where(has_started, (gained - spent) / temperature, 0.0)
        ratio = torch.exp(log_ratio)
        is_accepted = ~has_started | ((u.abs() <= ratio) & torch.isfinite(log_ratio))
        lowered, accepted = (u / ratio).clamp(-1, 1), state.accepted + 1
        proposed = GHMCState(position, momentum, gradient, log_joint, lowered, accepted)
        rejected = state._replace(momentum=-before, slice=u)
        moved = (
            torch.where(is_accepted, new, old).to(old)
            for new, old in zip(proposed, rejected, strict=True)
        )
        state = GHMCState(*moved)
        return state, evaluation._replace(log_joint=state.log_joint)
