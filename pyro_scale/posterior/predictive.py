"""Log likelihood of each row, and draws from the posterior predictive distribution."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import evenly
from pyro_scale.curvature.chunks import Chunk, chunks_of
from pyro_scale.data.sources import Data
from pyro_scale.errors import ArgumentError, ModelError, PyroScaleError
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.recorder import LatentShapeChanged
from pyro_scale.model.sites import Site
from pyro_scale.posterior import local_latents
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.readers import Readers, readers_of
from pyro_scale.posterior.reductions import (
    AllDraws,
    Mean,
    Reduce,
    Reduction,
    Values,
    as_reduction,
)
from pyro_scale.posterior.row_batches import (
    RowBatches,
    chosen_sites,
    data_sites,
    row_axes,
    row_batches,
    run_at_first_draw,
)

#: Sites by name -> the tensors of each that a reduction accumulates, by site.
Terms = Callable[[Mapping[str, Site]], dict[str, tuple[Tensor, ...]]]


def check_model(log_posterior: LogPosterior, argument: str) -> None:
    """Raises if the run was on a log density that a user's function computes, which has no sites to
    predict.

    Args:
        log_posterior: model of the run.
        argument: name of the method or argument that needs sites, for the message.

    Raises:
        ArgumentError: the log posterior was made from a function.
    """
    if log_posterior.model_info.is_function:
        raise ArgumentError(
            f"{argument}: a log posterior made from a function has no model to predict with, only "
            "its density: run a Pyro model, or compute it from get_samples()"
        )


# ------------------------------------------------------------------ log likelihood


def log_likelihood(result: PosteriorDraws, data: Data) -> dict[str, Tensor]:
    """Log likelihood of every row of the data at every draw, in nats, not scaled (by N/B): `[chains
    * draws, N]` by data site, rows in the data's order."""
    log_posterior = result.log_posterior
    groups = local_latents.sharing_groups(data)

    def of_chunk(chunk: Chunk) -> dict[str, Tensor]:
        if groups is not None:
            return local_latents.member_log_likelihood(result, chunk)
        values = result.over_draws(
            lambda params: log_posterior.log_likelihood(params, chunk.arguments, chunk.indices)
        )
        return {name: value[:, chunk.keep] for name, value in values.items()}

    with readers_of(result, "log_likelihood", data) as readers:
        chunks = chunks_of(log_posterior, data, share=readers.share)
        parts = [part for part, _ in readers.map(of_chunk, chunks)]
        joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    if groups is None:
        return joined
    return {name: value[:, groups] for name, value in joined.items()}


def log_likelihood_of_rows(result: PosteriorDraws, params: Params, chunk: Chunk) -> Tensor:
    """Log likelihood of the rows of one chunk at one set of params, in nats, summed over data
    sites, `[rows]`.

    Args:
        result: draws and facts of the run.
        params: unconstrained values by site.
        chunk: the rows; those that earlier chunks had are left out of the result.

    Raises:
        ArgumentError: data sites have different numbers of values, so that no row has all sites.
    """
    values = result.log_posterior.log_likelihood(params, chunk.arguments, chunk.indices)
    sizes = {name: len(value) for name, value in values.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"'{name}': {size}" for name, size in sizes.items())
        raise ArgumentError(
            f"the sites' log likelihoods have different numbers of values ({listed}), so there are "
            "no rows with all sites: take one site, arviz.loo(fit.to_arviz(), var_name=...)"
        )
    return torch.stack(list(values.values())).sum(0)[chunk.keep]


def row_log_likelihood(result: PosteriorDraws, chunk: Chunk) -> Tensor:
    """The log likelihood of each row of one chunk at every draw, `[chains * draws, rows]` in nats,
    summed over the data sites; rows that earlier chunks had are left out."""
    return result.over_draws(
        lambda params: {"rows": log_likelihood_of_rows(result, params, chunk)}
    )["rows"]


def observed_data(result: PosteriorDraws, data: Data) -> dict[str, Tensor]:
    """The observed values of the observed sites, by name, in the rows' order, for ArviZ's group
    `observed_data`; tensors of the sites' shapes for all rows of the data."""
    params = result.layout.unflatten(result.positions[0, 0])
    parts = []
    for chunk in chunks_of(result.log_posterior, data):
        sites = result.log_posterior.run(params, chunk.arguments, chunk.indices).sites
        values = {name: site.value for name, site in sites.items() if site.kind == "observed"}
        parts.append((values, chunk))
    return join(parts, row_axes(result))


# ------------------------------------------------------------------ predictions

#: What to do where an index of a group is out of range.
_NEW_GROUPS = (
    "if it is the index of a group: one that is new has no draws. With a sampler, give the groups' "
    "plate a place for it when you fit: a group without rows is drawn given the others"
)


def predict(
    result: PosteriorDraws,
    arguments: Arguments,
    num_samples: int | None,
    batch_size: int | None,
    return_sites: Sequence[str] | None,
    reduce: Reduce | Reduction | None = None,
) -> dict[str, Any]:
    """Posterior predictive draws of observed and other sites, `[draws, ...]` by name, one for each
    posterior draw; or a summary of them.

    Args:
        result: draws and facts of the run.
        arguments: the model's arguments for the rows to predict.
        num_samples: number of posterior draws to use, evenly spaced; None for all.
        batch_size: rows that are predicted together; None for all.
        return_sites: names of the sites; None for all but latents and those that `get_samples`
            returns.
        reduce: summary of the draws: "mean", "entropy", "variance", levels of quantiles, or a
            reduction; None for the draws.

    Raises:
        ModelError: the model needs all rows of its data together, and fails on these rows.
    """
    options = {"num_samples": num_samples, "batch_size": batch_size, "return_sites": return_sites}
    with readers_of(result, "predict", arguments, True, reduce=reduce, **options) as readers:
        drawn, reduction = resample_equally(result, num_samples), as_reduction(reduce)
        terms_by_block = partial(_terms_by_block, drawn, return_sites, reduction)
        with explain_failures(result, arguments, batch_size):
            may_split = not reduction.keeps_draws
            batches = row_batches(
                result, arguments, batch_size, return_sites, readers.share, may_split
            )
            return reduce_batches(result, batches, reduction, readers, terms_by_block)


def predict_all(result: PosteriorDraws, data: Data) -> dict[str, Tensor]:
    """Predictive draws of the data sites for all rows of the data, `[chains * draws, ...]` by name,
    rows in the data's order."""
    with readers_of(result, "draws for all rows", data, draws=True) as readers:
        chunks = chunks_of(result.log_posterior, data, share=readers.share)
        batches, reduction = RowBatches(chunks, row_axes(result)), AllDraws()
        terms_by_block = partial(_terms_by_block, result, list(data_sites(result)), reduction)
        return reduce_batches(result, batches, reduction, readers, terms_by_block)


def reduce_batches(
    result: PosteriorDraws,
    batches: RowBatches,
    reduction: Reduction,
    readers: Readers,
    terms_by_block: Callable[[Chunk, Terms], Iterable[dict[str, tuple[Tensor, ...]]]],
) -> dict[str, Any]:
    """Predictions for batches of rows, by site and joined along the rows: all draws or a summary of
    them, as `reduction` says.

    Args:
        result: draws and facts of the run.
        batches: the rows, in chunks.
        reduction: what is returned of the draws: all of them, or a summary.
        readers: the processes that share out the rows.
        terms_by_block: function of (chunk of rows, function of sites) that yields the latter's
            values, `[draws, ...]` by site, one block of draws after another.
    """

    def reduce_chunk(chunk: Chunk) -> tuple[dict[str, Any], dict[str, int]]:
        """(The predictions for one chunk of rows; the axis of the rows in each), both by site."""
        axes: dict[str, int] = {}

        def terms(sites: Mapping[str, Site]) -> dict[str, tuple[Tensor, ...]]:
            for name, site in sites.items():
                if name in batches.axes:
                    axes[name] = reduction.axis(site, batches.axes[name])
            return {name: reduction.terms(site) for name, site in sites.items()}

        draws: dict[str, Any] = {}
        for block in terms_by_block(chunk, terms):
            for name, values in block.items():
                draws.setdefault(name, reduction.accumulator()).add(values)
        totals = {name: reduction.total(accumulator) for name, accumulator in draws.items()}
        if not reduction.keeps_draws:  # means are accumulated in double precision
            totals = pytree.tree_map(lambda value: value.to(result.layout.dtype), totals)
        return totals, axes

    parts = readers.map(reduce_chunk, batches.chunks)
    return join([(totals, chunk) for (totals, _), chunk in parts], parts[0][0][1])


def _terms_by_block(
    result: PosteriorDraws,
    return_sites: Sequence[str] | None,
    reduction: Reduction,
    chunk: Chunk,
    terms: Terms,
) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Yields the reduction's terms of the sites for a chunk of rows at every draw, `[draws, ...]`
    each by site, one block of draws after another.

    Args:
        result: draws and facts of the run.
        return_sites: names of the sites; None for the default ones.
        reduction: what is returned of the draws.
        chunk: the rows.
        terms: function from sites to their terms, by name.
    """
    needs_draws = issubclass(reduction.accumulator, Values)
    drawn = {} if needs_draws else _undrawable_values(result, chunk)

    def at_draw(params: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
        return terms(_sites(result, params, chunk, return_sites, reduction.observed_only, drawn))

    return result.chunks(at_draw, random=True)


@contextlib.contextmanager
def explain_failures(
    result: PosteriorDraws, arguments: Arguments, batch_size: int | None
) -> Iterator[None]:
    """Context for running the model on new rows: an error that the model raises because of the rows
    is replaced by one that says why, or gets a note that describes the rows.

    Args:
        result: draws and facts of the run.
        arguments: the model's arguments, with the new rows.
        batch_size: the user's `batch_size=`; None if it was not passed.

    Raises:
        ArgumentError: the rows have other shapes than those of the run.
        ModelError: the model runs only on all rows of its data together.
    """
    info, count = result.log_posterior.model_info, rows.count(arguments)
    try:
        yield
    except Exception as error:
        differ = rows.other_columns(arguments, info.example)
        reason = None if isinstance(error, PyroScaleError) else str(error)
        if isinstance(error, LatentShapeChanged):
            reason = f"the shape of site '{error.name}' follows them"
        if differ and reason is not None:
            raise ArgumentError(f"the model fails on these rows ({reason}): {differ}") from error
        if isinstance(error, PyroScaleError):
            raise
        if not info.whole_only or (batch_size is None and count == info.batch_size):
            error.add_note(f"raised by the model in predict: {rows.described(arguments)}")
            if isinstance(error, IndexError):
                error.add_note(_NEW_GROUPS)
            raise
        raise ModelError(
            f"predict: the model runs on all {info.batch_size} rows of its data together, and "
            f"fails on {batch_size or count} rows ({error}): pass as many, or give its local "
            "latents and sizes a plate that follows the rows"
        ) from error


def predictive_means(result: PosteriorDraws, arguments: Arguments) -> dict[str, Tensor]:
    """The mean of the predictive distribution of every data site at each posterior draw, `[chains *
    draws, elements]` by name; for classes, their probabilities. For R-hat of predictions. Rows that
    the model takes twice are returned twice."""
    mean, parts = Mean(), []
    for chunk in row_batches(result, arguments, None).chunks:

        def means(params: dict[str, Tensor], chunk: Chunk = chunk) -> dict[str, Tensor]:
            sites = _sites(result, params, chunk, list(data_sites(result)))
            return {name: mean.terms(site)[0].reshape(-1) for name, site in sites.items()}

        parts.append(result.over_draws(means, random=True))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def _undrawable_values(result: PosteriorDraws, chunk: Chunk) -> dict[str, Tensor]:
    """A dict from each site whose distribution cannot be sampled to a tensor of NaN in the shape of
    its value, with which the model runs on; means and variances need no draws. Empty if all sites
    can be sampled."""
    run = run_at_first_draw(result, chunk.arguments, chunk.indices)
    values = {name: run.sites[name].value for name in run.drawn}
    return {name: value for name, value in values.items() if bool(value.isnan().all())}


def _sites(
    result: PosteriorDraws,
    params: dict[str, Tensor],
    chunk: Chunk,
    return_sites: Sequence[str] | None,
    observed_only: bool = False,
    drawn: Params | None = None,
) -> dict[str, Site]:
    """The sites to predict, by name, from a run of the model at one draw on a chunk of rows.

    Args:
        result: draws and facts of the run.
        params: unconstrained values of the draw, by site.
        chunk: the rows.
        return_sites: names of the sites; None for the default ones.
        observed_only: whether the default ones are observed sites only.
        drawn: values by site to use instead of draws.
    """
    sites = result.log_posterior.simulate(params, chunk.arguments, chunk.indices, drawn).sites
    names = chosen_sites(result, sites, return_sites)
    if return_sites is None and observed_only:
        names = [name for name in names if sites[name].kind == "observed"]
    return {name: sites[name] for name in names}


# ------------------------------------------------------------------ draws and rows


def resample_equally(result: PosteriorDraws, num_samples: int | None) -> PosteriorDraws:
    """Draws that all count alike, for functions that know no weights: a copy of the result with
    `num_samples` draws in one chain, evenly spaced over chains and draws. For None, as many as
    there are; then the result itself is returned if its draws have no weights.

    Draws with weights are repeated or left out in proportion (systematic resampling).
    """
    chains, draws = result.positions.shape[:2]
    if num_samples is not None:
        chosen = spread_evenly(chains * draws, num_samples)
    elif result.weights is None:
        return result
    if result.weights is not None:
        chosen = in_proportion(result.weights.flatten(), num_samples or chains * draws)
    return dataclasses.replace(
        result, positions=result.positions[chosen // draws, chosen % draws][None]
    )


def in_proportion(weights: Tensor, count: int) -> Tensor:
    """`count` indices into `weights`, ascending, each repeated in proportion to its weight (up to
    rounding to whole numbers, without random numbers: systematic resampling)."""
    shares = weights.cumsum(0) / weights.sum()
    places = (torch.arange(count, dtype=shares.dtype) + 0.5) / count
    return torch.searchsorted(shares, places).clamp(max=len(weights) - 1)


def spread_evenly(total: int, num_samples: int) -> Tensor:
    """`num_samples` indices from 0 to `total` - 1, evenly spaced, in ascending order.

    Raises:
        ArgumentError: `num_samples` is not an integer from 1 to `total`.
    """
    if type(num_samples) is not int or not 1 <= num_samples <= total:
        raise ArgumentError(
            f"num_samples={num_samples}: pass an int from 1 to {total}, or None for all"
        )
    return evenly(total, num_samples)


def join(parts: Sequence[tuple[Mapping[str, Any], Chunk]], axes: Mapping[str, int]) -> Any:
    """The values of all chunks of rows by site, joined along each site's axis of rows: tensors, or
    tuples of tensors. A site without rows has the value from the first chunk.

    Args:
        parts: (values by site, chunk) of all chunks, in the data's order; rows of a chunk that
            earlier chunks had are dropped.
        axes: axis of the rows in the values, by site.
    """
    sites = dict(parts[0][0])
    if len(parts) == 1 and parts[0][1].keep == slice(None):
        return sites
    for name, axis in axes.items():
        if name in sites:

            def concatenate(*values: Tensor, axis: int = axis) -> Tensor:
                kept = [
                    value.movedim(axis, 0)[chunk.keep].movedim(0, axis)
                    for value, (_, chunk) in zip(values, parts, strict=True)
                ]
                return torch.cat(kept, dim=axis)

            sites[name] = pytree.tree_map(concatenate, *(values[name] for values, _ in parts))
    return sites
