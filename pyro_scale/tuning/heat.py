"""How much the noise of minibatches raises the temperature of chains ("heats" them), and how to
prevent it: a shorter step, control variates of second order, or larger batches, whichever takes the
fewest gradients of rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.core.whitening import DenseWhitening
from pyro_scale.curvature.chunks import chunks_of, is_row_wise
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.run.budget import rows_a_step
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.control_variates import with_curvature
from pyro_scale.tuning.gradient_noise import NUMBERS_AT_ONCE, first_batches, row_gradients
from pyro_scale.tuning.policy import GEOMETRY, NOISE


class RowNoise(NamedTuple):
    """Noise of minibatch gradients in whitened coordinates.

    Attributes:
        variance: variance of (minibatch gradient / N), in the direction where it is
            largest.
        largest: norm of the largest gradient of a single row, in nats, at one sd from the center
            along that gradient.
    """

    variance: float
    largest: float


class Heat(NamedTuple):
    """Effects of minibatch noise on chains at one step size and batch size.

    Attributes:
        added: relative rise of the temperature, in the direction where it is largest.
        kick: the largest change of a chain's momentum, in sds of the momentum, that the gradient of
            a single row of a batch causes far from the center.
    """

    added: float
    kick: float

    @property
    def lr_factor(self) -> float:
        """The factor, at most 1, by which to multiply the step size so that both effects stay
        within their limits (both are proportional to lr)."""
        added, kick = max(self.added, 1e-300), max(self.kick, 1e-300)
        return min(1.0, NOISE.most_heat / added, NOISE.most_kick / kick)

    @property
    def batch_factor(self) -> float:
        """The factor by which to multiply the batch size so that both effects just become
        negligible (both are proportional to 1/B); below 1 if batches may be smaller."""
        return max(self.added / NOISE.little_heat, self.kick / NOISE.most_kick)

    def times(self, factor: float) -> Heat:
        """Both effects multiplied by a factor, for another step size or batch size."""
        return Heat(self.added * factor, self.kick * factor)


class Cooled(NamedTuple):
    """A problem whose step size and batches are such that minibatches hardly raise the temperature
    of the chains.

    Attributes:
        problem: the problem with its new step size, density and batch size.
        passes: passes through the data that the measurements took.
        heat: effects of minibatches that are left; None if they are not known.
        far: distance from the center, in sds, at which kicks were measured.
    """

    problem: Problem
    passes: float
    heat: Heat | None
    far: float


def cool(problem: Problem, sampling: Sampling, full_data: FullDataDensity, far: float) -> Cooled:
    """Shortens the step until minibatches hardly raise the temperature of chains. Changes nothing
    if steps take all rows, or no theory says how minibatches act on this sampler.

    Control variates get second order if a draw then takes fewer gradients of rows. If the library
    chooses the batch size, batches become as small as possible, or are replaced by all rows.

    Args:
        problem: chains in whitened coordinates, with the longest step size and the largest batches.
        sampling: how the rows of batches are drawn.
        full_data: log density of all rows.
        far: distance from the center that chains reach, in sds.
    """
    theory = problem.engine.kernel.theory
    if problem.data.batch_size is None or theory is None or not theory.heated:
        return Cooled(problem, 0.0, None, far)
    heat = _measure_heat(problem, sampling, far)
    passes = _gradients_of_row(problem) + _order(problem)  # an anchor takes as many passes
    if _might_need_curvature(problem, heat):
        curved = with_curvature(problem, full_data)
        if curved is not None:
            curved_heat = _measure_heat(curved, sampling, far)
            passes += 1 + _gradients_of_row(curved)
            if _cost(curved, curved_heat) < _cost(problem, heat):
                problem, heat = curved, curved_heat
    if problem.chooses_batches and _cost(problem, heat) > problem.log_posterior.num_data:
        on_all_rows = problem.with_engine(density=problem.log_posterior).in_batches_of(None)
        return Cooled(on_all_rows, passes, Heat(0.0, 0.0), far)
    size = _batch_size(problem, heat)
    if heat is not None:
        problem = problem.with_lr(float(problem.engine.kernel.lr) * heat.lr_factor)
        heat = heat.times(heat.lr_factor * problem.batch_size / size)
    if size != problem.batch_size:
        problem = problem.in_batches_of(size)
    return Cooled(problem, passes, heat, far)


def with_fewest_rows(problem: Problem) -> Problem:
    """The problem with the smallest batches that the library may choose for it; unchanged if the
    user set the batch size, or steps take all rows."""
    if not problem.chooses_batches or problem.data.batch_size is None:
        return problem
    return problem.in_batches_of(min(NOISE.fewest_rows, problem.batch_size))


def stays_cool(cooled: Cooled, problem: Problem) -> bool:
    """Whether minibatches surely heat chains little after warm-up as well, so that the heating need
    not be measured again; decided by a bound. False if the bound cannot be computed.

    If directions are c times as long and the center is d sds away from the anchor, the noise of a
    gradient of order p is at most c (c + d)^p times as large in whitened coordinates.

    Args:
        cooled: problem and effects before warm-up.
        problem: the problem after warm-up, with other whitened coordinates and step size.
    """
    before, after = cooled.problem.engine, problem.engine
    density, old, new = before.density, before.whitening, after.whitening
    if cooled.heat is None or not isinstance(density, ControlVariates):
        return False
    if not (isinstance(old, DenseWhitening) and isinstance(new, DenseWhitening)):
        return False
    factor, num_data = old.factor.double(), problem.log_posterior.num_data
    stretch = torch.linalg.solve_triangular(factor, new.factor.double(), upper=False)
    longest = float(torch.linalg.matrix_norm(stretch, 2))
    way = (new.center - before.layout.flatten(density.anchor)[: len(factor)]).double()
    away = torch.linalg.solve_triangular(factor, way[:, None], upper=False).norm()
    further = longest + float(away) * num_data**0.5
    order = density.order
    more = longest * further**order
    heat = cooled.heat.times(float(after.kernel.lr) / float(before.kernel.lr))
    kick = heat.kick * (NOISE.far / cooled.far) ** order
    return heat.added * more**2 <= NOISE.little_heat and kick * more <= NOISE.most_kick


def _might_need_curvature(problem: Problem, heat: Heat | None) -> bool:
    """Whether it is worth measuring if control variates of second order are cheaper: those of first
    order, which the problem has, cost more than those of second order would at best. False without
    control variates of first order, or in many dimensions."""
    if _order(problem) != 1:
        return False
    least = NOISE.fewest_rows if problem.chooses_batches else problem.batch_size
    is_small = problem.engine.layout.size <= GEOMETRY.dense
    return is_small and _cost(problem, heat) > 2 * _gradients_of_row(problem) * least


def _cost(problem: Problem, heat: Heat | None) -> float:
    """The number of gradients of rows that it takes to move as far as one step does now, if step
    size and batch size are such that minibatches have little effect; to choose the cheaper of two
    problems.

    Args:
        problem: model and chains.
        heat: effects of minibatches at the present step size; None if they are not known.
    """
    lr_factor = 1.0 if heat is None else heat.lr_factor
    return _gradients_of_row(problem) * _batch_size(problem, heat) / lr_factor


def _gradients_of_row(problem: Problem) -> int:
    """The number of gradients that a step takes of each row in its batch: 1, or 2 or more with
    control variates."""
    return rows_a_step(problem) // problem.batch_size


def _order(problem: Problem) -> int:
    """The order of the problem's control variates, 1 or 2; 0 without. Gradients of single rows,
    after correction, grow with this power of the distance from the anchor."""
    density = problem.engine.density
    return density.order if isinstance(density, ControlVariates) else 0


def _batch_size(problem: Problem, heat: Heat | None) -> int:
    """The number of rows of a batch: the problem's own, or, if the library may choose it, the
    smallest power of two at which minibatches heat chains little (at most the problem's own)."""
    size = problem.batch_size
    if not problem.chooses_batches or heat is None:
        return size
    least = max(NOISE.fewest_rows, size * heat.batch_factor)
    return min(size, 2 ** math.ceil(math.log2(least)))


def _measure_heat(problem: Problem, sampling: Sampling, far: float) -> Heat | None:
    """Measures the effects of minibatches on chains at the step size of the sampler's kernel: the
    rise of the temperature and the largest kick by a single row. None if there are no gradients of
    single rows.

    Args:
        problem: chains in whitened coordinates, with minibatches.
        sampling: how the rows of batches are drawn.
        far: distance from the center at which a row's kick is measured, in sds.
    """
    kernel, order = problem.engine.kernel, _order(problem)
    noise = most_noise(problem, typical_places(problem), sampling, order)
    if noise is None:
        return None
    values, theory = problem.engine.kernel_values(kernel.values(0)), kernel.theory
    assert theory is not None

    def rise(variance: float) -> float:
        """Relative rise of the temperature caused by gradient noise of this variance (of
        gradient / N)."""
        added = theory.added_temperature(values, torch.tensor(variance, dtype=torch.float64))
        return float((added / values["temperature"]).max())

    of_row = noise.largest * far**order / problem.batch_size
    # kicks at every step heat by their squares over 2 lr, at a friction of about 1
    return Heat(rise(noise.variance), math.sqrt(2 * float(values["lr"]) * rise(of_row**2)))


def typical_places(problem: Problem) -> Tensor:
    """Points at a typical distance of draws from the center of the whitened coordinates, as
    unconstrained params `[places, D]`, at which the noise of minibatches is measured.

    They are not draws: the noise of a row with a direction of its own would depend on one random
    number. With random signs z, the noise is the average noise if gradients differ by z from those
    at the anchor (first order). If they differ by z^2, the average has E z^4 = 3, and signs are
    multiplied by 3^(1/4).
    """
    engine, positions = problem.engine, problem.positions
    assert engine.whitening is not None
    source = generator(problem.seed, 0, Purpose.SEARCH, 1)
    shape = NOISE.places, len(engine.whitening.tensors[0])
    signs = 2.0 * torch.randint(2, shape, generator=source) - 1
    sds = 3**0.25 if _order(problem) == 2 else 1.0
    length = sds / problem.log_posterior.num_data**0.5
    return engine.whitening.to_params((length * signs).to(positions))


def most_noise(
    problem: Problem, positions: Tensor, sampling: Sampling, order: int
) -> RowNoise | None:
    """The noise of minibatch gradients in whitened coordinates; None if there are no gradients of
    single rows.

    Every row is evaluated, at one of the positions, as a few rows may be the only ones that depend
    on a direction.

    Args:
        problem: chains in whitened coordinates, with minibatches.
        positions: unconstrained params typical of the posterior, `[positions, D]`.
        sampling: how the rows of batches are drawn.
        order: power of the distance from the center with which gradients of rows grow.
    """
    size, whitening = problem.data.batch_size, problem.engine.whitening
    assert size is not None
    assert whitening is not None
    num_data, num_latents = problem.log_posterior.num_data, problem.engine.num_latents
    second, count = torch.zeros(num_latents, num_latents, dtype=torch.float64), 0
    longest = 0.0
    sds = whitening.to_whitened(positions[:, :num_latents]) * num_data**0.5
    for gradients, places in _gradients_of_all_rows(problem, positions):
        whitened = whitening.pull_back(gradients)
        second += (whitened.mT @ whitened).to(second)
        count += len(whitened)
        lengths = whitened.norm(dim=1)
        if order:  # at one sd along the gradient, instead of the position's distance
            along = (sds[places] * whitened).sum(1).abs() / lengths.clamp(min=1e-30)
            lengths = lengths / along.clamp(min=NOISE.near) ** order
        longest = max(longest, float(lengths.max()))
    if not count:
        return None
    all_different = 0.0 if sampling == "replacement" else size / num_data
    most = float(torch.linalg.eigvalsh(second / count)[-1])
    return RowNoise(most / size * (1 - all_different), longest)


def _gradients_of_all_rows(problem: Problem, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (gradients of single rows' log likelihoods, `[rows, latents]`; the number of the
    position at which each row was evaluated, `[rows]`), block after block. Each row is evaluated at
    one position.

    If the model does not run on single rows, the rows are those of a few batches; nothing is
    yielded if there are no gradients of single rows.
    """
    log_posterior, engine = problem.log_posterior, problem.engine
    layout, num_rows = engine.layout, max(1, NUMBERS_AT_ONCE // engine.layout.size)

    def gradient(position: Tensor, row: Arguments) -> Tensor:
        by_site = engine.density.row_gradients(layout.unflatten(position), row)
        return torch.cat([by_site[name].reshape(-1) for name in log_posterior.latents])

    if log_posterior.model_info.own_plate is None and is_row_wise(log_posterior):
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            for chunk in chunks_of(log_posterior, problem.data, num_rows):
                single = rows.map_rows(lambda leaf: leaf[:, None], chunk.arguments)
                places = torch.arange(chunk.num_rows) % len(positions)
                dims = 0, rows.vmap_dims(single, 0)
                yield torch.vmap(gradient, in_dims=dims)(positions[places], single), places
            return
    batches = [[batch] for batch in first_batches(problem, NOISE.rows, "shuffle")]
    places = torch.arange(len(batches)) % len(positions)
    gradients = row_gradients(problem, engine.density, positions[places], batches)
    if gradients is not None:
        yield gradients.flatten(0, 1), places.repeat_interleave(gradients.shape[1])
