"""The noise that rows make in whitened coordinates, by the gradients of them all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.chunks import chunks_of, is_row_wise
from pyro_scale.data.batches import batches_from
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.gradient_noise import NUMBERS_AT_ONCE, row_gradients
from pyro_scale.tuning.policy import NOISE


class RowNoise(NamedTuple):
    """The noise that rows make.

    Attributes:
        variance: of the minibatch gradient over N, in the direction where it is largest.
        largest: the length of the largest of all rows' gradients, in nats, one sd from the center
            along itself.
    """

    variance: float
    largest: float


def most_noise(
    problem: Problem, positions: Tensor, sampling: Sampling, order: int
) -> RowNoise | None:
    """The noise of minibatches in whitened coordinates; None where rows have no gradients of their
    own.

    Every row counts, at one of the positions: rows that are few may have a direction to
    themselves.

    Args:
        problem: with its geometry, and its density, which may have control variates.
        positions: of the posterior, `[positions, D]`.
        sampling: how rows are drawn.
        order: the power of the distance from the center with which rows' gradients grow.
    """
    size, whitening = problem.data.batch_size, problem.engine.whitening
    assert size is not None
    assert whitening is not None
    num_data, num_latents = problem.log_posterior.num_data, problem.engine.num_latents
    second, count = torch.zeros(num_latents, num_latents, dtype=torch.float64), 0
    longest = 0.0
    sds = whitening.to_whitened(positions[:, :num_latents]) * num_data**0.5
    for gradients, places in _every_row(problem, positions):
        whitened = whitening.pull_back(gradients)
        second += (whitened.mT @ whitened).to(second)
        count += len(whitened)
        lengths = whitened.norm(dim=1)
        if order:  # along a row's own direction it is as near to the center as chance has it
            along = (sds[places] * whitened).sum(1).abs() / lengths.clamp(min=1e-30)
            lengths = lengths / along.clamp(min=NOISE.near) ** order
        longest = max(longest, float(lengths.max()))
    if not count:
        return None
    all_different = 0.0 if sampling == "replacement" else size / num_data
    most = float(torch.linalg.eigvalsh(second / count)[-1])
    return RowNoise(most / size * (1 - all_different), longest)


def _every_row(problem: Problem, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(Gradients of all rows, `[rows, latents]` at a time, at which of the positions each is
    `[rows]`); those of some batches where the model takes no single rows; nothing where rows
    have none."""
    log_posterior, engine = problem.log_posterior, problem.engine
    layout, num_rows = engine.layout, max(1, NUMBERS_AT_ONCE // engine.layout.size)

    def of_row(position: Tensor, row: Arguments) -> Tensor:
        gradients = engine.density.row_gradients(layout.unflatten(position), row)
        return torch.cat([gradients[name].reshape(-1) for name in log_posterior.latents])

    if log_posterior.model_info.own_plate is None and is_row_wise(log_posterior):
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            for chunk in chunks_of(log_posterior, problem.data, num_rows):
                single = rows.map_rows(lambda leaf: leaf[:, None], chunk.arguments)
                places = torch.arange(chunk.num_rows) % len(positions)
                dims = 0, rows.vmap_dims(single, 0)
                yield torch.vmap(of_row, in_dims=dims)(positions[places], single), places
            return
    batches = batches_from(problem.batches(1, "shuffle"), 0, -(-NOISE.rows // problem.batch_size))
    own = [[batch.of_chain(0)] for batch in batches]
    places = torch.arange(len(own)) % len(positions)
    gradients = row_gradients(problem, engine.density, positions[places], own)
    if gradients is not None:
        yield gradients.flatten(0, 1), places.repeat_interleave(gradients.shape[1])
