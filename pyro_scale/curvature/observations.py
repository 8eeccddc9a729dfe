"""Observed sites as factors of a curvature J^T F J: the outputs of a row, and the matrix F.

An observation's outputs are the arguments of a site's distribution, or log likelihoods; J is their
Jacobian in the params.  F is a positive semi-definite matrix for each row, such as the Fisher
information of the distribution in these arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import gaussian
from pyro_scale.curvature import fisher
from pyro_scale.errors import CannotDrawError, SiteError
from pyro_scale.model.draws import cannot_draw, draws, with_totals
from pyro_scale.model.scaling import Rule, Scaling
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import align, unwrap

#: Most bytes of the Fisher information of a batch.
_MOST_BYTES = 2**30
#: Draws of each row where Fisher information has to be estimated, unless the user sets more.
_NUM_DRAWS = 100


@dataclass(frozen=True)
class Observation(ABC):
    """An observed site's part of a curvature, the sum of J^T F J over rows of data: K outputs of
    each row, whose Jacobian is J, and the matrix F [K, K] of each row.

    Attributes:
        row_values: numbers from which F is computed, for each row of the batch, `[B, ...]`; without
            an autograd graph.
    """

    row_values: Tensor

    @property
    def note(self) -> str | None:
        """A remark for users if F (the Fisher information in the outputs) is a Monte Carlo
        estimate; None if it is exact.
        """
        return None

    @property
    @abstractmethod
    def width(self) -> int:
        """K, the number of outputs of each row of data that belong to this observed site."""

    @abstractmethod
    def outputs(self, sites: Mapping[str, Site], row_values: Tensor) -> Tensor:
        """The outputs of the b rows of a run, `[b, K]`, differentiable in the run's params.

        Args:
            sites: the sites of the run.
            row_values: the entries of `self.row_values` for the rows of the run, `[b, ...]`.
        """

    @abstractmethod
    def times(self, jacobian: Tensor, row_values: Tensor) -> Tensor:
        """The products of each row's matrix F [K, K] with the row's matrix in `jacobian`, `[b, K,
        D]`: a tensor `[b, K, D]`. `row_values` has the entries of `self.row_values` for these b
        rows, from which F is computed.
        """

    @abstractmethod
    def columns(self, start: int, stop: int) -> Tensor:
        """Columns start, ..., stop - 1 of a matrix L with L L^T = F, for each row of the batch:
        `[stop - start, B, K]`. Gradients of outputs weighted by these columns have outer products
        that add up to the curvature.
        """


@dataclass(frozen=True)
class Exact(Observation):
    """An observation whose outputs are the arguments of the site's distribution, and whose F is the
    distribution's Fisher information in these arguments.

    Attributes:
        row_values: the Fisher information of each element of a row, `[B, elements, m, m]` for m
            arguments, times the user's scale and mask.
        name: the site's name.
        rule: the site's rule, which says which dimension holds the rows.
        arguments: names of the distribution's arguments that depend on the params.
    """

    name: str
    rule: Rule
    arguments: tuple[str, ...]

    @property
    def width(self) -> int:
        return self.row_values.shape[1] * self.row_values.shape[2]

    def of_rows(self, sites: Mapping[str, Site]) -> Exact:
        """The observation of the same site in another run of the model: its Fisher information is
        that at the params and for the rows of that run.

        Args:
            sites: all sites of that run, by name.
        """
        return observe_exactly(sites[self.name], self.rule, self.arguments)

    def outputs(self, sites: Mapping[str, Site], row_values: Tensor) -> Tensor:
        fn = broadcast(sites[self.name])
        base = fisher.base_of(fn)
        values = fisher.own_arguments(base)
        parts = [
            _rows_first(fn, self.rule, base, value, value.dim() - len(base.batch_shape))
            for value in (values[name] for name in self.arguments)
        ]
        flat = [part.reshape(*part.shape[:2], -1) for part in parts]
        return torch.cat(flat, dim=2).flatten(1)

    def times(self, jacobian: Tensor, row_values: Tensor) -> Tensor:
        elements, m = row_values.shape[1:3]
        return torch.einsum(
            "beij,bejd->beid", row_values.to(jacobian.dtype), jacobian.unflatten(1, (elements, m))
        ).flatten(1, 2)

    def columns(self, start: int, stop: int) -> Tensor:
        rows, elements, m = self.row_values.shape[:3]
        columns = self.row_values.new_zeros(stop - start, rows, elements, m)
        for place, number in enumerate(range(start, stop)):  # F has a block for each element
            element, column = divmod(number, m)
            columns[place, :, element] = self._column(element, column)
        return columns.flatten(2)

    def _column(self, element: int, column: int) -> Tensor:
        """One column of a matrix R with R R^T = the Fisher information of one element of each row:
        `[B, m]`.

        Args:
            element: index of the element among the row's elements.
            column: index of the column, below m.
        """
        return self._roots[:, element, :, column]

    @cached_property
    def _roots(self) -> Tensor:
        """For each observed element of each row, a matrix R with R R^T = the Fisher information
        about the m parameters of the element's distribution (its logits, or mean and scale), `[B,
        elements, m, m]`.
        """
        return gaussian.semidefinite_root(self.row_values)


@dataclass(frozen=True)
class Classes(Exact):
    """An observation whose outputs are the logits of a softmax. Its Fisher information,
    diag(p) - p p^T times the total count, is never stored as a matrix.

    Attributes:
        row_values: the probabilities p of each row's elements, `[B, elements, m]`, times the total
            count, the user's scale and the mask.
    """

    def times(self, jacobian: Tensor, row_values: Tensor) -> Tensor:
        probs = row_values.to(jacobian.dtype)[..., None]
        logits = jacobian.unflatten(1, row_values.shape[1:])
        mean = (_over_sum(probs, 2) * logits).sum(2, keepdim=True)
        return (probs * (logits - mean)).flatten(1, 2)

    def _column(self, element: int, column: int) -> Tensor:
        """One column of a matrix R with R R^T = the Fisher information of one element of each row,
        `[B, m]`: for column j, sqrt(p_j) (e_j - p) times the root of the total count, scale and
        mask.

        Args:
            element: index of the element among the row's elements.
            column: index j of the column, below m.
        """
        root = -self._probs[:, element]
        root[:, column] += 1
        return root * self.row_values[:, element, column, None].sqrt()

    @cached_property
    def _probs(self) -> Tensor:
        """The class probabilities p of each element of each row, `[B, elements, m]`, normalized to
        add up to 1; zeros for elements that are masked.
        """
        return _over_sum(self.row_values, 2)


@dataclass(frozen=True)
class Drawn(Observation):
    """An observation whose outputs are the log likelihoods of K values drawn from the site's
    distribution.

    The mean of the outer products of their gradients estimates the Fisher information in the
    params.

    Attributes:
        row_values: the drawn values, `[B, draws, ...]`.
        name: the site's name.
        rule: the site's rule, which says which dimension holds the rows.
        axis: the dimension of a drawn value that holds the rows, negative: counted from the right.
    """

    name: str
    rule: Rule
    axis: int

    @property
    def width(self) -> int:
        return self.row_values.shape[1]

    @property
    def note(self) -> str:
        return f"site '{self.name}' by Monte Carlo, {self.width} draws a row"

    def outputs(self, sites: Mapping[str, Site], row_values: Tensor) -> Tensor:
        site = sites[self.name]
        fn = unwrap(broadcast(site), self.rule.depth)
        log_prob = fn.log_prob(row_values.movedim(0, self.axis))  # [draws, ..., b, ...]
        weighted = log_prob * _weights(site, self.rule, len(fn.batch_shape)).sqrt()
        rows_first = weighted.movedim((_dim(self.rule), 0), (0, 1))
        return rows_first.reshape(*rows_first.shape[:2], -1).sum(2)

    def times(self, jacobian: Tensor, row_values: Tensor) -> Tensor:
        return jacobian / self.width

    def columns(self, start: int, stop: int) -> Tensor:
        units = torch.eye(self.width, dtype=torch.float64)[start:stop, None].to(
            self.row_values.device
        )
        return units.expand(-1, len(self.row_values), -1) / self.width**0.5


@dataclass(frozen=True)
class Total(Observation):
    """An observation whose single output is each row's log likelihood, with F = 1: the sum of the
    outer products of its gradients is the empirical Fisher.

    Attributes:
        row_values: an empty tensor, `[B, 0]`.
        scaling: the model's scaling, which says which terms belong to the rows.
    """

    scaling: Scaling

    @property
    def width(self) -> int:
        return 1

    def outputs(self, sites: Mapping[str, Site], row_values: Tensor) -> Tensor:
        of_sites = self.scaling.rows_of_run(sites, len(row_values))
        return sum(of_sites.values(), start=torch.zeros(()))[:, None]

    def times(self, jacobian: Tensor, row_values: Tensor) -> Tensor:
        return jacobian

    def columns(self, start: int, stop: int) -> Tensor:
        return torch.ones(stop - start, len(self.row_values), 1, device=self.row_values.device)


def observe_site(site: Site, rule: Rule, kind: str, num_draws: int) -> Observation | None:
    """A site's observation for the GGN: exact if the Fisher information can be computed, otherwise
    by Monte Carlo. None if the site does not depend on the params.

    Args:
        site: the observed site, from a run with an autograd graph.
        rule: the site's rule, which says which dimension holds the rows.
        kind: "ggn", or "monte_carlo" to draw in any case.
        num_draws: number of values drawn for each row; at least `_NUM_DRAWS` where "ggn" has to be
            estimated.
    """
    fn = broadcast(site)
    try:
        base = fisher.base_of(fn)
        arguments = fisher.own_arguments(base)
        names = tuple(name for name, value in arguments.items() if value.requires_grad)
        if arguments and not names:
            return None
        if kind != "monte_carlo" and arguments:
            return observe_exactly(site, rule, names)
    except fisher.NoInformation:
        pass
    return _draw(site, rule, num_draws if kind == "monte_carlo" else max(num_draws, _NUM_DRAWS))


def observe_exactly(site: Site, rule: Rule, names: tuple[str, ...]) -> Exact:
    """A site's observation with the exact Fisher information in the named arguments of the site's
    distribution.

    Raises:
        NoInformation: there is no way to compute the Fisher information.
        SiteError: the matrices of Fisher information do not fit in memory.
    """
    fn = broadcast(site)
    base = with_totals(fisher.base_of(fn), site.value)
    counts = fisher.class_counts(base, names)
    if counts is None:
        _check_fits(site, base, names)
    information = fisher.information(base, names) if counts is None else counts
    event_dims = information.dim() - len(base.batch_shape)
    row_values = _rows_first(fn, rule, base, information, event_dims)
    weights = _weights(site, rule, len(base.batch_shape)) * fisher.mask_of(fn)
    weights = weights * row_values.new_ones(base.batch_shape)
    row_values = row_values * _rows_first(fn, rule, base, weights, 0)[(..., *(None,) * event_dims)]
    return (Exact if counts is None else Classes)(row_values, site.name, rule, names)


def _check_fits(site: Site, base: Any, names: tuple[str, ...]) -> None:
    """Checks that the matrices of Fisher information of all rows fit in memory (`_MOST_BYTES`).

    Raises:
        SiteError: the matrices are larger.
    """
    shape = torch.Size(base.batch_shape)  # a tuple in some of Pyro's classes
    if len(shape) == 0:
        return
    arguments = fisher.own_arguments(base)
    count = sum(arguments[name][0].numel() for name in names)  # of the first index of the batch
    size = count // max(1, shape[1:].numel())
    needed = 8 * shape.numel() * size**2
    if needed > _MOST_BYTES:
        raise SiteError(
            f"site '{site.name}': the Fisher information of {size} outputs would take "
            f"{needed / 2**30:.1f} GiB for these rows: use curvature='monte_carlo', or a smaller "
            "batch_size",
            code="memory",
        )


def _draw(site: Site, rule: Rule, num_draws: int) -> Drawn:
    """A site's observation by Monte Carlo, from `num_draws` values drawn for each row.

    Raises:
        CannotDrawError: the site's distribution has no sampler.
    """
    fn = broadcast(site)
    axis = _dim(rule) - len(unwrap(fn, rule.depth).event_shape)
    try:
        with torch.no_grad():
            values = draws(fn, num_draws, site.value)
    except NotImplementedError as error:
        raise CannotDrawError(
            f"{cannot_draw(site.name, fn, error)}, of which its Fisher information would be "
            "estimated, or use curvature='hessian' or 'empirical_fisher'"
        ) from error
    return Drawn(values.movedim(axis, 0), site.name, rule, axis)


def _over_sum(values: Tensor, dim: int) -> Tensor:
    """`values` divided by their sum along dimension `dim`, so that they add up to 1; 0 where the
    sum is 0.
    """
    total = values.sum(dim, keepdim=True)
    return torch.where(total > 0, values / total, 0)


def _dim(rule: Rule) -> int:
    assert rule.dim is not None  # the site has rows
    return rule.dim


def broadcast(site: Site) -> Any:
    """The site's distribution, expanded to the shape of the site's value, which may be larger.

    Raises:
        SiteError: the value's event shape is not the distribution's.
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
    """A tensor over the batch of a base distribution, with the dimension of the rows of data moved
    to the front: `[B, elements, *event]`.

    Args:
        fn: the site's distribution.
        rule: the site's rule, which says which dimension holds the rows.
        base: the distribution inside the wrappers of `fn`.
        values: the tensor, `[..., *event]`, which broadcasts to the base's batch shape.
        event_dims: the number of dimensions of `event`.
    """
    shape = base.batch_shape
    event = values.shape[values.dim() - event_dims :]
    inner = len(shape) - len(unwrap(fn, rule.depth).batch_shape)
    values = values.expand(shape + event).movedim(_dim(rule) - inner - event_dims, 0)
    return values.reshape(len(values), -1, *event)


def _weights(site: Site, rule: Rule, dims: int) -> Tensor:
    """The site's weight in the log joint: the user's `poutine.scale`, if the rule keeps it, times
    the mask. The tensor broadcasts over the `dims` batch dimensions of the base distribution."""
    extra = dims - len(broadcast(site).batch_shape)
    scale = align(site.scale, extra) if rule.keeps_scale else 1.0
    mask = True if site.mask is None else align(site.mask, extra)
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=torch.float64, device=site.value.device)
    return scale * torch.as_tensor(mask, device=scale.device)
