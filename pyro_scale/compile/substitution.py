"""Triangular solves of single vectors, written out in C++.

A call of BLAS by ATen's dispatcher takes longer than substitution for a hundred equations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyro_scale.compile.views import View

#: What a call is in C++: what is known leaves the equations that are left.  Pointers are not
#: restricted: g++ 12 then computes something else where it unrolls both loops.
SUBSTITUTION = """
template <typename T, int64_t n, int64_t row, int64_t column, bool upper, bool unit>
static void substitute(const T* matrix, const T* right, int64_t stride, T* x) {
    for (int64_t i = 0; i < n; ++i) x[i] = right[i * stride];
    for (int64_t place = 0; place < n; ++place) {
        const int64_t i = upper ? n - 1 - place : place;
        if (!unit) x[i] /= matrix[i * (row + column)];
        const T known = x[i];
        for (int64_t j = upper ? 0 : i + 1; j < (upper ? i : n); ++j)
            x[j] -= matrix[j * row + i * column] * known;
    }
}
"""
#: Equations up to which that is the faster way.
_MOST = 128

_NAMES = {torch.float32: "float", torch.float64: "double"}


def is_substitution(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ATen's is A x = b, with a triangular A and a vector b, or some of them."""
    if function != "torch.ops.aten.linalg_solve_triangular.default":
        return False
    matrix, right = args
    alike = matrix.dtype == right.dtype and matrix.size[:-2] == right.size[:-2]
    simple = matrix.dtype in _NAMES and len(matrix.size) <= 3 and right.size[-1] == 1
    return alike and simple and right.size[-2] <= _MOST and bool(kwargs.get("left", True))


def solution(right: View) -> View:
    """The solution's geometry, ATen's own: each vector's elements one after another."""
    *many, size, one = right.size
    return View("", right.dtype, (*many, size, one), (*(size for _ in many), 1, size))


def write_substitution(matrix: View, right: View, x: View, kwargs: Mapping[str, Any]) -> str:
    """The statement that solves A x = b."""
    kind = _NAMES[x.dtype]
    upper, unit = kwargs["upper"], kwargs.get("unitriangular", False)
    form = [
        kind,
        x.size[-2],
        *matrix.stride[-2:],
        *(str(bool(each)).lower() for each in (upper, unit)),
    ]
    pointers = [f"({kind}*){each.address} + i * {_apart(each)}" for each in (matrix, right, x)]
    return (
        f"for (int64_t i = 0; i < {math.prod(x.size[:-2])}; ++i) "
        f"substitute<{', '.join(map(str, form))}>"
        f"({pointers[0]}, {pointers[1]}, {right.stride[-2]}, {pointers[2]});"
    )


def _apart(view: View) -> int:
    """Elements from one matrix or vector to the next."""
    return view.stride[0] if len(view.size) == 3 else 0
