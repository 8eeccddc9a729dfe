"""Compiles a traced function to a loop over steps, a C function, or a Python function."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyro_scale.compile.cache import key_of, library_for
from pyro_scale.compile.cpp_function import NativeFunction, check_signature, write_function
from pyro_scale.compile.cpp_loop import Inputs, Loop, write_loop
from pyro_scale.compile.inductor import Compiled, build_library, compile_graph
from pyro_scale.compile.trace import Graph
from pyro_scale.errors import Code

#: Dict from hashes to functions that this process has compiled, the latest last; loops are cached
#: on disk.
_compiled_before: dict[str, Compiled] = {}
_MOST_KEPT = 16
_NO_COMPILER = "there is no C++ compiler"


def compile_loop(graph: Graph, inputs: Inputs, threads: int | None) -> Loop:
    """A compiled loop over a sampler's step, from the cache on disk if possible.

    Args:
        graph: graph of the step, whose last output is a number for each chain.
        inputs: for each input of the step, whether it is part of the state, changes at each step,
            is gathered by row indices, or is fixed.
        threads: number of threads that C++ kernels use; None for torch's number.

    Raises:
        NotALoop: the step has an operation that cannot be written as C++.
        Exception: whatever Inductor and the C++ compiler raise.
    """

    def build() -> str:
        return build_library(write_loop(graph, inputs, _compile(graph, threads)))

    library = library_for(graph, inputs, threads, build)
    return Loop(library, inputs.position, graph.output_dtypes[-1])


def compile_value_and_gradient(graph: Graph) -> NativeFunction:
    """A C function of a vector that computes a value and its gradient on one thread, from the cache
    on disk if possible.

    Args:
        graph: graph of (float64 vector, other tensors) -> (value, gradient), traced at the tensors
            that the function will read.

    Raises:
        TypeError: the graph has other arguments or results.
        NotALoop: the function has an operation that cannot be written as C++.
        Exception: whatever Inductor and the C++ compiler raise.
    """
    check_signature(graph)

    def build() -> str:
        return build_library(write_function(graph, _compile(graph, threads=1)))

    library = library_for(graph, "value and gradient", 1, build)
    return NativeFunction(library, len(graph.examples[0]), graph.examples[1:])


def compile_function(graph: Graph) -> Callable[[list[Tensor]], Any]:
    """A compiled function, called from Python with the list of the graph's inputs; a call empties
    the list.

    Raises:
        Exception: whatever Inductor and the C++ compiler raise.
    """
    compiled = _compile(graph, threads=None)
    compiled.build()  # so that errors are raised here, and not in a step
    return compiled.call


def _compile(graph: Graph, threads: int | None) -> Compiled:
    key = key_of(graph, None, threads)
    if key not in _compiled_before:
        if len(_compiled_before) == _MOST_KEPT:
            del _compiled_before[next(iter(_compiled_before))]
        _compiled_before[key] = compile_graph(graph.module, graph.examples, threads)
    return _compiled_before[key]


def why_not(error: Exception) -> str:
    """The reason why a model cannot be compiled, as one line for messages, from the exception that
    tracing, Inductor or the C++ compiler raised.
    """
    if isinstance(error, FileNotFoundError) or "InvalidCxxCompiler" in str(error):
        return f"{_NO_COMPILER}: {error}"
    first = str(error).strip().partition("\n")[0][:300]
    compilers_own = re.search(r"^.*\berror: .*$", str(error), re.MULTILINE)
    if compilers_own:
        first = f"{first}: {compilers_own[0].strip()[:300]}"
    if "tracing tensor" in first:
        return "it reads a tensor's value in Python: .item(), float(), bool(), an if"
    if "DynamicOutputShape" in type(error).__name__:
        return f"the shape of a result depends on values: {first}"
    return f"{type(error).__name__}: {first}"


def section_on(reason: str) -> Code:
    """The section of the documentation's troubleshooting page to refer to in a message:
    "no-compiler" if `reason`, a line from `why_not`, says that there is no C++ compiler; otherwise
    "not-compiled".
    """
    return "no-compiler" if reason.startswith(_NO_COMPILER) else "not-compiled"
