"""The temperature of a run's momenta, beside the one that its step size implies.

N p^2 / (m T) is 1 on average in continuous time.  A finite step may hold momenta at another value
while positions are nearly right: for SGHMC it is 4 / (4 - 2 e f - e^2 L / m) on a Gaussian of
precision L over N.  The expected value is read out of the kernel's own update.  An excess is heat:
from minibatches, or from a step that is too long for the posterior's shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.diagnostics.temperature import Virial
from pyro_scale.engine.draws import Draws
from pyro_scale.engine.step import Engine
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.kernel import Kernel
from pyro_scale.run.measurements import GradientNoise, Kinetic
from pyro_scale.run.problem import Problem

#: The flattest that a direction is taken for, as lr^2 L / m: below, momenta are those of free ones.
_FREE = 1e-6
#: The least part of the temperature that draws are taken to have.
_COLDEST = 0.1
#: Elements at a time, for the processor's cache.
_ELEMENTS_AT_ONCE = 2**13


def kinetic(
    problem: Problem,
    draws: Draws,
    values: Mapping[str, Tensor],
    noise: GradientNoise | None,
    virial: Virial | None,
) -> Kinetic | None:
    """What the momenta of finished chains say; None for a method without, or where none were seen.

    Args:
        problem: of the run.
        draws: of the run.
        values: the hyperparameters', on average over the draws.
        noise: of minibatches.
        virial: what gradients at the draws say.
    """
    if draws.kinetic is None:
        return None
    measured = draws.kinetic[draws.finished]
    measured = measured[:, measured.isfinite().all(-1).all(0)]
    if not measured.numel():
        return None
    precision = _precision(problem, values, noise, virial)
    if precision is None:
        unknown = torch.full(measured.shape[-1:], torch.nan, dtype=torch.float64)
        return Kinetic.of(measured, unknown)
    engine, latents = problem.engine, problem.log_posterior.latents

    def expect() -> Tensor:
        of_elements = _expect(engine, values, precision)
        return torch.stack([of_elements[engine.layout.slices()[name]].mean() for name in latents])

    return Kinetic(measured, expect)


def _precision(
    problem: Problem,
    values: Mapping[str, Tensor],
    noise: GradientNoise | None,
    virial: Virial | None,
) -> Tensor | None:
    """Each element's precision L_ii over N, `[latents]`: where the law is exp(log joint / T), the
    gradient of the log joint over N has the variance T L_ii / N.  T is the draws' own temperature,
    which is not quite the one asked for."""
    if virial is None or (noise is None and not virial.whole):
        return None
    count = problem.engine.num_latents
    square, heat = virial.mean_square[:count], virial.of_elements[:count]
    if not virial.whole and noise is not None:
        square = (square - noise.variance).clamp(min=0)
    return square * problem.engine.density.num_data / heat.maximum(_COLDEST * values["temperature"])


def _expect(engine: Engine, values: Mapping[str, Tensor], precision: Tensor) -> Tensor:
    """The momentum's variance over m T / N, `[latents]`, on a Gaussian of such precisions.

    To first order in lr^2 L the variance depends on L_ii alone, however elements are correlated.
    """
    kernel = engine.kernel
    if kernel.theory is None:
        return torch.full_like(precision, torch.nan)
    values = engine.latent_values(values)
    blocks = torch.arange(len(precision)).split(_ELEMENTS_AT_ONCE)
    parts = [slice(int(block[0]), int(block[-1]) + 1) for block in blocks]
    return torch.cat([_of_some(kernel, _at(values, part), precision[part]) for part in parts])


def _at(values: Mapping[str, Tensor], part: slice) -> dict[str, Tensor]:
    """Values of some elements, where these differ."""
    return {name: value[part] if value.dim() else value for name, value in values.items()}


def _of_some(kernel: Kernel, values: Mapping[str, Tensor], precision: Tensor) -> Tensor:
    """The same of some elements."""
    assert kernel.theory is not None
    settled = kernel.theory.linearize(kernel, values, torch.zeros_like(precision))
    steepness = precision / values["mass"]  # in units where the mass is 1
    steepness = steepness.maximum(_FREE / values["lr"].square() * torch.ones_like(steepness))
    chain = GaussianChain.from_kernel(settled.kernel, settled.values, steepness)
    variance = chain.covariance(torch.zeros_like(steepness))[:, 1, 1]
    return torch.where(chain.stable, variance / values["temperature"], torch.nan)
