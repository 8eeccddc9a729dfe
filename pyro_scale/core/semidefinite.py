"""Factors of positive semi-definite matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def root(matrix: Tensor) -> Tensor:
    """L, lower triangular, with L L^T a positive semi-definite matrix `[..., m, m]`.

    Where torch's Cholesky factor wants a positive matrix, a pivot here may be 0 to rounding, of its
    own diagonal element: its column is then 0.
    """
    size = matrix.shape[-1]
    scale = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    inverse = torch.where(scale > 0, 1 / scale, 0)
    left = inverse[..., None] * matrix * inverse[..., None, :]
    least = size * torch.finfo(matrix.dtype).eps
    columns = []
    for place in range(size):
        pivot = left[..., place, place, None]
        column = torch.where(pivot > least, left[..., place] * pivot.clamp(min=least).rsqrt(), 0)
        columns.append(column)
        left = left - column[..., None] * column[..., None, :]
    return scale[..., None] * torch.stack(columns, -1).tril()


def triangular(root: Tensor) -> Tensor:
    """L, lower triangular with a positive diagonal, with L L^T = R R^T for any root R, `[m, m]`."""
    _, triangle = torch.linalg.qr(root.mT)
    return triangle.mT * triangle.diagonal().sign()
