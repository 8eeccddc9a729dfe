"""Whether other batches obey the rules that were found on the first one.

The rows of the first batch may be alike: labels of one class, a series that begins with zeros.
What a model computes from a batch (a mean, class weights, a lag, a count of events) does not show
there.  So the rules are tried on batches from all over the data, and on some that a run meets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import PlateError, SiteError
from pyro_scale.model.checks import inside_support
from pyro_scale.model.classify import close, dtype_of
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import rows_of
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import Term, terms_of
from pyro_scale.model.understanding import PER_DATUM, Understanding

#: Draws from the prior at which batches are looked at, besides a start.
_PRIOR_DRAWS = 2
#: Log densities so far out, in nats, have too few digits to be compared.
_TOO_FAR = 1e6


def check_batches(
    log_posterior: LogPosterior, start: Params, first: Arguments, others: Iterable[Arguments]
) -> None:
    """Tries the rules on other batches, at a start and at draws from the prior.

    Args:
        log_posterior: understood on the first batch.
        start: unconstrained params.
        first: that batch.
        others: batches of as many rows.

    Raises:
        PlateError: a row's log density depends on the other rows of its batch, or what was taken
            for a constant on the rows.
    """
    if not is_checked(log_posterior.understanding):
        return
    points: list[Params] = [start]
    with contextlib.suppress(Exception):  # a prior that cannot be drawn from, or not here
        drawn = log_posterior.prior_draws(first, _PRIOR_DRAWS, seed=0)
        points += [{n: v[i] for n, v in drawn.items()} for i in range(_PRIOR_DRAWS)]
    for params in points:
        params = {**start, **params}
        for batch in others:
            check_batch(log_posterior, params, batch, first)


def is_checked(known: Understanding) -> bool:
    """Whether batches are parts of the data, and rows can be left out of them."""
    is_part = known.batch_size < known.scaling.num_data
    is_function = any(rule.why == PER_DATUM for rule in known.scaling.rules.values())
    return is_part and known.own_plate is None and not known.whole_only and not is_function


def check_batch(
    log_posterior: LogPosterior, params: Params, batch: Arguments, first: Arguments | None = None
) -> None:
    """Tries the rules on one batch and its halves, and constants on the first batch as well.

    Params where a log density is not finite, or far out, say nothing and are passed over.

    Raises:
        PlateError: see `check_batches`.
    """
    count = rows.count(batch)
    if count is None or count < 2:
        return
    halves = [rows.take(batch, part) for part in (slice(0, count // 2), slice(count // 2, None))]
    rules = log_posterior.understanding.scaling.rules
    constant = [n for n, r in rules.items() if r.role != "rows" and not r.whole_data]
    compared = [*halves, first] if first is not None and constant else halves
    with own_generator(), torch.no_grad():
        runs = [_terms(log_posterior, params, each) for each in (batch, *compared)]
    if any(run is None for run in runs):
        return
    whole, *parts = (run for run in runs if run is not None)
    for name, rule in rules.items():
        terms = [each.get(name) for each in (whole, *parts)]
        found = [term for term in terms if term is not None]
        if len(found) < len(terms):
            continue  # which evaluating it says
        dtype = dtype_of(found[0], params.values())
        if rule.role == "rows":
            apart = torch.cat([rows_of(term, rule) for term in found[1:3]])
            if not close(rows_of(found[0], rule), apart, dtype=dtype):
                raise PlateError(
                    f"site '{name}': a row's log density depends on which other rows are in its "
                    "batch, so minibatches do not estimate the posterior. Compute what it takes "
                    "from many rows (means, class weights, lags, maxima) once, from all of the "
                    "data, and pass it as a column; or pass the whole data without batch_size"
                )
        elif not rule.whole_data:
            total, *others = ((term.log_prob * term.scale).sum() for term in found)
            if not all(close(total, other, roundings=64, dtype=dtype) for other in others):
                raise PlateError(
                    f"site '{name}': it is one value that was the same for the first batch and its "
                    "halves, but it changes with the rows of other batches, and so cannot be "
                    "counted once: give it one value per row, inside the data's plate"
                )


def check_supports(log_posterior: LogPosterior, params: Params, pieces: Iterable[Any]) -> None:
    """Refuses observed values outside of their support, by row; all rows in one pass.

    Supports that depend on a latent are left to the density, which is infinite there.

    Args:
        log_posterior: understood on a first batch.
        params: unconstrained.
        pieces: of the data, each with `arguments` and `indices`, in order.

    Raises:
        SiteError: it names the site, the row and its value.
    """
    known = log_posterior.understanding
    if not known.validated:
        return
    other = {name: value + 0.5 for name, value in params.items()}
    begin = 0
    for piece in pieces:
        with own_generator(), torch.no_grad():
            sites = log_posterior.run(params, piece.arguments, piece.indices).sites
            for name in known.validated & sites.keys():
                if sites[name].kind == "observed" and not bool(inside_support(sites[name]).all()):
                    again = log_posterior.run(other, piece.arguments, piece.indices).sites[name]
                    if same_support(sites[name].fn.support, again.fn.support):
                        raise SiteError(_outside(known, sites[name], begin))
        begin += piece.num_new


def same_support(one: Any, other: Any) -> bool:
    """Whether two constraints are the same, bounds included."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if not hasattr(one, "check"):
        return bool(one == other)
    mine, theirs = vars(one), vars(other)
    return mine.keys() == theirs.keys() and all(same_support(mine[k], theirs[k]) for k in mine)


def _terms(
    log_posterior: LogPosterior, params: Params, batch: Arguments
) -> Mapping[str, Term] | None:
    """The terms at params; None where they say nothing."""
    terms = terms_of(log_posterior.run(params, batch).sites)
    sizes = [term.log_prob.abs().max() for term in terms.values() if term.log_prob.numel()]
    usable = all(bool(size < _TOO_FAR) for size in sizes)  # NaN is not
    return terms if usable else None


def _outside(known: Understanding, site: Site, begin: int) -> str:
    rule = known.scaling.rules.get(site.name)
    inside = inside_support(site)
    place = (~inside).nonzero()[0]
    where, value = "", ""
    if rule is not None and rule.role == "rows" and not rule.depth and rule.dim is not None:
        where = f" in row {begin + int(place[rule.dim])}"
        observed = site.value.expand(site.shape)[tuple(place)]
        value = f", {observed.tolist()}," if observed.numel() <= 10 else ""
    return (
        f"site '{site.name}': an observed value{where}{value} is NaN or outside the support of "
        f"its {type(site.fn).__name__} ({type(site.fn.support).__name__}); check the data, or "
        "choose a likelihood that allows it; masked values have to be allowed, too: clamp labels "
        "of -100 to 0"
    )
