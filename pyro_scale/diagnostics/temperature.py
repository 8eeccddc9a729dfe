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

Gradients of all rows cost much, and an element's part is nearly proportional to (w - c)_i^2, which
costs nothing.  So gradients are taken at some draws only, until what the regression of parts on
(w - c)_i^2 leaves unexplained adds no more to the error than the draws themselves; the parts of
many more draws are predicted by it, and corrected by the residuals of those with gradients (double
sampling; Cochran 1977, chapter 12; the difference estimator of Saerndal et al. 1992, chapter 6).

A site may be right on average while one of its elements is not.  Long steps and minibatches heat an
element in proportion to its mean squared gradient, so the element where that is largest, the
steepest, is reported by itself.

Momenta have a temperature by their variance: N p^2 / (m T) is 1 on average in continuous time.  A
finite step may keep it at another value although positions are nearly right: for SGHMC it is
4 / (4 - 2 e f - e^2 L / m) on a Gaussian of precision L divided by N.  The expected value comes
from the kernel's own update.  An excess is heat, from minibatches or from a step that is too long.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.online_moments import Sums
from pyro_scale.core.thread_count import Arithmetic
from pyro_scale.data.batches import Batches, WholeData
from pyro_scale.data.sources import OwnSubsamples, TensorData
from pyro_scale.engine.draws import Draws
from pyro_scale.engine.step import Engine
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.run.measurements import GradientNoise, Kinetic
from pyro_scale.run.problem import Problem
from pyro_scale.storage.lazy_draws import Positions, spread

#: Numbers that gradients at several draws may make; most are in memory at once.  Fewer would make
#: blocks of small models whose Python takes longer than their arithmetic.
_NUMBERS_AT_ONCE = 2**23
#: Least lr^2 L / m of a direction: flatter ones have the momenta of free motion.
_FLATTEST = 1e-6
#: Least fraction of the requested temperature that draws are assumed to have.
_COLDEST = 0.1
#: Elements whose laws are computed at a time, to stay in the processor's cache.
_ELEMENTS_AT_ONCE = 2**13


@dataclass(frozen=True, kw_only=True)
class GradientWork:
    """Limits on the number of gradients that are computed after a run to measure the temperature of
    its draws."""

    #: Draws at which gradients are taken: at most; and at least, whatever the work: on a Gaussian,
    #: a temperature from so few has a standard error of 0.09.
    most_draws: int = 4000
    enough: int = 256
    #: Work of all gradients, in draws x rows x (D + params that take as long as the rest of a row):
    #: about half a second on one core.
    most: int = 2**28
    params_per_row: int = 32
    #: Draws of a model that is evaluated at one draw at a time.
    one_by_one: int = 64


GRADIENT_WORK = GradientWork()


class Virial(NamedTuple):
    """The virial temperature of draws (the product of distance from the mean and gradient; the
    requested temperature if all is right), from gradients at some of the draws.

    Attributes:
        parts: what each draw contributes, `[finished chains, draws, sites, 2]`: the mean over a
            site's elements, and the contribution of its steepest element. The mean over draws is
            the temperature, and their scatter gives its error.
        num_draws: number of independent draws that would have about these errors: of those at
            which gradients were taken, or of all if their squared distances explain most.
        of_elements: temperature of each element, `[D]`.
        errors: standard errors of `of_elements`, `[D]`.
        mean_square: mean squared gradient of the log joint divided by N, `[D]`.
        is_exact: whether gradients are of all rows, without noise.
    """

    parts: Tensor
    num_draws: int
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
    work: GradientWork = GRADIENT_WORK,
    temperature: float = 1.0,
) -> Virial:
    """Measures the temperature of a run's draws by the virial theorem, from the products of
    distance from the mean and gradient, on batches that the draws have not seen; to detect chains
    that minibatches or long steps have heated.

    Args:
        problem: model and engine of the run.
        positions: draws of the finished chains; some of them are used, evenly spread.
        finished: numbers of these chains.
        batches: batches of the run.
        step: first step whose batch neither the run nor another measurement has used.
        noise: variance of the minibatch gradient, `[latents]`, whose largest elements are the
            steepest; None to take those with the largest gradients at the first draws.
        work: limits on the number of gradients.
        temperature: the requested temperature.
    """
    engine, batches, size = _for_gradients(problem, batches, work)
    is_exact, chains = isinstance(batches, WholeData), torch.tensor(finished)
    most = _most_gradients(problem, positions, size, step, work)
    seen = _choose_draws(positions, most, work.most_draws if is_exact else 0)
    cloud = _Cloud.from_draws(positions, seen)
    slices = [engine.layout.slices()[name] for name in problem.log_posterior.latents]
    steepest = _largest(noise, slices) if noise is not None and noise.any() else None
    sample = _Sample(engine, batches, positions, chains, seen, cloud, problem.positions.device)
    order = _evenly_from_the_first(len(seen))[:most] if is_exact else torch.arange(len(seen))
    with Arithmetic() as counted:
        sample.measure(order[:1], step)
    # on all rows, one draw of each chain takes almost as long as two
    at_once = max(1 + is_exact, _NUMBERS_AT_ONCE // counted.numbers)
    enough, every = -(-work.enough // len(chains)), len(seen) * len(chains)
    step, taken, measured, is_explained = step + 1, 0, [], False
    totals = torch.zeros(8, engine.layout.size, dtype=torch.float64)
    for places in order.split(min(at_once, enough)):
        parts, squares, distances = sample.measure(places, step)
        step, taken = step + len(places), taken + len(places)
        count = taken * len(chains)
        _add_moments(totals, parts, squares, distances)
        steepest = _largest(squares.sum((0, 1)), slices) if steepest is None else steepest
        measured.append(_by_site(parts, slices, steepest))
        if is_exact and taken >= enough:
            of_parts, _ = _regressions(totals / count)
            if is_explained := of_parts.explains(taken / len(seen), temperature):
                break
    assert steepest is not None
    of_parts, of_squares = _regressions(totals / count)
    of_sites = sample.complete(torch.cat(measured, 1), order[:taken], of_parts, slices, steepest)
    return Virial(
        parts=of_sites,
        num_draws=math.ceil((every if is_explained else count) / cloud.time.median()),
        of_elements=of_parts.predict(1.0),
        errors=of_parts.errors(count, every, temperature) * cloud.time**0.5,
        mean_square=of_squares.predict(1.0).clamp(min=0),
        is_exact=is_exact,
    )


class _Cloud(NamedTuple):
    """Where draws are, on average over the chains.

    Attributes:
        mean: mean of the draws, `[D]`.
        variance: variance of the draws, `[D]`, above 0.
        block: number of draws of each chain whose moments fit into memory at a time.
        time: autocorrelation time of the squared distances from the mean, in draws, `[D]`.
    """

    mean: Tensor
    variance: Tensor
    block: int
    time: Tensor

    @classmethod
    def from_draws(cls, positions: Positions, places: Tensor) -> _Cloud:
        """The cloud of the draws at `places` of every chain, of positions `[chains, draws, D]`."""
        chains, _, size = positions.shape
        # moments take four copies in double precision
        block = max(1, _NUMBERS_AT_ONCE // (16 * size * chains))
        every = torch.arange(chains)[:, None]
        sums = (Sums.from_draws(positions[every, part]) for part in places.split(block))
        total = functools.reduce(Sums.__or__, sums).pool()
        mean = total.mean[0].to(positions[0, 0].dtype)
        variance = (total.squares / total.number)[0].clamp(min=torch.finfo(mean.dtype).tiny)
        cloud = cls(mean, variance, block, torch.ones_like(total.mean[0]))
        # batch means: of about sqrt(n) batches of sqrt(n) draws of each chain
        count = math.isqrt(len(places))
        if count < 8:
            return cloud
        batches = torch.zeros(chains, count, size, dtype=torch.float64)
        squares = torch.zeros(size, dtype=torch.float64)
        for part in torch.arange(len(places)).split(block):
            distances = cloud.squared_distances(positions[every, places[part]])
            batches.index_add_(1, part * count // len(places), distances)
            squares += distances.square().sum((0, 1))
        of_draws = squares / (chains * len(places)) - 1
        of_means = (batches * count / len(places)).var((0, 1))
        time = len(places) / count * of_means / of_draws.clamp(min=torch.finfo(torch.float64).eps)
        return cloud._replace(time=time.nan_to_num(1.0, 1.0, 1.0).clamp(1, chains * len(places)))

    def squared_distances(self, draws: Tensor) -> Tensor:
        """Squared distance of each element of draws `[..., D]` from the mean over the variance,
        `[..., D]`, in double precision; 1 on average."""
        return (self.mean - draws).double().square_().div_(self.variance)


@dataclass(frozen=True)
class _Sample:
    """Draws of a run, and what their gradients need.

    Attributes:
        engine: engine that computes the gradients.
        batches: minibatches of the gradients.
        positions: draws of the finished chains, `[chains, draws, D]`.
        chains: numbers of these chains.
        seen: indices of the draws, the same for every chain.
        cloud: mean and variance of these draws.
        device: device of the model.
    """

    engine: Engine
    batches: Batches
    positions: Positions
    chains: Tensor
    seen: Tensor
    cloud: _Cloud
    device: torch.device

    def draws(self, places: Tensor) -> Tensor:
        """The draws at `places` among those seen, of every chain, `[chains, n, D]`."""
        return self.positions[torch.arange(len(self.chains))[:, None], self.seen[places]]

    def measure(self, places: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """(Contribution of each draw and element to the temperature; squared gradient of the log
        joint divided by N; squared distance from the mean over the variance), `[chains, n, D]`
        each, in double precision, of the draws at `places` among those seen, on the minibatches
        from `step` on."""
        changing = self.batches.take(step, step + len(places))
        changing = pytree.tree_map(lambda leaf: leaf[self.chains].flatten(0, 1), changing)
        batch, draws = self.batches.batch(self.batches.fixed, changing), self.draws(places)
        gradient = self.engine.gradient(draws.flatten(0, 1).to(self.device), batch).cpu()
        away, along = self.cloud.mean - draws, _along(self.engine, gradient).view_as(draws)
        parts = (away * along).double() * self.engine.density.num_data
        squares = gradient.view_as(draws).double().square()
        return parts, squares, self.cloud.squared_distances(draws)

    def complete(
        self,
        measured: Tensor,
        places: Tensor,
        of_parts: _Regression,
        slices: Sequence[slice],
        steepest: Tensor,
    ) -> Tensor:
        """Contributions of all draws seen to the temperature, by site, `[chains, draws, sites, 2]`.
        Those of draws without gradients are predicted from their squared distances, and residuals
        of the others correct the mean.

        Args:
            measured: contributions of the draws with gradients, as `_by_site` returns them.
            places: indices of these draws among those seen.
            of_parts: regression by which the others are predicted.
            slices, steepest: arguments of `_by_site`.
        """
        if len(places) == len(self.seen):
            return measured[:, places.argsort()]
        blocks = torch.arange(len(self.seen)).split(self.cloud.block)
        distances = (self.cloud.squared_distances(self.draws(block)) for block in blocks)
        parts = [_by_site(of_parts.predict(part), slices, steepest) for part in distances]
        predicted = torch.cat(parts, 1)
        residuals = measured - predicted[:, places]
        predicted[:, places] += len(self.seen) / len(places) * residuals
        return predicted


def _add_moments(totals: Tensor, parts: Tensor, squares: Tensor, distances: Tensor) -> None:
    """Adds the sums over draws from which `_regressions` follow to `totals`, `[8, D]`: of parts, of
    their squares, and of parts times distances; the same three of `squares`; and of the distances
    and their squares.

    Args:
        totals: the sums over earlier draws, which are changed.
        parts, squares: two numbers of each draw and element, `[chains, draws, D]`.
        distances: squared distances of the draws' elements from the mean, `[chains, draws, D]`.
    """
    pairs = [(parts, parts), (parts, distances), (squares, squares), (squares, distances)]
    for place, numbers in zip((0, 3, 6), (parts, squares, distances), strict=True):
        totals[place] += numbers.sum((0, 1))
    for place, (one, other) in zip((1, 2, 4, 5, 7), [*pairs, (distances, distances)], strict=True):
        totals[place] += (one * other).sum((0, 1))


def _regressions(means: Tensor) -> tuple[_Regression, _Regression]:
    """The regressions of parts and of squares on squared distances, from the sums of `_add_moments`
    over their number of draws, `[8, D]`."""
    of_parts, of_squares, of_distances = means.split(3)
    return (
        _Regression.from_moments(*of_parts, *of_distances),
        _Regression.from_moments(*of_squares, *of_distances),
    )


class _Regression(NamedTuple):
    """Regression of a number of each draw on the draw's squared distance from the mean, element by
    element; all `[D]`.

    Attributes:
        mean: mean number of the draws with gradients.
        distance: mean squared distance of these draws; that of all draws is 1.
        slope: number per squared distance.
        variance: variance of the numbers.
        explained: fraction of the variance that squared distances explain.
    """

    mean: Tensor
    distance: Tensor
    slope: Tensor
    variance: Tensor
    explained: Tensor

    @classmethod
    def from_moments(
        cls,
        mean: Tensor,
        square: Tensor,
        product: Tensor,
        distance: Tensor,
        distance_square: Tensor,
    ) -> _Regression:
        """The regression from means over draws, `[D]` each: of the numbers, of their squares, of
        numbers times squared distances, of squared distances, and of their squares."""
        covariance, variance = product - mean * distance, square - mean.square()
        slope = covariance / (distance_square - distance.square()).clamp(min=1e-300)
        explained = (slope * covariance / variance.clamp(min=1e-300)).nan_to_num(0.0, 0.0, 0.0)
        slope = slope.nan_to_num(0.0, 0.0, 0.0)
        return cls(mean, distance, slope, variance, explained.clamp(max=1))

    def predict(self, distances: Tensor | float) -> Tensor:
        """Numbers of draws at squared distances `[..., D]`, `[..., D]`; at 1, the mean over all
        draws."""
        return self.mean + self.slope * (distances - self.distance)

    def explains(self, fraction: float, temperature: float) -> bool:
        """Whether, with gradients at this fraction of the draws, what is not explained adds no more
        to the squared error of any element than the draws themselves, or draws of a Gaussian at the
        requested temperature."""
        explained = self.explained * self.variance
        unexplained = self.variance - explained
        return bool((unexplained <= fraction * explained.clamp(min=2 * temperature**2)).all())

    def errors(self, count: int, more: int, temperature: float) -> Tensor:
        """Standard errors of the temperature of each element, `[D]`, if draws are independent:
        `count` with gradients, `more` with squared distances, of a run at the requested
        temperature."""
        # that of a Gaussian is 2 T^2; with few draws, small means have small spreads
        variance = self.variance.clamp(min=2 * temperature**2)
        return (variance * ((1 - self.explained) / count + self.explained / more)).sqrt()


def _evenly_from_the_first(count: int) -> Tensor:
    """The numbers 0, ..., count - 1 in an order of which every first part is nearly evenly spaced:
    by multiples of the golden ratio."""
    multiples = torch.arange(count, dtype=torch.float64) * ((5**0.5 - 1) / 2)
    return (multiples % 1).argsort().argsort()


def _choose_draws(positions: Positions, most: int, more: int) -> Tensor:
    """Indices of the draws that are used, evenly spread and the same for every chain: `most` of a
    chain, or `more` of all chains if they fit into memory."""
    chains, _, size = positions.shape
    return spread(positions, max(min(more, _NUMBERS_AT_ONCE // size) // chains, most))


def _most_gradients(
    problem: Problem, positions: Positions, size: int, step: int, work: GradientWork
) -> int:
    """The largest number of draws of each chain at which gradients are taken.

    Args:
        problem: model and engine of the run.
        positions: draws of the finished chains.
        size: rows of the batch at each draw.
        step: number of steps that the run took.
        work: limits on the number of gradients.
    """
    row_work = problem.log_posterior.model_info.row_work
    of_draw = size * row_work * (problem.engine.layout.size + work.params_per_row)
    most = max(work.enough, work.most // of_draw)
    most = min(work.most_draws, most) if problem.engine.vectorized else work.one_by_one
    per_chain = max(1, most // positions.shape[0])
    if not isinstance(problem.data, TensorData | OwnSubsamples):
        per_chain = min(per_chain, max(1, step // 10))  # read at most a tenth of the run's batches
    return min(per_chain, positions.shape[1])


def _by_site(parts: Tensor, slices: Sequence[slice], steepest: Tensor) -> Tensor:
    """Two columns for each site at every draw, `[..., sites, 2]`: the mean of `parts` over the
    site's elements, and the value of `parts` at its steepest element.

    Args:
        parts: a number for each element, `[..., D]`.
        slices: indices of each site's elements among the D.
        steepest: index, among the D, of each site's steepest element (that of the largest mean
            squared gradient), `[sites]`.
    """
    means = torch.stack([parts[..., place].mean(-1) for place in slices], -1)
    return torch.stack([means, parts[..., steepest]], -1)


def _along(engine: Engine, gradient: Tensor) -> Tensor:
    """The gradient in the direction in which whitened chains move, C g divided by the diagonal of
    C, `[draws, D]`, where C is the covariance by which the run's chains are whitened. The gradient
    itself if chains are not whitened, and for point-estimated sites.

    Args:
        engine: engine of the run.
        gradient: gradients g at the draws, `[draws, D]`.
    """
    whitening, count = engine.whitening, engine.num_latents
    if whitening is None:
        return gradient
    whitening = whitening.with_tensors([tensor.cpu() for tensor in whitening.tensors])
    along = whitening.push_forward(whitening.pull_back(gradient[..., :count]))
    return torch.cat([along / whitening.variance, gradient[..., count:]], -1)


def _largest(numbers: Tensor, slices: Sequence[slice]) -> Tensor:
    """The index, among all D elements, of the largest number of each site, `[sites]`.

    Args:
        numbers: a number for each element, such as a variance, `[D]`.
        slices: indices of each site's elements among the D.
    """
    return torch.tensor([place.start + int(numbers[place].argmax()) for place in slices])


def _for_gradients(
    problem: Problem, batches: Batches, work: GradientWork
) -> tuple[Engine, Batches, int]:
    """(The engine that computes gradients for the temperature, the batches that it uses, the number
    of rows of each batch).

    All rows if they are few enough for `work.enough` draws, so that gradients have no noise;
    control variates cancel there and are left out. Otherwise further batches of the run. Batches
    without control variates are noisy, and are avoided up to four times the work. The features of a
    frozen base have a fixed batch size, so they are never all rows.
    """
    engine, exact = problem.engine, problem.log_posterior
    if isinstance(problem.data, TensorData) and problem.features is None:
        total = rows.count(problem.data.arguments) or 1
        row_work = exact.model_info.row_work
        needed = work.enough * total * row_work * (engine.layout.size + work.params_per_row)
        if needed <= (4 * work.most if engine.density is exact else work.most):
            engine = dataclasses.replace(engine, density=exact)
            return engine, WholeData(problem.data.arguments), total
    return engine, batches, problem.batch_size


# ------------------------------------------------------------------ momenta


def kinetic(
    problem: Problem,
    draws: Draws,
    values: Mapping[str, Tensor],
    noise: GradientNoise | None,
    virial: Virial | None,
) -> Kinetic | None:
    """The kinetic temperature of the finished chains' momenta, relative to the requested one, with
    the value that the step size alone implies; None for samplers without momenta, or if no momenta
    were recorded.

    Args:
        problem: model and engine of the run.
        draws: draws of the run, with recorded momenta.
        values: hyperparameters of the sampler's kernel by name, averaged over the draws.
        noise: noise of minibatch gradients; None if it was not measured.
        virial: temperature of the draws; None if it was not measured.
    """
    if draws.kinetic is None:
        return None
    measured = draws.kinetic[draws.finished]
    measured = measured[:, measured.isfinite().all(-1).all(0)]
    if not measured.numel():
        return None
    engine, latents = problem.engine, problem.log_posterior.latents
    if virial is None or (noise is None and not virial.is_exact) or engine.kernel.theory is None:
        unknown = torch.full(measured.shape[-1:], torch.nan, dtype=torch.float64)
        return Kinetic.of(measured, unknown)
    variance = torch.zeros(()) if noise is None or virial.is_exact else noise.variance
    precision = _precision(engine, values["temperature"], virial, variance)

    def expect() -> Tensor:
        of_elements = _expected_kinetic(engine, values, precision)
        return torch.stack([of_elements[engine.layout.slices()[name]].mean() for name in latents])

    return Kinetic(measured, expect)


def _precision(engine: Engine, temperature: Tensor, virial: Virial, noise: Tensor) -> Tensor:
    """The precision L_ii of each latent element divided by N, `[latents]`, from the mean squared
    gradient.

    Under the law exp(log joint / T) the gradient of the log joint divided by N has variance T L_ii
    / N. T is the temperature of the draws, which is not quite the requested one.

    Args:
        engine: engine of the run.
        temperature: the requested temperature.
        virial: measured temperature of the draws.
        noise: variance of the gradients from which that was measured.
    """
    count = engine.num_latents
    square = (virial.mean_square[:count] - noise).clamp(min=0)
    heat = virial.of_elements[:count].maximum(_COLDEST * temperature)
    return square * engine.density.num_data / heat


def _expected_kinetic(engine: Engine, values: Mapping[str, Tensor], precision: Tensor) -> Tensor:
    """The kinetic temperature, relative to the requested one, that the sampler has at the run's
    step size on a Gaussian posterior without minibatches, of each latent element, `[latents]`.

    To first order in lr^2 L it depends on L_ii alone, however elements are correlated.

    Args:
        engine: engine of the run.
        values: hyperparameters of the sampler's kernel by name.
        precision: precision of each element divided by N, `[latents]`.
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
