"""The stochastic gradient Nosé-Hoover thermostat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.kernels.baoa import BAOA
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Kernel, Linearized, Target, Theory
from pyro_scale.kernels.langevin import Underdamped, UnderdampedTheory, drift, kick


class SGNHTState(NamedTuple):
    """State of an SGNHT chain: position (unconstrained parameters) and momentum, each `[D]`, and
    xi, the friction that the thermostat adapts, 0-d.
    """

    position: Tensor
    momentum: Tensor
    xi: Tensor


class _Thermostatted(UnderdampedTheory):
    """Theory of Langevin dynamics with a thermostat, whose friction rises until gradient noise no
    longer raises the temperature."""

    heated: ClassVar[bool] = False
    largest_lr: ClassVar[float] = 2.0  # xi moves by lr (|p|^2 / (m T d) - 1) in a step

    def added_temperature(self, values: Values, gradient_noise: Tensor) -> Tensor:
        return torch.zeros_like(gradient_noise)

    def traveling_steps(
        self, values: Values, distance: Tensor, gradient: Tensor, scale: Tensor
    ) -> Tensor:
        # at the speed sqrt(T); then xi, which balanced the gradient, falls by 1 per unit of time
        return (distance + gradient) / (values["lr"] * torch.sqrt(values["temperature"]))

    def linearize(self, kernel: Kernel, values: Values, gradient_noise: Tensor) -> Linearized:
        cooled = gradient_noise.mean()  # the thermostat's friction rises to compensate it
        friction = values["friction"] + values["lr"] * cooled / (2 * values["temperature"])
        settled = {**values, "friction": friction, "mass": torch.ones(())}
        return Linearized(BAOA(lr=kernel.lr), settled, gradient_noise - cooled)


@dataclass(frozen=True, kw_only=True)
class SGNHT(Underdamped):
    """The stochastic gradient Nosé-Hoover thermostat (Ding et al. 2014; the paper's B.3).

        d theta = p/m dt,    dp = g dt - xi p dt + sqrt(2 friction m T) dw
        d xi = (|p|^2 / (m T d) - 1) dt

    with g the gradient of the log joint divided by N, the number of rows of the data, and T the
    temperature divided by N, so that `temperature=1` samples the posterior. If minibatches heat the
    momentum, xi rises until the temperature is right: on average to friction + lr V / (2 m T), with
    V the variance of g. Minibatches then cause no bias, if V is the same everywhere and for all d
    elements, and lr^2 V is far below m T. Without minibatches xi has mean friction and variance 1/d
    as lr goes to 0. The published form, with |p|^2/d - T, relaxes N times as slowly as this one:
    too slowly for large N.

    A step is Leimkuhler and Shang's symmetric splitting BADODAB (2016) with its two half kicks
    combined, g = gradient of log joint / N and zeta standard normal:

        B  p     = p + lr g(theta)
        A  theta = theta + lr/2 p / m
        D  xi    = xi + lr/2 (|p|^2 / (m T d) - 1)
        O  p     = exp(-lr xi) p + sqrt(friction m T (1 - exp(-2 lr xi)) / xi) zeta
        D, A     as above

    The thermostat also limits the kinetic energy while a chain moves from its start to the mode,
    to a speed of about sqrt(T/m): for large N start near the mode (`init_strategy`).

    At temperature 0 the friction takes the place of xi, which does not change: this is SGD with
    momentum.  Batches are drawn with replacement by default: the noise of shuffled batches mostly
    cancels over an epoch, but the thermostat would cool as if it did not.

    Args:
        lr: the step size (of time, about the square root of SGD's), a float or a schedule, or
            a dict of them by site.
        friction: the rate at which momentum decays without minibatches; xi starts at this rate.
        mass: mass of the momentum; may be a dict by site, of numbers or of tensors of the site's
            unconstrained shape.
        temperature: 1 samples the posterior, 0 is SGD with momentum.
    """

    per_site: ClassVar[tuple[str, ...]] = ("lr", "mass")
    sampling: ClassVar[Literal["shuffle", "replacement"]] = "replacement"
    theory: ClassVar[Theory | None] = _Thermostatted()

    def init(self, position: Tensor, values: Values, noise: Tensor) -> SGNHTState:
        position, momentum = super().init(position, values, noise)
        return SGNHTState(position, momentum, values["friction"].to(position.dtype))

    def update(
        self, state: SGNHTState, target: Target, values: Values, noise: Tensor
    ) -> tuple[SGNHTState, Evaluation]:
        lr, friction = values["lr"], values["friction"]
        mass, temperature = values["mass"], values["temperature"]
        position, momentum, xi = state
        gradient, evaluation = target.grad(position)
        momentum = kick(momentum, gradient, lr)
        position = drift(position, momentum, mass, lr / 2)
        xi = xi + _heating(momentum, values) / 2
        lr_xi = lr * torch.where(temperature > 0, xi, friction)
        spread = torch.sqrt(2 * lr * friction * mass * temperature)
        spread = spread * torch.sqrt(_mean_decay(2 * lr_xi))
        momentum = torch.exp(-lr_xi) * momentum + spread * noise[0]
        xi = xi + _heating(momentum, values) / 2
        position = drift(position, momentum, mass, lr / 2)
        return SGNHTState(position, momentum, xi), evaluation


def _heating(momentum: Tensor, values: Values) -> Tensor:
    """lr (|p|^2 / (m T d) - 1), 0-d: the rise of the thermostat's friction xi over a time of lr.
    Only the d elements whose temperature is above 0 count; 0 if there are none.

    Args:
        momentum: p, `[D]`.
        values: hyperparameters of the step by name: `lr`, `mass`, `temperature` (divided by N, the
            number of rows of the data).
    """
    lr, mass, temperature = values["lr"], values["mass"], values["temperature"]
    thermal = (temperature > 0).expand_as(momentum)
    energy = momentum * momentum / (mass * temperature)
    heating = torch.where(thermal, lr * (energy - 1), 0)
    return heating.sum() / thermal.sum().clamp(min=1)


def _mean_decay(rate: Tensor) -> Tensor:
    """(1 - exp(-rate)) / rate, elementwise: the mean of exp(-rate t) over t in [0, 1]; 1 at rate
    0."""
    at_zero = rate == 0
    return torch.where(at_zero, 1, -torch.expm1(-rate) / torch.where(at_zero, 1, rate))
