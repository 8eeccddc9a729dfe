"""Improved variational online Newton: natural-gradient variational inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.kernels.hyperparameters import Hyper, Hyperparameters, Values
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.vi import entropies


def _averaging(step: int) -> float:
    """The default `forgetting` of `IVON` at a step: weight of the past curvature in its running
    mean, which rises to 1 - 1e-5, so that later steps count more."""
    return 1 - max(1e-5, 2 / (20 + step))


class IVONState(NamedTuple):
    """State of IVON, four vectors `[D]`.

    Attributes:
        position: mean of the Gaussian, in unconstrained parameters.
        curvature: h, the precision of the Gaussian times T, with T the temperature divided by N,
            the number of rows of the data: the sd is sqrt(T / h).
        momentum: running mean of the gradient of the log joint divided by N.
        weight: sum of the weights in that running mean, by which it is divided.
    """

    position: Tensor
    curvature: Tensor
    momentum: Tensor
    weight: Tensor


@dataclass(frozen=True, kw_only=True)
class IVON(Hyperparameters):
    """Improved variational online Newton (Shen et al. 2024) for a diagonal Gaussian:

        theta = m + sd eps,    sd = sqrt(T / h),    g = gradient of log joint / N at theta
        p'    = momentum p + (1 - momentum) g
        ĥ     = -g eps / sd                                     (of mean E[-Hessian])
        h'    = h + (1 - forgetting) (ĥ - h) + (1 - forgetting)^2 (ĥ - h)^2 / (2 h)
        m'    = m + lr (p' / w') / h'

    with N the number of rows of the data, T the temperature divided by N, eps standard normal and
    w' the sum of the weights in p', as in Adam. The square keeps h positive. The step follows the
    natural gradient, at the cost of Adam. The prior is part of g, so there is no weight decay.

    With V the variance of a row's gradient, the square makes h too large, relatively, by about
    (1 - forgetting) (1 + N V / (2 B h)).  At a constant lr the mean fluctuates with a variance of
    lr N V / (2 B h) posterior variances: let lr fall.

    Args:
        lr: the step size, as a factor on Newton's step.
        momentum: the weight of past gradients in the running mean of gradients.
        forgetting: the weight of past curvature; by default 1 - 2 / (20 + step), which averages
            over the later steps and rises to the published 1 - 1e-5.
        first_curvature: h at the start; 1 is the precision of N rows with unit information each.
        temperature: 1 approximates the posterior; below 1, the Gaussian is narrower.
    """

    lr: Hyper = 0.1
    momentum: Hyper = 0.9
    forgetting: Hyper = _averaging
    first_curvature: Hyper = 1.0
    temperature: Hyper = 1.0

    normals: ClassVar[int] = 1
    may_be_zero: ClassVar[tuple[str, ...]] = ("temperature", "momentum")

    def init(self, position: Tensor, values: Values, noise: Tensor) -> IVONState:
        zero = torch.zeros_like(position)
        curvature = zero + values["first_curvature"].to(position.dtype)
        return IVONState(position, curvature, zero, zero)

    def update(
        self, state: IVONState, target: Target, values: Values, noise: Tensor
    ) -> tuple[IVONState, Evaluation]:
        mean, curvature, momentum, weight = state
        sd = torch.sqrt(values["temperature"] / curvature)
        gradient, evaluation = target.grad(mean + sd * noise[0])
        momentum = momentum + (1 - values["momentum"]) * (gradient - momentum)
        weight = weight + (1 - values["momentum"]) * (1 - weight)
        is_random = torch.as_tensor(values["temperature"] > 0, device=mean.device)  # not points
        surprise = -gradient * noise[0] / torch.where(is_random, sd, 1) - curvature
        change = is_random * (1 - values["forgetting"]) * surprise
        curvature = curvature + change + change * change / (2 * curvature)
        total = getattr(target, "total", torch.sum)  # includes elements on other processes
        entropy = total(entropies(values["temperature"], sd.log()))
        bound = evaluation.log_joint + target.num_data * entropy
        mean = mean + values["lr"] * momentum / (weight * curvature)
        state = IVONState(mean, curvature, momentum, weight)
        return state, evaluation._replace(log_joint=bound)
