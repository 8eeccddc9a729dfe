"""A traced function as machine code: a loop over steps, a C function of a vector, or a function to
call from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyro_scale.compile.cache import key_of, library_for
from pyro_scale.compile.cpp_function import (
    NativeFunction,
    check_signature,
    write_function,
)
from pyro_scale.compile.cpp_loop import Inputs, Loop, write_loop
from pyro_scale.compile.inductor import Compiled, build_library, compile_graph
from pyro_scale.compile.trace import Graph

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
        return build_library(write_loop(graph, inputs, _compile(graph, threads)))

    library = library_for(graph, inputs, threads, build)
    return Loop(library, inputs.position, graph.output_dtypes[-1])


def compile_value_and_gradient(graph: Graph) -> NativeFunction:
    """The C function of a vector, from the cache on disk if it is there; it uses one thread.

    Args:
        graph: (float64 vector, other tensors) -> (value, gradient), traced at the tensors that it
            is to read.

    Raises:
        TypeError: the graph has other arguments or results.
        NotALoop: the function does what cannot be written out in C++.
        Exception: whatever Inductor and the C++ compiler raise.
    """
    check_signature(graph)

    def build() -> str:
        return build_library(write_function(graph, _compile(graph, threads=1)))

    library = library_for(graph, "value and gradient", 1, build)
    return NativeFunction(library, len(graph.examples[0]), graph.examples[1:])


def compile_function(graph: Graph) -> Callable[[list[Tensor]], Any]:
    """The function of a list of its inputs, which it empties; its kernels are built.

    Raises:
        Exception: whatever Inductor and the C++ compiler raise.
    """
    compiled = _compile(graph, threads=None)
    compiled.build()  # so that what fails does so here
    return compiled.call


def _compile(graph: Graph, threads: int | None) -> Compiled:
    key = key_of(graph, None, threads)
    if key not in _compiled_before:
        if len(_compiled_before) == _MOST_KEPT:
            del _compiled_before[next(iter(_compiled_before))]
        _compiled_before[key] = compile_graph(graph.module, graph.examples, threads)
    return _compiled_before[key]
