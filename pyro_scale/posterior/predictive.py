"""Log likelihood of each row, and draws from the posterior predictive distribution."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
from pyro_scale.posterior.by_rank import Readers, readers_of
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.reductions import Mean, Reduce, Reduction, Values, reduction_of
from pyro_scale.posterior.row_batches import RowBatches, row_batches, run_at_first_draw
from pyro_scale.posterior.site_rows import chosen_sites, data_sites, row_axes


def check_model(log_posterior: LogPosterior, asked: str) -> None:
    """Refuses what needs a model's sites where there are none, but a function.

    Raises:
        ArgumentError: names what was asked for.
    """
    if log_posterior.model_info.is_function:
        raise ArgumentError(
            f"{asked}: a log posterior made from a function has no model to predict with, only "
            "its density: run a Pyro model, or compute it from get_samples()"
        )


def log_likelihood(result: PosteriorDraws, data: Data) -> dict[str, Tensor]:
    """Per data site `[chains * draws, N]` in the data's order, in nats, without N/B."""
    with readers_of(result, "log_likelihood", data) as readers:
        chunks = chunks_of(result.log_posterior, data, share=readers.share)
        parts = [part for part, _ in readers.map(partial(log_likelihood_of, result), chunks)]
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def log_likelihood_of(result: PosteriorDraws, chunk: Chunk) -> dict[str, Tensor]:
    """The same of a chunk's new rows."""

    def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return result.log_posterior.log_likelihood(params, chunk.arguments, chunk.indices)

    return {name: value[:, chunk.keep] for name, value in result.over_draws(values).items()}


def log_likelihood_of_rows(result: PosteriorDraws, params: Params, chunk: Chunk) -> Tensor:
    """The same at params, of all sites together, `[rows]`: a row is one with all its sites.

    Raises:
        ArgumentError: sites of a model of all rows have different numbers of values.
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
    """The same of all draws, `[draws, rows]`."""

    def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"rows": log_likelihood_of_rows(result, params, chunk)}

    return result.over_draws(values)["rows"]


def observed_data(result: PosteriorDraws, data: Data) -> dict[str, Tensor]:
    """The observed values of each site; those with a value a row in the data's order."""
    params = result.layout.unflatten(result.positions[0, 0])
    parts = []
    for chunk in chunks_of(result.log_posterior, data):
        sites = result.log_posterior.run(params, chunk.arguments, chunk.indices).sites
        values = {name: site.value for name, site in sites.items() if site.kind == "observed"}
        parts.append((values, chunk))
    return join(parts, row_axes(result))


#: What to do where rows of groups are predicted that the data did not have.
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
    """Draws of observed and other sites, `[draws, ...]`, one for each posterior draw, or what is
    kept of them.

    Raises:
        ModelError: a model that runs on the whole data only fails on these rows.
    """
    asked = {"num_samples": num_samples, "batch_size": batch_size, "return_sites": return_sites}
    with readers_of(result, "predict", arguments, True, reduce=reduce, **asked) as readers:
        return _predict(result, arguments, num_samples, batch_size, return_sites, reduce, readers)


def _predict(
    result: PosteriorDraws,
    arguments: Arguments,
    num_samples: int | None,
    batch_size: int | None,
    return_sites: Sequence[str] | None,
    reduce: Reduce | Reduction | None,
    readers: Readers,
) -> dict[str, Any]:
    drawn = resample_equally(result, num_samples)
    reduction = None if reduce is None else reduction_of(reduce)
    with explain_failures(result, arguments, batch_size):
        batches = row_batches(
            result, arguments, batch_size, return_sites, readers.share, reduction is not None
        )
        if reduction is None:
            return _make_predictions(drawn, batches, return_sites, readers)
        return _reduce(drawn, batches, return_sites, reduction, readers)


@contextlib.contextmanager
def explain_failures(
    result: PosteriorDraws, arguments: Arguments, batch_size: int | None
) -> Iterator[None]:
    """Says why a model fails on rows that it has not been run on.

    Raises:
        ArgumentError: rows have other shapes than those that it was run on.
        ModelError: it runs on the whole data only.
    """
    info, count = result.log_posterior.model_info, rows.count(arguments)
    try:
        yield
    except Exception as error:
        differ = rows.other_columns(arguments, info.example)
        what = None if isinstance(error, PyroScaleError) else str(error)
        if isinstance(error, LatentShapeChanged):
            what = f"the shape of site '{error.name}' follows them"
        if differ and what is not None:
            raise ArgumentError(f"the model fails on these rows ({what}): {differ}") from error
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
    """Every draw's predictive mean of each data site, `[draws, elements]`; of classes, their
    probabilities.  Rows that the model takes twice are there twice."""
    mean, parts = Mean(), []
    for chunk in row_batches(result, arguments, None).chunks:

        def terms(params: dict[str, Tensor], chunk: Chunk = chunk) -> dict[str, Tensor]:
            sites = _sites(result, params, chunk, list(data_sites(result)))
            return {name: mean.terms(site)[0].reshape(-1) for name, site in sites.items()}

        parts.append(result.over_draws(terms, random=True))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def predict_all(result: PosteriorDraws, data: Data) -> dict[str, Tensor]:
    """Draws of the data sites for all rows of the data, in their order."""
    with readers_of(result, "draws for all rows", data, draws=True) as readers:
        chunks = chunks_of(result.log_posterior, data, share=readers.share)
        batches = RowBatches(chunks, row_axes(result))
        return _make_predictions(result, batches, list(data_sites(result)), readers)


def _make_predictions(
    result: PosteriorDraws,
    batches: RowBatches,
    return_sites: Sequence[str] | None,
    readers: Readers,
) -> dict[str, Tensor]:
    def draws(chunk: Chunk) -> dict[str, Tensor]:
        def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
            sites = _sites(result, params, chunk, return_sites)
            return {name: site.value for name, site in sites.items()}

        return result.over_draws(values, random=True)

    joined: dict[str, Tensor] = join(readers.map(draws, batches.chunks), batches.axes)
    return joined


def _reduce(
    result: PosteriorDraws,
    batches: RowBatches,
    return_sites: Sequence[str] | None,
    reduction: Reduction,
    readers: Readers,
) -> dict[str, Any]:
    """What is kept of the draws, a chunk of the rows after the other."""
    axes = batches.axes

    def kept(chunk: Chunk) -> tuple[dict[str, Any], dict[str, int]]:
        """(Of every site, where its rows are)."""
        where: dict[str, int] = {}
        takes_draws = issubclass(reduction.gathered, Values)
        no_draws = {} if takes_draws else _without_draws(result, chunk)

        def terms(params: dict[str, Tensor]) -> Any:
            sites = _sites(result, params, chunk, return_sites, reduction.observed_only, no_draws)
            where.update((n, reduction.axis(sites[n], axes[n])) for n in sites if n in axes)
            return {name: reduction.terms(site) for name, site in sites.items()}

        draws: dict[str, Any] = {}
        for block in result.chunks(terms, random=True):
            for name, values in block.items():
                draws.setdefault(name, reduction.gathered()).add(values)
        totals = {name: reduction.total(each) for name, each in draws.items()}
        return as_dtype(totals, result.layout.dtype), where

    parts = readers.map(kept, batches.chunks)
    return join([(totals, chunk) for (totals, _), chunk in parts], parts[0][0][1])


def _without_draws(result: PosteriorDraws, chunk: Chunk) -> dict[str, Tensor]:
    """Sites whose distributions have no draws, with NaN for one: what moments need not know."""
    run = run_at_first_draw(result, chunk.arguments, chunk.indices)
    values = {name: run.sites[name].value for name in run.drawn}
    return {n: value for n, value in values.items() if bool(value.isnan().all())}


def _sites(
    result: PosteriorDraws,
    params: dict[str, Tensor],
    chunk: Chunk,
    return_sites: Sequence[str] | None,
    observed_only: bool = False,
    drawn: Params | None = None,
) -> dict[str, Site]:
    """The sites that are asked for, of one draw."""
    sites = result.log_posterior.simulate(params, chunk.arguments, chunk.indices, drawn).sites
    names = chosen_sites(result, sites, return_sites)
    if return_sites is None and observed_only:
        names = [name for name in names if sites[name].kind == "observed"]
    return {name: sites[name] for name in names}


def resample_equally(result: PosteriorDraws, num_samples: int | None) -> PosteriorDraws:
    """The result with `num_samples` draws in all that count alike, evenly spaced over chains and
    draws; by default as many as there are.

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


def in_proportion(weights: Tensor, wanted: int) -> Tensor:
    """`wanted` indices, in order, each as often as its share of the weights `[total]`, but for
    rounding."""
    shares = weights.cumsum(0) / weights.sum()
    places = (torch.arange(wanted, dtype=shares.dtype) + 0.5) / wanted
    return torch.searchsorted(shares, places).clamp(max=len(weights) - 1)


def spread_evenly(total: int, wanted: int) -> Tensor:
    """`wanted` indices, evenly spaced over `total`.

    Raises:
        ArgumentError: more are wanted than there are, or none.
    """
    if type(wanted) is not int or not 1 <= wanted <= total:
        raise ArgumentError(f"num_samples={wanted}: pass an int from 1 to {total}, or None for all")
    return evenly(total, wanted)


def as_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Tensors, added up in double precision, in the model's own."""
    return pytree.tree_map(lambda value: value.to(dtype), values)


def join(parts: Sequence[tuple[Mapping[str, Any], Chunk]], axes: Mapping[str, int]) -> Any:
    """Chunks' values, tensors or tuples of them, joined along each site's rows; what has no rows
    is the first chunk's."""
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
