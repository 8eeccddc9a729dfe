"""Calls of ATen's operations from C++, by its stable C interface.

Matrix products have functions of their own there.  What else has no kernel of Inductor's (Cholesky
factors, triangular solves, special functions) goes through ATen's dispatcher, which takes and
gives 64-bit words; tensors are handles that belong to whoever has taken them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.compile.views import NotALoop, View

#: What handles and checks are in C++.
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

#: The matrix products, with the names of their scalar arguments.
PRODUCTS: dict[str, tuple[str, ...]] = {
    "extern_kernels.mm": (),
    "extern_kernels.bmm": (),
    "extern_kernels.addmm": ("beta", "alpha"),
    "extern_kernels.baddbmm": ("beta", "alpha"),
}


def is_operation(function: str) -> bool:
    """Whether a call in Inductor's source is one of ATen's operations."""
    return function.startswith("torch.ops.aten.")


def write_product(function: str, operands: Sequence[View], scales: Mapping[str, float]) -> str:
    """The statement of a matrix product.

    Args:
        function: one of `PRODUCTS`.
        operands: the result's memory first.
        scales: its scalar arguments other than 1.

    Raises:
        NotALoop: another argument.
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
    """(The statements of a call; its results, which live until the end of the block).

    Args:
        name: that nothing else in the block has.
        function: such as `torch.ops.aten.linalg_cholesky_ex.default`.
        args: views, and numbers as Python has them.
        kwargs: the same, by name.

    Raises:
        NotALoop: it writes into its arguments, draws random numbers, or takes or gives something
            besides tensors and numbers.
    """
    operation: Any = functools.reduce(getattr, function.split(".")[2:], torch.ops)
    schema = operation._schema
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags:
        raise NotALoop(function)
    values = dict(zip((each.name for each in schema.arguments), args, strict=False)) | dict(kwargs)
    defaults = {each.name: each.default_value for each in schema.arguments}
    words = [
        _word(values.get(each.name, defaults[each.name]), str(each.type), function)
        for each in schema.arguments
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
    """An argument as a word, in C++."""
    if kind.startswith("Optional["):
        if value is None:
            return "0"
        of = _word(value, kind.removeprefix("Optional[").removesuffix("]"), function)
        return f"reinterpret_cast<StableIValue>(new StableIValue({of}))"
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
    """Tensors without memory, as an operation would give them."""

    def like(value: Any) -> Any:
        if not isinstance(value, View):
            return value
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")

    results = operation(*map(like, args), **{name: like(each) for name, each in kwargs.items()})
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _handle(view: View) -> str:
    kind = f"aoti_torch_dtype_{str(view.dtype).removeprefix('torch.')}()"
    return f"Handle({view.address}, {len(view.size)}, {_geometry(view)}, {kind})"


def _geometry(view: View) -> str:
    return ", ".join("{" + ", ".join(map(str, each)) + "}" for each in (view.size, view.stride))
