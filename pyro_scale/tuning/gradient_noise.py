"""The variance of minibatch gradients, from the gradients of single rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batches, batches_from
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.step import Density, Engine
from pyro_scale.errors import BiasWarning
from pyro_scale.fullbatch.chunks import is_row_wise
from pyro_scale.model.control_variates import ControlVariates
from pyro_scale.model.curvature.row_moments import row_moments
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.run.measurements import GradientNoise
from pyro_scale.run.problem import Problem
from pyro_scale.storage.lazy_draws import Positions, spread
from pyro_scale.tuning.policy import NOISE

#: Rows times D, above which rows are not differentiated one by one.
_MOST_GRADIENT_NUMBERS = 2**28
#: Numbers on the way back from rows that are differentiated at once.
NUMBERS_AT_ONCE = 2**22
#: Numbers in these rows' gradients, unless there are the fewest draws alone.
_NOISE_NUMBERS = 2**24
#: By how much a row's log likelihood may differ from its own in a batch.
_ROW_TOLERANCE = 1e-3
#: One chain's batch: the model's arguments, and indices for one that subsamples by itself.
OwnBatch = tuple[Arguments, Tensor | None]


def row_gradients(
    problem: Problem,
    density: Density,
    positions: Tensor,
    batches: Sequence[Sequence[OwnBatch]],
    singly: bool | None = None,
) -> Tensor | None:
    """Each row's gradient of its log likelihood, `[positions, rows, latents]`, in nats.

    None where the model has no rows, or they are too many to differentiate one by one.

    Args:
        problem: the model.
        density: the target; with control variates, rows' differences to the anchor count.
        positions: `[positions, D]`.
        batches: whose rows to use, some at each position.
        singly: whether the model takes rows one by one; found out by default.
    """
    scaling, layout = problem.log_posterior.model_info.scaling, problem.engine.layout
    has_rows = any(rule.role == "rows" for rule in scaling.rules.values())
    first, indices = batches[0][0]
    size = (rows.count(first) if indices is None else None) or problem.batch_size
    if not has_rows or size * layout.size > _MOST_GRADIENT_NUMBERS:
        return None
    if singly is None:
        singly = takes_single_rows(problem, positions[0], first)
    latents = [name for name in layout.names if name in problem.log_posterior.latents]

    def of_batch(position: Tensor, *batch: Any) -> Tensor:
        gradients = density.row_gradients(layout.unflatten(position), *batch)
        return torch.cat(
            [gradients[name].reshape(len(gradients[name]), -1) for name in latents], dim=1
        )

    def of_rows(position: Tensor, arguments: Arguments, _: None) -> Tensor:
        def of_row(row: Arguments) -> Tensor:
            return of_batch(position, row)[0]

        return _over_rows(of_row, arguments)

    each_at = zip(positions, batches, strict=True)
    pairs = [(position, *batch) for position, some in each_at for batch in some]
    row = layout.size + sum(leaf[0].numel() for leaf in rows.leaves(pairs[0][1]))
    # without single rows, every row's gradient goes back through a whole batch
    together = max(1, NUMBERS_AT_ONCE // ((size if singly else problem.batch_size**2) * row))
    blocks = (pairs[i : i + together] for i in range(0, len(pairs), together))
    parts = [_of_each(of_rows if singly else of_batch, block) for block in blocks]
    gradients = parts[0] if len(parts) == 1 else torch.cat(parts)
    return gradients.reshape(len(positions), -1, gradients.shape[-1])


def takes_single_rows(problem: Problem, position: Tensor, arguments: Arguments) -> bool:
    """Whether the model gives a row by itself the log likelihood that it has in a batch: its
    gradient is then that of a model on one row."""
    log_posterior = problem.log_posterior
    has_batches = log_posterior.model_info.own_plate is None and problem.features is None
    if not (has_batches and is_row_wise(log_posterior) and problem.engine.vectorized):
        return False
    params = problem.engine.layout.unflatten(position)

    def log_lik(arguments: Arguments) -> Tensor:
        return torch.stack(list(log_posterior.log_likelihood(params, arguments).values())).sum(0)

    try:
        together, alone = log_lik(arguments), _over_rows(log_lik, arguments)[:, 0]
        return torch.allclose(alone, together, rtol=_ROW_TOLERANCE, atol=_ROW_TOLERANCE)
    except Exception as error:  # the model's own, of one row
        raise_if_from_handler(error)
        return False


def _over_rows(function: Callable[[Arguments], Tensor], arguments: Arguments) -> Tensor:
    """A function of a batch of one row, of each of a batch's rows, `[B, ...]`."""
    single = rows.map_rows(lambda leaf: leaf[:, None], arguments)
    return torch.vmap(function, in_dims=(rows.vmap_dims(single, 0),))(single)


def _of_each(function: Callable[..., Tensor], pairs: Sequence[tuple[Any, ...]]) -> Tensor:
    """A function of positions and batches, of each pair: vmapped, or one by one where vmap
    refuses."""
    positions, arguments, indices = zip(*pairs, strict=True)
    is_shared = all(each is arguments[0] for each in arguments)
    stacked = arguments[0] if is_shared else rows.stack(arguments)
    dims = rows.vmap_dims(stacked, None if is_shared else 0)
    own = None if indices[0] is None else torch.stack(indices)
    try:
        every = torch.vmap(function, in_dims=(0, dims, None if own is None else 0))
        return every(torch.stack(positions), stacked, own)
    except (RuntimeError, NotImplementedError):
        return torch.stack([function(*pair) for pair in pairs])


def gradient_variance(
    gradients: Tensor, batch_size: int, num_data: int, sampling: Sampling
) -> Tensor:
    """The variance of the minibatch gradient of the log joint over N, `[latents]`.

    V / B, V the variance of rows' gradients, on average over positions; times 1 - B/N where the
    rows of a batch are all different.

    Args:
        gradients: of rows, `[positions, rows, latents]`.
        batch_size: B.
        num_data: N.
        sampling: how rows are drawn.
    """
    # torch's own var is many times slower here
    centered = gradients - gradients.mean(1, keepdim=True)
    variance = (centered.square_().sum(1) / (gradients.shape[1] - 1)).mean(0)
    return variance * _part_of_batches(batch_size, num_data, sampling)


def _part_of_batches(batch_size: int, num_data: int, sampling: Sampling) -> float:
    """The variance of a batch's mean over that of rows: less where its rows are all different."""
    all_different = 0.0 if sampling == "replacement" else batch_size / num_data
    return (1 - all_different) / batch_size


def _variance_of_rows(
    log_posterior: LogPosterior, layout: Layout, position: Tensor, batches: Sequence[OwnBatch]
) -> Tensor:
    """The variance of rows' gradients, `[latents]`, without a row's own."""
    params, every = layout.unflatten(position), [arguments for arguments, _ in batches]
    moments = [row_moments(log_posterior, params, arguments) for arguments in every]
    latents = [name for name in layout.names if name in log_posterior.latents]
    total, squares = (
        torch.stack([torch.cat([of[name].flatten() for name in latents]) for of in each]).sum(0)
        for each in zip(*moments, strict=True)
    )
    count = sum(rows.count(arguments) or 1 for arguments in every)
    return (squares - total.square_() / count).clamp_(min=0) / (count - 1)


def gradient_noise(
    problem: Problem,
    positions: Positions,
    finished: list[int],
    batches: Batches,
    step: int,
    values: Mapping[str, Tensor],
    sampling: Sampling,
) -> GradientNoise | None:
    """The noise of minibatches at some draws, from batches at each; None where the rows'
    gradients cannot be had at once, and at temperature 0.

    Args:
        problem: the model.
        positions: of the finished chains' draws.
        finished: which chains those are.
        batches: of the run.
        step: the first that the run did not take.
        values: the hyperparameters', on average over the draws.
        sampling: how rows are drawn.
    """
    log_posterior, engine = problem.log_posterior, problem.engine
    size, num_latents = problem.batch_size, engine.num_latents
    if values["temperature"] == 0 or not engine.vectorized:
        return None
    if problem.data.batch_size is None:  # the whole data at every step
        return GradientNoise(torch.ones(num_latents), torch.zeros(num_latents))
    each = -(-NOISE.rows_each // size)  # batches at one draw
    singly = takes_single_rows(problem, problem.positions[0], problem.data.first())
    few = slice(min(size, NOISE.rows_each))  # rows of each, if the rest has no part in them
    in_rows = each * (few.stop if singly else size) * engine.layout.size
    places = max(NOISE.fewest_draws, min(NOISE.draws // each, _NOISE_NUMBERS // in_rows))
    chains = finished[:places]
    chosen = spread(positions, places // len(chains))
    draws = positions[torch.arange(len(chains))[:, None], chosen]
    at = draws.flatten(0, 1).to(problem.positions.device)
    run_batches = batches_from(batches, step, each * len(chosen))
    own = [
        [batch.of_chain(chain) for batch in run_batches[i : i + each]]
        for chain in chains
        for i in range(0, len(run_batches), each)
    ]
    if singly:
        own = [[(rows.take(arguments, few), None) for arguments, _ in some] for some in own]

    together = max(1, NUMBERS_AT_ONCE // in_rows)  # positions whose rows' gradients are in memory

    def variance_of(density: Density, heats: bool = False) -> Tensor | None:
        """The mean over positions; in the direction that an element of whitened chains is heated
        from."""
        own_axes = not heats or engine.whitening is None
        if isinstance(density, LogPosterior) and singly and own_axes and together == 1:
            pairs = zip(at, own, strict=True)
            each = [_variance_of_rows(density, engine.layout, *pair) for pair in pairs]
            part = _part_of_batches(size, density.num_data, sampling)
            return torch.stack(each).mean(0).mul_(part).cpu()
        parts = []
        for block in torch.arange(len(at)).split(together):
            batches_there = [own[place] for place in block]
            gradients = row_gradients(problem, density, at[block], batches_there, singly)
            if gradients is None:
                return None
            if heats and engine.whitening is not None:
                along = engine.whitening.push_forward(engine.whitening.pull_back(gradients))
                gradients = along / engine.whitening.variance.sqrt()
            variance = gradient_variance(gradients, size, log_posterior.num_data, sampling)
            parts.append(variance.cpu() * len(block) / len(at))
        return torch.stack(parts).sum(0)

    variance, reduction = variance_of(engine.density), None
    if variance is None:
        return None
    if isinstance(engine.density, ControlVariates):
        without = variance_of(log_posterior)
        reduction = None if without is None else without / variance
    heating = variance if engine.whitening is None else variance_of(engine.density, heats=True)
    assert heating is not None
    return GradientNoise(_inflation(engine, values, heating), variance, reduction)


def _inflation(engine: Engine, values: Mapping[str, Tensor], variance: Tensor) -> Tensor | None:
    """By what minibatches multiply the temperature, and by what part is taken off again; None
    where the kernel has no theory."""
    theory = engine.kernel.theory
    if theory is None:
        return None
    values = engine.kernel_values(values)
    padded = engine.pad(variance.to(values["lr"]))
    injected = engine.subtract_known_noise(values)["temperature"].expand_as(padded)
    total = (injected + theory.added_temperature(values, padded)) / values["temperature"]
    return total[: len(variance)].cpu()


def warn_of_a_bad_anchor(noise: GradientNoise | None) -> None:
    """Warns where control variates add noise: their anchor is far from where the chains are, or
    the rows' gradients change too much on the way, if it is the mode."""
    if noise is None or noise.reduction is None:
        return
    least = float(noise.reduction[noise.reduction > 0].amin()) if (noise.reduction > 0).any() else 1
    if least < 1:
        warn(
            BiasWarning,
            f"control_variates multiply the variance of the gradient by {1 / least:.3g} at some "
            "element: the draws are far from the anchor, or rows' gradients change too much on the "
            "way; pass control_variates=True, which finds the mode, or, if the anchor is that, "
            "leave them out",
        )
