"""Reads the Python that Inductor wrote for a step, and turns it into a plan in C++.

That Python allocates buffers, calls kernels and matrix products on them, frees and renames them,
and returns some.  The plan says which pointers each kernel gets, and how many bytes each buffer
has.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_scale.engine.compile.inductor import Compiled, CppKernel

#: The matrix products that a loop may call, with the names of their scalar arguments.
_MATRIX_PRODUCTS: dict[str, tuple[str, ...]] = {
    "extern_kernels.mm": (),
    "extern_kernels.bmm": (),
    "extern_kernels.addmm": ("beta", "alpha"),
    "extern_kernels.baddbmm": ("beta", "alpha"),
}
#: Calls that compute nothing: what they check of inputs holds of all that a loop passes.
_CHECKS = (
    "args.clear",
    "assert_size_stride",
    "assert_size_stride_grouped",
    "assert_alignment",
)


class NotALoop(Exception):
    """A step that does more than call kernels and matrix products; the statement that does."""


@dataclass(frozen=True)
class View:
    """A tensor in memory: a named C++ pointer, an offset in elements, and its geometry."""

    root: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def address(self) -> str:
        """Its first element's, in C++."""
        return f"({self.root} + {self.offset * self.dtype.itemsize})"

    @property
    def num_bytes(self) -> int:
        """From its first element to its last."""
        if 0 in self.size:
            return 0
        pairs = zip(self.size, self.stride, strict=True)
        return (1 + sum((n - 1) * step for n, step in pairs)) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after another."""
        return torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()


@dataclass
class Plan:
    """What one step does, as C++ statements.

    Attributes:
        inputs: the step's.
        names: what names in Inductor's source stand for.
        lines: the statements.
        buffers: each buffer's bytes.
        outputs: what the step returns.
        kernels: those that are called, by name.
        views: the tensors that have a name at this point of the source.
        free: buffers that nothing uses any more, at this point.
    """

    inputs: list[View]
    names: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    outputs: list[View] = field(default_factory=list)
    kernels: dict[str, CppKernel] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    free: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------ statements

    def read(self, statement: ast.stmt) -> None:
        """Takes one statement of the source in.

        Raises:
            NotALoop: it is of a kind that there is no C++ for.
        """
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                for name, view in zip(names, self.inputs, strict=True):
                    self.views[name.id] = view  # type: ignore[attr-defined]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.views[name] = self._view(value)
            case ast.Delete(targets=names):
                for name in names:
                    self._forget(name.id)  # type: ignore[attr-defined]
            case ast.Expr(value=ast.Call() as call):
                self._call(call)
            case ast.Return(value=ast.Tuple(elts=values)):
                self.outputs = [self._view(value) for value in values]
            case _:
                raise NotALoop(ast.unparse(statement))

    def _forget(self, name: str) -> None:
        root = self.views.pop(name).root
        if root in self.buffers and all(view.root != root for view in self.views.values()):
            self.free.append(root)

    def _call(self, call: ast.Call) -> None:
        function = ast.unparse(call.func)
        kernel = self.names.get(function)
        if isinstance(kernel, CppKernel):
            self.kernels[function] = kernel
            pointers = [
                f"({kind}){self._view(argument).address}"
                for kind, argument in zip(kernel.argument_types, call.args, strict=True)
                if self._is_pointer(kind)
            ]
            self.lines.append(f"{function}({', '.join(pointers)});")
        elif function in _MATRIX_PRODUCTS:
            self._product(function, call)
        elif function not in _CHECKS:
            raise NotALoop(ast.unparse(call))

    @staticmethod
    def _is_pointer(kind: str) -> bool:
        if not kind.endswith("*"):
            raise NotALoop(f"a kernel's argument of type {kind}")
        return True

    def _product(self, function: str, call: ast.Call) -> None:
        """A matrix product, by ATen's stable C interface."""
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        operands = [options.pop("out"), *call.args]
        handles = [self._handle(self._view(operand)) for operand in operands]
        scales = [
            repr(float(ast.literal_eval(options.pop(name, ast.Constant(1)))))
            for name in _MATRIX_PRODUCTS[function]
        ]
        if options:
            raise NotALoop(ast.unparse(call))
        shim = function.replace("extern_kernels.", "aoti_torch_cpu_") + "_out"
        self.lines.append(f"check({shim}({', '.join(handles + scales)}));")

    @staticmethod
    def _handle(view: View) -> str:
        size, stride = ("{" + ", ".join(map(str, v)) + "}" for v in (view.size, view.stride))
        kind = f"aoti_torch_dtype_{str(view.dtype).removeprefix('torch.')}()"
        return f"Handle({view.address}, {len(view.size)}, {size}, {stride}, {kind}).get()"

    # ------------------------------------------------------------------ expressions

    def _view(self, expression: ast.expr) -> View:
        match expression:
            case ast.Name(id=name) if name in self.views:
                return self.views[name]
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[size, stride, dtype]):
                kind = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
                view = View("", kind, ast.literal_eval(size), ast.literal_eval(stride))
                return self._allocate(view)
            case ast.Call(
                func=ast.Name(id="reinterpret_tensor"), args=[base, size, stride, offset]
            ):
                of = self._view(base)
                sizes = ast.literal_eval(size), ast.literal_eval(stride)
                return View(of.root, of.dtype, *sizes, of.offset + ast.literal_eval(offset))
        raise NotALoop(ast.unparse(expression))

    def _allocate(self, view: View) -> View:
        """The view in a buffer of its own, or in one that is no longer used."""
        root = next((r for r in self.free if self.buffers[r] == view.num_bytes), None)
        if root is None:
            root = f"buffer{len(self.buffers)}"
            self.buffers[root] = view.num_bytes
        else:
            self.free.remove(root)
        return replace(view, root=root)


def plan_of(compiled: Compiled, examples: Sequence[Tensor]) -> Plan:
    """The plan of a compiled step, for inputs like the examples.

    Raises:
        NotALoop: the step does what cannot be written out in C++.
    """
    inputs = [
        View(f"in{i}", example.dtype, tuple(example.shape), example.stride())
        for i, example in enumerate(examples)
    ]
    plan = Plan(inputs, compiled.names)
    for statement in _body(compiled.source):
        plan.read(statement)
    return plan


def _body(source: str) -> list[ast.stmt]:
    """The statements of the generated function `call`."""
    functions = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    function = next(functions, None)
    if function is None:
        raise NotALoop("Inductor's output has no function `call`")
    return function.body
