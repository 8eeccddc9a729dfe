"""The maps from unconstrained space to supports: torch's bijections, one that torch lacks, and one
that replaces torch's because it can be traced."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints


class _Triangular(Transform):
    """Base class of the bijections from vectors to triangular matrices that are filled row by row.

    Attributes:
        has_diagonal: whether the vector has elements for the diagonal.
    """

    domain = constraints.real_vector
    bijective = True
    has_diagonal = True

    def forward_shape(self, shape: Any) -> torch.Size:
        """The matrices' shape `[..., n, n]`, from the vectors' shape `[..., number of
        elements]`.
        """
        n = self._order(shape[-1])
        return torch.Size((*shape[:-1], n, n))

    def inverse_shape(self, shape: Any) -> torch.Size:
        """The vectors' shape `[..., number of elements]`, from the matrices' shape `[..., n,
        n]`.
        """
        n = shape[-1]
        return torch.Size((*shape[:-2], n * (n - 1) // 2 + n * self.has_diagonal))

    def _order(self, size: int) -> int:
        """n, the number of rows of the n x n matrix that a vector of `size` elements fills."""
        return int(((8 * size + 1) ** 0.5 - 1) / 2 + 0.5) + (not self.has_diagonal)

    def _indices(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(Row indices, column indices), one of each for every element of the vector: where in the
        n x n matrix the element is written.
        """
        rows, columns = torch.tril_indices(n, n, self.has_diagonal - 1, device=device)
        return rows, columns


class LowerCholesky(_Triangular):
    """Bijection from vectors of n (n + 1) / 2 reals to lower triangular matrices with a positive
    diagonal.

    The vector has the lower triangle row by row, and the logarithms of the diagonal's elements: log
    |det J| is the sum of these logarithms. torch's map takes n x n matrices and ignores half of
    their elements, so it is not a bijection.
    """

    codomain = constraints.lower_cholesky

    def _call(self, x: Tensor) -> Tensor:
        n = self._order(x.shape[-1])
        rows, columns = self._indices(n, x.device)
        return _place(torch.where(rows == columns, x.exp(), x), rows * n + columns, n)

    def _inverse(self, y: Tensor) -> Tensor:
        rows, columns = self._indices(y.shape[-1], y.device)
        values = y[..., rows, columns]
        diagonal = rows == columns
        return torch.where(diagonal, torch.where(diagonal, values, 1).log(), values)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log |det dy/dx| `[...]`: the sum of the logarithms of the diagonal's elements."""
        return y.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class CorrelationCholesky(_Triangular):
    """Bijection from vectors of n (n - 1) / 2 reals to Cholesky factors of n x n correlation
    matrices.

    Row i is a point on the half sphere, by stick-breaking: with z = tanh(x), element j is z_ij
    times the remaining length, sqrt(prod_k<j (1 - z_ik^2)), and the diagonal is the length that
    remains at the end (Lewandowski, Kurowicka and Joe 2009). torch has the same map, but with
    boolean masks, whose shapes depend on values when they are traced.
    """

    codomain = constraints.corr_cholesky
    has_diagonal = False

    def _call(self, x: Tensor) -> Tensor:
        n = self._order(x.shape[-1])
        rows, columns = self._indices(n, x.device)
        limit = 1 - torch.finfo(x.dtype).eps
        z = _place(torch.tanh(x).clamp(-limit, limit), rows * n + columns, n)
        lengths = (1 - z.square()).sqrt().cumprod(-1)
        before = torch.nn.functional.pad(lengths[..., :-1], (1, 0), value=1.0)
        return (z + torch.eye(n, dtype=x.dtype, device=x.device)) * before

    def _inverse(self, y: Tensor) -> Tensor:
        rows, columns = self._indices(y.shape[-1], y.device)
        lengths = (1 - _squares_before(y)).sqrt()
        return torch.atanh((y / lengths)[..., rows, columns])

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log |det dy/dx| `[...]`: the sum over elements below the diagonal of log remaining length
        + log tanh'(x)."""
        rows, columns = self._indices(y.shape[-1], y.device)
        length = (1 - _squares_before(y))[..., rows, columns].log() / 2
        slope = 2 * (math.log(2.0) - x - torch.nn.functional.softplus(-2 * x))
        return (length + slope).sum(-1)


def _squares_before(y: Tensor) -> Tensor:
    """For each element of a matrix `[..., n, n]`, the sum of squares of the elements to its left in
    its row."""
    return torch.nn.functional.pad(y.square().cumsum(-1)[..., :-1], (1, 0))


def _place(values: Tensor, places: Tensor, n: int) -> Tensor:
    """Matrices `[..., n, n]`, zero except at m elements.

    Computed as a matrix product, which works under vmap.

    Args:
        values: the m elements of each matrix, `[..., m]`.
        places: their indices in the flattened matrix, `[m]`.
        n: number of the matrix's rows and columns.
    """
    columns = torch.zeros(n * n, len(places), dtype=values.dtype, device=values.device)
    columns[places, torch.arange(len(places), device=values.device)] = 1
    return (values @ columns.mT).reshape(*values.shape[:-1], n, n)


def bijection(support: Any) -> Transform:
    """The bijection (a torch `Transform`) from unconstrained space to a support. It is torch's
    `biject_to`, except for Cholesky factors of covariances and of correlations.

    Raises:
        NotImplementedError: the support has none.
    """
    base = _of_elements(support)
    if base is constraints.lower_cholesky:
        return LowerCholesky()
    if base is constraints.corr_cholesky:
        return CorrelationCholesky()
    return biject_to(support)


def is_real(support: Any) -> bool:
    """Whether a support is all reals, elementwise, so that its bijection is the identity."""
    return _of_elements(support) is constraints.real


def bijection_of_elements(support: constraints.Constraint) -> Transform | None:
    """The bijection from the reals to a support, applied element by element; None for a support
    that is all reals, or whose bijection mixes elements (a simplex, an ordered vector)."""
    transform = bijection(_of_elements(support))
    return None if is_real(support) or transform.domain.event_dim else transform


def _of_elements(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support
