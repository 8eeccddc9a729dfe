"""Step sizes that a kernel's theory suggests for Gaussian posteriors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from pyro_scale.errors import ArgumentError
from pyro_scale.kernels import Kernel
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.tuning.policy import STEP_SIZE

#: Reductions of the step size by 10%, at most, in the search for a stable one.
_MOST_REDUCTIONS = 400


def chain_at(kernel: Kernel, lr: float, precision: float = 1.0) -> GaussianChain:
    """The linear Gaussian process that the sampler's kernel follows at step size `lr` on a Gaussian
    of one dimension, at temperature 1; from it, stability and the bias of the variance are read.

    Args:
        kernel: sampler's kernel, whose own step size is not used.
        lr: step size.
        precision: precision of the Gaussian, divided by N.
    """
    theory = kernel.theory
    assert theory is not None
    one = torch.ones(1, dtype=torch.float64)
    values: Values = {**dataclasses.replace(kernel, lr=lr).values(0), "temperature": one[0]}
    settled, values, _ = theory.linearize(kernel, values, torch.zeros_like(one))
    return GaussianChain.from_kernel(settled, values, one * precision)


def largest_stable_lr(kernel: Kernel, precision: float) -> float:
    """The largest step size, to within 10% and at most 10, at which the sampler's kernel is stable
    on a Gaussian whose precision (curvature) divided by N is `precision`."""
    lr = 10.0
    for _ in range(_MOST_REDUCTIONS):
        if bool(chain_at(kernel, lr, precision).stable.all()):
            break
        lr /= 1.1
    return lr


def longest_whitened_lr(kernel: Kernel) -> float:
    """The longest step size for whitened coordinates: the sampler's kernel is stable on a standard
    normal, and the sd that it samples there has nearly no bias. To three digits.

    Raises:
        ArgumentError: no step size is stable and accurate on a standard normal.
    """
    theory = kernel.theory
    assert theory is not None
    for exponent in torch.linspace(0, -3, 61, dtype=torch.float64):
        lr = min(STEP_SIZE.longest * 10 ** float(exponent), theory.largest_lr)
        chain = chain_at(kernel, lr)
        if bool(chain.stable.all()):
            sd = float(chain.covariance(torch.zeros(1, dtype=torch.float64))[0, 0, 0]) ** 0.5
            if abs(math.log(sd)) <= STEP_SIZE.sd_bias:
                return float(f"{lr:.3g}")
    raise ArgumentError("lr='auto': no step size samples a standard normal; pass a number for lr")


def kernel_for_whitened(kernel: Kernel, lr: bool, friction: bool) -> Kernel:
    """The sampler's kernel for the first steps in whitened coordinates: with the longest step size
    there, and the friction at which all directions relax fastest. Unchanged if it accepts or
    rejects proposals.

    Args:
        kernel: the kernel as the user set it.
        lr: whether the step size is to be replaced.
        friction: whether the friction is to be replaced.
    """
    if friction and hasattr(kernel, "friction") and not kernel.adjusted:
        changes: dict[str, Any] = {"friction": STEP_SIZE.friction}
        kernel = dataclasses.replace(kernel, **changes)
    if lr and not kernel.adjusted:
        kernel = dataclasses.replace(kernel, lr=longest_whitened_lr(kernel))
    return kernel
