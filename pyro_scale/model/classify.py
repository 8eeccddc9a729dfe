"""Decides which terms are multiplied by N/B, by running the model on different numbers of rows.

1. Run the model on B rows.
2. Run it again on part of these rows, at the same latent values.
3. A term whose size follows the number of rows, and whose value for a row is the same in both runs,
   is likelihood: it is scaled by N/B, unless Pyro does so already.  A term that does not change is
   a prior or a constant.  Anything else is a `PlateError`.

Sizes that are equal by coincidence decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.errors import PlateError
from pyro_scale.model.scaling import (
    Rule,
    Scaling,
    dependence_message,
    joint_message,
    sum_but,
)
from pyro_scale.model.terms import Term, aligned_scale


@dataclass(frozen=True)
class Probe:
    """One more run of the model, on other rows, at the same latent values.

    Attributes:
        terms: its terms.
        origin: for each of its rows, which row of the first run it is, `[b]`; -1 for another.
    """

    terms: Mapping[str, Term]
    origin: Tensor

    def shared_rows(self, terms_of_batch: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that both runs have, of the first run and of this one."""
        known = self.origin >= 0
        return terms_of_batch[self.origin[known]], part[known]


def classify(
    terms: Mapping[str, Term],
    probes: Sequence[Probe],
    batch_size: int,
    num_data: int,
    own_plate: str | None = None,
    elsewhere: Sequence[Probe] = (),
) -> Scaling:
    """Finds each term's rule by comparing a run with its probes.

    Args:
        terms: of the run on a batch of `batch_size` rows.
        probes: the same model on other rows; none if it runs on the whole data only.
        batch_size: B.
        num_data: N.
        own_plate: the plate whose rows the model draws by itself, if it does.
        elsewhere: the same runs, the batch's first and then the probes', at other latent
            values: what the rows do not change at one they may change at another.

    Raises:
        PlateError: it is ambiguous how often a term is to be counted.
    """
    latents = [t.site.value for t in terms.values() if t.is_prior and t.site is not None]
    comparison = _Comparison(probes, batch_size, num_data, own_plate, elsewhere, latents)
    return Scaling(num_data, {name: comparison.rule(term) for name, term in terms.items()})


@dataclass(frozen=True)
class _Comparison:
    probes: Sequence[Probe]
    batch_size: int
    num_data: int
    own_plate: str | None
    elsewhere: Sequence[Probe]
    latents: Sequence[Tensor]

    def rule(self, term: Term) -> Rule:
        if any(term.name not in probe.terms for probe in self.probes):
            if self.batch_size == self.num_data:
                return self._joint(term)
            raise PlateError(
                f"site '{term.name}': it is there for some batches only; every batch must have "
                "the same sites"
            )
        if term.is_prior:
            self._require_fixed_scale(term, "a prior")
            return self._prior(term)
        place = self._find_rows(term)
        if place is not None and self._is_by_row(term, place):
            return self._scale(term, place)
        if not self.probes:
            return Rule("global", whole_data=True, why="the model runs on the whole data only")
        if self._is_constant(term):
            self._require_fixed_scale(term, "a term that the batch does not change")
            return Rule("global", why="does not change with the batch")
        return self._joint(term, place)

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
                return Rule("rows", dim, depth)
        return None

    def _row_dim(self, term: Term, depth: int) -> int | None:
        """The dimension from the right that follows the rows, each of which it has, or all but as
        many here as in each probe."""
        if self.own_plate is not None:
            return next((f.dim for f in term.plates if f.name == self.own_plate), None)
        shape = term.unwrap(depth).shape
        if not self.probes:  # the whole data or nothing: the factor is 1 whatever is a row
            sized = {i - len(shape) for i, n in enumerate(shape) if n == self.batch_size}
            return sized.pop() if len(sized) == 1 else None
        following = set()
        for probe in self.probes:
            other = probe.terms[term.name].unwrap(depth).shape
            if len(other) != len(shape):
                return None
            following |= {i - len(shape) for i, n in enumerate(shape) if n != other[i]}
        if len(following) > 1 and depth == 0:
            raise PlateError(
                f"site '{term.name}': its log density has shape {list(shape)}, and more than one "
                "dimension follows the batch; most often a value [B] meets a distribution "
                "[B, 1], or the reverse: squeeze the one"
            )
        if len(following) != 1:
            return None
        dim = following.pop()
        sizes = [v.terms[term.name].unwrap(depth).shape[dim] for v in self.probes]
        missing = self.batch_size - shape[dim]  # such as the first, in a regression on the last row
        return dim if missing >= 0 and sizes == [n - missing for n in self._sizes[1:]] else None

    @property
    def _sizes(self) -> list[int]:
        """Rows of the first run and of each probe."""
        return [self.batch_size, *(len(v.origin) for v in self.probes)]

    def _is_by_row(self, term: Term, rule: Rule) -> bool:
        """Whether every row has a value, the same whichever rows are with it."""
        has_all = term.unwrap(rule.depth).shape[rule.dim or 0] == self.batch_size
        return (self.own_plate is not None or has_all) and self._rows_match(term, rule)

    def _rows_match(self, term: Term, rule: Rule) -> bool:
        """Whether a row's value is the same whichever rows are with it."""
        return self._same_rows(term, self.probes, rule) and (
            not self.elsewhere
            or self._same_rows(self.elsewhere[0].terms[term.name], self.elsewhere[1:], rule)
        )

    def _same_rows(self, term: Term, probes: Sequence[Probe], rule: Rule) -> bool:
        full = sum_but(term.unwrap(rule.depth), rule.dim)
        parts = [sum_but(v.terms[term.name].unwrap(rule.depth), rule.dim) for v in probes]
        dtype = dtype_of(term, self.latents)
        return all(
            close(*probe.shared_rows(full, part), dtype=dtype)
            for probe, part in zip(probes, parts, strict=True)
        )

    def _is_constant(self, term: Term) -> bool:
        there = [run.terms[term.name] for run in self.elsewhere]
        return _same_totals(self._runs(term)) and _same_totals(there)

    def _scale(self, term: Term, rule: Rule) -> Rule:
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
        sizes = self._sizes
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
        full = _scale_rows(term, rule)
        for probe in self.probes:
            other = _scale_rows(probe.terms[term.name], rule)
            if not close(*probe.shared_rows(full, other)):
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
        """The term as it is in the first run and in each probe."""
        return [term, *(probe.terms[term.name] for probe in self.probes)]

    def _joint(self, term: Term, place: Rule | None = None) -> Rule:
        """The rule of what depends on all rows; its values have a place where they follow them."""
        if self.batch_size != self.num_data:
            raise PlateError(self._why_joint(term))
        why = "a joint density of all rows; the whole data only"
        if place is None:
            return Rule("global", whole_data=True, why=why)
        return Rule("global", place.dim, place.depth, whole_data=True, why=why)

    def _why_joint(self, term: Term) -> str:
        for depth in range(term.max_depth + 1):
            dim = self._row_dim(term, depth)
            if dim is not None:
                return dependence_message(term.name, self._changes(term, Rule("rows", dim, depth)))
        total, *parts = (run.log_prob.sum() for run in self._runs(term))
        if len(parts) == 3 and self.own_plate is None:
            if close(total, parts[0] + parts[1]):
                return joint_message(term.name, "sum", self.num_data)
            weights = [len(probe.origin) / self.batch_size for probe in self.probes]
            if close(total, weights[0] * parts[0] + weights[1] * parts[1]):
                return joint_message(term.name, "mean", self.num_data)
        return joint_message(term.name, "neither", self.num_data)

    def _changes(self, term: Term, rule: Rule) -> list[tuple[bool, Tensor]]:
        """Of each half of the batch: whether it is the second, and which of its rows differ."""
        if self.own_plate is not None or self.batch_size == 1:  # other runs are no halves
            return []
        dtype, changes = dtype_of(term, self.latents), []
        groups = [(term, self.probes)]
        groups += [(run.terms[term.name], self.elsewhere[1:]) for run in self.elsewhere[:1]]
        for run, probes in groups:
            full = sum_but(run.unwrap(rule.depth), rule.dim)
            for probe in probes:
                if len(probe.origin) == self.batch_size:  # the batch backwards
                    continue
                part = sum_but(probe.terms[term.name].unwrap(rule.depth), rule.dim)
                mine, theirs = probe.shared_rows(full, part)
                apart = ~are_close(mine, theirs, dtype=dtype)
                changes.append((int(probe.origin[0]) != 0, apart))
        return changes


def dtype_of(term: Term, latents: Iterable[Tensor]) -> torch.dtype:
    """The coarsest dtype that a term is computed in: its own, that of its distribution's
    arguments, and, as values in float64 may be of a mean in float32, that of the latents, those in
    half precision apart, which may belong to other sites."""
    tensors = [term.log_prob, *(each for each in latents if _eps(each.dtype) <= _SINGLE)]
    fn = term.site.fn if term.site is not None else None
    while fn is not None:
        tensors += [each for each in vars(fn).values() if isinstance(each, Tensor)]
        fn = getattr(fn, "base_dist", None)
    dtypes = [each.dtype for each in tensors if each.is_floating_point()]
    return max(dtypes, key=_eps, default=torch.float64)


def _same_totals(runs: Sequence[Term]) -> bool:
    totals = [run.log_prob.sum() for run in runs]
    return all(close(totals[0], total, roundings=64) for total in totals[1:])


def close(
    a: Tensor, b: Tensor, roundings: float | None = None, dtype: torch.dtype | None = None
) -> bool:
    """Whether all elements are equal to rounding: see `are_close`."""
    return a.shape == b.shape and bool(are_close(a, b, roundings, dtype).all())


def are_close(
    a: Tensor, b: Tensor, roundings: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Equal, each element by itself, to so many roundings of it and of one.

    By default 64 roundings of the element, and a third of the dtype's digits after the point, or
    after the first digit of the largest element, if that is less than one: batches of different
    sizes are added up in different orders.  The dtype is that of the numbers, unless they come
    from a coarser one.
    """
    eps = _eps(dtype or torch.promote_types(a.dtype, b.dtype))
    largest = min(1.0, float(a.detach().abs().max())) if a.numel() else 1.0
    of_one = max(64 * eps, eps**0.5 / 3 * largest) if roundings is None else roundings * eps
    tolerance = of_one + (roundings or 64.0) * eps * a.abs()
    return (a - b).abs() <= tolerance


#: The rounding of float32.
_SINGLE = float(torch.finfo(torch.float32).eps)


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _scale_rows(term: Term, rule: Rule) -> Tensor:
    """The user's scale along the rows, `[B, ...]`."""
    log_prob = term.unwrap(rule.depth)
    scale = torch.as_tensor(aligned_scale(term, log_prob), dtype=log_prob.dtype)
    assert rule.dim is not None
    return scale.expand(log_prob.shape).movedim(rule.dim, 0)


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
