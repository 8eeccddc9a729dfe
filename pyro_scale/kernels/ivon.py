"""Improved variational online Newton: natural-gradient variational inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.kernels.hyperparameters import Hyper, Hyperparameters, Values
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.vi import entropies


def _averaging(step: int) -> float:
    """The weight of the past in an average to which later steps count more."""
    return 1 - max(1e-5, 2 / (20 + step))


class IVONState(NamedTuple):
    """The Gaussian's mean, its precision in units of N / T, the gradient's running mean, each
    [D], and what part of that is known by now."""

    position: Tensor
    curvature: Tensor
    momentum: Tensor
    known: Tensor


@dataclass(frozen=True, kw_only=True)
class IVON(Hyperparameters):
    """Improved variational online Newton (Shen et al. 2024) for a diagonal Gaussian:

        theta = m + sd eps,    sd = sqrt(T / h),    g = gradient of log joint / N at theta
        p'    = momentum p + (1 - momentum) g
        ĥ     = -g eps / sd                                     (of mean E[-Hessian])
        h'    = h + (1 - forgetting) (ĥ - h) + (1 - forgetting)^2 (ĥ - h)^2 / (2 h)
        m'    = m + lr (p' / known') / h'

    with T the temperature over N, eps standard normal and known' the sum of p's weights, as in
    Adam.  The square keeps h positive.  The step is the natural gradient's, for the price of
    Adam's.  As the prior is in g, there is no weight decay of its own.

    With V the variance of a row's gradient, the square makes h too large by a part of about
    (1 - forgetting) (1 + N V / (2 B h)); and at a constant lr the mean moves about by
    lr N V / (2 B h) posterior variances: let lr fall.

    Args:
        lr: the step size in units of Newton's.
        momentum: the weight of past gradients.
        forgetting: the weight of past curvature; by default it rises to 1 - 1e-5, the published
            one, as the average over the latter steps: 1 - 2 / (20 + step).
        first_curvature: h at first; 1 is the precision of N rows that each know a param to 1.
        temperature: 1 is the posterior; below, it is colder.
    """

    lr: Hyper = 0.1
    momentum: Hyper = 0.9
    forgetting: Hyper = _averaging
    first_curvature: Hyper = 1.0
    temperature: Hyper = 1.0

    normals: ClassVar[int] = 1
    may_be_zero: ClassVar[tuple[str, ...]] = ("temperature", "momentum")

    def init(self, position: Tensor, values: Values, noise: Tensor) -> IVONState:
        nothing = torch.zeros_like(position)
        curvature = nothing + values["first_curvature"].to(position.dtype)
        return IVONState(position, curvature, nothing, nothing)

    def update(
        self, state: IVONState, target: Target, values: Values, noise: Tensor
    ) -> tuple[IVONState, Any]:
        mean, curvature, momentum, weight = state
        sd = torch.sqrt(values["temperature"] / curvature)
        gradient, evaluation = target.grad(mean + sd * noise[0])
        momentum = momentum + (1 - values["momentum"]) * (gradient - momentum)
        weight = weight + (1 - values["momentum"]) * (1 - weight)
        is_random = torch.as_tensor(values["temperature"] > 0, device=mean.device)  # points are not
        surprise = -gradient * noise[0] / torch.where(is_random, sd, 1) - curvature
        change = is_random * (1 - values["forgetting"]) * surprise
        curvature = curvature + change + change * change / (2 * curvature)
        total = getattr(target, "total", torch.sum)  # of elements on other processes, too
        entropy = total(entropies(values["temperature"], sd.log()))
        bound = evaluation.log_joint + target.num_data * entropy
        mean = mean + values["lr"] * momentum / (weight * curvature)
        state = IVONState(mean, curvature, momentum, weight)
        return state, evaluation._replace(log_joint=bound)
