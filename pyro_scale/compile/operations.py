"""C++ source of operations for which Inductor writes no kernel.

Matrix products have functions in ATen's stable C interface. Others (Cholesky factors, triangular
solves, special functions) go through ATen's dispatcher, which takes and returns 64-bit words;
tensors are handles, which belong to the code that received them. Triangular solves of single
vectors are written out: a call of BLAS through the dispatcher takes longer than substitution in a
hundred equations.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class NotALoop(Exception):
    """Raised if a step contains a statement that cannot be written as C++; the exception's argument
    is this statement. Callers then run steps from Python.
    """


@dataclass(frozen=True)
class View:
    """A tensor in the memory of compiled code: a C++ pointer, with offset, shape, strides and
    dtype.

    Attributes:
        root: name of the C++ pointer to the memory.
        dtype: dtype of the elements.
        size: shape of the tensor.
        stride: strides in elements.
        offset: number of elements between the pointer and the tensor's first element.
    """

    root: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def address(self) -> str:
        """C++ expression for the address of the tensor's first element."""
        return f"({self.root} + {self.offset * self.dtype.itemsize})"

    @property
    def num_bytes(self) -> int:
        """Number of bytes from the tensor's first element to its last; 0 without elements."""
        if 0 in self.size:
            return 0
        pairs = zip(self.size, self.stride, strict=True)
        return (1 + sum((n - 1) * step for n, step in pairs)) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the tensor's elements lie one after another, in row-major order."""
        return torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()


#: C++ of handles and checks.
ATEN = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

static void check(AOTITorchError error) {
    if (error) throw std::runtime_error("an operation of ATen's failed");
}

struct Handle {
    AtenTensorHandle handle;
    Handle(char* data, int64_t dim, std::initializer_list<int64_t> size,
           std::initializer_list<int64_t> stride, int32_t dtype) {
        check(aoti_torch_create_tensor_from_blob(
            data, dim, size.begin(), stride.begin(), 0, dtype, aoti_torch_device_type_cpu(), -1,
            &handle));
    }
    explicit Handle(StableIValue result) : handle(reinterpret_cast<AtenTensorHandle>(result)) {}
    Handle(const Handle&) = delete;
    ~Handle() { aoti_torch_delete_tensor_object(handle); }
    AtenTensorHandle get() const { return handle; }
    StableIValue release() {
        return reinterpret_cast<StableIValue>(std::exchange(handle, nullptr));
    }
    // the first element, if the strides are those that kernels were written for
    char* data(std::initializer_list<int64_t> size, std::initializer_list<int64_t> stride) const {
        int64_t* own;
        void* first;
        check(aoti_torch_get_strides(handle, &own));
        for (size_t i = 0; i < size.size(); ++i)
            if (size.begin()[i] > 1 && own[i] != stride.begin()[i])
                throw std::runtime_error("an operation of ATen's gave unforeseen strides");
        check(aoti_torch_get_data_ptr(handle, &first));
        return static_cast<char*>(first);
    }
};
"""

#: Matrix products, with the names of their scalar arguments.
PRODUCTS: dict[str, tuple[str, ...]] = {
    "extern_kernels.mm": (),
    "extern_kernels.bmm": (),
    "extern_kernels.addmm": ("beta", "alpha"),
    "extern_kernels.baddbmm": ("beta", "alpha"),
}


def is_operation(function: str) -> bool:
    """Whether a name in Inductor's Python source, such as
    `torch.ops.aten.linalg_cholesky_ex.default`, is that of an ATen operation.
    """
    return function.startswith("torch.ops.aten.")


def write_product(function: str, operands: Sequence[View], scales: Mapping[str, float]) -> str:
    """The C++ statement that computes a matrix product.

    Args:
        function: name in Inductor's source, one of `PRODUCTS`.
        operands: memory of the result, then the arguments.
        scales: scalar arguments other than 1, by name.

    Raises:
        NotALoop: the call has another scalar argument.
    """
    if not scales.keys() <= set(PRODUCTS[function]):
        raise NotALoop(f"{function}({', '.join(scales)})")
    words = [f"{_handle(view)}.get()" for view in operands]
    words += [repr(float(scales.get(name, 1))) for name in PRODUCTS[function]]
    symbol = function.replace("extern_kernels.", "aoti_torch_cpu_") + "_out"
    return f"check({symbol}({', '.join(words)}));"


def write_call(
    name: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[View]]:
    """(C++ statements that call an ATen operation, the operation's results).  Results live until
    the end of the C++ block.

    Args:
        name: prefix of the results' C++ names, unique in the block.
        function: name in Inductor's source, such as `torch.ops.aten.linalg_cholesky_ex.default`.
        args: positional arguments, views and Python numbers.
        kwargs: keyword arguments, views and Python numbers.

    Raises:
        NotALoop: the operation writes into its arguments, draws random numbers, or has arguments or
            results other than tensors and numbers.
    """
    operation: Any = functools.reduce(getattr, function.split(".")[2:], torch.ops)
    schema = operation._schema
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags:
        raise NotALoop(function)
    values = dict(zip((arg.name for arg in schema.arguments), args, strict=False)) | dict(kwargs)
    words = [
        _word(values.get(arg.name, arg.default_value), str(arg.type), function)
        for arg in schema.arguments
    ]
    results = [
        View(f"{name}_{i}", result.dtype, tuple(result.shape), result.stride())
        for i, result in enumerate(_results_like(operation, args, kwargs))
    ]
    lines = [
        f"StableIValue {name}[{max(len(words), len(results))}] = {{{', '.join(words)}}};",
        f'check(aoti_torch_call_dispatcher("{schema.name}", "{schema.overload_name}", {name}));',
    ]
    for i, view in enumerate(results):
        lines.append(f"Handle {view.root}_handle({name}[{i}]);")
        lines.append(f"char* {view.root} = {view.root}_handle.data({_geometry(view)});")
    return lines, results


def _word(value: Any, kind: str, function: str) -> str:
    """The C++ expression for an argument of ATen's dispatcher as a 64-bit word.

    Args:
        value: a view, a Python number or None.
        kind: type of the argument in the operation's schema.
        function: name of the operation, for the error.

    Raises:
        NotALoop: the argument has another type.
    """
    if kind.startswith("Optional["):
        if value is None:
            return "0"
        word = _word(value, kind.removeprefix("Optional[").removesuffix("]"), function)
        return f"reinterpret_cast<StableIValue>(new StableIValue({word}))"
    match kind, value:
        case "Tensor", View():
            return f"{_handle(value)}.release()"
        case "float", int() | float():
            (bits,) = struct.unpack("<Q", struct.pack("<d", value))
            return f"{bits}ULL"
        case "int" | "bool", int():
            return f"static_cast<StableIValue>({int(value)})"
    raise NotALoop(f"{function} with an argument of type {kind}")


def _results_like(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """The shapes and dtypes of an operation's results for these arguments: tensors on torch's meta
    device, without memory.
    """

    def like(value: Any) -> Any:
        if not isinstance(value, View):
            return value
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")

    results = operation(*map(like, args), **{name: like(value) for name, value in kwargs.items()})
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _handle(view: View) -> str:
    kind = f"aoti_torch_dtype_{str(view.dtype).removeprefix('torch.')}()"
    return f"Handle({view.address}, {len(view.size)}, {_geometry(view)}, {kind})"


def _geometry(view: View) -> str:
    return ", ".join("{" + ", ".join(map(str, n)) + "}" for n in (view.size, view.stride))


#: C++ of substitution: each solved unknown is removed from the remaining equations.  Pointers are
#: not marked `__restrict__`: with it, g++ 12 computes wrong results where it unrolls both loops.
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
#: Number of equations up to which substitution is faster than BLAS.
_MOST = 128

_NAMES = {torch.float32: "float", torch.float64: "double"}


def is_substitution(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ATen solves A x = b by substitution in C++: A is triangular, b one vector
    or a batch of vectors, and there are few equations.

    Args:
        function: name in Inductor's source.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    if function != "torch.ops.aten.linalg_solve_triangular.default":
        return False
    matrix, right = args
    alike = matrix.dtype == right.dtype and matrix.size[:-2] == right.size[:-2]
    simple = matrix.dtype in _NAMES and len(matrix.size) <= 3 and right.size[-1] == 1
    return alike and simple and right.size[-2] <= _MOST and bool(kwargs.get("left", True))


def solution(right: View) -> View:
    """A `View` for the solution x of A x = b, which has no memory yet: the shape, dtype and strides
    that ATen would give to x. `right` is b.
    """
    *many, size, one = right.size
    return View("", right.dtype, (*many, size, one), (*(size for _ in many), 1, size))


def write_substitution(matrix: View, right: View, x: View, kwargs: Mapping[str, Any]) -> str:
    """The C++ statement that solves A x = b for triangular A.

    Args:
        matrix: A, `[..., n, n]`.
        right: b, `[..., n, 1]`.
        x: memory of the solution.
        kwargs: keyword arguments of `linalg_solve_triangular`.
    """
    kind = _NAMES[x.dtype]
    upper, unit = kwargs["upper"], kwargs.get("unitriangular", False)
    form = [
        kind,
        x.size[-2],
        *matrix.stride[-2:],
        *(str(bool(flag)).lower() for flag in (upper, unit)),
    ]
    pointers = [f"({kind}*){v.address} + i * {_batch_stride(v)}" for v in (matrix, right, x)]
    return (
        f"for (int64_t i = 0; i < {math.prod(x.size[:-2])}; ++i) "
        f"substitute<{', '.join(map(str, form))}>"
        f"({pointers[0]}, {pointers[1]}, {right.stride[-2]}, {pointers[2]});"
    )


def _batch_stride(view: View) -> int:
    """The number of elements in memory from one matrix (or vector) of a batch to the next; 0 if
    there is only one.
    """
    return view.stride[0] if len(view.size) == 3 else 0
