"""The temperature of a run's draws, by the virial theorem.

If w has the law exp(log joint / T), then E[-(w - c) d log joint / dw] = T for every element and any
constant c, whatever the law's shape.  Evaluated with gradients of batches that the draws have not
seen, it responds to everything that heats or cools a run: long steps, minibatch noise and the part
of it that shuffling cancels, and a warm-up that was too short.  The condition is necessary, not
sufficient.  On a Gaussian it is the variance over that at temperature 1; elsewhere it is a mean
over directions.

The theorem gives E[-(w - c)_i (A g)_i] = T A_ii as well, g the gradient and A any constant matrix.
Where chains are whitened, by a covariance C, an element's part is -(w - c)_i (C g)_i / C_ii.  On a
Gaussian that is the square of its distance from the mean over its variance; its error does not grow
with correlations, as that of -(w - c)_i g_i does.

A site may be right on average while one of its elements is not.  Long steps and minibatches heat an
element in proportion to the mean square of its gradient.  So the element where that is largest is
reported by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.data.batches import Batches, WholeData
from pyro_scale.data.sources import OwnSubsamples, TensorData
from pyro_scale.engine.step import Engine
from pyro_scale.run.problem import Problem
from pyro_scale.storage.lazy_draws import Positions, spread

#: Draws whose gradients are taken: the most, the most times rows times D, and the least; and how
#: many are enough to take all rows.
_MOST_TAKEN, _MOST_WORK, _LEAST_TAKEN, _ENOUGH = 4000, 2**28, 256, 200
#: Draws where the model goes one by one.
_ONE_BY_ONE = 64
#: Numbers of params and rows in memory at once, with some room for what is made of a row.
_NUMBERS_IN_MEMORY, _ROOM = 2**22, 64


class Virial(NamedTuple):
    """What gradients at some draws say.

    Attributes:
        parts: every draw's part in the temperature, `[finished chains, some draws, sites, 2]`: the
            mean over a site's elements, and that of its steepest element; its mean over draws is
            the temperature.
        of_elements: the mean of each element's part, `[D]`.
        errors: the standard error of that, as of independent draws, `[D]`.
        mean_square: of the gradient of the log joint over N, `[D]`.
        whole: whether gradients were of all rows, without noise.
    """

    parts: Tensor
    of_elements: Tensor
    errors: Tensor
    mean_square: Tensor
    whole: bool


def virial(
    problem: Problem,
    positions: Positions,
    finished: list[int],
    batches: Batches,
    step: int,
    noise: Tensor | None = None,
) -> Virial:
    """The temperature that draws have.

    Args:
        problem: of the run.
        positions: of the finished chains' draws, evenly thinned here.
        finished: which chains those are.
        batches: of the run.
        step: the first of them whose batch nothing has seen.
        noise: the variance of the minibatch gradient, `[latents]`, where that is known: the
            steepest elements are those where it is largest, or else those of the first draws.
    """
    engine, layout = problem.engine, problem.engine.layout
    alive = torch.tensor(finished)
    chains = len(alive)
    batches, size = _fresh_batches(problem, batches)
    whole = isinstance(batches, WholeData)
    affordable = max(_LEAST_TAKEN, _MOST_WORK // (size * layout.size))
    most = min(_MOST_TAKEN, affordable) if engine.vectorized else _ONE_BY_ONE
    each = max(1, most // chains)
    if not isinstance(problem.data, TensorData | OwnSubsamples):
        each = min(each, max(1, step // 10))  # no more reading than a tenth of the run's
    chosen = spread(positions, each)
    every = torch.arange(chains)[:, None]
    blocks = chosen.split(_together(problem, size, chains))
    total = torch.stack([positions[every, places].sum((0, 1)) for places in blocks]).sum(0)
    center = total / (chains * len(chosen))
    slices = [layout.slices()[name] for name in problem.log_posterior.latents]
    steepest = _largest(noise, slices) if noise is not None and noise.any() else None
    found, elements, spreads, squares = [], [], [], []
    for places in blocks:
        draws = positions[every, places].flatten(0, 1)
        taken = batches.take(step, step + len(places))
        step += len(places)
        of_draws = pytree.tree_map(lambda leaf: leaf[alive].flatten(0, 1), taken)
        batch = batches.batch(batches.fixed, of_draws)
        gradient = engine.gradient(draws.to(problem.positions.device), batch).cpu()
        parts = (center - draws).mul_(_along(engine, gradient)).mul_(engine.density.num_data)
        squares.append(gradient.square().sum(0, dtype=torch.float64))
        steepest = _largest(squares[0], slices) if steepest is None else steepest
        means = [parts[:, place].mean(-1, dtype=torch.float64) for place in slices]
        of_sites = torch.stack(means, -1)
        of_sites = torch.stack([of_sites, parts[:, steepest].double()], -1)
        found.append(of_sites.unflatten(0, (chains, len(places))))
        elements.append(parts.sum(0, dtype=torch.float64))
        spreads.append(parts.square().sum(0, dtype=torch.float64))
    count = chains * len(chosen)
    sums = (torch.stack(each).sum(0) / count for each in (elements, spreads, squares))
    of_elements, variance, mean_square = sums
    # of a Gaussian a part has variance 2; of few draws, small means come with small spreads
    errors = ((variance - of_elements.square()).clamp(min=2) / count).sqrt()
    return Virial(torch.cat(found, 1), of_elements, errors, mean_square, whole)


def _along(engine: Engine, gradient: Tensor) -> Tensor:
    """C g over the diagonal of C, `[draws, D]`, with the covariance C of a run's geometry; g itself
    where it has none, and of points."""
    whitening, count = engine.whitening, engine.num_latents
    if whitening is None:
        return gradient
    whitening = whitening.with_tensors([tensor.cpu() for tensor in whitening.tensors])
    along = whitening.push_forward(whitening.pull_back(gradient[..., :count]))
    return torch.cat([along / whitening.variance, gradient[..., count:]], -1)


def _largest(numbers: Tensor, slices: Sequence[slice]) -> Tensor:
    """Each site's element where they are largest, `[sites]`."""
    return torch.tensor([place.start + int(numbers[place].argmax()) for place in slices])


def _fresh_batches(problem: Problem, batches: Batches) -> tuple[Batches, int]:
    """(What gradients are taken of, its rows): all rows where they are few enough, whose gradient
    has no noise; else the run's further batches, as for features of a frozen base, which takes
    batches of one size alone."""
    if isinstance(problem.data, TensorData) and problem.features is None:
        total = rows.count(problem.data.arguments) or 1
        if total * problem.engine.layout.size * _ENOUGH <= _MOST_WORK:
            return WholeData(problem.data.arguments), total
    return batches, problem.batch_size


def _together(problem: Problem, size: int, chains: int) -> int:
    """Draws of each chain that fit into memory at once, with so many rows for each."""
    leaves = rows.leaves(problem.data.first())
    width = sum(leaf[0].numel() for leaf in leaves) + _ROOM
    return max(1, _NUMBERS_IN_MEMORY // ((problem.engine.layout.size + size * width) * chains))
