"""Which kernels threads share: those that take longer than it takes them to meet.  Which vectors
they use: those that Inductor chooses by trials."""

import os
import subprocess
import sys

import pytest
import torch
from reference import normals

from pyro_scale.compile import inductor
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


def test_vectors_that_torch_does_not_use_are_tried(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not inductor._uses_widest_vectors()


@pytest.mark.slow
def test_trials_choose_the_same_vectors(tmp_path):
    if not inductor._uses_widest_vectors():
        pytest.skip("Inductor tries all vectors here")
    code = (
        "from torch._inductor.cpu_vec_isa import pick_vec_isa\n"
        "print(pick_vec_isa(), pick_vec_isa().build_arch_flags())"
    )
    chosen = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **setting},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for setting in ({}, {"TORCHINDUCTOR_VEC_ISA_OK": "1"})
    ]
    assert chosen[0] == chosen[1]
    assert "avx" in chosen[0]
