"""Compiles a function of a vector, with its gradient, to C++ that other compiled code calls by
pointer.

    int value_and_gradient(size_t size, const double* x, double* gradient, double* value,
                           const void* inputs)

    int copy(size_t size, size_t, const double* x, double* out, const void*)

The first returns 0; 1 if the value or an element of the gradient is not finite (it then also copies
x behind the inputs); -1 if an operation failed.  Several threads may call it at once.  The second
copies x, for samplers that need a function which writes a draw.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_scale.compile.cpp_source import indent, write_buffers, write_kernels
from pyro_scale.compile.inductor import Compiled
from pyro_scale.compile.lowering import plan_of
from pyro_scale.compile.operations import NotALoop
from pyro_scale.compile.trace import Graph

_FUNCTION = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

%(kernels)s

%(threads)s
static void evaluate(char* in0, char* const* inputs, char* gradient, char* value) {
%(buffers)s
%(pointers)s
%(body)s
    std::memcpy(value, %(value)s, sizeof(double));
    std::memcpy(gradient, %(gradient)s, %(bytes)d);
}

extern "C" int value_and_gradient(size_t size, const double* x, double* gradient, double* value,
                                  const void* inputs) {
    try {
        %(one_thread)s
        evaluate((char*)x, (char* const*)inputs, (char*)gradient, (char*)value);
    } catch (const std::exception&) {
        return -1;
    }
    bool finite = std::isfinite(*value);
    for (size_t i = 0; i < size; ++i) finite = finite && std::isfinite(gradient[i]);
    if (finite) return 0;
    static std::mutex last;
    std::lock_guard<std::mutex> lock(last);
    std::memcpy(((char* const*)inputs)[%(num_inputs)d], x, size * sizeof(double));
    return 1;
}

extern "C" int copy(size_t size, size_t, const double* x, double* out, const void*) {
    std::memcpy(out, x, size * sizeof(double));
    return 0;
}
"""

#: C++ that keeps ATen's operations on one thread; they would use all cores for small products.
_THREADS = """
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads() { return 1; }
static void omp_set_num_threads(int) {}
#endif

extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));

// one for this thread alone, until the end of the block
struct OneThread {
    int openmp = omp_get_max_threads(), mkl = 0;
    OneThread() {
        omp_set_num_threads(1);
        if (MKL_Set_Num_Threads_Local) mkl = MKL_Set_Num_Threads_Local(1);
    }
    ~OneThread() {
        omp_set_num_threads(openmp);
        if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl);
    }
};
"""


def check_signature(graph: Graph) -> None:
    """Checks that a graph is that of a function from a float64 vector (and other tensors) to a
    float64 value and its gradient. Returns None if so.

    Raises:
        TypeError: the graph's first argument is no float64 vector, or it returns something else.
    """
    position = graph.examples[0]
    is_vector = position.dim() == 1 and position.dtype == torch.float64
    if not is_vector or graph.output_dtypes != [torch.float64, torch.float64]:
        raise TypeError("the function must map a float64 vector to a float64 (value, gradient)")


def write_function(graph: Graph, compiled: Compiled) -> str:
    """The C++ source of a compiled function (vector, other tensors) -> (value, gradient).

    Args:
        graph: graph of the function.
        compiled: the graph as Inductor compiled it.

    Raises:
        NotALoop: the function has an operation that cannot be written as C++.
    """
    plan = plan_of(compiled, graph.examples)
    value, gradient = plan.outputs
    if not gradient.is_contiguous or gradient.size != plan.inputs[0].size:
        raise NotALoop("a gradient that is not the vector's")
    places = enumerate(plan.inputs[1:])
    pointers = [f"char* {view.root} = inputs[{place}];" for place, view in places]
    calls_aten = plan.calls_aten
    return _FUNCTION % {
        "kernels": write_kernels(plan),
        "threads": _THREADS if calls_aten else "",
        "one_thread": "OneThread one_thread;" if calls_aten else "",
        "buffers": write_buffers(plan),
        "pointers": indent(pointers, 4),
        "body": indent(plan.lines, 4),
        "value": value.address,
        "gradient": gradient.address,
        "bytes": gradient.num_bytes,
        "num_inputs": len(pointers),
    }


class NativeFunction:
    """Machine code of a function of a vector and its gradient, with the tensors that it reads.

    Args:
        library: loaded library, built from the source of `write_function`.
        size: length of the vector.
        inputs: tensors that the C function reads.

    Attributes:
        size: length of the vector.
        address: address of the C function.
        inputs_address: address to pass as the C function's last argument.
        copy_address: address of the C function `copy`.
        inputs: tensors that the C function reads.
        not_finite_at: the last vector at which the value or the gradient was not finite; NaN if
            there is none.
    """

    def __init__(self, library: ctypes.CDLL, size: int, inputs: Sequence[Tensor]):
        self.not_finite_at = torch.full((size,), torch.nan, dtype=torch.float64)
        self._library, self.inputs = library, list(inputs)
        addresses = [tensor.data_ptr() for tensor in (*inputs, self.not_finite_at)]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._function = library.value_and_gradient
        self._function.argtypes = [ctypes.c_size_t, *[ctypes.c_void_p] * 4]
        self.size = size
        self.address: int = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.copy_address: int = ctypes.cast(library.copy, ctypes.c_void_p).value or 0
        self.inputs_address = ctypes.addressof(self._pointers)

    def reading(self, inputs: Sequence[Tensor]) -> NativeFunction:
        """A function with the same machine code that reads other tensors: `inputs` in place of its
        first `len(inputs)` tensors, the others as before. For another data set of the same shape.

        Raises:
            ValueError: a tensor has another dtype, shape or stride than the one it replaces.
        """
        for new, old in zip(inputs, self.inputs, strict=False):
            actual, expected = ((t.dtype, t.shape, t.stride()) for t in (new, old))
            if actual != expected:
                raise ValueError(f"the function reads {expected}, not {actual}")
        return NativeFunction(self._library, self.size, [*inputs, *self.inputs[len(inputs) :]])

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(The function's value, 0-d; its gradient, `[D]`) at a vector x `[D]`, in float64; they
        may be NaN or infinite.

        Raises:
            RuntimeError: an operation failed.
        """
        x = x.detach().to(torch.float64).contiguous()
        gradient, value = torch.empty_like(x), x.new_empty(())
        pointers = (x.data_ptr(), gradient.data_ptr(), value.data_ptr())
        if self._function(self.size, *pointers, self.inputs_address) < 0:
            raise RuntimeError("a matrix product failed")
        return value, gradient
