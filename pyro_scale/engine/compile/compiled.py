"""A traced function as machine code: a loop over steps in C++, or a function to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyro_scale.engine.compile.cache import key_of, library_for
from pyro_scale.engine.compile.cpp_loop import Inputs, Loop, write_loop
from pyro_scale.engine.compile.inductor import Compiled, build_library, compile_graph
from pyro_scale.engine.compile.trace import Graph

#: Functions that this process has compiled, the latest last; loops are kept on disk.
_compiled_before: dict[str, Compiled] = {}
_MOST_KEPT = 16


def compile_loop(graph: Graph, inputs: Inputs, threads: int | None) -> Loop:
    """The loop over a step, from the cache on disk if it is there.

    Args:
        graph: of the step, whose last output is a number for each chain.
        inputs: of the step.
        threads: that its kernels use; None for torch's number.

    Raises:
        NotALoop: the step does what cannot be written out in C++.
        Exception: whatever Inductor and the C++ compiler raise.
    """

    def build() -> str:
        return build_library(write_loop(graph, inputs, _compiled(graph, threads)))

    library = library_for(graph, inputs, threads, build)
    return Loop(library, inputs.position, graph.output_dtypes[-1])


def compile_function(graph: Graph) -> Callable[[list[Tensor]], Any]:
    """The function of a list of its inputs, which it empties; its kernels are built.

    Raises:
        Exception: whatever Inductor and the C++ compiler raise.
    """
    call = _compiled(graph, threads=None).call
    call(list(graph.examples))  # builds the kernels, so that what fails does so here
    return call


def _compiled(graph: Graph, threads: int | None) -> Compiled:
    key = key_of(graph, None, threads)
    if key not in _compiled_before:
        if len(_compiled_before) == _MOST_KEPT:
            del _compiled_before[next(iter(_compiled_before))]
        _compiled_before[key] = compile_graph(graph.module, graph.examples, threads)
    return _compiled_before[key]
