"""Per-row log likelihood, and draws from the posterior predictive distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count, evenly
from pyro_scale.data.loaders import refuse_arrays
from pyro_scale.data.sources import Data
from pyro_scale.errors import ArgumentError, DataError, ModelError, PyroScaleError
from pyro_scale.fullbatch.chunks import PIECE_ROWS, Piece, is_row_wise, pieces_of, split
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import unwrapped
from pyro_scale.posterior.draws import Result
from pyro_scale.posterior.reductions import Mean, Reduce, Reduction, reduction_of


def log_likelihood(result: Result, data: Data) -> dict[str, Tensor]:
    """Per data site `[chains * draws, N]` in the data's order, in nats, without N/B."""
    pieces = pieces_of(result.log_posterior, data)
    parts = [log_likelihood_of(result, piece) for piece in pieces]
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def log_likelihood_of(result: Result, piece: Piece) -> dict[str, Tensor]:
    """The same of a piece's new rows."""

    def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return result.log_posterior.log_likelihood(params, piece.arguments, piece.indices)

    return {name: value[:, piece.keep] for name, value in result.over_draws(values).items()}


def observed_data(result: Result, data: Data) -> dict[str, Tensor]:
    """The observed values of each site; those with a value a row in the data's order."""
    params = result.layout.unflatten(result.positions[0, 0])
    parts = []
    for piece in pieces_of(result.log_posterior, data):
        sites = result.log_posterior.run(params, piece.arguments, piece.indices).sites
        values = {name: site.value for name, site in sites.items() if site.kind == "observed"}
        parts.append((values, piece))
    return joined(parts, row_axes(result))


def data_sites(result: Result) -> dict[str, int]:
    """Observed sites that have a value a row -> the rows' axis in their value, from the right."""
    known = result.log_posterior.model_info
    axes = {}
    for name, rule in known.scaling.rules.items():
        if rule.role == "rows" and rule.dim is not None:
            for part in name.split("+"):
                site = known.sites[part]
                if site.kind == "observed":
                    axes[part] = rule.dim - len(unwrapped(site.fn, rule.depth).event_shape)
    return axes


def predict(
    result: Result,
    arguments: Arguments,
    num_samples: int | None,
    batch_size: int | None,
    return_sites: Sequence[str] | None,
    reduce: Reduce | None = None,
) -> dict[str, Any]:
    """Draws of observed and other sites, `[draws, ...]`, one for each posterior draw, or what is
    kept of them.

    Raises:
        ModelError: a model that runs on the whole data only fails on these rows.
    """
    drawn = equally_weighted(result, num_samples)
    reduction = None if reduce is None else reduction_of(reduce)
    if reduction is not None and batch_size is None and is_row_wise(result.log_posterior):
        batch_size = PIECE_ROWS
    pieces = pieces_for(result, arguments, batch_size)
    known, count = result.log_posterior.model_info, rows.count(arguments)
    try:
        if reduction is None:
            return _predicted(drawn, pieces, return_sites)
        return _reduced(drawn, pieces, return_sites, reduction)
    except PyroScaleError:
        raise
    except Exception as error:
        if not known.whole_only or (batch_size is None and count == known.batch_size):
            raise
        raise ModelError(
            f"predict: the model runs on all {known.batch_size} rows of its data together, and "
            f"fails on {batch_size or count} rows ({error}): pass as many, or give its local "
            "latents and sizes a plate that follows the rows"
        ) from error


def pieces_for(result: Result, arguments: Arguments, batch_size: int | None) -> Iterator[Piece]:
    """The rows to predict for, so many at a time.

    Raises:
        DataError: there are none, or less than the model takes; a loader among the arguments.
    """
    refuse_arrays(arguments)
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
    pieces = [arguments]
    if batch_size is not None:
        batch_size = as_count("batch_size", batch_size, hint=", or None for all rows")
    if batch_size is not None and num_rows is not None:
        starts = range(0, num_rows, batch_size)
        pieces = [rows.take(arguments, slice(start, start + batch_size)) for start in starts]
    return split(result.log_posterior, pieces)


def predictive_means(result: Result, arguments: Arguments) -> dict[str, Tensor]:
    """Every draw's predictive mean of each data site, `[draws, elements]`; of classes, their
    probabilities.  Rows that the model takes twice are there twice."""
    mean, parts = Mean(), []
    for piece in pieces_for(result, arguments, None):

        def terms(params: dict[str, Tensor], piece: Piece = piece) -> dict[str, Tensor]:
            sites = _sites(result, params, piece, list(data_sites(result)))
            return {name: mean.terms(site)[0].reshape(-1) for name, site in sites.items()}

        parts.append(result.over_draws(terms, random=True))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def predict_all(result: Result, data: Data) -> dict[str, Tensor]:
    """Draws of the data sites for all rows of the data, in their order."""
    return _predicted(result, pieces_of(result.log_posterior, data), list(data_sites(result)))


def _predicted(
    result: Result, pieces: Iterable[Piece], return_sites: Sequence[str] | None
) -> dict[str, Tensor]:
    parts = []
    for piece in pieces:

        def values(params: dict[str, Tensor], piece: Piece = piece) -> dict[str, Tensor]:
            sites = _sites(result, params, piece, return_sites)
            return {name: site.value for name, site in sites.items()}

        parts.append((result.over_draws(values, random=True), piece))
    return joined(parts, row_axes(result))


def _reduced(
    result: Result,
    pieces: Iterable[Piece],
    return_sites: Sequence[str] | None,
    reduction: Reduction,
) -> dict[str, Any]:
    """What is kept of the draws, a piece of the rows after the other."""
    parts = []
    for piece in pieces:

        def terms(params: dict[str, Tensor], piece: Piece = piece) -> Any:
            sites = _sites(result, params, piece, return_sites, reduction.observed_only)
            return {name: reduction.terms(site) for name, site in sites.items()}

        draws: dict[str, Any] = {}
        for some in result.chunks(terms, random=True):
            for name, values in some.items():
                draws.setdefault(name, reduction.gathered()).add(values)
        totals = {name: reduction.total(each) for name, each in draws.items()}
        parts.append((as_dtype(totals, result.layout.dtype), piece))
    of_one = result.layout.unflatten(result.positions[0, 0])
    with own_generator(), torch.no_grad():
        sites = _sites(result, of_one, piece, return_sites, reduction.observed_only)
    known = row_axes(result)
    return joined(parts, {n: reduction.axis(sites[n], known[n]) for n in sites if n in known})


def _sites(
    result: Result,
    params: dict[str, Tensor],
    piece: Piece,
    return_sites: Sequence[str] | None,
    observed_only: bool = False,
) -> dict[str, Site]:
    """The sites that are asked for, of one draw."""
    sites = result.log_posterior.simulate(params, piece.arguments, piece.indices).sites
    names = _returned(result, sites) if return_sites is None else return_sites
    for name in names:
        if name not in sites:
            raise ArgumentError(f"return_sites: no site '{name}'; the model has {sorted(sites)}")
    if return_sites is None and observed_only:
        names = [name for name in names if sites[name].kind == "observed"]
    return {name: sites[name] for name in names}


def equally_weighted(result: Result, num_samples: int | None) -> Result:
    """The result with `num_samples` draws in all that count alike, evenly spaced over chains and
    draws; by default as many as there are.

    Draws with weights are repeated or left out in proportion (systematic resampling).
    """
    chains, draws = result.positions.shape[:2]
    if num_samples is not None:
        chosen = even(chains * draws, num_samples)
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


def even(total: int, wanted: int) -> Tensor:
    """`wanted` indices, evenly spaced over `total`.

    Raises:
        ArgumentError: more are wanted than there are, or none.
    """
    if type(wanted) is not int or not 1 <= wanted <= total:
        raise ArgumentError(f"num_samples={wanted}: pass an int from 1 to {total}, or None for all")
    return evenly(total, wanted)


def _returned(result: Result, sites: Mapping[str, Site]) -> list[str]:
    """What `predict` returns unless it is told: neither latents nor what `get_samples` has."""
    known = set(result.log_posterior.latents) | set(result.log_posterior.model_info.steady)
    return [
        name
        for name, site in sites.items()
        if site.kind in ("observed", "deterministic") and name not in known
    ]


def as_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Tensors, added up in double precision, in the model's own."""
    return pytree.tree_map(lambda value: value.to(dtype), values)


def row_axes(result: Result) -> dict[str, int]:
    """Sites that have a value a row -> the rows' axis in it, from the right."""
    return {**result.log_posterior.model_info.row_axes, **data_sites(result)}


def joined(parts: Sequence[tuple[Mapping[str, Any], Piece]], axes: Mapping[str, int]) -> Any:
    """Pieces' values, tensors or tuples of them, joined along each site's rows; what has no rows
    is the first piece's."""
    joined = dict(parts[0][0])
    if len(parts) == 1 and parts[0][1].keep == slice(None):
        return joined
    for name, axis in axes.items():
        if name in joined:

            def join(*values: Tensor, axis: int = axis) -> Tensor:
                kept = [
                    value.movedim(axis, 0)[piece.keep].movedim(0, axis)
                    for value, (_, piece) in zip(values, parts, strict=True)
                ]
                return torch.cat(kept, dim=axis)

            joined[name] = pytree.tree_map(join, *(values[name] for values, _ in parts))
    return joined
