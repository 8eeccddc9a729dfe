"""The log joint density as a sum of terms: one for each site, with enumerated sites summed out.

A term keeps its batch dimensions, so that rows can be identified when it is scaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor
from torch.distributions import Independent

from pyro_scale.core.exclusive import exclusive
from pyro_scale.errors import SiteError
from pyro_scale.model.sites import Site


@dataclass(frozen=True)
class Term:
    """One additive part of the log joint density in one run, of one site or of a sum over
    enumerated sites, without any scale.

    Attributes:
        name: the site's name; for a sum over enumerated sites, the observed sites' names, joined by
            "+".
        log_prob: log density per batch element, zero where a mask leaves it out, `[*batch_shape]`.
        scale: the user's `poutine.scale`, not yet applied.
        plates: the plates around the site.
        is_prior: whether it is the density of a latent.
        site: the term's only site; None for a sum over enumerated sites.
    """

    name: str
    log_prob: Tensor
    scale: float | Tensor
    plates: tuple[CondIndepStackFrame, ...]
    is_prior: bool
    site: Site | None = field(default=None, repr=False)

    def unwrap(self, depth: int) -> Tensor:
        """The log density with `depth` layers of `to_event` undone: their event dimensions become
        batch dimensions, the sum is the same."""
        if depth == 0 or self.site is None:  # enumerated terms have no layers to undo
            return self.log_prob
        return _log_prob(self.site, depth)

    @property
    def max_depth(self) -> int:
        """The number of `to_event` layers (nested `Independent` distributions) around the site's
        distribution, each over any number of dimensions; 0 for a sum over enumerated sites."""
        depth, fn = 0, self.site.fn if self.site else None
        while isinstance(fn, Independent):
            depth, fn = depth + 1, fn.base_dist
        return depth


def terms_of(sites: Mapping[str, Site]) -> dict[str, Term]:
    """The terms of the log joint density in one run of a model, by name, with enumerated sites
    summed out.

    Raises:
        SiteError: enumerated sites cannot be summed out.
    """
    terms = [
        Term(
            name=site.name,
            log_prob=_log_prob(site, 0),
            scale=site.scale,
            plates=site.plates,
            is_prior=site.kind == "latent",
            site=site,
        )
        for site in sites.values()
        if site.kind in ("latent", "observed", "factor", "enumerated")
    ]
    enumerated = [site for site in sites.values() if site.enum_dim is not None]
    free = max((site.enum_dim or 0 for site in enumerated), default=0)
    if enumerated:
        _check_plates(terms, enumerated[0].name, free)
    for variable in sorted(enumerated, key=lambda site: -len(site.plates)):
        terms = _sum_out(variable, terms, free)
    return {term.name: term for term in terms}


def unwrap(fn: Any, depth: int) -> Any:
    """The distribution `fn` with `depth` layers of `to_event` undone: their event dimensions are
    batch dimensions of the result.
    """
    for _ in range(depth):
        fn = fn.base_dist
    return fn


def _log_prob(site: Site, depth: int) -> Tensor:
    fn = unwrap(site.fn, depth)
    with exclusive, pyro.validation_enabled(False):  # for distributions that this one creates
        log_prob = fn.log_prob(site.value)
    if site.kind == "enumerated":  # without its mask, so that it sums to one
        return log_prob
    mask = align(site.mask, len(fn.batch_shape) - len(site.fn.batch_shape))
    return scale_and_mask(log_prob, 1.0, mask)


def aligned_scale(term: Term, log_prob: Tensor) -> float | Tensor:
    """A term's `poutine.scale`, reshaped so that it broadcasts with `log_prob`: the term's log
    density with some layers of `to_event` undone.
    """
    return align(term.scale, log_prob.dim() - term.log_prob.dim())


def align(batchwise: Any, extra: int) -> Any:
    """A scale or mask over batch dimensions with `extra` dimensions of size 1 appended, one for
    each event dimension; numbers and None are returned as they are."""
    if not isinstance(batchwise, Tensor) or batchwise.dim() == 0:
        return batchwise
    return batchwise.reshape(batchwise.shape + (1,) * extra)


def _sum_out(variable: Site, terms: list[Term], free: int) -> list[Term]:
    """The terms after one enumerated site is summed out: those that depend on it are replaced by
    the log of the sum, over the site's values, of their product.

    Elements along dimensions that the site does not have share its value, so their log densities
    are added before the sum over its values. Along its own dimensions there is one such sum for
    each element.

    Args:
        variable: the enumerated site.
        terms: all terms.
        free: dimension, negative, from which on to the left dimensions belong to enumerated sites.

    Raises:
        SiteError: a term is not in all plates of the site, or the terms' scales differ.
    """
    dim = variable.enum_dim
    assert dim is not None
    involved = [t for t in terms if t.log_prob.dim() >= -dim and t.log_prob.shape[dim] > 1]
    if not involved:  # a single value in the support: nothing to sum
        return terms
    names = {term.name for term in involved}
    others = [term for term in terms if term.name not in names]
    variable_dims = _dims(variable.plates, variable.fn.batch_shape, free)
    total: Tensor | float = 0.0
    for term in involved:
        term_dims = _dims(term.plates, term.log_prob.shape, free)
        if not variable_dims <= term_dims:
            raise SiteError(
                f"site '{term.name}' depends on the enumerated site '{variable.name}' but is not "
                "in all of its plates, so the sum does not factorize over the plate; put it "
                f"inside the plate, or take '{variable.name}' out of it",
                code="discrete-latent",
            )
        log_prob = term.log_prob
        for extra in term_dims - variable_dims:
            if log_prob.dim() >= -extra:
                log_prob = log_prob.sum(extra, keepdim=True)
        total = total + log_prob
    observed = [t.name for t in involved if t.site is None or t.site.kind != "enumerated"]
    merged = Term(
        name="+".join(observed) or variable.name,
        log_prob=torch.logsumexp(torch.as_tensor(total), dim, keepdim=True),
        scale=_common_scale(variable, involved),
        plates=variable.plates,
        is_prior=False,
    )
    return [*others, merged]


def _dims(plates: Iterable[CondIndepStackFrame], shape: torch.Size, free: int) -> set[int]:
    """The dimensions (negative, from the right) of the plates, and those of `shape` with more than
    one element. Dimensions from `free` to the left belong to enumerated sites and are left out of
    the latter."""
    plated = {frame.dim for frame in plates if frame.dim is not None}
    return plated | {i for i in range(max(free + 1, -len(shape)), 0) if shape[i] > 1}


def _check_plates(terms: list[Term], enumerated: str, free: int) -> None:
    """Checks that no term that is in plates has a dimension outside them: that would be an
    enumerated dimension that the model has moved, by a sum or an index. Returns None if so.

    Args:
        terms: all terms.
        enumerated: name of an enumerated site, for the message.
        free: dimension, negative, from which on to the left dimensions belong to enumerated sites.

    Raises:
        SiteError: there is such a site.
    """
    for term in terms:
        plated = {frame.dim for frame in term.plates}
        for dim in _dims((), term.log_prob.shape, free) - plated:
            if plated and not term.is_prior:
                raise SiteError(
                    f"site '{term.name}': dimension {dim} of its log density, of size "
                    f"{term.log_prob.shape[dim]}, is in no plate; in a model with enumerated "
                    f"sites ('{enumerated}') keep values in the dimensions that they have",
                    code="discrete-latent",
                )


def _common_scale(variable: Site, involved: Iterable[Term]) -> float | Tensor:
    scales = [term.scale for term in involved]
    first = torch.as_tensor(scales[0])
    if not all(torch.equal(torch.as_tensor(scale), first) for scale in scales):
        raise SiteError(
            f"site '{variable.name}': the sites that are summed over it have different scales; "
            "put one poutine.scale around all of them",
            code="discrete-latent",
        )
    return scales[0]
