"""What the curvature of a likelihood is made of: the outputs of each row, and the matrix between.

An observation says what its outputs are (the arguments of a distribution, or log likelihoods).  It
multiplies their Jacobian by the matrix between, such as the Fisher information of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_scale.core import gaussian
from pyro_scale.errors import CannotDrawError, SiteError
from pyro_scale.model.curvature import fisher
from pyro_scale.model.draws import cannot_draw, draws, with_totals
from pyro_scale.model.scaling import Rule, Scaling
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import align, unwrap

#: Of matrices of Fisher information of a batch.
_MOST_BYTES = 2**30


class Observation(Protocol):
    """Outputs of each row.

    Attributes:
        known: what it knows of each row of the batch, `[B, ...]`.
        width: outputs a row.
        note: what is to be said of it, if anything.
    """

    @property
    def known(self) -> Tensor: ...

    @property
    def width(self) -> int: ...

    @property
    def note(self) -> str | None: ...

    def outputs(self, sites: Mapping[str, Site], known: Tensor) -> Tensor:
        """A run's outputs, `[b, width]`, differentiable in its params."""
        ...

    def times(self, jacobian: Tensor, known: Tensor) -> Tensor:
        """The matrix between, of each row, times `[b, width, D]`."""
        ...

    @property
    def num_columns(self) -> int:
        """Columns of a factor L of the matrix between, L L^T."""
        ...

    def columns(self, start: int, stop: int) -> Tensor:
        """Some of them, of each row of the batch: `[stop - start, B, width]`."""
        ...


@dataclass(frozen=True)
class Exact:
    """The arguments of a site's distribution, and its Fisher information in them.

    Attributes:
        name: the site's.
        rule: where its rows are.
        arguments: those that depend on the params.
        known: the information of each row's elements, `[B, elements, m, m]`, times the user's
            scale and mask.
    """

    name: str
    rule: Rule
    arguments: tuple[str, ...]
    known: Tensor
    note: None = None

    @property
    def width(self) -> int:
        return self.known.shape[1] * self.known.shape[2]

    def of_rows(self, sites: Mapping[str, Site]) -> Exact:
        """The same of the rows, and at the params, of another run."""
        return exact(sites[self.name], self.rule, self.arguments)

    def outputs(self, sites: Mapping[str, Site], known: Tensor) -> Tensor:
        fn = broadcast(sites[self.name])
        base = fisher.base_of(fn)
        given = fisher.own_arguments(base)
        parts = [
            _rows_first(fn, self.rule, base, value, value.dim() - len(base.batch_shape))
            for value in (given[name] for name in self.arguments)
        ]
        numbers = [part.reshape(*part.shape[:2], -1) for part in parts]
        return torch.cat(numbers, dim=2).flatten(1)

    def times(self, jacobian: Tensor, known: Tensor) -> Tensor:
        elements, m = known.shape[1:3]
        return torch.einsum(
            "beij,bejd->beid", known.to(jacobian.dtype), jacobian.unflatten(1, (elements, m))
        ).flatten(1, 2)

    @property
    def num_columns(self) -> int:
        return self.width

    def columns(self, start: int, stop: int) -> Tensor:
        rows, elements, m = self.known.shape[:3]
        found = self.known.new_zeros(stop - start, rows, elements, m)
        for place, number in enumerate(range(start, stop)):  # an element's are zero elsewhere
            element, column = divmod(number, m)
            found[place, :, element] = self._roots[:, element, :, column]
        return found.flatten(2)

    @cached_property
    def _roots(self) -> Tensor:
        """Of each row's elements, `[B, elements, m, m]`."""
        return gaussian.semidefinite_root(self.known)


@dataclass(frozen=True)
class Classes(Exact):
    """The logits of a softmax, whose information diag(p) - p p^T is never written out.

    Attributes:
        known: the probabilities of each row's elements, `[B, elements, m]`, times the total count,
            the user's scale and the mask.
    """

    def times(self, jacobian: Tensor, known: Tensor) -> Tensor:
        elements, m = known.shape[1:]
        probs = known.to(jacobian.dtype)[..., None]
        each = jacobian.unflatten(1, (elements, m))
        mean = (_over_sum(probs, 2) * each).sum(2, keepdim=True)
        return (probs * (each - mean)).flatten(1, 2)

    def columns(self, start: int, stop: int) -> Tensor:
        """sqrt(p_j) (e_j - p)."""
        rows, elements, m = self.known.shape
        chances = _over_sum(self.known, 2)
        found = self.known.new_zeros(stop - start, rows, elements, m)
        for place, number in enumerate(range(start, stop)):
            element, column = divmod(number, m)
            found[place, :, element] = -chances[:, element]
            found[place, :, element, column] += 1
            found[place, :, element] *= self.known[:, element, column, None].sqrt()
        return found.flatten(2)


@dataclass(frozen=True)
class Drawn:
    """Log likelihoods of observations drawn from a site's distribution: the mean of the squares
    of their gradients is the Fisher information in the params.

    Attributes:
        name: the site's.
        rule: where its rows are.
        known: the draws, `[B, draws, ...]`.
        axis: of the rows in a draw, from the right.
    """

    name: str
    rule: Rule
    known: Tensor
    axis: int

    @property
    def width(self) -> int:
        return self.known.shape[1]

    @property
    def note(self) -> str:
        return f"site '{self.name}' by Monte Carlo, {self.width} draws a row"

    def outputs(self, sites: Mapping[str, Site], known: Tensor) -> Tensor:
        site = sites[self.name]
        fn = unwrap(broadcast(site), self.rule.depth)
        log_prob = fn.log_prob(known.movedim(0, self.axis))  # of [draws, ..., b, ...]
        weighted = log_prob * _weights(site, self.rule, len(fn.batch_shape)).sqrt()
        rows_first = weighted.movedim((_dim(self.rule), 0), (0, 1))
        return rows_first.reshape(*rows_first.shape[:2], -1).sum(2)

    def times(self, jacobian: Tensor, known: Tensor) -> Tensor:
        return jacobian / self.width

    @property
    def num_columns(self) -> int:
        return self.width

    def columns(self, start: int, stop: int) -> Tensor:
        draws = torch.eye(self.width, dtype=torch.float64)[start:stop, None].to(self.known.device)
        return draws.expand(-1, len(self.known), -1) / self.width**0.5


@dataclass(frozen=True)
class Total:
    """Each row's log likelihood: the squares of its gradients are the empirical Fisher.

    Attributes:
        scaling: where the rows are.
        known: nothing, `[B, 0]`.
    """

    scaling: Scaling
    known: Tensor
    width: int = 1
    num_columns: int = 1
    note: None = None

    def outputs(self, sites: Mapping[str, Site], known: Tensor) -> Tensor:
        of_sites = self.scaling.rows_of_run(sites, len(known))
        return sum(of_sites.values(), start=torch.zeros(()))[:, None]

    def times(self, jacobian: Tensor, known: Tensor) -> Tensor:
        return jacobian

    def columns(self, start: int, stop: int) -> Tensor:
        return torch.ones(stop - start, len(self.known), 1, device=self.known.device)


def exact(site: Site, rule: Rule, names: tuple[str, ...]) -> Exact:
    """A site's Fisher information in some of its distribution's arguments."""
    fn = broadcast(site)
    base = with_totals(fisher.base_of(fn), site.value)
    chances = fisher.class_counts(base, names)
    if chances is None:
        _check_num_outputs(site, base, names)
    found = fisher.information(base, names) if chances is None else chances
    dims = found.dim() - len(base.batch_shape)
    of_rows = _rows_first(fn, rule, base, found, dims)
    weights = _weights(site, rule, len(base.batch_shape)) * fisher.mask_of(fn)
    everywhere = weights * of_rows.new_ones(base.batch_shape)
    of_rows = of_rows * _rows_first(fn, rule, base, everywhere, 0)[(..., *(None,) * dims)]
    return (Exact if chances is None else Classes)(site.name, rule, names, of_rows)


def _check_num_outputs(site: Site, base: Any, names: tuple[str, ...]) -> None:
    """Refuses matrices of Fisher information that are too large."""
    shape = torch.Size(base.batch_shape)  # a tuple in some of Pyro's classes
    if len(shape) == 0:
        return
    arguments = fisher.own_arguments(base)
    count = sum(arguments[name][0].numel() for name in names)  # of one part of the batch
    each = count // max(1, shape[1:].numel())
    needed = 8 * shape.numel() * each**2
    if needed > _MOST_BYTES:
        raise SiteError(
            f"site '{site.name}': the Fisher information of {each} outputs would take "
            f"{needed / 2**30:.1f} GiB for these rows: use curvature='monte_carlo', or a smaller "
            "batch_size",
            code="memory",
        )


def drawn(site: Site, rule: Rule, num_draws: int) -> Drawn:
    """Draws of a site, as tensors without a history."""
    fn = broadcast(site)
    axis = _dim(rule) - len(unwrap(fn, rule.depth).event_shape)
    try:
        with torch.no_grad():
            found = draws(fn, num_draws, site.value)
    except NotImplementedError as error:
        raise CannotDrawError(
            f"{cannot_draw(site.name, fn, error)}, of which its Fisher information would be "
            "estimated, or use curvature='hessian' or 'empirical_fisher'"
        ) from error
    return Drawn(site.name, rule, found.movedim(axis, 0), axis)


def _over_sum(values: Tensor, dim: int) -> Tensor:
    """Values over their sum; 0 where that is 0."""
    total = values.sum(dim, keepdim=True)
    return torch.where(total > 0, values / total, 0)


def _dim(rule: Rule) -> int:
    assert rule.dim is not None  # it has rows
    return rule.dim


def broadcast(site: Site) -> Any:
    """The site's distribution in the shape that its value has, which torch lets differ.

    Raises:
        SiteError: its event shape differs.
    """
    fn, shape = site.fn, site.value.shape
    split = len(shape) - len(fn.event_shape)
    if shape[split:] != fn.event_shape:
        raise SiteError(
            f"site '{site.name}': its value has the shape {list(shape)}, its distribution events "
            f"of shape {list(fn.event_shape)}: expand the distribution's arguments to the value's"
        )
    batch_shape = torch.broadcast_shapes(shape[:split], fn.batch_shape)
    return fn if fn.batch_shape == batch_shape else fn.expand(batch_shape)


def _rows_first(fn: Any, rule: Rule, base: Any, values: Tensor, event_dims: int) -> Tensor:
    """Values of the unwrapped distribution's elements, `[..., *event]`, as `[B, elements,
    *event]`."""
    shape = base.batch_shape
    event = values.shape[values.dim() - event_dims :]
    inner = len(shape) - len(unwrap(fn, rule.depth).batch_shape)
    values = values.expand(shape + event).movedim(_dim(rule) - inner - event_dims, 0)
    return values.reshape(len(values), -1, *event)


def _weights(site: Site, rule: Rule, dims: int) -> Tensor:
    """The user's scale and mask, over so many batch dimensions of the distribution unwrapped."""
    extra = dims - len(broadcast(site).batch_shape)
    scale = align(site.scale, extra) if rule.keeps_scale else 1.0
    mask = True if site.mask is None else align(site.mask, extra)
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=torch.float64, device=site.value.device)
    return scale * torch.as_tensor(mask, device=scale.device)
