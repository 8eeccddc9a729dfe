"""Decides which terms are multiplied by N/B, by comparing runs of the model on different rows.

The runs have the same latent values. For each term, in this order:

1. The density of a latent must be the same in all runs, and counts once.
2. A term has a row dimension if one dimension has size B in the batch and size b in a run on b of
   its rows.
3. If, besides, every row's value is the same in all runs, the term is likelihood: it is multiplied
   by N/B, unless Pyro already does so.
4. A term with the same total in all runs is a constant, and counts once.
5. Anything else is a joint density of rows, which needs the whole data (B = N).

`scaling` applies the rules that are found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from pyro_scale.model.sites import Site, layers
from pyro_scale.model.terms import Term, aligned_scale, terms_of


@dataclass(frozen=True)
class Probe:
    """One run of the model on other rows than the batch, made to find out how log densities depend
    on the rows: on a part of the batch, on the batch in another order, or on rows outside it.

    Attributes:
        sites: the run's sites by name.
        terms: the run's terms of the log joint density by name.
        origin: index in the batch of each of the run's b rows of data, `[b]`; -1 for rows that are
            not in the batch.
    """

    sites: Mapping[str, Site]
    terms: Mapping[str, Term]
    origin: Tensor

    @classmethod
    def from_sites(cls, sites: Mapping[str, Site], origin: Tensor) -> Probe:
        """A `Probe` made from the sites of a run; the run's log densities are computed from these
        sites.

        Args:
            sites: the run's sites by name.
            origin: index in the batch of each of the run's b rows of data, `[b]`; -1 for rows that
                are not in the batch.
        """
        return cls(sites, terms_of(sites), origin)

    def shared_rows(self, of_batch: Tensor, of_probe: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of two tensors for the rows of data that the batch and this run share, row by
        row.

        Args:
            of_batch: one entry for every row of the batch, `[B, ...]`.
            of_probe: one entry for every row of this run, `[b, ...]`.

        Returns:
            (Entries of `of_batch`, entries of `of_probe`), `[shared rows, ...]` both, in the run's
            order.
        """
        is_shared = self.origin >= 0
        return of_batch[self.origin[is_shared]], of_probe[is_shared]


@dataclass(frozen=True)
class Comparison:
    """Compares a run on a batch with runs on other rows (probes), to find for every term of the log
    joint density whether it counts once or is multiplied by N/B. All runs have the same latent
    values.

    Attributes:
        terms: terms of the run on the batch, by name.
        probes: runs of the same model on other rows; empty if the model runs on the whole data
            only.
        batch_size: B, rows of the batch.
        num_data: N, rows of the whole data set.
        own_plate: name of the plate that the model subsamples by itself; None if there is none.
        shifted: the run on the batch, then the probes, at other latent values: a dependence on the
            rows may be invisible at the first values. Empty if these values are impossible.
    """

    terms: Mapping[str, Term]
    probes: Sequence[Probe]
    batch_size: int
    num_data: int
    own_plate: str | None
    shifted: Sequence[Probe]

    def scaling(self) -> Scaling:
        """A `Scaling` with a rule for every term of the log joint density: whether the term counts
        once or is multiplied by N/B (rows of the data over rows of the batch).

        Raises:
            PlateError: the factor of a term is ambiguous, or the term needs the whole data and B <
                N.
        """
        return Scaling(self.num_data, {name: self.rule(term) for name, term in self.terms.items()})

    def rule(self, term: Term) -> Rule:
        """The scaling rule of one term of the log joint density: a prior or a global term, which
        counts once, or rows, which are multiplied by N/B (rows of the data over rows of the batch).

        Raises:
            PlateError: the factor is ambiguous, or the term needs the whole data and B < N.
        """
        if any(term.name not in probe.terms for probe in self.probes):
            if self.batch_size == self.num_data:
                return self._joint_rule(term, None)
            raise PlateError(
                f"site '{term.name}': it is there for some batches only; every batch must have "
                "the same sites"
            )
        if term.is_prior:
            return self._prior_rule(term)
        rows = self._find_rows(term)
        if rows is not None and self._has_all_rows(term, rows) and self._rows_match(term, rows):
            return self._scaled_rule(term, rows)
        if not self.probes:
            return Rule("global", whole_data=True, why="the model runs on the whole data only")
        if self._is_constant(term):
            self._check_fixed_scale(term, "a term that the batch does not change")
            return Rule("global", why="does not change with the batch")
        return self._joint_rule(term, rows)

    # ------------------------------------------------------------------ the rows of a term

    def _find_rows(self, term: Term) -> Rule | None:
        """A `Rule` that holds the row dimension of a term and the number of `to_event` layers to
        undo in order to expose it; None if no dimension's size follows the number of rows.
        """
        for depth in range(term.max_depth + 1):
            dim = self._row_dim(term, depth)
            if dim is not None:
                return Rule("rows", dim, depth)
        return None

    def _row_dim(self, term: Term, depth: int) -> int | None:
        """The row dimension of a term (negative, counted from the right) once `depth` layers of
        `to_event` are undone; None if there is none or, without probes, more than one. Its size is
        the number of rows in every run, or smaller by the same number in all runs.

        Raises:
            PlateError: at depth 0, several dimensions follow the number of rows.
        """
        if self.own_plate is not None:
            return next((f.dim for f in term.plates if f.name == self.own_plate), None)
        shape = term.unwrap(depth).shape
        if not self.probes:  # the whole data or nothing: the factor is 1 in any case
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
        sizes = [probe.terms[term.name].unwrap(depth).shape[dim] for probe in self.probes]
        missing = self.batch_size - shape[dim]  # such as the first, in a regression on lags
        return dim if missing >= 0 and sizes == [n - missing for n in self._sizes[1:]] else None

    @property
    def _sizes(self) -> list[int]:
        """A list with the number of rows of the batch (B), then the number of rows of each run in
        `probes`.
        """
        return [self.batch_size, *(len(probe.origin) for probe in self.probes)]

    def _has_all_rows(self, term: Term, rows: Rule) -> bool:
        size = term.unwrap(rows.depth).shape[rows.dim or 0]
        return self.own_plate is not None or size == self.batch_size

    def _rows_match(self, term: Term, rows: Rule) -> bool:
        """Whether each row's log density is independent of the other rows in its batch. True if a
        row has the same log density, up to rounding, in the run on the batch and in every run on
        other rows (`probes`).

        Args:
            term: a term of the log joint density, from the run on the batch.
            rows: rule that says which dimension of the term is that of the rows.
        """
        dtype, pairs = self._dtype(term), self._row_pairs(term, rows)
        return all(close(mine, theirs, dtype=dtype) for _, mine, theirs in pairs)

    def _dtype(self, term: Term) -> torch.dtype:
        priors = [t.site for t in self.terms.values() if t.is_prior]
        return dtype_of(term, [site.value for site in priors if site is not None])

    def _row_pairs(self, term: Term, rows: Rule) -> Iterator[tuple[Probe, Tensor, Tensor]]:
        """Yields, for each run on other rows (a probe), (the probe; the log densities `[shared
        rows]` of the rows that it has in common with the batch, as computed in the batch; those of
        the same rows, as computed in the probe). The runs at the first latent values come first,
        then those at the shifted ones.
        """
        runs = [(term, self.probes)]
        runs += [(run.terms[term.name], self.shifted[1:]) for run in self.shifted[:1]]
        for of_batch, probes in runs:
            full = sum_but(of_batch.unwrap(rows.depth), rows.dim)
            for probe in probes:
                part = sum_but(probe.terms[term.name].unwrap(rows.depth), rows.dim)
                yield probe, *probe.shared_rows(full, part)

    # ------------------------------------------------------------------ terms that count once

    def _prior_rule(self, term: Term) -> Rule:
        self._check_fixed_scale(term, "a prior")
        if self._is_constant(term):
            return Rule("prior", why="latent")
        if self.batch_size != self.num_data:
            raise PlateError(
                f"site '{term.name}': its prior changes with the rows of the batch, so minibatches "
                "do not estimate it; compute what it takes from the data once, from all rows and "
                "outside of the model"
            )
        return Rule("prior", whole_data=True, why="latent; its prior needs the whole data")

    def _is_constant(self, term: Term) -> bool:
        """Whether a term's total (its log density summed over all elements) does not depend on the
        rows: it is the same in the run on the batch and in all runs on other rows, up to rounding,
        at the first and at the shifted latent values.
        """
        shifted = [run.terms[term.name] for run in self.shifted]
        return _same_totals(self._runs(term)) and _same_totals(shifted)

    def _check_fixed_scale(self, term: Term, what: str) -> None:
        for other in self._runs(term)[1:]:
            is_fixed = torch.equal(torch.as_tensor(term.scale), torch.as_tensor(other.scale))
            if not is_fixed or any(f.size != f.full_size for f in other.plates if f.full_size):
                raise PlateError(
                    f"site '{term.name}': {what} must count once, but its scale follows the "
                    "batch; move it out of the poutine.scale or plate that holds the data"
                )

    def _runs(self, term: Term) -> list[Term]:
        """A list with the term itself (from the run on the batch), then the term of the same name
        from each run in `probes`: to be compared with each other.
        """
        return [term, *(probe.terms[term.name] for probe in self.probes)]

    # ------------------------------------------------------------------ terms that count N/B times

    def _scaled_rule(self, term: Term, rows: Rule) -> Rule:
        """The rule of a likelihood term, which is multiplied by N/B (rows of the data over rows of
        the batch): by Pyro (in a plate), by the user (a `poutine.scale`), or by this library.

        Args:
            term: the term.
            rows: its row dimension and depth, as found by `_find_rows`.

        Raises:
            PlateError: a plate and a `poutine.scale` both multiply by N/B.
        """
        plate = self._scaling_plate(term)
        keeps_scale = self._keeps_scale(term, rows)
        if not keeps_scale and plate is not None:
            raise PlateError(
                f"site '{term.name}': plate '{plate}' already multiplies it by N/B, and so does a "
                "poutine.scale; remove the poutine.scale"
            )
        pyro, ours = "N/B", "1"
        if self.own_plate is not None:
            why = f"the model subsamples by itself in plate '{self.own_plate}'"
        elif plate is not None:
            why = f"plate '{plate}' has {self.num_data} rows in all"
        elif not keeps_scale:
            why = "a poutine.scale that follows N/B"
        else:
            pyro, ours, why = "1", "N/B", _why_rows(term, rows)
        return Rule(rows.role, rows.dim, rows.depth, keeps_scale, False, pyro, ours, why)

    def _scaling_plate(self, term: Term) -> str | None:
        """The name of the plate for which Pyro multiplies the term by N/B; None if Pyro does not,
        or the model subsamples by itself.

        Raises:
            PlateError: the plate declares another number of rows than N.
        """
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

    def _keeps_scale(self, term: Term, rows: Rule) -> bool:
        """Whether the `poutine.scale` around a term is the user's weight, which is kept (True), or
        a handwritten N/B, which is replaced (False).

        Raises:
            PlateError: the scale depends on the batch, but is not N/B.
        """
        scales = [run.scale for run in self._runs(term)]
        if all(not isinstance(scale, Tensor) or scale.numel() == 1 for scale in scales):
            numbers = [float(scale) for scale in scales]
            if all(abs(number - numbers[0]) <= 1e-9 * abs(numbers[0]) for number in numbers):
                return True
            by_hand = [self.num_data / size for size in self._sizes]
            if all(abs(a - b) <= 1e-6 * b for a, b in zip(numbers, by_hand, strict=True)):
                return False
            pairs = zip(numbers, self._sizes, strict=True)
            listed = ", ".join(dict.fromkeys(f"{s:.6g} for {n} rows" for s, n in pairs))
            raise PlateError(
                f"site '{term.name}': its poutine.scale changes with the batch ({listed}) but is "
                f"not N/B (N = {self.num_data}); remove it: the library multiplies by N/B, and a "
                "scale of your own must not depend on the batch size"
            )
        full = _row_scales(term, rows)
        for probe in self.probes:
            part = _row_scales(probe.terms[term.name], rows)
            if not close(*probe.shared_rows(full, part)):
                raise PlateError(
                    f"site '{term.name}': a row's poutine.scale depends on the other rows of the "
                    "batch; a weight must belong to its row (the library multiplies by N/B)"
                )
        return True

    # ------------------------------------------------------------------ joint densities of rows

    def _joint_rule(self, term: Term, rows: Rule | None) -> Rule:
        """The rule of a term that is a joint density of all rows, counted once; raises unless B =
        N.

        Args:
            term: the term.
            rows: its row dimension, if it has one value for every row; None if it has none.

        Raises:
            PlateError: the batch is only a part of the data.
        """
        if self.batch_size != self.num_data:
            raise PlateError(self._why_joint(term, rows))
        why = "a joint density of all rows; the whole data only"
        if rows is None:
            return Rule("global", whole_data=True, why=why)
        return Rule("global", rows.dim, rows.depth, whole_data=True, why=why)

    def _why_joint(self, term: Term, rows: Rule | None) -> str:
        if rows is not None:
            return dependence_message(term.name, self._changed_rows(term, rows))
        total, *parts = (run.log_prob.sum() for run in self._runs(term))
        if len(parts) == 3 and self.own_plate is None:
            if close(total, parts[0] + parts[1]):
                return joint_message(term.name, "sum", self.num_data)
            weights = [len(probe.origin) / self.batch_size for probe in self.probes]
            if close(total, weights[0] * parts[0] + weights[1] * parts[1]):
                return joint_message(term.name, "mean", self.num_data)
        return joint_message(term.name, "neither", self.num_data)

    def _changed_rows(self, term: Term, rows: Rule) -> list[tuple[bool, Tensor]]:
        """The rows whose log density changes if the batch's other half is left out.

        Returns:
            A list of (whether the rows are the second half, mask of its changed rows `[b]`), up to
            two for each set of latent values; empty if the model subsamples by itself, the batch is
            one row, or the term lacks rows.
        """
        if self.own_plate is not None or self.batch_size == 1 or not self._has_all_rows(term, rows):
            return []
        dtype = self._dtype(term)
        return [
            (int(probe.origin[0]) != 0, ~are_close(mine, theirs, dtype=dtype))
            for probe, mine, theirs in self._row_pairs(term, rows)
            if len(probe.origin) != self.batch_size  # this probe is the batch in reverse order
        ]


def _row_scales(term: Term, rows: Rule) -> Tensor:
    """The user's `poutine.scale` of a term, expanded to the shape of its log density, with the row
    dimension moved to the front: `[B, ...]`.
    """
    log_prob = term.unwrap(rows.depth)
    scale = torch.as_tensor(aligned_scale(term, log_prob), dtype=log_prob.dtype)
    assert rows.dim is not None
    return scale.expand(log_prob.shape).movedim(rows.dim, 0)


def _why_rows(term: Term, rows: Rule) -> str:
    if rows.depth:
        return "its event dimension follows the batch"
    plate = next((frame.name for frame in term.plates if frame.dim == rows.dim), None)
    if plate is not None:
        return f"plate '{plate}' follows the batch"
    return "its batch dimension follows the batch"


def _same_totals(runs: Sequence[Term]) -> bool:
    totals = [run.log_prob.sum() for run in runs]
    return all(close(totals[0], total, roundings=64) for total in totals[1:])


# ---------------------------------------------------------------------- equal to rounding


def close(
    a: Tensor, b: Tensor, roundings: float | None = None, dtype: torch.dtype | None = None
) -> bool:
    """Whether two tensors have the same shape and all of their elements are equal up to rounding.
    Infinite and NaN elements count as different.

    Args:
        a: first tensor.
        b: second tensor.
        roundings: tolerance in multiples of the machine epsilon, see `are_close`; None for its
            default.
        dtype: coarsest dtype that the numbers were computed in, which gives the epsilon; None for
            the tensors' own.
    """
    return a.shape == b.shape and bool(are_close(a, b, roundings, dtype).all())


def are_close(
    a: Tensor, b: Tensor, roundings: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Mask of the elements of two tensors that are equal up to rounding, of their shape. Infinite
    and NaN elements count as different.

    Args:
        a: first tensor; the relative tolerance is in units of its elements.
        b: second tensor, of the same shape.
        roundings: tolerance in multiples of the machine epsilon, absolute (of 1) plus relative (of
            the element). If None, 64 relative; absolute a third of the dtype's digits, in units of
            1 or of the largest element if that is below 1: batches of different sizes are summed in
            different orders.
        dtype: coarsest dtype that the numbers were computed in, which gives the epsilon; None for
            the tensors' own.
    """
    eps = _eps(dtype or torch.promote_types(a.dtype, b.dtype))
    largest = min(1.0, float(a.detach().abs().max())) if a.numel() else 1.0
    of_one = max(64 * eps, eps**0.5 / 3 * largest) if roundings is None else roundings * eps
    tolerance = of_one + (roundings or 64.0) * eps * a.abs()
    return (a - b).abs() <= tolerance


def dtype_of(term: Term, latents: Iterable[Tensor]) -> torch.dtype:
    """The coarsest dtype that a term is computed in, for tolerances: of its log density, its
    distribution's arguments and the latents (observations in float64 may have a mean in float32).
    Latents in half precision are ignored, since they may belong to other sites.

    Args:
        term: a term of the log joint density.
        latents: values of the model's latents.
    """
    tensors = [term.log_prob, *(value for value in latents if _eps(value.dtype) <= _SINGLE_EPS)]
    for fn in layers(term.site.fn) if term.site is not None else ():
        tensors += [value for value in vars(fn).values() if isinstance(value, Tensor)]
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return max(dtypes, key=_eps, default=torch.float64)


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


_SINGLE_EPS = _eps(torch.float32)
