"""Triangular solves of vectors in generated C++, against torch's own."""

import itertools

import pytest
import torch
from reference import close, normals

from pyro_scale.compile.compiled import compile_value_and_gradient
from pyro_scale.compile.inductor import compile_graph
from pyro_scale.compile.lowering import plan_of
from pyro_scale.compile.trace import trace

SIZE = 7
#: Elements of two matrices, and of two vectors of which every other element counts.
MATRICES, VECTORS = 2 * SIZE**2, 2 * (2 * SIZE)


def solutions(x, dtype):
    """A x = b in every form: upper or lower, by rows or by columns, a diagonal of ones or not, each
    of one matrix or of some."""
    matrix = x[:MATRICES].view(2, SIZE, SIZE) * 0.3 + 2 * torch.eye(SIZE, dtype=x.dtype)
    right = x[MATRICES:].view(2, SIZE, 2)[..., :1]
    parts = itertools.cycle([slice(None), 1, slice(1, 2)])
    for upper, by_column, unit in itertools.product([False, True], repeat=3):
        part = next(parts)
        a, b = matrix[part].to(dtype), right[part].to(dtype)
        a = a.mT if by_column else a
        yield torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=unit)


def density(x, dtype):
    """Each element of each solution counts by a weight of its own."""
    found = torch.cat([each.double().flatten() for each in solutions(x, dtype)])
    return found.sin() @ torch.linspace(0.5, 1.5, len(found), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_it_is_torchs_solve(dtype, tolerance):
    def value_and_gradient(x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = density(leaf, dtype)
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient

    graph = trace(value_and_gradient, [normals(MATRICES + VECTORS)])
    plan = plan_of(compile_graph(graph.module, graph.examples, threads=1), graph.examples)
    assert plan.substitutes
    assert not plan.calls_aten
    compiled = compile_value_and_gradient(graph)
    for seed in range(1, 4):
        x = normals(MATRICES + VECTORS, seed=seed)
        for found, expected in zip(compiled(x), value_and_gradient(x), strict=True):
            close(found, expected, tolerance)


@pytest.mark.slow
def test_a_singular_matrix_gives_what_torch_gives():
    """Infinities, which end a chain, and no error."""
    matrix, right = torch.tensor([[2.0, 1.0], [0.0, 0.0]]).double(), normals(2, 1)

    def function(x):
        a = matrix * x.sum()
        return torch.linalg.solve_triangular(a, right, upper=True).sum(), x

    assert not torch.linalg.solve_triangular(matrix, right, upper=True).isfinite().all()
    value, _ = compile_value_and_gradient(trace(function, [normals(2)]))(torch.ones(2).double())
    assert not value.isfinite()


@pytest.mark.slow
def test_many_equations_are_blass():
    """Which is faster there."""
    matrix = 2 * torch.eye(200).double() + 0.01 * normals(200, 200)

    def function(x):
        return torch.linalg.solve_triangular(matrix, x[:, None], upper=False).sum(), x

    graph = trace(function, [normals(200)])
    plan = plan_of(compile_graph(graph.module, graph.examples, threads=1), graph.examples)
    assert plan.calls_aten
    assert not plan.substitutes
