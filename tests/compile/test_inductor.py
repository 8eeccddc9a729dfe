"""Which kernels threads share: those that take longer than it takes them to meet."""

import pytest
import torch
from reference import normals

from pyro_scale.compile.inductor import CppKernel, compile_graph
from pyro_scale.compile.trace import trace


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "shared"), [(64, False), (20_000, True)])
def test_small_kernels_are_one_threads(rows, shared):
    graph = trace(lambda x, w: [(x @ w).exp().sum()], [normals(rows, 20), normals(20)])
    compiled = compile_graph(graph.module, graph.examples, threads=2)
    kernels = [each for each in compiled.names.values() if isinstance(each, CppKernel)]
    assert any("#pragma omp parallel" in kernel.source for kernel in kernels) == shared
    assert torch.allclose(
        compiled.call([*graph.examples])[0], (graph.examples[0] @ graph.examples[1]).exp().sum()
    )
