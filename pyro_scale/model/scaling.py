"""Scales the likelihood by N/B: the only place where the log joint is scaled.

    log posterior estimate = log prior + (N/B) x log likelihood of the batch

N/B is applied exactly once, by this library or by Pyro. `classify` finds the rules; this file
applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.errors import PlateError, SiteError
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import Term, aligned_scale, terms_of

_ESCAPE = "write plate('data', {num_data}, subsample_size=len(x)) around it"


#: (sites of a run, the model's own log prior) -> the log prior that counts, in nats.
Prior: TypeAlias = Callable[[Mapping[str, Site], Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """How one term enters the log joint density: counted once or multiplied by N/B (rows of the
    data over rows of the batch), and by whom.

    Attributes:
        role: what the term is: a latent's density, rows of the data, or a global term that counts
            once.
        dim: dimension of the rows, negative and from the right, of the term with `depth` layers of
            `to_event` undone; None without rows. A term that needs the whole data may have a row
            dimension, too: a row's value is then conditional on the others.
        depth: number of `to_event` layers that are undone to find the rows.
        keeps_scale: False if the user's scale is N/B written by hand, which is replaced.
        whole_data: whether the term is a joint density of all rows, so that B = N is required.
        pyro: the factor by which Pyro multiplies, in words.
        ours: the factor by which this library multiplies, in words.
        why: how the rule was recognized, in words.
    """

    role: Literal["prior", "rows", "global"]
    dim: int | None = None
    depth: int = 0
    keeps_scale: bool = True
    whole_data: bool = False
    pyro: str = "1"
    ours: str = "1"
    why: str = ""


@dataclass(frozen=True)
class Scaling:
    """The scaling rules of all terms of a model: computes the log joint density from the sites of a
    run.

    Attributes:
        num_data: N, the number of rows of the whole data set.
        rules: each term's rule, by the term's name.
    """

    num_data: int
    rules: Mapping[str, Rule]

    def evaluate(
        self,
        sites: Mapping[str, Site],
        batch_size: int,
        prior: Prior | None = None,
    ) -> Evaluation:
        """The log joint density estimated from one run on a batch, in nats.

        Args:
            sites: the run's sites by name.
            batch_size: B, rows of the batch.
            prior: function of (sites, log prior) that returns the log prior to use; None keeps the
                model's.
        """
        terms = terms_of(sites)
        self._check(terms, batch_size)
        parts = [site.log_det for site in sites.values() if site.log_det is not None]
        for name, term in terms.items():
            if self.rules[name].role != "rows":
                parts.append((term.log_prob * term.scale).sum())
        log_prior = sum(parts[1:], start=parts[0])
        if prior is not None:
            log_prior = prior(sites, log_prior)
        log_lik = sum(self.rows(terms, batch_size).values(), start=log_prior.new_zeros(batch_size))
        log_joint = log_prior + self.num_data / batch_size * log_lik.sum()
        return Evaluation(log_joint, log_prior, log_lik)

    def rows(self, terms: Mapping[str, Term], batch_size: int) -> dict[str, Tensor]:
        """Each row's log likelihood in nats, `[B]` by data term: not scaled up from the batch to
        the data (by N/B), but with the user's scale and mask.

        Args:
            terms: terms of a run, by name.
            batch_size: B, rows of the batch.

        Raises:
            PlateError: a term has another number of rows than B.
        """
        rows = {}
        for name, term in terms.items():
            rule = self.rules[name]
            if rule.role == "rows":
                rows[name] = rows_of(term, rule)
                if len(rows[name]) != batch_size:
                    raise PlateError(
                        f"site '{name}': it has {len(rows[name])} rows but the batch has "
                        f"{batch_size}; every row of the batch needs one value: "
                        + _ESCAPE.format(num_data=self.num_data)
                    )
        return rows

    def rows_of_run(self, sites: Mapping[str, Site], batch_size: int) -> dict[str, Tensor]:
        """Each row's log likelihood in nats, `[B]` by data term, as `rows` returns it, from the
        sites of a run instead of its terms."""
        names = {name for name, rule in self.rules.items() if rule.role == "rows"}
        return self.rows(_terms_among(sites, names), batch_size)

    def log_likelihood(self, sites: Mapping[str, Site], batch_size: int) -> dict[str, Tensor]:
        """Each row's log likelihood in nats, `[B]` by term, as `rows_of_run` returns it, and also
        for terms that need the whole data: their rows are conditional on the other rows."""
        terms = _terms_among(sites, {n for n, rule in self.rules.items() if rule.dim is not None})
        conditional = {
            name: rows_of(term, rule)
            for name, term in terms.items()
            if (rule := self.rules[name]).whole_data and rule.dim is not None
        }
        return self.rows(terms, batch_size) | conditional

    def _check(self, terms: Mapping[str, Term], batch_size: int) -> None:
        for name in terms.keys() ^ self.rules.keys():
            raise SiteError(
                f"site '{name}': it is there for some batches only; every batch must have the "
                "same sites"
            )
        for name, rule in self.rules.items():
            if rule.whole_data and batch_size != self.num_data:
                raise PlateError(
                    f"site '{name}': {rule.why}, and a batch has {batch_size} of "
                    f"{self.num_data} rows: pass the whole data (batch_size=None)"
                )


def _terms_among(sites: Mapping[str, Site], names: Collection[str]) -> dict[str, Term]:
    """The terms of the named sites, by name; of all sites if any site is enumerated, since terms
    span several sites then. Used where a network's priors would take longer to compute than the
    terms of the rows.
    """
    if all(site.enum_dim is None for site in sites.values()):
        sites = {name: site for name, site in sites.items() if name in names}
    return terms_of(sites)


def rows_of(term: Term, rule: Rule) -> Tensor:
    """The log likelihood of each row, `[B]`, of a data term: with the user's scale if its rule
    keeps that, and not scaled up from the batch to the data."""
    log_prob = term.unwrap(rule.depth)
    if rule.keeps_scale:
        log_prob = log_prob * aligned_scale(term, log_prob)
    return sum_but(log_prob, rule.dim)


def sum_but(log_prob: Tensor, dim: int | None) -> Tensor:
    """A log density summed over all dimensions except `dim` (negative, from the right): a vector
    with an entry for each row of data, `[rows]`.
    """
    assert dim is not None
    keep = log_prob.dim() + dim
    others = [i for i in range(log_prob.dim()) if i != keep]
    return log_prob.sum(others) if others else log_prob


def joint_message(name: str, parts: Literal["sum", "mean", "neither"], num_data: int) -> str:
    """The message for an error about a term that is one value for all rows of a batch.

    Args:
        name: the site's name.
        parts: whether the batch's value is the sum or the mean of the values of its halves, or
            neither.
        num_data: N, the number of rows of the whole data set.
    """
    by_row = f"one value per row, inside the data's plate ({_ESCAPE.format(num_data=num_data)})"
    if parts == "neither":
        return (
            f"site '{name}': its log density is one value for all rows of a batch, and not the sum "
            "of those of its halves: rows depend on each other (a Gaussian process, a time "
            "series), or something besides the rows is in it. Pass the whole data "
            f"(batch_size=None); or give it {by_row}, and what is not a row's a site of its own"
        )
    return (
        f"site '{name}': its log density is one value, the {parts} over the rows of a batch. Give "
        f"it {by_row}, or pass the whole data (batch_size=None)"
    )


def dependence_message(name: str, changes: Sequence[tuple[bool, Tensor]]) -> str:
    """The message for an error about a site whose rows' log densities depend on other rows of the
    batch.

    Args:
        name: the site's name.
        changes: for halves of batches, (whether it is the second half, mask `[b]` of its rows whose
            log density changes without the other half).
    """
    half = min((len(rows) for _, rows in changes), default=0)
    before = max((_reach(rows) for is_second, rows in changes if is_second), default=0)
    after = max((_reach(rows.flip(0)) for is_second, rows in changes if not is_second), default=0)
    far, on = max(before, after), "other rows"
    if (before == 0) != (after == 0) and half > 1:
        many = "the rows" if far > half // 2 else f"the {far} rows" if far > 1 else "the row"
        on = f"{many} {'before' if before else 'after'} it"
    if changes and far == 0:
        return (
            f"site '{name}': a row's log density depends on its place in its batch, so minibatches "
            "do not estimate the posterior. Pass the whole data (batch_size=None); or pass what "
            "the model makes of places (arange(len(x)), such as a row's month) as a column"
        )
    return (
        f"site '{name}': a row's log density depends on {on} in its batch, so minibatches do not "
        "estimate the posterior. Pass the whole data (batch_size=None); or compute what a row "
        "takes from others (lags, means, class weights, maxima) once, from all of the data, and "
        "pass it as a column"
    )


def _reach(changed: Tensor) -> int:
    """The length of the range from the first to the last True element of a mask `[b]`, both
    included; 0 if no element is True.
    """
    places = torch.nonzero(changed)
    return int(places.max()) + 1 if len(places) else 0
