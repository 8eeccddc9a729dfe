"""Log likelihood of each row, and draws from the posterior predictive distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count, evenly
from pyro_scale.data.loaders import check_tensors
from pyro_scale.data.sources import Data
from pyro_scale.distributed.shares import WHOLE, Share
from pyro_scale.errors import ArgumentError, DataError, ModelError, PyroScaleError
from pyro_scale.fullbatch.chunks import CHUNK_ROWS, Chunk, chunks_of, is_row_wise, split
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import unwrap
from pyro_scale.posterior.by_rank import Readers, readers_of
from pyro_scale.posterior.draws import Result
from pyro_scale.posterior.reductions import Mean, Reduce, Reduction, reduction_of


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


def log_likelihood(result: Result, data: Data) -> dict[str, Tensor]:
    """Per data site `[chains * draws, N]` in the data's order, in nats, without N/B."""
    with readers_of(result, "log_likelihood", data) as readers:
        chunks = chunks_of(result.log_posterior, data, share=readers.share)
        parts = [part for part, _ in readers.map(partial(log_likelihood_of, result), chunks)]
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def log_likelihood_of(result: Result, chunk: Chunk) -> dict[str, Tensor]:
    """The same of a chunk's new rows."""

    def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return result.log_posterior.log_likelihood(params, chunk.arguments, chunk.indices)

    return {name: value[:, chunk.keep] for name, value in result.over_draws(values).items()}


def observed_data(result: Result, data: Data) -> dict[str, Tensor]:
    """The observed values of each site; those with a value a row in the data's order."""
    params = result.layout.unflatten(result.positions[0, 0])
    parts = []
    for chunk in chunks_of(result.log_posterior, data):
        sites = result.log_posterior.run(params, chunk.arguments, chunk.indices).sites
        values = {name: site.value for name, site in sites.items() if site.kind == "observed"}
        parts.append((values, chunk))
    return join(parts, row_axes(result))


def data_sites(result: Result) -> dict[str, int]:
    """Observed sites that have a value a row -> the rows' axis in their value, from the right."""
    return data_axes(result.log_posterior.model_info)


def data_axes(info: ModelInfo) -> dict[str, int]:
    """The same, of a model."""
    axes = {}
    for name, rule in info.scaling.rules.items():
        if rule.role == "rows" and rule.dim is not None:
            for part in name.split("+"):
                site = info.sites[part]
                if site.kind == "observed":
                    axes[part] = rule.dim - len(unwrap(site.fn, rule.depth).event_shape)
    return axes


#: What to do where rows of groups are predicted that the data did not have.
_NEW_GROUPS = (
    "if it is the index of a group: one that is new has no draws. With a sampler, give the groups' "
    "plate a place for it when you fit: a group without rows is drawn given the others"
)


def predict(
    result: Result,
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
    result: Result,
    arguments: Arguments,
    num_samples: int | None,
    batch_size: int | None,
    return_sites: Sequence[str] | None,
    reduce: Reduce | Reduction | None,
    readers: Readers,
) -> dict[str, Any]:
    drawn = resample_equally(result, num_samples)
    reduction = None if reduce is None else reduction_of(reduce)
    if reduction is not None and batch_size is None and is_row_wise(result.log_posterior):
        batch_size = CHUNK_ROWS
    chunks = chunks_for(result, arguments, batch_size, readers.share)
    info, count = result.log_posterior.model_info, rows.count(arguments)
    try:
        if reduction is None:
            return _make_predictions(drawn, chunks, return_sites, readers)
        return _reduce(drawn, chunks, return_sites, reduction, readers)
    except PyroScaleError:
        raise
    except Exception as error:
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


def chunks_for(
    result: Result, arguments: Arguments, batch_size: int | None, share: Share = WHOLE
) -> Iterator[Chunk]:
    """The rows to predict for, so many at a time; of these, a rank's share.

    Raises:
        DataError: there are none, or less than the model takes; a loader among the arguments.
    """
    check_tensors(arguments)
    for name, leaf in rows.named_leaves(arguments):
        if isinstance(leaf, DataLoader):
            raise DataError(
                f"predict: argument {name} is a DataLoader: pass what the model takes, for each of "
                "its batches, or the tensors with batch_size="
            )
    num_rows = rows.count(arguments)
    if num_rows == 0:
        raise DataError("predict: the arguments have no rows")
    own = result.log_posterior.model_info
    if own.own_plate is not None and num_rows is not None and num_rows < own.batch_size:
        raise DataError(
            f"predict: the model takes {own.batch_size} rows at a time in plate "
            f"'{own.own_plate}', but {num_rows} are passed: pass at least {own.batch_size}"
        )
    chunks = [arguments]
    if batch_size is not None:
        batch_size = as_count("batch_size", batch_size, hint=", or None for all rows")
    if share.world > 1 and num_rows is not None and _is_drawn_by_row(result):
        batch_size = share.size(batch_size or num_rows, num_rows)
    if batch_size is not None and num_rows is not None:
        starts = range(0, num_rows, batch_size)
        chunks = [rows.take(arguments, slice(start, start + batch_size)) for start in starts]
    return share.of(split(result.log_posterior, chunks))


def _is_drawn_by_row(result: Result) -> bool:
    """Whether what is drawn of some rows is nothing to the others."""
    log_posterior = result.log_posterior
    observed = {n for n, site in log_posterior.model_info.sites.items() if site.kind == "observed"}
    own_plate = log_posterior.model_info.own_plate
    return (
        own_plate is None and is_row_wise(log_posterior) and observed <= data_sites(result).keys()
    )


def predictive_means(result: Result, arguments: Arguments) -> dict[str, Tensor]:
    """Every draw's predictive mean of each data site, `[draws, elements]`; of classes, their
    probabilities.  Rows that the model takes twice are there twice."""
    mean, parts = Mean(), []
    for chunk in chunks_for(result, arguments, None):

        def terms(params: dict[str, Tensor], chunk: Chunk = chunk) -> dict[str, Tensor]:
            sites = _sites(result, params, chunk, list(data_sites(result)))
            return {name: mean.terms(site)[0].reshape(-1) for name, site in sites.items()}

        parts.append(result.over_draws(terms, random=True))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def predict_all(result: Result, data: Data) -> dict[str, Tensor]:
    """Draws of the data sites for all rows of the data, in their order."""
    with readers_of(result, "draws for all rows", data, draws=True) as readers:
        chunks = chunks_of(result.log_posterior, data, share=readers.share)
        return _make_predictions(result, chunks, list(data_sites(result)), readers)


def _make_predictions(
    result: Result, chunks: Iterable[Chunk], return_sites: Sequence[str] | None, readers: Readers
) -> dict[str, Tensor]:
    def draws(chunk: Chunk) -> dict[str, Tensor]:
        def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
            sites = _sites(result, params, chunk, return_sites)
            return {name: site.value for name, site in sites.items()}

        return result.over_draws(values, random=True)

    joined: dict[str, Tensor] = join(readers.map(draws, chunks), row_axes(result))
    return joined


def _reduce(
    result: Result,
    chunks: Iterable[Chunk],
    return_sites: Sequence[str] | None,
    reduction: Reduction,
    readers: Readers,
) -> dict[str, Any]:
    """What is kept of the draws, a chunk of the rows after the other."""
    axes = row_axes(result)

    def kept(chunk: Chunk) -> tuple[dict[str, Any], dict[str, int]]:
        """(Of every site, where its rows are)."""
        where: dict[str, int] = {}

        def terms(params: dict[str, Tensor]) -> Any:
            sites = _sites(result, params, chunk, return_sites, reduction.observed_only)
            where.update((n, reduction.axis(sites[n], axes[n])) for n in sites if n in axes)
            return {name: reduction.terms(site) for name, site in sites.items()}

        draws: dict[str, Any] = {}
        for block in result.chunks(terms, random=True):
            for name, values in block.items():
                draws.setdefault(name, reduction.gathered()).add(values)
        totals = {name: reduction.total(each) for name, each in draws.items()}
        return as_dtype(totals, result.layout.dtype), where

    parts = readers.map(kept, chunks)
    return join([(totals, chunk) for (totals, _), chunk in parts], parts[0][0][1])


def _sites(
    result: Result,
    params: dict[str, Tensor],
    chunk: Chunk,
    return_sites: Sequence[str] | None,
    observed_only: bool = False,
) -> dict[str, Site]:
    """The sites that are asked for, of one draw."""
    sites = result.log_posterior.simulate(params, chunk.arguments, chunk.indices).sites
    names = _default_sites(result, sites) if return_sites is None else return_sites
    for name in names:
        if name not in sites:
            raise ArgumentError(f"return_sites: no site '{name}'; the model has {sorted(sites)}")
    if return_sites is None and observed_only:
        names = [name for name in names if sites[name].kind == "observed"]
    return {name: sites[name] for name in names}


def resample_equally(result: Result, num_samples: int | None) -> Result:
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


def _default_sites(result: Result, sites: Mapping[str, Site]) -> list[str]:
    """What `predict` returns unless it is told: neither latents nor what `get_samples` has."""
    latents, steady = result.log_posterior.latents, result.log_posterior.model_info.steady
    hidden = {"observed": latents, "deterministic": {*latents, *steady}}
    return [name for name, site in sites.items() if name not in hidden.get(site.kind, sites)]


def as_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Tensors, added up in double precision, in the model's own."""
    return pytree.tree_map(lambda value: value.to(dtype), values)


def row_axes(result: Result) -> dict[str, int]:
    """Sites that have a value a row -> the rows' axis in it, from the right."""
    return {**result.log_posterior.model_info.row_axes, **data_sites(result)}


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
