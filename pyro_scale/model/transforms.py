"""The maps from unconstrained space to supports: torch's bijections, one that torch lacks, and one
that cannot be traced."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints


class LowerCholesky(Transform):
    """Vectors of n (n + 1) / 2 reals <-> lower triangular matrices with a positive diagonal.

    The lower triangle row by row, the diagonal's elements by exp: log |det J| is their sum.
    torch has a map from n x n matrices that ignores half of them, which is no bijection.
    """

    domain = constraints.real_vector
    codomain = constraints.lower_cholesky
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        n = _order(x.shape[-1])
        rows, columns = torch.tril_indices(n, n, device=x.device)
        values = torch.where(rows == columns, x.exp(), x)
        return _place(values, rows * n + columns, n)

    def _inverse(self, y: Tensor) -> Tensor:
        rows, columns = torch.tril_indices(y.shape[-1], y.shape[-1], device=y.device)
        values = y[..., rows, columns]
        diagonal = rows == columns
        return torch.where(diagonal, torch.where(diagonal, values, 1).log(), values)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of the diagonal's logarithms."""
        return y.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        """[..., n (n + 1) / 2] -> [..., n, n]."""
        n = _order(shape[-1])
        return torch.Size((*shape[:-1], n, n))

    def inverse_shape(self, shape: Any) -> torch.Size:
        """[..., n, n] -> [..., n (n + 1) / 2]."""
        n = shape[-1]
        return torch.Size((*shape[:-2], n * (n + 1) // 2))


class CorrelationCholesky(Transform):
    """Vectors of n (n - 1) / 2 reals <-> Cholesky factors of correlation matrices.

    Row i is a point on the half sphere, by stick-breaking: with z = tanh(x), element j is z_ij
    times the length that elements before it leave, sqrt(prod_k<j (1 - z_ik^2)), and the diagonal
    is what is left at last (Lewandowski, Kurowicka and Joe 2009).  torch has the same map, by
    boolean masks, whose shapes depend on values when they are traced.
    """

    domain = constraints.real_vector
    codomain = constraints.corr_cholesky
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        n = _order(x.shape[-1]) + 1
        limit = 1 - torch.finfo(x.dtype).eps
        z = self._below_diagonal(torch.tanh(x).clamp(-limit, limit), n)
        left = (1 - z.square()).sqrt().cumprod(-1)
        before = torch.nn.functional.pad(left[..., :-1], (1, 0), value=1.0)
        return (z + torch.eye(n, dtype=x.dtype, device=x.device)) * before

    def _inverse(self, y: Tensor) -> Tensor:
        n = y.shape[-1]
        rows, columns = torch.tril_indices(n, n, -1, device=y.device)
        left = (1 - self._squares_before(y)).sqrt()
        return torch.atanh((y / left)[..., rows, columns])

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Of each element below the diagonal: the length left before it, and tanh's slope."""
        n = y.shape[-1]
        rows, columns = torch.tril_indices(n, n, -1, device=y.device)
        left = (1 - self._squares_before(y))[..., rows, columns].log() / 2
        slope = 2 * (math.log(2.0) - x - torch.nn.functional.softplus(-2 * x))
        return (left + slope).sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        """[..., n (n - 1) / 2] -> [..., n, n]."""
        n = _order(shape[-1]) + 1
        return torch.Size((*shape[:-1], n, n))

    def inverse_shape(self, shape: Any) -> torch.Size:
        """[..., n, n] -> [..., n (n - 1) / 2]."""
        n = shape[-1]
        return torch.Size((*shape[:-2], n * (n - 1) // 2))

    @staticmethod
    def _squares_before(y: Tensor) -> Tensor:
        """Of each row, the sum of squares of the elements before each element."""
        return torch.nn.functional.pad(y.square().cumsum(-1)[..., :-1], (1, 0))

    @staticmethod
    def _below_diagonal(values: Tensor, n: int) -> Tensor:
        rows, columns = torch.tril_indices(n, n, -1, device=values.device)
        return _place(values, rows * n + columns, n)


def _place(values: Tensor, places: Tensor, n: int) -> Tensor:
    """Values `[..., m]` at m places of n x n zeros; as a product, which goes through vmap."""
    chosen = torch.zeros(n * n, len(places), dtype=values.dtype, device=values.device)
    chosen[places, torch.arange(len(places), device=values.device)] = 1
    return (values @ chosen.mT).reshape(*values.shape[:-1], n, n)


def bijection(support: Any) -> Transform:
    """The bijection from unconstrained space to a support.

    Raises:
        NotImplementedError: there is none.
    """
    base = _of_elements(support)
    if base is constraints.lower_cholesky:
        return LowerCholesky()
    if base is constraints.corr_cholesky:
        return CorrelationCholesky()
    return biject_to(support)


def is_real(support: Any) -> bool:
    """Whether a support is all reals, of which the bijection is none."""
    return _of_elements(support) is constraints.real


def _of_elements(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _order(size: int) -> int:
    """n, given n (n + 1) / 2."""
    return int(((8 * size + 1) ** 0.5 - 1) / 2 + 0.5)
