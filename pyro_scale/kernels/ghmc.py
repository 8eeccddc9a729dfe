"""Generalized Hamiltonian Monte Carlo with a slice variable that persists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.baoa import BAOA
from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Kernel, Linearized, Target, Theory
from pyro_scale.kernels.splitting import drift, kick, ornstein_uhlenbeck
from pyro_scale.kernels.theory import UnderdampedTheory
from pyro_scale.kernels.underdamped import Underdamped

#: What the slice variable moves by in a step.  On six models of benchmarks/exact 0.03 and 0.1 give
#: about the same effective draws a gradient.
_SLICE_STEP = 0.1


class GHMCState(NamedTuple):
    """A chain's position and momentum, and what the next proposal is compared with.

    Attributes:
        position: [D].
        momentum: [D].
        gradient: of the log joint over N at the position, [D].
        log_joint: at the position, in nats; -infinity until the first step.
        slice: u, in [-1, 1], 0-d.
        accepted: how many proposals were, 0-d.
    """

    position: Tensor
    momentum: Tensor
    gradient: Tensor
    log_joint: Tensor
    slice: Tensor
    accepted: Tensor


class _AdjustedTheory(UnderdampedTheory):
    """Of Langevin dynamics whose law is exact at any step size, as BAOA's is on a Gaussian."""

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

    with T the temperature over N, so that `temperature=1` samples the posterior, and zeta
    standard normal.  The law is exact at any step size: theta, p and u are independent in it, p
    is N(0, m T) and |u| is uniform on [0, 1].  So it needs the log joint of all rows; minibatches
    would leave nothing of that.

    A rejection turns the momentum around.  With a new uniform number at each step, as in
    Metropolis et al., one in ten proposals rejected would mean that momenta last for ten steps.
    u moves slowly instead, so that rejections come together, while |u| is near 1: two of them
    turn the momentum back, and between them there are long runs without any.

    The first step stays where the chain starts, and takes the log joint and gradient there.

    Args:
        lr: the step size (of time), a float or a schedule, or a dict of them by site.
        friction: the rate at which momentum decays; a dict by site, too.
        mass: of the momentum; a dict by site of numbers or of tensors of the site's
            unconstrained shape, too.
        temperature: 1 is the posterior; above 0.
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
        unknown = position.new_full((), -torch.inf)
        uniform = torch.erf(noise[0] / 2**0.5)  # on [-1, 1]
        none = torch.zeros_like(position)
        return GHMCState(position, momentum, none, unknown, uniform, torch.zeros_like(unknown))

    def update(
        self, state: GHMCState, target: Target, values: Values, noise: Tensor
    ) -> tuple[GHMCState, Any]:
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
