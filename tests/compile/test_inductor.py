"""Which kernels threads share: those that take longer than it takes them to meet.  Which vectors
they use: as wide as those that Inductor chooses by trials."""

import os
import subprocess
import sys

import pytest
import torch
from reference import normals
from torch._inductor import cpu_vec_isa

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


def vectors():
    """The vectors that Inductor would use now."""
    return cpu_vec_isa.pick_vec_isa()


@pytest.mark.slow
def test_vectors_are_as_wide_as_trials_find(tmp_path):
    """And no trial is compiled, neither for the graph nor for the library."""
    with inductor._vectors_as_in_torch():
        ours = vectors()
    if type(ours).__name__ != "AsInTorch":
        pytest.skip("Inductor chooses vectors here")
    code = "from torch._inductor import cpu_vec_isa; print(cpu_vec_isa.pick_vec_isa().bit_width())"
    tried = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(tried.stdout) == ours.bit_width()
    assert bool(ours)


def test_no_trial_is_compiled(monkeypatch):
    def refuse(self, code):
        raise AssertionError("a trial")

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", refuse)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: refuse(None, ""))
    graph = trace(lambda x: [x.exp() * 2], [normals(64)])
    compiled = compile_graph(graph.module, graph.examples, threads=1)
    (kernel,) = [each for each in compiled.names.values() if isinstance(each, CppKernel)]
    assert "at::vec::Vectorized" in kernel.source


def test_other_processors_keep_the_choice_of_inductor(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    chosen = cpu_vec_isa.pick_vec_isa
    with inductor._vectors_as_in_torch():
        assert cpu_vec_isa.pick_vec_isa is chosen
