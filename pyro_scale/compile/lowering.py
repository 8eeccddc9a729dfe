"""Translates the Python that Inductor wrote for a step into C++ statements.

That Python allocates buffers, calls kernels and operations of ATen on them, frees and renames them,
and returns some of them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_scale.compile.inductor import Compiled, CppKernel
from pyro_scale.compile.operations import (
    PRODUCTS,
    NotALoop,
    View,
    is_operation,
    is_substitution,
    solution,
    write_call,
    write_product,
    write_substitution,
)

#: Names of functions that compute nothing: the inputs that they check are always right in a loop.
_CHECKS = ("args.clear", "assert_size_stride", "assert_size_stride_grouped", "assert_alignment")


@dataclass
class Plan:
    """The translation of one step into C++: statements, the buffers they use, and the kernels they
    call. `read` adds the translation of the next statement of Inductor's Python source.

    Attributes:
        inputs: inputs of the step.
        names: kernels and constants by their names in Inductor's source.
        lines: C++ statements so far.
        buffers: size of every buffer in bytes, by name.
        outputs: outputs of the step.
        kernels: kernels that are called, by name.
        shared: dict from the name of a kernel to the indices of its arguments that, in some call,
            share memory with another argument.
        views: tensors that exist after the statements so far, by name in the source.
        results: results of ATen's operations that exist after the statements so far, by name.
        free: names of the buffers that are no longer used after the statements so far.
    """

    inputs: list[View]
    names: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    outputs: list[View] = field(default_factory=list)
    kernels: dict[str, CppKernel] = field(default_factory=dict)
    shared: dict[str, set[int]] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    results: dict[str, list[View]] = field(default_factory=dict)
    free: list[str] = field(default_factory=list)

    @property
    def calls_aten(self) -> bool:
        """Whether some statement calls a torch (ATen) operation, which the C++ source then needs
        helpers for.
        """
        return any("check(" in line for line in self.lines)

    @property
    def substitutes(self) -> bool:
        """Whether some statement solves triangular equations by substitution in C++ (instead of a
        call of torch), which the C++ source then needs a helper for.
        """
        return any("substitute<" in line for line in self.lines)

    # ------------------------------------------------------------------ statements

    def read(self, statement: ast.stmt) -> None:
        """Translates the next statement of Inductor's source.

        Raises:
            NotALoop: the statement has no translation.
        """
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                for name, view in zip(names, self.inputs, strict=True):
                    self.views[name.id] = view  # type: ignore[attr-defined]
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if is_operation(
                ast.unparse(call.func)
            ):
                self._aten(name, call)
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
        if self.results.pop(name, None) is not None:
            return
        root = self.views.pop(name).root
        if root in self.buffers and all(view.root != root for view in self.views.values()):
            self.free.append(root)

    def _call(self, call: ast.Call) -> None:
        function = ast.unparse(call.func)
        kernel = self.names.get(function)
        if isinstance(kernel, CppKernel):
            self.kernels[function] = kernel
            views = [self._view(argument) for argument in call.args]
            roots = [view.root for view in views]
            shared = {i for i, root in enumerate(roots) if roots.count(root) > 1}
            self.shared[function] = self.shared.get(function, set()) | shared
            pointers = [
                f"({kind}){view.address}"
                for kind, view in zip(kernel.argument_types, views, strict=True)
                if self._is_pointer(kind)
            ]
            self.lines.append(f"{function}({', '.join(pointers)});")
        elif function in PRODUCTS:
            values = {keyword.arg: keyword.value for keyword in call.keywords}
            operands = [self._view(operand) for operand in (values.pop("out"), *call.args)]
            scales = {str(name): ast.literal_eval(value) for name, value in values.items()}
            self.lines.append(write_product(function, operands, scales))
        elif function not in _CHECKS:
            raise NotALoop(ast.unparse(call))

    @staticmethod
    def _is_pointer(kind: str) -> bool:
        if not kind.endswith("*"):
            raise NotALoop(f"a kernel's argument of type {kind}")
        return True

    def _aten(self, name: str, call: ast.Call) -> None:
        """Adds C++ statements that call an ATen operation, and gives the operation's results a
        name.

        Args:
            name: name of the results in Inductor's source.
            call: expression of the call.
        """
        function = ast.unparse(call.func)
        args = [self._argument(arg) for arg in call.args]
        kwargs = {str(keyword.arg): self._argument(keyword.value) for keyword in call.keywords}
        if is_substitution(function, args, kwargs):
            matrix, right = args
            self.views[name] = x = self._allocate(solution(right))
            self.lines.append(write_substitution(matrix, right, x, kwargs))
            return
        lines, self.results[name] = write_call(f"results{len(self.lines)}", function, args, kwargs)
        self.lines += lines

    # ------------------------------------------------------------------ expressions

    def _argument(self, expression: ast.expr) -> Any:
        """The argument that an expression in Inductor's source stands for: a view of a tensor, or a
        Python number.
        """
        try:
            return ast.literal_eval(expression)
        except ValueError:
            return self._view(expression)

    def _view(self, expression: ast.expr) -> View:
        match expression:
            case ast.Name(id=name) if name in self.views:
                return self.views[name]
            case ast.Name(id=name) if name in self.results:
                (view,) = self.results[name]
                return view
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int() as place)):
                return self.results[name][place]
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[size, stride, dtype]):
                kind = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
                view = View("", kind, ast.literal_eval(size), ast.literal_eval(stride))
                return self._allocate(view)
            case ast.Call(
                func=ast.Name(id="reinterpret_tensor"), args=[base, size, stride, offset]
            ):
                view = self._view(base)
                sizes = ast.literal_eval(size), ast.literal_eval(stride)
                return View(view.root, view.dtype, *sizes, view.offset + ast.literal_eval(offset))
        raise NotALoop(ast.unparse(expression))

    def _allocate(self, view: View) -> View:
        """The tensor `view` with memory assigned to it: a buffer of the same size whose contents
        are no longer used, or else a new buffer.
        """
        root = next((r for r in self.free if self.buffers[r] == view.num_bytes), None)
        if root is None:
            root = f"buffer{len(self.buffers)}"
            self.buffers[root] = view.num_bytes
        else:
            self.free.remove(root)
        return replace(view, root=root)


def plan_of(compiled: Compiled, examples: Sequence[Tensor]) -> Plan:
    """The C++ statements of a compiled step, for inputs of the examples' shapes, strides and
    dtypes.

    Raises:
        NotALoop: the step has an operation that cannot be written as C++.
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
    """The statements of the function `call` in Inductor's source.

    Raises:
        NotALoop: there is no such function.
    """
    functions = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    function = next(functions, None)
    if function is None:
        raise NotALoop("Inductor's output has no function `call`")
    return function.body
