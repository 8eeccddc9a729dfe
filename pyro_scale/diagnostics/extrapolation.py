"""The order in lr of a run's bias in variance, from the kernel's exact law on a Gaussian.

Minibatch noise and a finite step act together, and how much of the noise shuffling cancels depends
on lr.  So no single order holds.  On a Gaussian with the draws' own variances the kernel's law is
known exactly, for batches drawn anew or shuffled (kernels/gaussian.py).  It says how much of the
bias remains at half the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.kernels import Kernel
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.run.run import RunPlan

#: The variance at lr = 0 depends on the law, and that on it: so often is it put in again.
_ROUNDS = 20
#: Of a variance: the least part of it that is taken for the posterior's, and what is rounding.
LEAST_VARIANCE, _ROUNDED_GAP = 0.01, 1e-6


class Law(NamedTuple):
    """How variances differ between lr and lr/2, by element.

    Attributes:
        gap: 1 - the variance at lr/2 over that at lr.
        order: p of 2^p, the bias at lr over that at lr/2; NaN where there is no such thing.
    """

    gap: Tensor
    order: Tensor


def law_of(plan: RunPlan, noise: Tensor, own: Tensor, coupled: Tensor) -> Law:
    """What the kernel's exact law on a Gaussian says.

    Args:
        plan: of the run.
        noise: the variance of the minibatch gradient of the log joint over N, `[latents]`.
        own: unconstrained variances of the run's draws, `[latents]`.
        coupled: of those at half the step.
    """
    kernel, values = plan.kernel, _mean_values(plan)
    half, temperature = {**values, "lr": values["lr"] / 2}, values["temperature"]
    mass = values.get("mass", torch.ones((), dtype=torch.float64)) * torch.ones_like(own)
    epoch = plan.problem.epoch(plan.sampling)
    exact, least = coupled, LEAST_VARIANCE * own
    gap = order = torch.full_like(own, torch.nan)
    for _ in range(_ROUNDS):
        precision = temperature / (exact * mass)  # in units where the mass is 1
        at_lr, short = (
            _variance(kernel, v, precision, noise / mass, epoch) for v in (values, half)
        )
        bias = at_lr - temperature / precision
        gap = (at_lr - short) / at_lr
        factor = torch.where(gap.abs() > _ROUNDED_GAP, bias / (at_lr - short), torch.nan)
        order = torch.where(factor > 1, (factor / (factor - 1)).log2(), torch.nan)
        exact = (own - factor.nan_to_num(0.0) * (own - coupled)).maximum(least)
    return Law(gap, order)


def _mean_values(plan: RunPlan) -> dict[str, Tensor]:
    """The run's values on average, of latents, in double precision."""
    values = {name: column[plan.steps.kept].mean(0) for name, column in plan.columns.items()}
    return plan.problem.engine.latent_values(values)


def _variance(
    kernel: Kernel, values: Values, precision: Tensor, noise: Tensor, epoch: int | None
) -> Tensor:
    """The stationary variance of positions, NaN where there is none."""
    assert kernel.theory is not None  # else there is no law
    settled = kernel.theory.linearize(kernel, values, noise)
    chain = GaussianChain.from_kernel(settled.kernel, settled.values, precision)
    variance = chain.covariance(settled.gradient_noise, epoch)[:, 0, 0]
    return torch.where(chain.stable, variance, torch.nan)
