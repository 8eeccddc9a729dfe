"""Extrapolation of a run's variance to lr = 0, from the runs at lr and at lr/2.

A bias that falls as lr^p is 1/2^p as large at lr/2, so it is the difference of the two runs times
2^p / (2^p - 1) (Richardson's extrapolation).  Minibatch noise and a finite step act together, and
how much of the noise shuffling cancels depends on lr, so no single order p holds.  On a Gaussian
the kernel's stationary variance is known exactly, for batches drawn anew or shuffled
(kernels/gaussian.py).  It gives the fraction of the bias that remains at lr/2, and so p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.kernels import Kernel
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.run.run import RunPlan

#: Iterations of the variance at lr = 0, on which the order depends and which depends on the order.
_ROUNDS = 20
#: Least variance at lr = 0, as a fraction of that at lr.
_LEAST_VARIANCE = 0.01
#: Relative differences of variances up to this are rounding.
_ROUNDED_GAP = 1e-6


class Law(NamedTuple):
    """How the variance of each element of a Gaussian depends on the sampler's step size, compared
    at lr and lr/2.

    Attributes:
        gap: 1 - (variance at lr/2) / (variance at lr), `[elements]`.
        order: p, where 2^p = (bias at lr) / (bias at lr/2), `[elements]`; NaN without bias.
    """

    gap: Tensor
    order: Tensor


def gaussian_law(plan: RunPlan, noise: Tensor, at_lr: Tensor, at_half: Tensor) -> Law:
    """The dependence of each latent element's variance on the step size, by the theory of the
    sampler's kernel on a Gaussian, for comparison with the draws. The Gaussian has the variances of
    the draws, extrapolated to lr = 0.

    Args:
        plan: plan of the run.
        noise: variance of the minibatch gradient of log joint / N, `[latents]`.
        at_lr: unconstrained variances of the draws at lr, `[latents]`.
        at_half: unconstrained variances of the draws at lr/2, `[latents]`.
    """
    kernel = plan.kernel
    means = {name: column[plan.steps.kept].mean(0) for name, column in plan.columns.items()}
    values = plan.problem.engine.latent_values(means)
    half, temperature = {**values, "lr": values["lr"] / 2}, values["temperature"]
    mass = values.get("mass", torch.ones((), dtype=torch.float64)) * torch.ones_like(at_lr)
    epoch = plan.problem.epoch(plan.sampling)
    exact, least = at_half, _LEAST_VARIANCE * at_lr
    gap = order = torch.full_like(at_lr, torch.nan)
    for _ in range(_ROUNDS):
        precision = temperature / (exact * mass)  # in units where the mass is 1
        long, short = (
            _stationary_variance(kernel, v, precision, noise / mass, epoch) for v in (values, half)
        )
        gap = (long - short) / long
        bias = long - temperature / precision
        factor = torch.where(gap.abs() > _ROUNDED_GAP, bias / (long - short), torch.nan)
        order = torch.where(factor > 1, (factor / (factor - 1)).log2(), torch.nan)
        exact = (at_lr - factor.nan_to_num(0.0) * (at_lr - at_half)).maximum(least)
    return Law(gap, order)


def _stationary_variance(
    kernel: Kernel, values: Values, precision: Tensor, noise: Tensor, epoch: int | None
) -> Tensor:
    """The variance of each latent element in the sampler's stationary distribution on a Gaussian
    posterior, by theory, `[latents]`; NaN where the step size is not stable.

    Args:
        kernel: the sampler's kernel, whose theory is known.
        values: hyperparameters of the sampler's kernel by name.
        precision: precision of the Gaussian divided by N, `[latents]`.
        noise: variance of (minibatch gradient / N), `[latents]`.
        epoch: number of batches of an epoch; None if batches are drawn with replacement, or are all
            rows.
    """
    assert kernel.theory is not None  # otherwise there is no law
    settled = kernel.theory.linearize(kernel, values, noise)
    chain = GaussianChain.from_kernel(settled.kernel, settled.values, precision)
    variance = chain.covariance(settled.gradient_noise, epoch)[:, 0, 0]
    return torch.where(chain.stable, variance, torch.nan)


def choose_orders(ratio: Tensor, law: Law | None, plan: RunPlan) -> tuple[Tensor, Tensor]:
    """How to extrapolate the variance of each of a site's elements to lr = 0: (p, the power of lr
    with which the bias falls; whether the variance is linear in lr^p, otherwise the precision is),
    tensors in the shape of `ratio`.

    The power is that of the law if the law explains the observed ratio, to within a factor of 2.
    Otherwise it is the sampler's order, or 1 if minibatch noise raises the temperature by an
    unknown amount.

    Args:
        ratio: (variance at lr) / (variance at lr/2), of each element of a site.
        law: how variances of the site's unconstrained elements depend on lr; None if it is not
            known.
        plan: plan of the run.
    """
    theory, in_batches = plan.kernel.theory, plan.problem.data.batch_size is not None
    is_unknown = theory is None or (in_batches and theory.heated and law is None)
    order = 1 if theory is None or is_unknown else theory.order
    orders = torch.full_like(ratio, order)
    if law is None:  # heat of minibatches adds to the variance
        return orders, torch.full_like(ratio, in_batches and order == 1, dtype=torch.bool)
    if law.gap.shape != ratio.shape:  # constrained elements are others, as in a simplex
        law = Law(*(x.nanmean().expand_as(ratio) for x in law))
    explained = (1 - 1 / ratio) / law.gap
    explains = (explained > 0.5) & (explained < 2) & law.order.isfinite()
    return torch.where(explains, law.order, orders), explains


def bias_factor(order: Tensor) -> Tensor:
    """The factor by which to multiply (result at lr) - (result at lr/2) to get the bias at lr,
    elementwise: 2^p / (2^p - 1).

    Args:
        order: p, the power of lr with which the bias falls.
    """
    return 2.0**order / (2.0**order - 1)


def extrapolate_sd(ratio: Tensor, order: Tensor, in_variance: Tensor) -> Tensor:
    """The ratio (sd at lr) / (sd at lr = 0) of each element, by which a finite step size inflates
    the sd.

    Args:
        ratio: (variance at lr) / (variance at lr/2).
        order: power of lr with which the bias falls.
        in_variance: whether the variance is linear in lr^order; otherwise the precision is.
    """
    factor, least = bias_factor(order), torch.full_like(ratio, _LEAST_VARIANCE)
    of_variance = 1 - factor * (1 - 1 / ratio.maximum(least))
    of_precision = 1 + factor * (ratio - 1)
    inflation = torch.where(
        in_variance, 1 / of_variance.maximum(least), of_precision.maximum(least)
    )
    return inflation.sqrt()
