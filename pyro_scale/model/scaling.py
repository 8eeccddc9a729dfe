"""How often the likelihood is counted: the only place that knows N/B.

    log posterior estimate = log prior + (N/B) x log likelihood of the batch

in total exactly once.  Who multiplies by N/B is found by running the model at two batch sizes
at the same latent values: the data's terms are those that follow B.  Equal numbers alone decide
nothing, and what stays ambiguous is a `PlateError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_scale.errors import PlateError, SiteError
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import Term, aligned_scale

_ESCAPE = "write plate('data', {num_data}, subsample_size=len(x)) around it"


class Evaluation(NamedTuple):
    """The log joint density estimated from one batch, in nats, totals over the data.

    Attributes:
        log_joint: `log_prior + N/B * log_lik.sum()`, a scalar.
        log_prior: priors, Jacobian, global factors and observed sites outside the data's plate.
        log_lik: each row's log likelihood, `[B]`, summed over sites, without N/B.
    """

    log_joint: Tensor
    log_prior: Tensor
    log_lik: Tensor


@dataclass(frozen=True)
class Variant:
    """One more run of the model, on other rows, at the same latent values.

    Attributes:
        terms: its terms.
        origin: for each of its rows, which row of the first run it is, `[b]`.
    """

    terms: Mapping[str, Term]
    origin: Tensor


@dataclass(frozen=True)
class Rule:
    """How one term enters the log joint.

    Attributes:
        role: a latent's density, rows of the data, or a global term that is counted once.
        dim: the rows' dimension, from the right, of the term unwrapped `depth` times.
        depth: how many `to_event` are undone to find the rows.
        keeps_scale: False where the user's scale is N/B written by hand, which ours replaces.
        whole_data: whether the term is a joint density of all rows, so that B = N is required.
        pyro: what Pyro multiplied by, in words.
        ours: what we multiply by, in words.
        why: how it was recognised.
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
    """The rules of every term of a model, for N rows."""

    num_data: int
    rules: Mapping[str, Rule]

    def evaluate(
        self, sites: Mapping[str, Site], terms: Mapping[str, Term], batch_size: int
    ) -> Evaluation:
        """The log joint of one run on a batch of B rows."""
        self._check(terms, batch_size)
        parts = [site.log_det for site in sites.values() if site.log_det is not None]
        for name, term in terms.items():
            if self.rules[name].role != "rows":
                parts.append((term.log_prob * term.scale).sum())
        log_prior = sum(parts[1:], start=parts[0])
        log_lik = sum(self.rows(terms, batch_size).values(), start=log_prior.new_zeros(batch_size))
        log_joint = log_prior + self.num_data / batch_size * log_lik.sum()
        return Evaluation(log_joint, log_prior, log_lik)

    def rows(self, terms: Mapping[str, Term], batch_size: int) -> dict[str, Tensor]:
        """Each data site's log likelihood a row, `[B]`: no N/B, the user's scale and mask kept."""
        rows = {}
        for name, term in terms.items():
            rule = self.rules[name]
            if rule.role == "rows":
                rows[name] = _rows(term, rule)
                if len(rows[name]) != batch_size:
                    raise PlateError(
                        f"site '{name}': it has {len(rows[name])} rows but the batch has "
                        f"{batch_size}; every row of the batch needs one value: "
                        + _ESCAPE.format(num_data=self.num_data)
                    )
        return rows

    def _check(self, terms: Mapping[str, Term], batch_size: int) -> None:
        for name in terms.keys() ^ self.rules.keys():
            raise SiteError(
                f"site '{name}': it is there for some batches only; every batch must have the "
                "same sites"
            )
        for name, rule in self.rules.items():
            if rule.whole_data and batch_size != self.num_data:
                raise PlateError(_joint_message(name, batch_size, self.num_data))


def classify(
    terms: Mapping[str, Term],
    variants: Sequence[Variant],
    batch_size: int,
    num_data: int,
    own_plate: str | None = None,
) -> Scaling:
    """Finds each term's rule by comparing a run with its variants.

    Args:
        terms: of the run on a batch of `batch_size` rows.
        variants: the same model on other rows; none if it runs on the whole data only.
        batch_size: B.
        num_data: N.
        own_plate: the plate whose rows the model draws by itself, if it does.

    Raises:
        PlateError: it is ambiguous how often a term is to be counted.
    """
    comparison = _Comparison(variants, batch_size, num_data, own_plate)
    return Scaling(num_data, {name: comparison.rule(term) for name, term in terms.items()})


@dataclass(frozen=True)
class _Comparison:
    variants: Sequence[Variant]
    batch_size: int
    num_data: int
    own_plate: str | None

    def rule(self, term: Term) -> Rule:
        if any(term.name not in variant.terms for variant in self.variants):
            return self._joint(term)
        if term.is_prior:
            self._require_fixed_scale(term, "a prior")
            return self._prior(term)
        found = self._find_rows(term)
        if isinstance(found, Rule):
            return found
        if self._is_constant(term):
            self._require_fixed_scale(term, "a term that the batch does not change")
            return Rule("global", why="does not change with the batch")
        return self._joint(term)

    def _prior(self, term: Term) -> Rule:
        if self._is_constant(term):
            return Rule("prior", why="latent")
        if self.batch_size != self.num_data:
            raise PlateError(
                f"site '{term.name}': its prior changes with the rows of the batch, so minibatches "
                "do not estimate it; compute what it takes from the data once, from all rows and "
                "outside of the model"
            )
        return Rule("prior", whole_data=True, why="latent; its prior needs the whole data")

    def _find_rows(self, term: Term) -> Rule | None:
        for depth in range(term.max_depth + 1):
            dim = self._row_dim(term, depth)
            if dim is not None:
                rule = Rule("rows", dim, depth)
                return self._scaled(term, rule) if self._rows_match(term, rule) else None
        return None

    def _row_dim(self, term: Term, depth: int) -> int | None:
        """The dimension from the right that is B here and as long as each variant there."""
        if self.own_plate is not None:
            return next((f.dim for f in term.plates if f.name == self.own_plate), None)
        shape = term.unwrapped(depth).shape
        if not self.variants:  # the whole data or nothing: the factor is 1 whatever is a row
            plated = [f.dim for f in term.plates if f.dim and f.size == self.batch_size]
            sized = [i - len(shape) for i, n in enumerate(shape) if n == self.batch_size]
            return next(iter(plated + sized), None)
        following = set()
        for variant in self.variants:
            other = variant.terms[term.name].unwrapped(depth).shape
            if len(other) != len(shape):
                return None
            following |= {i - len(shape) for i, n in enumerate(shape) if n != other[i]}
        if len(following) != 1:
            return None
        dim = following.pop()
        sizes = [v.terms[term.name].unwrapped(depth).shape[dim] for v in self.variants]
        if shape[dim] != self.batch_size or sizes != [len(v.origin) for v in self.variants]:
            return None
        return dim

    def _rows_match(self, term: Term, rule: Rule) -> bool:
        """Whether a row's value is the same whichever rows are with it."""
        unscaled = _sum_but(term.unwrapped(rule.depth), rule.dim)
        return all(
            close(
                unscaled[v.origin],
                _sum_but(v.terms[term.name].unwrapped(rule.depth), rule.dim),
            )
            for v in self.variants
        )

    def _is_constant(self, term: Term) -> bool:
        total, *others = [run.log_prob.sum() for run in self._runs(term)]
        return all(close(total, other, roundings=64) for other in others)

    def _scaled(self, term: Term, rule: Rule) -> Rule:
        """The rule with who multiplies the rows by N/B."""
        plate = self._pyro_scales(term)
        kept = self._keeps_scale(term, rule)
        if not kept and plate is not None:
            raise PlateError(
                f"site '{term.name}': plate '{plate}' already multiplies it by N/B, and so does a "
                "poutine.scale; remove the poutine.scale"
            )
        if self.own_plate is not None:
            words = ("N/B", "1", f"the model subsamples by itself in plate '{self.own_plate}'")
        elif plate is not None:
            words = ("N/B", "1", f"plate '{plate}' has {self.num_data} rows in all")
        elif not kept:
            words = ("N/B", "1", "a poutine.scale that follows N/B")
        else:
            words = ("1", "N/B", _why_rows(term, rule))
        return Rule(rule.role, rule.dim, rule.depth, kept, False, *words)

    def _pyro_scales(self, term: Term) -> str | None:
        """The plate that makes Pyro multiply the term by N/B, if one does."""
        if self.own_plate is not None:
            return None
        for run in self._runs(term):
            for frame in run.plates:
                if frame.full_size in (None, frame.size):
                    continue
                if frame.full_size != self.num_data:
                    raise PlateError(
                        f"site '{term.name}': plate '{frame.name}' says that there are "
                        f"{frame.full_size} rows in all, but the data have N = {self.num_data}; "
                        f"write plate('{frame.name}', {self.num_data}, subsample_size=len(x)), "
                        f"or pass num_data={frame.full_size}"
                    )
                return str(frame.name)
        return None

    def _keeps_scale(self, term: Term, rule: Rule) -> bool:
        """Whether the user's scale is their own (True) or N/B by hand (False)."""
        sizes = [self.batch_size, *(len(v.origin) for v in self.variants)]
        scales = [run.scale for run in self._runs(term)]
        if all(_is_scalar(scale) for scale in scales):
            numbers = [float(scale) for scale in scales]
            if all(abs(number - numbers[0]) <= 1e-9 * abs(numbers[0]) for number in numbers):
                return True
            by_hand = [self.num_data / size for size in sizes]
            if all(abs(a - b) <= 1e-6 * b for a, b in zip(numbers, by_hand, strict=True)):
                return False
            raise PlateError(
                f"site '{term.name}': its poutine.scale changes with the batch "
                f"({_scales_in_words(numbers, sizes)}) but is not N/B (N = {self.num_data}); "
                "remove it: the library multiplies by N/B, and a scale of your own must not "
                "depend on the batch size"
            )
        whole = _scale_rows(term, rule)
        for variant in self.variants:
            if not close(whole[variant.origin], _scale_rows(variant.terms[term.name], rule)):
                raise PlateError(
                    f"site '{term.name}': a row's poutine.scale depends on the other rows of the "
                    "batch; a weight must belong to its row (the library multiplies by N/B)"
                )
        return True

    def _require_fixed_scale(self, term: Term, what: str) -> None:
        for other in self._runs(term)[1:]:
            fixed = torch.equal(torch.as_tensor(term.scale), torch.as_tensor(other.scale))
            if not fixed or any(f.size != f.full_size for f in other.plates if f.full_size):
                raise PlateError(
                    f"site '{term.name}': {what} must count once, but its scale follows the "
                    "batch; move it out of the poutine.scale or plate that holds the data"
                )

    def _runs(self, term: Term) -> list[Term]:
        """The term as it is in the first run and in each variant."""
        return [term, *(variant.terms[term.name] for variant in self.variants)]

    def _joint(self, term: Term) -> Rule:
        if self.batch_size != self.num_data:
            raise PlateError(_joint_message(term.name, self.batch_size, self.num_data))
        return Rule(
            "global", whole_data=True, why="a joint density of all rows; the whole data only"
        )


def close(a: Tensor, b: Tensor, roundings: float | None = None) -> bool:
    """Equal to so many roundings of the larger, or to half the digits that the dtype has."""
    eps = torch.finfo(torch.promote_types(a.dtype, b.dtype)).eps
    tolerance = eps**0.5 if roundings is None else roundings * eps
    size = torch.maximum(a.detach().abs().max(), torch.ones((), dtype=a.dtype, device=a.device))
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * size).all())


def _rows(term: Term, rule: Rule) -> Tensor:
    log_prob = term.unwrapped(rule.depth)
    if rule.keeps_scale:
        log_prob = log_prob * aligned_scale(term, log_prob)
    return _sum_but(log_prob, rule.dim)


def _scale_rows(term: Term, rule: Rule) -> Tensor:
    """The user's scale along the rows, `[B, ...]`."""
    log_prob = term.unwrapped(rule.depth)
    scale = torch.as_tensor(aligned_scale(term, log_prob), dtype=log_prob.dtype)
    assert rule.dim is not None
    return scale.expand(log_prob.shape).movedim(rule.dim, 0)


def _sum_but(log_prob: Tensor, dim: int | None) -> Tensor:
    assert dim is not None
    keep = log_prob.dim() + dim
    others = [i for i in range(log_prob.dim()) if i != keep]
    return log_prob.sum(others) if others else log_prob


def _is_scalar(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) or scale.numel() == 1


def _why_rows(term: Term, rule: Rule) -> str:
    if rule.depth:
        return "its event dimension follows the batch"
    plated = next((f.name for f in term.plates if f.dim == rule.dim), None)
    if plated is not None:
        return f"plate '{plated}' follows the batch"
    return "its batch dimension follows the batch"


def _scales_in_words(scales: Sequence[float], sizes: Sequence[int]) -> str:
    words = [f"{s:.6g} for {n} rows" for s, n in zip(scales, sizes, strict=True)]
    return ", ".join(dict.fromkeys(words))


def _joint_message(name: str, batch_size: int, num_data: int) -> str:
    return (
        f"site '{name}': its log density is one value that changes with the rows, and a batch of "
        f"{batch_size} of {num_data} rows does not say what the rest would add. Give it one value "
        f"per row, inside the data's plate ({_ESCAPE.format(num_data=num_data)}), or pass the "
        "whole data without batch_size"
    )
