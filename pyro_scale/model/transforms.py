"""The map from unconstrained space to a support: torch's bijections, and one that it lacks."""

from __future__ import annotations

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
        places = torch.zeros(n * n, x.shape[-1], dtype=x.dtype, device=x.device)
        places[rows * n + columns, torch.arange(x.shape[-1], device=x.device)] = 1
        return (values @ places.mT).reshape(*x.shape[:-1], n, n)

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


def bijection(support: Any) -> Transform:
    """The bijection from unconstrained space to a support.

    Raises:
        NotImplementedError: there is none.
    """
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    if base is constraints.lower_cholesky:
        return LowerCholesky()
    return biject_to(support)


def _order(size: int) -> int:
    """n, given n (n + 1) / 2."""
    return int(((8 * size + 1) ** 0.5 - 1) / 2 + 0.5)
