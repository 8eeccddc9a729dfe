"""Checks the scaling rules, which were found on the first batch, on other batches.

The rows of the first batch may be similar: labels of one class, or a series that begins with zeros.
Then the first batch does not reveal quantities that the model computes from a batch, such as a
mean, class weights, a lag or a count of events. So the rules are checked on batches spread over the
data, and on some that a run would draw.
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
from pyro_scale.model.classify import close, dtype_of
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.observation_checks import inside_support, outside_support
from pyro_scale.model.scaling import Rule, dependence_message, rows_of
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import Term, terms_of

#: Number of prior draws at which batches are checked, in addition to a start.
_PRIOR_DRAWS = 2
#: Number of evaluations at params a few roundings apart, which measure the effect of rounding.
_NEARBY = 4
#: The tolerance, in multiples of the measured effect of rounding, and in roundings of a total.
_ROUNDINGS = 64


def check_batches(
    log_posterior: LogPosterior,
    start: Params,
    first: Arguments,
    others: Iterable[tuple[Arguments, Tensor | None]],
) -> None:
    """Checks the scaling rules, which were found on the first batch, on other batches: at a start,
    and at two draws from the prior if the prior can be sampled. Returns nothing if they hold.

    Args:
        log_posterior: the model, after its preflight on the first batch.
        start: unconstrained params at which chains start.
        first: the first batch, as the model's arguments.
        others: (batch, indices) of other batches of the same size; the indices are those of the
            rows for a model that subsamples by itself, and None for others.

    Raises:
        PlateError: a row's log density depends on the other rows of its batch, or a term that was
            constant on the first batch depends on the rows.
    """
    if not is_checked(log_posterior.model_info):
        return
    points: list[Params] = [start]
    # a prior that cannot be sampled, in general or in this setting
    with contextlib.suppress(Exception):
        drawn = log_posterior.prior_draws(first, _PRIOR_DRAWS, seed=0)
        points += [{n: v[i] for n, v in drawn.items()} for i in range(_PRIOR_DRAWS)]
    for params in points:
        for batch, indices in others:
            check_batch(log_posterior, {**start, **params}, batch, indices, first)


def is_checked(info: ModelInfo) -> bool:
    """Whether `check_batches` can check anything: a batch is a part of the data, and the model runs
    on any combination of rows."""
    is_part = info.batch_size < info.scaling.num_data
    return is_part and not info.whole_only and not info.is_function


def check_batch(
    log_posterior: LogPosterior,
    params: Params,
    batch: Arguments,
    indices: Tensor | None,
    first: Arguments,
) -> None:
    """Checks on one batch that every row's log density is the same when the other half of the batch
    is left out, and that terms without rows equal those of the first batch. Returns None if so.

    Rows whose log density is not finite are skipped, and so is a point at which the model fails.

    Args:
        log_posterior: the model, after its preflight on the first batch.
        params: unconstrained values by site.
        batch: the batch to check, as the model's arguments.
        indices: indices of its rows, for a model that subsamples by itself; None for others.
        first: the first batch, as the model's arguments.

    Raises:
        PlateError: a row's log density depends on the other rows, or a constant term on the rows.
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
            continue  # evaluating such a term raises an error
        if rule.role != "rows" and reference is not None and name in reference:
            versions.append(reference[name])
        mine, *others = (_values(term, rule) for term in versions)
        if rule.role == "rows":
            pairs = [
                (mine[part.rows], other[part.places], part.rows)
                for part, other in zip(parts, others, strict=True)
            ]
        else:
            pairs = [(mine, other, slice(None)) for other in others]
        dtype = dtype_of(versions[0], params.values())
        roundings = None if rule.role == "rows" else _ROUNDINGS
        differing = [pair for pair in pairs if not _are_close(*pair[:2], dtype, roundings)]
        if not differing:
            continue
        rounding = _rounding(log_posterior, params, batch, indices, name, dtype)
        changes = [(bool(pair[2].start), _exceeds(*pair, rounding)) for pair in differing]
        if not any(bool(changed.any()) for _, changed in changes):
            continue
        if rule.role == "rows":
            raise PlateError(dependence_message(name, changes))
        raise PlateError(
            f"site '{name}': it is one value that was the same for the first batch and its halves, "
            "but it changes with the rows of other batches, and so cannot be counted once: give it "
            "one value per row, inside the data's plate"
        )


class _Part(NamedTuple):
    """Half of a batch's rows, to be evaluated without the other half.

    Attributes:
        arguments: the rows, as the model's arguments.
        indices: indices of the rows, for a model that subsamples by itself; None for others.
        rows: indices of these rows in the batch.
        places: indices of the same rows in `arguments`, which may have further rows.
    """

    arguments: Arguments
    indices: Tensor | None
    rows: slice
    places: slice


def _parts(
    info: ModelInfo, batch: Arguments, indices: Tensor | None, first: Arguments
) -> list[_Part]:
    """The halves of a batch, in which rows are evaluated without the rows of the other half. For a
    model that subsamples by itself, each half is filled up with other rows; a batch of a single row
    is put before the first batch (one part).

    Args:
        info: the result of the preflight.
        batch: the batch to check, as the model's arguments.
        indices: indices of its rows, for a model that subsamples by itself; None for others.
        first: the first batch, as the model's arguments.
    """
    if indices is not None:
        size, total = len(indices), info.scaling.num_data
        others, half = (indices + total // 2) % total, size // 2
        head, tail = slice(0, half), slice(half, size)
        return [
            _Part(batch, torch.cat([indices[head], others[tail]]), head, head),
            _Part(batch, torch.cat([others[head], indices[tail]]), tail, tail),
        ]
    count = rows.count(batch) or 0
    if count == 1:
        row = slice(0, 1)
        return [_Part(rows.concatenate([batch, first]), None, row, row)]
    halves = slice(0, count // 2), slice(count // 2, count)
    return [_Part(rows.take(batch, half), None, half, slice(None)) for half in halves]


def _terms(
    log_posterior: LogPosterior, params: Params, batch: Arguments, indices: Tensor | None
) -> Mapping[str, Term] | None:
    """The terms of the log joint density on a batch, by name; None if the model fails at these
    params, which is allowed at prior draws."""
    with contextlib.suppress(Exception), own_generator(), torch.no_grad():
        return terms_of(log_posterior.run(params, batch, indices).sites)
    return None


def _values(term: Term, rule: Rule) -> Tensor:
    """The numbers to compare between runs: the log likelihood of each row, `[B]`, for a term that
    has rows; the total log density, a scalar, for any other term.
    """
    return rows_of(term, rule) if rule.role == "rows" else (term.log_prob * term.scale).sum()


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
    """The tolerance of each row's log density `[B]`, or of a constant term (a scalar), in nats: 64
    times its largest change when the params change by a few roundings, which accounts for
    cancellation and ill-conditioned matrices. Infinite if the model fails nearby.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained values by site.
        batch: the batch, as the model's arguments.
        indices: indices of its rows, for a model that subsamples by itself; None for others.
        name: name of the term.
        dtype: coarsest dtype that the term is computed in.
    """
    rule, source = log_posterior.model_info.scaling.rules[name], torch.Generator()
    eps = 8 * float(torch.finfo(dtype).eps)

    def perturb(value: Tensor) -> Tensor:
        sign = torch.randint(0, 2, value.shape, generator=source).to(value) * 2 - 1
        return value + sign * eps * (1 + value.abs())

    values = []
    for seed in range(_NEARBY):
        source.manual_seed(seed)
        nearby = {n: perturb(value) for n, value in params.items()} if seed else params
        run = _terms(log_posterior, nearby, batch, indices)
        if run is None or name not in run:
            return torch.tensor(torch.inf)
        values.append(_values(run[name], rule))
    change = (torch.stack(values[1:]) - values[0]).abs().amax(0)
    return _ROUNDINGS * change.nan_to_num(torch.inf)


def _exceeds(a: Tensor, b: Tensor, place: slice, rounding: Tensor) -> Tensor:
    """Mask of the elements of `a` that differ from those of `b` by more than rounding; all True if
    the shapes differ. Elements that are not finite count as equal.

    Args:
        a: log densities of some rows in the batch, or a constant term.
        b: log densities of the same rows in another run.
        place: range of these rows in the batch, which selects their `rounding`.
        rounding: tolerance of each row of the batch, or one for all.
    """
    if a.shape != b.shape:
        return torch.ones_like(a, dtype=torch.bool)
    tolerance = rounding[place] if rounding.dim() else rounding
    usable = torch.isfinite(a) & torch.isfinite(b)
    floor = _ROUNDINGS * float(torch.finfo(a.dtype).eps) * a.abs()
    return ((a - b).abs() > tolerance + floor) & usable


# ---------------------------------------------------------------------- supports


def check_supports(log_posterior: LogPosterior, params: Params, chunks: Iterable[Any]) -> None:
    """Checks that the observed values of all rows are in their supports, in one pass over the data.
    Returns nothing if so.

    Supports that depend on a latent are left to the density, which is infinite there.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained values by site.
        chunks: consecutive chunks of the data, each with `arguments`, `indices` and `num_new` (its
            rows that earlier chunks do not have).

    Raises:
        SiteError: a value is outside; the message names the site, the row and its value.
    """
    info = log_posterior.model_info
    if not info.validated:
        return
    shifted = {name: value + 0.5 for name, value in params.items()}
    begin = 0
    for chunk in chunks:
        with own_generator(), torch.no_grad():
            sites = log_posterior.run(params, chunk.arguments, chunk.indices).sites
            for name in info.validated & sites.keys():
                if sites[name].kind == "observed" and not bool(inside_support(sites[name]).all()):
                    others: Mapping[str, Site] | None = None
                    with contextlib.suppress(Exception):  # the model may fail on other rows
                        others = log_posterior.run(shifted, chunk.arguments, chunk.indices).sites
                    support = sites[name].fn.support
                    if others is None or same_support(support, others[name].fn.support):
                        where = _first_outside(info.scaling.rules.get(name), sites[name], begin)
                        message = outside_support(sites[name], where)
                        raise SiteError(message, code="observed-value")
        begin += chunk.num_new


def same_support(one: Any, other: Any) -> bool:
    """Whether two torch constraints are of the same kind and have equal bounds."""
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


def _first_outside(rule: Rule | None, site: Site, begin: int) -> str:
    """A phrase for a message, such as " in row 7, -1.0,", about the first observed value outside
    its support; empty if the row is not known.

    Args:
        rule: the site's scaling rule; None if there is none.
        site: the site in a run on a chunk of the data.
        begin: index in the data of the chunk's first row.
    """
    if rule is None or rule.role != "rows" or rule.depth or rule.dim is None:
        return ""
    place = (~inside_support(site)).nonzero()[0]
    observed = site.value.expand(site.shape)[tuple(place)]
    value = f", {observed.tolist()}," if observed.numel() <= 10 else ""
    return f" in row {begin + int(place[rule.dim])}{value}"
