"""Per-row log likelihood, and draws from the posterior predictive distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.counts import as_count
from pyro_scale.core.rows import Arguments
from pyro_scale.drive.sources import Data, refuse_arrays
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.infer.pieces import Piece, pieces_of, split
from pyro_scale.infer.result import Result
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import unwrapped


def log_likelihood(result: Result, data: Data) -> dict[str, Tensor]:
    """Per data site `[chains * draws, N]` in the data's order, in nats, without N/B."""
    parts = []
    for piece in pieces_of(result.log_posterior, data):

        def values(params: dict[str, Tensor], piece: Piece = piece) -> dict[str, Tensor]:
            return result.log_posterior.log_likelihood(params, piece.arguments, piece.indices)

        part = result.over_draws(values, piece.num_rows)
        parts.append({name: value[:, piece.keep] for name, value in part.items()})
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def observed_data(result: Result, data: Data) -> dict[str, Tensor]:
    """The observed values of each site; those with a value a row in the data's order."""
    params = result.layout.unflatten(result.positions[0, 0])
    parts = []
    for piece in pieces_of(result.log_posterior, data):
        sites = result.log_posterior.run(params, piece.arguments, piece.indices).sites
        values = {name: site.value for name, site in sites.items() if site.kind == "observed"}
        parts.append((values, piece))
    return joined(result, parts)


def data_sites(result: Result) -> dict[str, int]:
    """Observed sites that have a value a row -> the rows' axis in their value, from the right."""
    known = result.log_posterior.understanding
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
) -> dict[str, Tensor]:
    """Draws of observed and other sites, `[draws, ...]`, one for each posterior draw."""
    pieces = pieces_for(result, arguments, batch_size)
    return _predicted(equally_weighted(result, num_samples), pieces, return_sites)


def pieces_for(result: Result, arguments: Arguments, batch_size: int | None) -> Iterator[Piece]:
    """The rows to predict for, so many at a time.

    Raises:
        DataError: there are none, or less than the model takes.
    """
    refuse_arrays(arguments)
    num_rows = rows.count(arguments)
    if num_rows == 0:
        raise DataError("predict: the arguments have no rows")
    own = result.log_posterior.understanding
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


def predict_all(result: Result, data: Data) -> dict[str, Tensor]:
    """Draws of the data sites for all rows of the data, in their order."""
    return _predicted(result, pieces_of(result.log_posterior, data), list(data_sites(result)))


def _predicted(
    result: Result, pieces: Iterable[Piece], return_sites: Sequence[str] | None
) -> dict[str, Tensor]:
    parts = []
    for piece in pieces:

        def values(params: dict[str, Tensor], piece: Piece = piece) -> dict[str, Tensor]:
            run = result.log_posterior.simulate(params, piece.arguments, piece.indices)
            names = _returned(result, run.sites) if return_sites is None else return_sites
            for name in names:
                if name not in run.sites:
                    raise ArgumentError(
                        f"return_sites: no site '{name}'; the model has {sorted(run.sites)}"
                    )
            return {name: run.sites[name].value for name in names}

        parts.append((result.draw_by_draw(values), piece))
    return joined(result, parts)


def equally_weighted(result: Result, num_samples: int | None) -> Result:
    """The result with `num_samples` draws in all that count alike, evenly spaced over chains and
    draws; by default as many as there are.

    Draws with weights are repeated or left out in proportion (systematic resampling).
    """
    flat = result.positions.flatten(0, 1)
    if num_samples is not None:
        chosen = even(len(flat), num_samples)
    elif result.weights is None:
        return result
    if result.weights is not None:
        chosen = in_proportion(result.weights.flatten(), num_samples or len(flat))
    return dataclasses.replace(result, positions=flat[chosen][None])


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
    return torch.linspace(0, total - 1, wanted, dtype=torch.float64).round().long()


def _returned(result: Result, sites: Mapping[str, Site]) -> list[str]:
    """What `predict` returns unless it is told: neither latents nor what `get_samples` has."""
    known = set(result.log_posterior.latents) | set(result.log_posterior.understanding.steady)
    return [
        name
        for name, site in sites.items()
        if site.kind in ("observed", "deterministic") and name not in known
    ]


def joined(result: Result, parts: list[tuple[dict[str, Tensor], Piece]]) -> dict[str, Tensor]:
    """Pieces' values, joined along each site's rows; what has no rows is the first piece's."""
    axes = {**result.log_posterior.understanding.row_axes, **data_sites(result)}
    joined = {}
    for name, first in parts[0][0].items():
        axis = axes.get(name)
        if axis is None or (len(parts) == 1 and parts[0][1].keep == slice(None)):
            joined[name] = first
            continue
        kept = [
            values[name].movedim(axis, 0)[piece.keep].movedim(0, axis) for values, piece in parts
        ]
        joined[name] = torch.cat(kept, dim=axis)
    return joined
