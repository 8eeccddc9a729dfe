"""The noise of minibatches: what keeps it from heating chains, for the fewest gradients of rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.whitening import DenseWhitening
from pyro_scale.curvature.control_variates import AnchorCurvature, ControlVariates
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.ggn import Curvature
from pyro_scale.curvature.observations import Exact
from pyro_scale.curvature.precision import CurvatureSpec, expand
from pyro_scale.curvature.prior_hessian import prior_precision
from pyro_scale.data.batches import batches_from
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.errors import ArgumentError, ModelError, SiteError
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.run.budget import rows_a_step
from pyro_scale.run.problem import Problem, position_of
from pyro_scale.tuning.choice import Asked
from pyro_scale.tuning.gradient_noise import gradient_variance, row_gradients
from pyro_scale.tuning.policy import GEOMETRY, NOISE
from pyro_scale.tuning.row_noise import most_noise


def center_of(problem: Problem) -> Tensor:
    """The center of the geometry, as a position."""
    whitening = problem.engine.whitening
    assert whitening is not None
    return whitening.tensors[0]


def typical_places(problem: Problem) -> Tensor:
    """Places that are as far from the center as draws are, along every axis of the geometry,
    `[few, D]`.

    Not draws themselves: a group of one row would be noisy or not by the luck of one number.  With
    random signs z its noise is what it is on average, where gradients are off by z (to first
    order).  Where they are off by z^2, E z^4 = 3 is that of signs times 3^(1/4).
    """
    engine, positions = problem.engine, problem.positions
    assert engine.whitening is not None
    source = generator(problem.seed, 0, Purpose.SEARCH, 1)
    shape = NOISE.places, len(engine.whitening.tensors[0])
    signs = 2.0 * torch.randint(2, shape, generator=source) - 1
    sds = 3**0.25 if _order(problem) == 2 else 1.0
    length = sds / problem.log_posterior.num_data**0.5
    return engine.whitening.to_params((length * signs).to(positions))


def _order(problem: Problem) -> int:
    """The power of the distance to the anchor with which rows' gradients grow."""
    density = problem.engine.density
    return density.order if isinstance(density, ControlVariates) else 0


def with_anchor(problem: Problem, asked: Asked, whole: FullDataDensity) -> Problem:
    """With control variates at the center of the geometry, or where they were asked for."""
    if problem.data.batch_size is None or asked.anchor is False:
        return problem
    if isinstance(asked.anchor, Mapping):
        return with_control_variates(
            problem, whole, position_of(problem, asked.anchor, "control_variates")
        )
    before = problem.engine.density
    problem = with_control_variates(problem, whole, center_of(problem))
    if isinstance(before, ControlVariates) and before.curvature is not None:
        return with_curvature(problem, whole) or problem
    return problem


def with_control_variates(problem: Problem, density: FullDataDensity, anchor: Tensor) -> Problem:
    """The problem with control variates at an anchor, [D]."""
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    _, gradient = density.grad(anchor)
    total = {
        name: part * log_posterior.num_data for name, part in layout.unflatten(gradient).items()
    }
    return problem.with_engine(
        density=ControlVariates(log_posterior, layout.unflatten(anchor), total)
    )


def with_curvature(problem: Problem, density: FullDataDensity) -> Problem | None:
    """The problem with control variates of second order: with the likelihood's curvature at the
    anchor.  None if single batches of the model do not give that curvature."""
    log_posterior, first = problem.log_posterior, problem.data.first()
    first_order = problem.engine.density
    assert isinstance(first_order, ControlVariates)
    anchor, names = first_order.anchor, density.layout.names
    if log_posterior.model_info.own_plate is not None:
        return None
    try:
        observed = Curvature(log_posterior).observe(anchor, first).observations
        exact = tuple(each for each in observed if isinstance(each, Exact))
        if len(exact) < len(observed):
            return None
        position = density.layout.flatten(anchor)
        total = expand(density, CurvatureSpec(position, names, "ggn"), dense=True).precision
        total = total - prior_precision(log_posterior, anchor, first, None, dense=True)
        curved = dataclasses.replace(first_order, curvature=AnchorCurvature(total, exact))
        curved.grad(anchor, first)
    except (ModelError, SiteError, RuntimeError, NotImplementedError):
        return None
    return problem.with_engine(density=curved)


def with_known_noise(problem: Problem, mode: Tensor, sampling: Sampling) -> Problem:
    """The problem with the noise of minibatches at the mode known."""
    log_posterior, engine = problem.log_posterior, problem.engine
    size = problem.data.batch_size
    if size is None:
        raise ArgumentError("subtract_noise: the whole data at every step has no noise")
    batches = problem.batches(1, sampling)
    run_batches = batches_from(batches, 0, -(-NOISE.rows // size))
    rows = row_gradients(
        problem, log_posterior, mode[None], [[batch.of_chain(0) for batch in run_batches]]
    )
    if rows is None:
        raise ArgumentError(
            "subtract_noise needs the gradient of single rows, which this model does not give: "
            "leave it out and lower lr"
        )
    if engine.whitening is not None:
        rows = engine.whitening.pull_back(rows)
    variance = gradient_variance(rows, size, log_posterior.num_data, sampling)
    return problem.with_engine(known_noise=engine.pad(variance))


class Heat(NamedTuple):
    """What minibatches do to chains at a step size.

    Attributes:
        added: what they add to the temperature, over it, in the direction where they add most.
        kick: by how many sds of the momentum the largest row kicks a chain that is far out.
    """

    added: float
    kick: float

    @property
    def share(self) -> float:
        """The part of the step size at which they do no more than they may; both go as it does."""
        added, kick = max(self.added, 1e-300), max(self.kick, 1e-300)
        return min(1.0, NOISE.most_heat / added, NOISE.most_kick / kick)

    @property
    def part(self) -> float:
        """The part of a batch's rows from which on they do little; both go as one over them."""
        return max(self.added / NOISE.little_heat, self.kick / NOISE.most_kick)

    def times(self, factor: float) -> Heat:
        """Both multiplied by a number."""
        return Heat(self.added * factor, self.kick * factor)


class Cooled(NamedTuple):
    """A problem whose step size minibatches hardly heat.

    Attributes:
        problem: with that step size.
        passes: through the data that it took.
        heat: what minibatches do there; None where that is not known.
        far: the distance from the center, in sds, at which kicks were taken.
    """

    problem: Problem
    passes: float
    heat: Heat | None
    far: float


def cool(problem: Problem, sampling: Sampling, whole: FullDataDensity, far: float) -> Cooled:
    """With a step size at which minibatches hardly heat, with control variates of second order
    where a draw then takes fewer gradients of rows, and with as few rows a batch as will do where
    that is the library's choice.

    Args:
        problem: with the most rows a batch.
        sampling: how rows are drawn.
        whole: the density of all rows.
        far: the distance from the center that chains get to, in sds.
    """
    theory = problem.engine.kernel.theory
    if problem.data.batch_size is None or theory is None or not theory.heated:
        return Cooled(problem, 0.0, None, far)
    heat = _heat(problem, sampling, far)
    passes = _gradients_a_row(problem) + _order(problem)  # passes of an anchor
    if _might_need_curvature(problem, heat):
        curved = with_curvature(problem, whole)
        if curved is not None:
            of_curved = _heat(curved, sampling, far)
            passes += 1 + _gradients_a_row(curved)
            if _rows_a_draw(curved, of_curved) < _rows_a_draw(problem, heat):
                problem, heat = curved, of_curved
    if problem.chooses_batches and _rows_a_draw(problem, heat) > problem.log_posterior.num_data:
        return Cooled(_on_all_rows(problem), passes, Heat(0.0, 0.0), far)
    kernel, size = problem.engine.kernel, _batch_size(problem, heat)
    if heat is not None:
        problem = problem.with_lr(float(kernel.lr) * heat.share)
        heat = heat.times(heat.share * problem.batch_size / size)
    if size != problem.batch_size:
        problem = problem.in_batches_of(size)
    return Cooled(problem, passes, heat, far)


def _on_all_rows(problem: Problem) -> Problem:
    """The problem without minibatches, which would shorten the step by more than they save."""
    return problem.with_engine(density=problem.log_posterior).in_batches_of(None)


def with_fewest_rows(problem: Problem) -> Problem:
    """The problem with the fewest rows a batch that may be chosen for it."""
    if not problem.chooses_batches or problem.data.batch_size is None:
        return problem
    return problem.in_batches_of(min(NOISE.fewest_rows, problem.batch_size))


def stays_cool(cooled: Cooled, problem: Problem) -> bool:
    """Whether minibatches do little after warm-up too, for all that geometry and step size have
    changed; kicks count at `NOISE.far`.

    With directions c times as long, and the center d sds away from the anchor, the noise of a
    gradient of order p is at most c (c + d)^p times as large in whitened coordinates.

    Args:
        cooled: before warm-up.
        problem: after it.
    """
    before, now = cooled.problem.engine, problem.engine
    anchored, one, other = before.density, before.whitening, now.whitening
    if cooled.heat is None or not isinstance(anchored, ControlVariates):
        return False
    if not (isinstance(one, DenseWhitening) and isinstance(other, DenseWhitening)):
        return False
    factor, num_data = one.factor.double(), problem.log_posterior.num_data
    longer = torch.linalg.solve_triangular(factor, other.factor.double(), upper=False)
    longest = float(torch.linalg.matrix_norm(longer, 2))
    way = (other.center - before.layout.flatten(anchored.anchor)[: len(factor)]).double()
    away = torch.linalg.solve_triangular(factor, way[:, None], upper=False).norm()
    further = longest + float(away) * num_data**0.5
    order = anchored.order
    more = longest * further**order
    heat = cooled.heat.times(float(now.kernel.lr) / float(before.kernel.lr))
    kick = heat.kick * (NOISE.far / cooled.far) ** order
    return heat.added * more**2 <= NOISE.little_heat and kick * more <= NOISE.most_kick


def _might_need_curvature(problem: Problem, heat: Heat | None) -> bool:
    """Whether control variates of first order take more than those of second order at best."""
    if _order(problem) != 1:
        return False
    least = NOISE.fewest_rows if problem.chooses_batches else problem.batch_size
    is_small = problem.engine.layout.size <= GEOMETRY.dense
    return is_small and _rows_a_draw(problem, heat) > 2 * _gradients_a_row(problem) * least


def _rows_a_draw(problem: Problem, heat: Heat | None) -> float:
    """Gradients of rows in the time of one step of the length that it has before it is cooled."""
    share = 1.0 if heat is None else heat.share
    return _gradients_a_row(problem) * _batch_size(problem, heat) / share


def _gradients_a_row(problem: Problem) -> int:
    """Gradients that a row takes."""
    return rows_a_step(problem) // problem.batch_size


def _batch_size(problem: Problem, heat: Heat | None) -> int:
    """Rows of a batch: where they are to be chosen, the power of two from which on minibatches
    heat little."""
    size = problem.batch_size
    if not problem.chooses_batches or heat is None:
        return size
    least = max(NOISE.fewest_rows, size * heat.part)
    return min(size, 2 ** math.ceil(math.log2(least)))


def _heat(problem: Problem, sampling: Sampling, far: float) -> Heat | None:
    """What minibatches do at the kernel's step size."""
    kernel, order = problem.engine.kernel, _order(problem)
    noise = most_noise(problem, typical_places(problem), sampling, order)
    if noise is None:
        return None
    values, theory = problem.engine.kernel_values(kernel.values(0)), kernel.theory
    assert theory is not None

    def added(variance: float) -> float:
        """To the temperature, over it, by noise of the gradient over N."""
        of_noise = theory.added_temperature(values, torch.tensor(variance, dtype=torch.float64))
        return float((of_noise / values["temperature"]).max())

    of_row = noise.largest * far**order / problem.batch_size
    # what kicks of every step add is worth their squares over 2 lr, where friction is about 1
    return Heat(added(noise.variance), math.sqrt(2 * float(values["lr"]) * added(of_row**2)))
