"""The variance of minibatch gradients, from gradients of single rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.curvature.chunks import is_row_wise
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.curvature.ggn import row_moments
from pyro_scale.data.batches import Batches, batches_from
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.step import Density, Engine
from pyro_scale.errors import ArgumentError, BiasWarning
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.run.measurements import GradientNoise
from pyro_scale.run.problem import Problem
from pyro_scale.storage.lazy_draws import Positions, spread
from pyro_scale.tuning.policy import NOISE

#: Rows of a batch times D, above which gradients of single rows are not computed.
_MOST_GRADIENT_NUMBERS = 2**28
#: Numbers in the gradients of rows that are differentiated together.
NUMBERS_AT_ONCE = 2**22
#: Numbers in all gradients that estimate the noise of a run, unless the fewest draws have more.
_NOISE_NUMBERS = 2**24
#: Difference allowed between a row's log likelihood alone and in a batch.
_ROW_TOLERANCE = 1e-3
#: A batch of one chain: the model's arguments, and indices if the model subsamples by itself.
ChainBatch = tuple[Arguments, Tensor | None]


def first_batches(problem: Problem, num_rows: int, sampling: Sampling) -> list[ChainBatch]:
    """The first batches that a run with a single chain would take, together at least `num_rows`
    rows, for measurements before the run: a list of (the model's arguments, indices of the rows for
    a model that subsamples by itself, otherwise None)."""
    count = -(-num_rows // problem.batch_size)
    batches = batches_from(problem.batches(1, sampling), 0, count)
    return [batch.of_chain(0) for batch in batches]


def row_gradients(
    problem: Problem,
    density: Density,
    positions: Tensor,
    batches: Sequence[Sequence[ChainBatch]],
    singly: bool | None = None,
) -> Tensor | None:
    """Gradients of the log likelihoods of single rows with respect to the latents, `[positions,
    rows, latents]`, in nats. None if no argument of the model has rows, or if a batch has too many
    numbers (rows times D).

    Args:
        problem: the model and its engine.
        density: the log posterior, or control variates, which are subtracted from the gradients.
        positions: unconstrained params at which gradients are taken, `[positions, D]`.
        batches: batches whose rows are used, for each of the positions.
        singly: whether the model runs on single rows; None to find that out.
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

    def gradients_of_batch(position: Tensor, *batch: Any) -> Tensor:
        gradients = density.row_gradients(layout.unflatten(position), *batch)
        return torch.cat(
            [gradients[name].reshape(len(gradients[name]), -1) for name in latents], dim=1
        )

    def gradients_of_rows(position: Tensor, arguments: Arguments, _: None) -> Tensor:
        def gradient(row: Arguments) -> Tensor:
            return gradients_of_batch(position, row)[0]

        return _vmap_rows(gradient, arguments)

    by_position = zip(positions, batches, strict=True)
    pairs = [(position, *batch) for position, group in by_position for batch in group]
    numbers = layout.size + sum(leaf[0].numel() for leaf in rows.leaves(pairs[0][1]))
    # if the model takes no single rows, the gradient of each row passes through a whole batch
    together = max(1, NUMBERS_AT_ONCE // ((size if singly else problem.batch_size**2) * numbers))
    blocks = (pairs[i : i + together] for i in range(0, len(pairs), together))
    function = gradients_of_rows if singly else gradients_of_batch
    parts = [_vmap_pairs(function, block) for block in blocks]
    gradients = parts[0] if len(parts) == 1 else torch.cat(parts)
    return gradients.reshape(len(positions), -1, gradients.shape[-1])


def takes_single_rows(problem: Problem, position: Tensor, arguments: Arguments) -> bool:
    """Whether a row alone has the same log likelihood as in a batch, within a tolerance, so that
    gradients of rows can be computed one row at a time.

    Args:
        problem: the model and its engine.
        position: unconstrained params `[D]`.
        arguments: the model's arguments of a batch.
    """
    log_posterior = problem.log_posterior
    has_batches = log_posterior.model_info.own_plate is None and problem.features is None
    if not (has_batches and is_row_wise(log_posterior) and problem.engine.vectorized):
        return False
    params = problem.engine.layout.unflatten(position)

    def log_lik(arguments: Arguments) -> Tensor:
        return torch.stack(list(log_posterior.log_likelihood(params, arguments).values())).sum(0)

    try:
        together, alone = log_lik(arguments), _vmap_rows(log_lik, arguments)[:, 0]
        return torch.allclose(alone, together, rtol=_ROW_TOLERANCE, atol=_ROW_TOLERANCE)
    except Exception as error:  # raised by the model on one row
        raise_if_from_handler(error)
        return False


def _vmap_rows(function: Callable[[Arguments], Tensor], arguments: Arguments) -> Tensor:
    """Results of a function at each of the B rows of a batch, `[B, ...]`, by vmap over batches of a
    single row."""
    single = rows.map_rows(lambda leaf: leaf[:, None], arguments)
    return torch.vmap(function, in_dims=(rows.vmap_dims(single, 0),))(single)


def _vmap_pairs(function: Callable[..., Tensor], pairs: Sequence[tuple[Any, ...]]) -> Tensor:
    """Results of a function for each of several pairs of params and a batch, stacked along the
    first dimension; computed one by one if vmap does not support the model.

    Args:
        function: (params `[D]`, the model's arguments, indices of rows or None) -> tensor.
        pairs: arguments of the function, one tuple for each call.
    """
    positions, arguments, indices = zip(*pairs, strict=True)
    is_shared = all(one is arguments[0] for one in arguments)
    stacked = arguments[0] if is_shared else rows.stack(arguments)
    dims = rows.vmap_dims(stacked, None if is_shared else 0)
    places = None if indices[0] is None else torch.stack(indices)
    try:
        vmapped = torch.vmap(function, in_dims=(0, dims, None if places is None else 0))
        return vmapped(torch.stack(positions), stacked, places)
    except (RuntimeError, NotImplementedError):
        return torch.stack([function(*pair) for pair in pairs])


def gradient_variance(
    gradients: Tensor, batch_size: int, num_data: int, sampling: Sampling
) -> Tensor:
    """The variance of the minibatch gradient of the log joint / N, in each latent element,
    `[latents]`.

    This is V / B, where V is the variance of gradients of single rows, averaged over positions;
    times 1 - B/N if all rows of a batch are different.

    Args:
        gradients: gradients of single rows, in nats, `[positions, rows, latents]`.
        batch_size: B, rows of a batch.
        num_data: N, rows of the data.
        sampling: how the rows of batches are drawn.
    """
    # torch.var is many times slower here
    centered = gradients - gradients.mean(1, keepdim=True)
    variance = (centered.square_().sum(1) / (gradients.shape[1] - 1)).mean(0)
    return variance * variance_factor(batch_size, num_data, sampling)


def variance_factor(batch_size: int, num_data: int, sampling: Sampling) -> float:
    """The factor that turns the variance of single rows into the variance of a batch's mean: 1/B if
    rows are drawn with replacement, (1 - B/N) / B if all rows of a batch are different.

    Args:
        batch_size: B, rows of a batch.
        num_data: N, rows of the data.
        sampling: how the rows of batches are drawn; only "replacement" may repeat rows.
    """
    all_different = 0.0 if sampling == "replacement" else batch_size / num_data
    return (1 - all_different) / batch_size


def with_known_noise(problem: Problem, mode: Tensor, sampling: Sampling) -> Problem:
    """The problem whose engine subtracts the variance of minibatch gradients from the injected
    noise; that variance is measured here, at a mode.

    Args:
        problem: model and chains, with minibatches.
        mode: unconstrained params `[D]`.
        sampling: how the rows of batches are drawn.

    Raises:
        ArgumentError: there are no minibatches, or no gradients of single rows.
    """
    log_posterior, engine = problem.log_posterior, problem.engine
    size = problem.data.batch_size
    if size is None:
        raise ArgumentError("subtract_noise: the whole data at every step has no noise")
    batches = first_batches(problem, NOISE.rows, sampling)
    gradients = row_gradients(problem, log_posterior, mode[None], [batches])
    if gradients is None:
        raise ArgumentError(
            "subtract_noise needs the gradient of single rows, which this model does not give: "
            "leave it out and lower lr"
        )
    if engine.whitening is not None:
        gradients = engine.whitening.pull_back(gradients)
    variance = gradient_variance(gradients, size, log_posterior.num_data, sampling)
    return problem.with_engine(known_noise=engine.pad(variance))


def _variance_of_rows(
    log_posterior: LogPosterior, layout: Layout, position: Tensor, batches: Sequence[ChainBatch]
) -> Tensor:
    """The variance of gradients of single rows in each latent element, in nats squared,
    `[latents]`. Computed from sums over batches, so that no gradient of a single row is kept in
    memory.

    Args:
        log_posterior: the model.
        layout: order of the sites' elements in the params.
        position: unconstrained params `[D]`.
        batches: batches whose rows are used.
    """
    params = layout.unflatten(position)
    moments = [row_moments(log_posterior, params, arguments) for arguments, _ in batches]
    latents = [name for name in layout.names if name in log_posterior.latents]
    total, squares = (
        torch.stack(
            [torch.cat([by_site[name].flatten() for name in latents]) for by_site in kind]
        ).sum(0)
        for kind in zip(*moments, strict=True)
    )
    count = sum(rows.count(arguments) or 1 for arguments, _ in batches)
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
    """Measures the noise of minibatch gradients at a few draws of a run, from a few batches at
    each, for `diagnostics()`: the gradients' variance, the factor by which it raises the
    temperature, and the factor by which control variates reduce it. None if the temperature is 0,
    vmap does not support the model, or there are no gradients of single rows.

    Args:
        problem: the model and its engine.
        positions: draws of the finished chains, unconstrained params `[chains, draws, D]`.
        finished: numbers of these chains among all chains of the run.
        batches: batches of the run.
        step: the first step after the run, whose batch is used first.
        values: hyperparameters of the sampler's kernel by name, averaged over the draws.
        sampling: how the rows of batches are drawn.
    """
    engine = problem.engine
    if values["temperature"] == 0 or not engine.vectorized:
        return None
    if problem.data.batch_size is None:  # all rows at every step
        return GradientNoise(torch.ones(engine.num_latents), torch.zeros(engine.num_latents))
    sample = _NoiseSample.from_run(problem, positions, finished, batches, step, sampling)
    variance, reduction = sample.variance_of(engine.density), None
    if variance is None:
        return None
    if isinstance(engine.density, ControlVariates):
        without = sample.variance_of(problem.log_posterior)
        reduction = None if without is None else without / variance
    is_whitened = engine.whitening is not None
    heating = sample.variance_of(engine.density, heats=True) if is_whitened else variance
    assert heating is not None
    return GradientNoise(_inflation(engine, values, heating), variance, reduction)


def noise_of_step(
    problem: Problem, position: Tensor, batch: ChainBatch, values: Mapping[str, Tensor]
) -> GradientNoise | None:
    """The noise of minibatch gradients of a single step, from the rows of its batch, if batches are
    parts of shuffled rows; None as for `gradient_noise`.

    Args:
        problem: the model and its engine.
        position: unconstrained params `[D]`.
        batch: batch of the step.
        values: hyperparameters of the step, by name.
    """
    if values["temperature"] == 0 or not problem.engine.vectorized:
        return None
    gradients = row_gradients(problem, problem.log_posterior, position[None], [[batch]])
    if gradients is None or gradients.shape[1] < 2:
        return None
    num_data = problem.log_posterior.num_data
    variance = gradient_variance(gradients, gradients.shape[1], num_data, "shuffle")
    return GradientNoise(_inflation(problem.engine, values, variance), variance)


@dataclass(frozen=True)
class _NoiseSample:
    """Draws of a run, and batches at each, at which gradients of single rows are computed.

    Attributes:
        problem: the model and its engine.
        draws: unconstrained params `[draws, D]`.
        batches: a few batches for each draw.
        singly: whether the model runs on single rows.
        together: number of draws whose gradients are in memory at a time.
        sampling: how the rows of batches are drawn.
    """

    problem: Problem
    draws: Tensor
    batches: Sequence[Sequence[ChainBatch]]
    singly: bool
    together: int
    sampling: Sampling

    @classmethod
    def from_run(
        cls,
        problem: Problem,
        positions: Positions,
        finished: list[int],
        batches: Batches,
        step: int,
        sampling: Sampling,
    ) -> _NoiseSample:
        """A few draws of a run, evenly spread over its chains, and batches that follow its last
        step; of large batches, a part of the rows. Arguments as for `gradient_noise`."""
        size = problem.batch_size
        count = -(-NOISE.rows_each // size)  # batches of each draw
        singly = takes_single_rows(problem, problem.positions[0], problem.data.first())
        few = slice(min(size, NOISE.rows_each))  # single rows of each batch
        numbers = count * (few.stop if singly else size) * problem.engine.layout.size
        num_draws = max(NOISE.fewest_draws, min(NOISE.draws // count, _NOISE_NUMBERS // numbers))
        chains = finished[:num_draws]
        chosen = spread(positions, num_draws // len(chains))
        draws = positions[torch.arange(len(chains))[:, None], chosen]
        run_batches = batches_from(batches, step, count * len(chosen))
        by_draw = [
            [batch.of_chain(chain) for batch in run_batches[i : i + count]]
            for chain in chains
            for i in range(0, len(run_batches), count)
        ]
        if singly:
            by_draw = [[(rows.take(args, few), None) for args, _ in group] for group in by_draw]
        flat, together = draws.flatten(0, 1), max(1, NUMBERS_AT_ONCE // numbers)
        return cls(problem, flat.to(problem.positions.device), by_draw, singly, together, sampling)

    def variance_of(self, density: Density, heats: bool = False) -> Tensor | None:
        """Variance of (minibatch gradient / N), averaged over the draws, `[latents]`;
        None if there are no gradients of single rows.

        Args:
            density: the log posterior, or control variates.
            heats: whether to return, of chains in whitened coordinates, the variance that raises
                each element's temperature.
        """
        problem, engine = self.problem, self.problem.engine
        size, num_data = problem.batch_size, problem.log_posterior.num_data
        mixes_axes = heats and engine.whitening is not None
        if (
            isinstance(density, LogPosterior)
            and self.singly
            and not mixes_axes
            and self.together == 1
        ):
            pairs = zip(self.draws, self.batches, strict=True)
            variances = [_variance_of_rows(density, engine.layout, *pair) for pair in pairs]
            factor = variance_factor(size, density.num_data, self.sampling)
            return torch.stack(variances).mean(0).mul_(factor).cpu()
        parts = []
        for block in torch.arange(len(self.draws)).split(self.together):
            batches = [self.batches[place] for place in block]
            gradients = row_gradients(problem, density, self.draws[block], batches, self.singly)
            if gradients is None:
                return None
            if heats and engine.whitening is not None:
                along = engine.whitening.push_forward(engine.whitening.pull_back(gradients))
                gradients = along / engine.whitening.variance.sqrt()
            variance = gradient_variance(gradients, size, num_data, self.sampling)
            parts.append(variance.cpu() * len(block) / len(self.draws))
        return torch.stack(parts).sum(0)


def _inflation(engine: Engine, values: Mapping[str, Tensor], variance: Tensor) -> Tensor | None:
    """The factor by which minibatch noise multiplies the temperature of each latent element, after
    the subtraction of known noise, `[latents]`; 1 for no effect, None if the effect on this kernel
    is not known.

    Args:
        engine: the engine of the run, with its kernel.
        values: hyperparameters of the sampler's kernel by name.
        variance: variance of (minibatch gradient / N), `[latents]`.
    """
    theory = engine.kernel.theory
    if theory is None:
        return None
    values = engine.kernel_values(values)
    padded = engine.pad(variance.to(values["lr"]))
    injected = engine.subtract_known_noise(values)["temperature"].expand_as(padded)
    total = (injected + theory.added_temperature(values, padded)) / values["temperature"]
    return total[: len(variance)].cpu()


def warn_of_a_bad_anchor(noise: GradientNoise | None) -> None:
    """Warns if control variates increase the variance of the minibatch gradient in some element
    instead of reducing it, as with an anchor far from the draws. Does nothing if there is no
    measurement (None) or there are no control variates."""
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
