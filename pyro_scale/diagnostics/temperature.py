"""The temperature of a run's draws, and that of its momenta.

Draws have a temperature by the virial theorem: if w has the law exp(log joint / T), then
E[-(w - c) d log joint / dw] = T for every element and any constant c, whatever the shape of the
law.  Gradients of batches that the draws have not seen make it sensitive to everything that heats
or cools a run: long steps, minibatch noise (less what shuffling cancels), and short warm-up.  The
condition is necessary, not sufficient.  On a Gaussian T is the variance relative to that at
temperature 1; on other laws it is a mean over directions.

The theorem also gives E[-(w - c)_i (A g)_i] = T A_ii, for the gradient g and any constant matrix A.
If chains are whitened by a covariance C, an element's part is -(w - c)_i (C g)_i / C_ii.  On a
Gaussian that is the squared distance from the mean over the variance, and its error does not grow
with correlations, as that of -(w - c)_i g_i does.

A site may be right on average while one of its elements is not.  Long steps and minibatches heat an
element in proportion to its mean squared gradient, so the element where that is largest, the
steepest, is reported by itself.

Momenta have a temperature by their variance: N p^2 / (m T) is 1 on average in continuous time.  A
finite step may keep it at another value although positions are nearly right: for SGHMC it is
4 / (4 - 2 e f - e^2 L / m) on a Gaussian of precision L over N.  The expected value comes from the
kernel's own update.  An excess is heat, from minibatches or from a step that is too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.data.batches import Batches, WholeData
from pyro_scale.data.sources import OwnSubsamples, TensorData
from pyro_scale.engine.draws import Draws
from pyro_scale.engine.step import Engine
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.run.measurements import GradientNoise, Kinetic
from pyro_scale.run.problem import Problem
from pyro_scale.storage.lazy_draws import Positions, spread

#: Draws at which gradients are taken: at most, so many that draws x rows x D is at most
#: `_MOST_WORK`, at least; and draws for which gradients of all rows must be affordable.
_MOST_DRAWS, _MOST_WORK, _LEAST_DRAWS, _ENOUGH = 4000, 2**28, 256, 200
#: The same for a model that is evaluated at one draw at a time.
_DRAWS_ONE_BY_ONE = 64
#: Numbers of params and rows in memory at once, and numbers that a model makes of a row, roughly.
_NUMBERS_IN_MEMORY, _NUMBERS_PER_ROW = 2**22, 64
#: Least lr^2 L / m of a direction: flatter ones have the momenta of free motion.
_FLATTEST = 1e-6
#: Least fraction of the requested temperature that draws are assumed to have.
_COLDEST = 0.1
#: Elements whose laws are computed at a time, to stay in the processor's cache.
_ELEMENTS_AT_ONCE = 2**13


class Virial(NamedTuple):
    """The virial temperature of draws, from gradients at some of them.

    Attributes:
        parts: each draw's part in the temperature, `[finished chains, draws, sites, 2]`: the mean
            over a site's elements, and the part of its steepest element.  The mean over draws is
            the temperature.
        of_elements: temperature of each element, `[D]`.
        errors: standard errors of `of_elements` if draws are independent, `[D]`.
        mean_square: mean squared gradient of the log joint over N, `[D]`.
        is_exact: whether gradients are of all rows, without noise.
    """

    parts: Tensor
    of_elements: Tensor
    errors: Tensor
    mean_square: Tensor
    is_exact: bool


def virial(
    problem: Problem,
    positions: Positions,
    finished: list[int],
    batches: Batches,
    step: int,
    noise: Tensor | None = None,
) -> Virial:
    """Measures the temperature of draws by the virial theorem.

    Args:
        problem: of the run.
        positions: draws of the finished chains; some of them are used, evenly spread.
        finished: numbers of these chains.
        batches: of the run.
        step: first step whose batch neither the run nor another measurement has used.
        noise: variance of the minibatch gradient, `[latents]`, whose largest elements are the
            steepest; None to take those with the largest gradients at the first draws.
    """
    engine, layout = problem.engine, problem.engine.layout
    chains = torch.tensor(finished)
    batches, size = _fresh_batches(problem, batches)
    affordable = max(_LEAST_DRAWS, _MOST_WORK // (size * layout.size))
    most = min(_MOST_DRAWS, affordable) if engine.vectorized else _DRAWS_ONE_BY_ONE
    per_chain = max(1, most // len(chains))
    if not isinstance(problem.data, TensorData | OwnSubsamples):
        per_chain = min(per_chain, max(1, step // 10))  # read at most a tenth of the run's batches
    chosen = spread(positions, per_chain)
    count, every = len(chains) * len(chosen), torch.arange(len(chains))[:, None]
    blocks = chosen.split(_draws_at_once(problem, size, len(chains)))
    center = torch.stack([positions[every, places].sum((0, 1)) for places in blocks]).sum(0) / count
    slices = [layout.slices()[name] for name in problem.log_posterior.latents]
    steepest = _largest(noise, slices) if noise is not None and noise.any() else None
    of_sites, totals = [], torch.zeros(3, layout.size, dtype=torch.float64)
    for places in blocks:
        draws = positions[every, places].flatten(0, 1)
        changing = batches.take(step, step + len(places))
        step += len(places)
        changing = pytree.tree_map(lambda leaf: leaf[chains].flatten(0, 1), changing)
        batch = batches.batch(batches.fixed, changing)
        gradient = engine.gradient(draws.to(problem.positions.device), batch).cpu()
        parts = (center - draws).mul_(_along(engine, gradient)).mul_(engine.density.num_data)
        squares = gradient.square().sum(0, dtype=torch.float64)
        steepest = _largest(squares, slices) if steepest is None else steepest
        means = torch.stack([parts[:, p].mean(-1, dtype=torch.float64) for p in slices], -1)
        both = torch.stack([means, parts[:, steepest].double()], -1)
        of_sites.append(both.unflatten(0, (len(chains), len(places))))
        sums = parts.sum(0, dtype=torch.float64), parts.square().sum(0, dtype=torch.float64)
        totals += torch.stack([*sums, squares])
    of_elements, squared_parts, mean_square = totals / count
    # the parts of a Gaussian have variance 2; with few draws, small means have small spreads
    errors = ((squared_parts - of_elements.square()).clamp(min=2) / count).sqrt()
    is_exact = isinstance(batches, WholeData)
    return Virial(torch.cat(of_sites, 1), of_elements, errors, mean_square, is_exact)


def _along(engine: Engine, gradient: Tensor) -> Tensor:
    """C g over the diagonal of C, `[draws, D]`, with the covariance C of the run's geometry; g
    itself without a geometry, and for point-estimated sites."""
    whitening, count = engine.whitening, engine.num_latents
    if whitening is None:
        return gradient
    whitening = whitening.with_tensors([tensor.cpu() for tensor in whitening.tensors])
    along = whitening.push_forward(whitening.pull_back(gradient[..., :count]))
    return torch.cat([along / whitening.variance, gradient[..., count:]], -1)


def _largest(numbers: Tensor, slices: Sequence[slice]) -> Tensor:
    """The place of each site's largest number, `[sites]`."""
    return torch.tensor([place.start + int(numbers[place].argmax()) for place in slices])


def _fresh_batches(problem: Problem, batches: Batches) -> tuple[Batches, int]:
    """Batches for the gradients, and the number of rows of each.

    All rows if they are few enough, so that gradients have no noise; otherwise further batches of
    the run.  The features of a frozen base have a fixed batch size, so they are never all rows.
    """
    if isinstance(problem.data, TensorData) and problem.features is None:
        total = rows.count(problem.data.arguments) or 1
        if total * problem.engine.layout.size * _ENOUGH <= _MOST_WORK:
            return WholeData(problem.data.arguments), total
    return batches, problem.batch_size


def _draws_at_once(problem: Problem, size: int, chains: int) -> int:
    """Draws of each chain that fit into memory at once, with `size` rows for each draw."""
    leaves = rows.leaves(problem.data.first())
    width = sum(leaf[0].numel() for leaf in leaves) + _NUMBERS_PER_ROW
    return max(1, _NUMBERS_IN_MEMORY // ((problem.engine.layout.size + size * width) * chains))


# ------------------------------------------------------------------ momenta


def kinetic(
    problem: Problem,
    draws: Draws,
    values: Mapping[str, Tensor],
    noise: GradientNoise | None,
    virial: Virial | None,
) -> Kinetic | None:
    """The temperature of the finished chains' momenta, and the one that the step size implies; None
    for methods without momenta, or if none were recorded.

    Args:
        problem: of the run.
        draws: of the run.
        values: mean hyperparameters over the draws.
        noise: of minibatch gradients.
        virial: temperature of the draws.
    """
    if draws.kinetic is None:
        return None
    measured = draws.kinetic[draws.finished]
    measured = measured[:, measured.isfinite().all(-1).all(0)]
    if not measured.numel():
        return None
    precision = _precision(problem, values, noise, virial)
    engine, latents = problem.engine, problem.log_posterior.latents
    if precision is None or engine.kernel.theory is None:
        unknown = torch.full(measured.shape[-1:], torch.nan, dtype=torch.float64)
        return Kinetic.of(measured, unknown)

    def expect() -> Tensor:
        of_elements = _expected_kinetic(engine, values, precision)
        return torch.stack([of_elements[engine.layout.slices()[name]].mean() for name in latents])

    return Kinetic(measured, expect)


def _precision(
    problem: Problem,
    values: Mapping[str, Tensor],
    noise: GradientNoise | None,
    virial: Virial | None,
) -> Tensor | None:
    """Precision L_ii over N of each latent element, `[latents]`; None if gradients' noise is not
    known.

    Under the law exp(log joint / T) the gradient of the log joint over N has variance T L_ii / N.
    T is the temperature of the draws, which is not quite the requested one.
    """
    if virial is None or (noise is None and not virial.is_exact):
        return None
    count = problem.engine.num_latents
    square, heat = virial.mean_square[:count], virial.of_elements[:count]
    if not virial.is_exact and noise is not None:
        square = (square - noise.variance).clamp(min=0)
    return square * problem.engine.density.num_data / heat.maximum(_COLDEST * values["temperature"])


def _expected_kinetic(engine: Engine, values: Mapping[str, Tensor], precision: Tensor) -> Tensor:
    """Kinetic temperature that the kernel's update has on a Gaussian of these precisions,
    `[latents]`.

    To first order in lr^2 L it depends on L_ii alone, however elements are correlated.
    """
    kernel, values, temperatures = engine.kernel, engine.latent_values(values), []
    assert kernel.theory is not None
    for start in range(0, len(precision), _ELEMENTS_AT_ONCE):
        part = slice(start, start + _ELEMENTS_AT_ONCE)
        of_part = {name: value[part] if value.dim() else value for name, value in values.items()}
        settled = kernel.theory.linearize(kernel, of_part, torch.zeros_like(precision[part]))
        steepness = precision[part] / of_part["mass"]  # in units where the mass is 1
        least = _FLATTEST / of_part["lr"].square() * torch.ones_like(steepness)
        chain = GaussianChain.from_kernel(settled.kernel, settled.values, steepness.maximum(least))
        variance = chain.covariance(torch.zeros_like(steepness))[:, 1, 1]
        temperature = torch.where(chain.stable, variance / of_part["temperature"], torch.nan)
        temperatures.append(temperature)
    return torch.cat(temperatures)
