"""Checks on other batches the rules that were found on the first one.

The rows of the first batch may be alike: labels of one class, or a series that begins with zeros.
Then quantities that a model computes from a batch (a mean, class weights, a lag, a count of events)
do not show.  So the rules are tried on batches from all over the data, and on some that a run
draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import PlateError, SiteError
from pyro_scale.model.checks import inside_support, outside_support
from pyro_scale.model.classify import close, dtype_of
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.scaling import dependence_message, rows_of
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import Term, terms_of

#: Draws from the prior at which batches are looked at, besides a start.
_PRIOR_DRAWS = 2
#: Evaluations at params a few roundings apart, and how many times what they show is allowed.
_NEARBY, _ROUNDINGS = 4, 64


class Part(NamedTuple):
    """Rows of a batch among other rows, or fewer.

    Attributes:
        arguments: the model's.
        indices: of the rows, for a model that subsamples by itself.
        rows: places in the batch of rows that are in the part.
        places: their places in the part.
    """

    arguments: Arguments
    indices: Tensor | None
    rows: slice
    places: slice


def check_batches(
    log_posterior: LogPosterior,
    start: Params,
    first: Arguments,
    others: Iterable[tuple[Arguments, Tensor | None]],
) -> None:
    """Tries the rules on other batches, at a start and at draws from the prior.

    Args:
        log_posterior: understood on the first batch.
        start: unconstrained params.
        first: that batch.
        others: batches of as many rows, and their indices for a model that subsamples by itself.

    Raises:
        PlateError: a row's log density depends on the other rows of its batch, or what was taken
            for a constant on the rows.
    """
    if not is_checked(log_posterior.model_info):
        return
    points: list[Params] = [start]
    with contextlib.suppress(Exception):  # a prior that cannot be drawn from, or not here
        drawn = log_posterior.prior_draws(first, _PRIOR_DRAWS, seed=0)
        points += [{n: v[i] for n, v in drawn.items()} for i in range(_PRIOR_DRAWS)]
    for params in points:
        for batch, indices in others:
            check_batch(log_posterior, {**start, **params}, batch, indices, first)


def is_checked(info: ModelInfo) -> bool:
    """Whether batches are parts of the data, and rows can be put together anew."""
    is_part = info.batch_size < info.scaling.num_data
    return is_part and not info.whole_only and not info.is_function


def check_batch(
    log_posterior: LogPosterior,
    params: Params,
    batch: Arguments,
    indices: Tensor | None,
    first: Arguments,
) -> None:
    """Tries the rules on one batch: each row's log density among other rows, and constants on the
    first batch as well.

    Rows whose log density is not finite say nothing, nor do params at which the model fails.

    Raises:
        PlateError: see `check_batches`.
    """
    parts = _parts(log_posterior.model_info, batch, indices, first)
    full = _terms(log_posterior, params, batch, indices)
    runs = [_terms(log_posterior, params, part.arguments, part.indices) for part in parts]
    reference = None if indices is not None else _terms(log_posterior, params, first, None)
    if full is None or any(run is None for run in runs):
        return
    for name, rule in log_posterior.model_info.scaling.rules.items():
        versions = [run[name] for run in (full, *runs) if run is not None and name in run]
        if len(versions) < len(runs) + 1 or rule.whole_data:
            continue  # which evaluating it says
        if rule.role == "rows":
            mine = rows_of(versions[0], rule)
            pairs = [
                (mine[part.rows], rows_of(term, rule)[part.places], part.rows)
                for part, term in zip(parts, versions[1:], strict=True)
            ]
        else:
            if reference is not None and name in reference:
                versions.append(reference[name])
            total, *others = (_total(term) for term in versions)
            pairs = [(total, other, slice(None)) for other in others]
        dtype = dtype_of(versions[0], params.values())
        differ = [
            (one, other, place)
            for one, other, place in pairs
            if not _are_close(one, other, dtype, None if rule.role == "rows" else 64)
        ]
        if not differ:
            continue
        rounding = _rounding(log_posterior, params, batch, indices, name, dtype)
        changes = [(bool(pair[2].start), _beyond(*pair, rounding)) for pair in differ]
        if not any(bool(changed.any()) for _, changed in changes):
            continue
        if rule.role == "rows":
            raise PlateError(dependence_message(name, changes))
        raise PlateError(
            f"site '{name}': it is one value that was the same for the first batch and its halves, "
            "but it changes with the rows of other batches, and so cannot be counted once: give it "
            "one value per row, inside the data's plate"
        )


def _parts(
    info: ModelInfo, batch: Arguments, indices: Tensor | None, first: Arguments
) -> list[Part]:
    """The batch's rows among others: its halves, each with rows from elsewhere in the data where
    the number of rows is fixed; a single row beside those of the first batch."""
    if indices is not None:
        size, total = len(indices), info.scaling.num_data
        elsewhere, half = (indices + total // 2) % total, size // 2
        head, tail = slice(0, half), slice(half, size)
        return [
            Part(batch, torch.cat([indices[head], elsewhere[tail]]), head, head),
            Part(batch, torch.cat([elsewhere[head], indices[tail]]), tail, tail),
        ]
    count = rows.count(batch) or 0
    if count == 1:
        only = slice(0, 1)
        return [Part(rows.concatenate([batch, first]), None, only, only)]
    halves = slice(0, count // 2), slice(count // 2, count)
    return [Part(rows.take(batch, half), None, half, slice(None)) for half in halves]


def _are_close(a: Tensor, b: Tensor, dtype: torch.dtype, roundings: float | None) -> bool:
    usable = torch.isfinite(a) & torch.isfinite(b) if a.shape == b.shape else torch.ones(())
    return a.shape == b.shape and close(a[usable], b[usable], roundings=roundings, dtype=dtype)


def _rounding(
    log_posterior: LogPosterior,
    params: Params,
    batch: Arguments,
    indices: Tensor | None,
    name: str,
    dtype: torch.dtype,
) -> Tensor:
    """By how much rounding may change each row's log density, or a constant's value: some times
    what a few roundings of the params do.  Cancellation and badly conditioned matrices show."""
    rule, source = log_posterior.model_info.scaling.rules[name], torch.Generator()
    eps = 8 * float(torch.finfo(dtype).eps)

    def moved(value: Tensor) -> Tensor:
        sign = torch.randint(0, 2, value.shape, generator=source).to(value) * 2 - 1
        return value + sign * eps * (1 + value.abs())

    values = []
    for seed in range(_NEARBY):
        source.manual_seed(seed)
        nearby = {n: moved(value) for n, value in params.items()} if seed else params
        run = _terms(log_posterior, nearby, batch, indices)
        if run is None or name not in run:
            return torch.tensor(torch.inf)
        values.append(rows_of(run[name], rule) if rule.role == "rows" else _total(run[name]))
    apart = (torch.stack(values[1:]) - values[0]).abs().amax(0)
    return _ROUNDINGS * apart.nan_to_num(torch.inf)


def _beyond(a: Tensor, b: Tensor, place: slice, rounding: Tensor) -> Tensor:
    """Which elements differ by more than rounding; all if there are others."""
    if a.shape != b.shape:
        return torch.ones_like(a, dtype=torch.bool)
    allowed = rounding[place] if rounding.dim() else rounding
    usable = torch.isfinite(a) & torch.isfinite(b)
    floor = 64 * float(torch.finfo(a.dtype).eps) * a.abs()
    return ((a - b).abs() > allowed + floor) & usable


def _total(term: Term) -> Tensor:
    return (term.log_prob * term.scale).sum()


def check_supports(log_posterior: LogPosterior, params: Params, chunks: Iterable[Any]) -> None:
    """Refuses observed values outside of their support, by row; all rows in one pass.

    Supports that depend on a latent are left to the density, which is infinite there.

    Args:
        log_posterior: understood on a first batch.
        params: unconstrained.
        chunks: of the data, each with `arguments` and `indices`, in order.

    Raises:
        SiteError: it names the site, the row and its value.
    """
    info = log_posterior.model_info
    if not info.validated:
        return
    other = {name: value + 0.5 for name, value in params.items()}
    begin = 0
    for chunk in chunks:
        with own_generator(), torch.no_grad():
            sites = log_posterior.run(params, chunk.arguments, chunk.indices).sites
            for name in info.validated & sites.keys():
                if sites[name].kind == "observed" and not bool(inside_support(sites[name]).all()):
                    again = None
                    with contextlib.suppress(Exception):  # the model may fail elsewhere
                        again = log_posterior.run(other, chunk.arguments, chunk.indices).sites
                    support = sites[name].fn.support
                    if again is None or same_support(support, again[name].fn.support):
                        raise SiteError(_outside(info, sites[name], begin), code="observed-value")
        begin += chunk.num_new


def same_support(one: Any, other: Any) -> bool:
    """Whether two constraints are the same, bounds included."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_support, one, other))
    if not hasattr(one, "check"):
        return bool(one == other)
    mine, theirs = vars(one), vars(other)
    return mine.keys() == theirs.keys() and all(same_support(mine[k], theirs[k]) for k in mine)


def _terms(
    log_posterior: LogPosterior, params: Params, batch: Arguments, indices: Tensor | None
) -> Mapping[str, Term] | None:
    """The terms at params; None where the model fails, as a prior draw may be out of its reach."""
    with contextlib.suppress(Exception), own_generator(), torch.no_grad():
        return terms_of(log_posterior.run(params, batch, indices).sites)
    return None


def _outside(info: ModelInfo, site: Site, begin: int) -> str:
    rule = info.scaling.rules.get(site.name)
    inside = inside_support(site)
    place = (~inside).nonzero()[0]
    where, value = "", ""
    if rule is not None and rule.role == "rows" and not rule.depth and rule.dim is not None:
        where = f" in row {begin + int(place[rule.dim])}"
        observed = site.value.expand(site.shape)[tuple(place)]
        value = f", {observed.tolist()}," if observed.numel() <= 10 else ""
    return outside_support(site, where + value)
