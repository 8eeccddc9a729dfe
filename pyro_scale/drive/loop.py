"""A loop over steps, in C++, around the kernels that Inductor wrote.

Inductor hands a step over as a few C++ kernels on plain pointers and a Python function that
allocates buffers and calls them.  For small models that function costs a hundred times what the
kernels do.  Here it is read as a plan and written out in C++: buffers are allocated once, tapes
are walked by pointer, and the state's memory changes place with the step's output.
"""

from __future__ import annotations

import ast
import ctypes
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_scale.drive.batches import Fixed, Gathered, Source, Taped
from pyro_scale.drive.inductor import Compiled, CppKernel
from pyro_scale.drive.trace import StepGraph

_ALIGNMENT = 64


class NotALoop(Exception):
    """A step that calls more than kernels and matrix products."""


@dataclass(frozen=True)
class _View:
    """A tensor in memory: a named C++ pointer, an offset in elements, and its geometry."""

    root: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def address(self) -> str:
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
        return torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()


@dataclass
class _Plan:
    """What one step does, as C++ statements.

    Attributes:
        lines: the statements.
        buffers: each buffer's bytes.
        outputs: what the step returns.
        kernels: the kernels' sources by name.
        constants: tensors that Inductor put into the module, by the C++ pointer's name.
    """

    inputs: list[_View]
    names: Any
    lines: list[str] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    outputs: list[_View] = field(default_factory=list)
    kernels: dict[str, CppKernel] = field(default_factory=dict)
    views: dict[str, _View] = field(default_factory=dict)
    free: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------ statements

    def read(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                for name, view in zip(names, self.inputs, strict=True):
                    self.views[name.id] = view  # type: ignore[attr-defined]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.views[name] = self.view(value)
            case ast.Delete(targets=names):
                for name in names:
                    self.forget(name.id)  # type: ignore[attr-defined]
            case ast.Expr(value=ast.Call() as call):
                self.call(call)
            case ast.Return(value=ast.Tuple(elts=values)):
                self.outputs = [self.view(value) for value in values]
            case _:
                raise NotALoop(ast.unparse(statement))

    def forget(self, name: str) -> None:
        root = self.views.pop(name).root
        if root in self.buffers and all(view.root != root for view in self.views.values()):
            self.free.append(root)

    def call(self, call: ast.Call) -> None:
        function = ast.unparse(call.func)
        kernel = self.names.get(function)
        if isinstance(kernel, CppKernel):
            self.kernels[function] = kernel
            pointers = [
                f"({kind}){self.view(argument).address}"
                for kind, argument in zip(kernel.argument_types, call.args, strict=True)
                if self.is_pointer(kind)
            ]
            self.lines.append(f"{function}({', '.join(pointers)});")
        elif function in _MATRIX_PRODUCTS:
            self.product(function, call)
        elif function not in ("args.clear", "assert_size_stride", "assert_alignment"):
            raise NotALoop(ast.unparse(call))

    @staticmethod
    def is_pointer(kind: str) -> bool:
        if not kind.endswith("*"):
            raise NotALoop(f"a kernel's argument of type {kind}")
        return True

    def product(self, function: str, call: ast.Call) -> None:
        """A matrix product, by ATen's stable C interface."""
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        operands = [options.pop("out"), *call.args]
        handles = [self.handle(self.view(operand)) for operand in operands]
        scales = [
            repr(float(ast.literal_eval(options.pop(name, ast.Constant(1)))))
            for name in _MATRIX_PRODUCTS[function]
        ]
        if options:
            raise NotALoop(ast.unparse(call))
        shim = function.replace("extern_kernels.", "aoti_torch_cpu_") + "_out"
        self.lines.append(f"check({shim}({', '.join(handles + scales)}));")

    @staticmethod
    def handle(view: _View) -> str:
        size, stride = ("{" + ", ".join(map(str, v)) + "}" for v in (view.size, view.stride))
        kind = f"aoti_torch_dtype_{str(view.dtype).removeprefix('torch.')}()"
        return f"Handle({view.address}, {len(view.size)}, {size}, {stride}, {kind}).get()"

    # ------------------------------------------------------------------ expressions

    def view(self, expression: ast.expr) -> _View:
        match expression:
            case ast.Name(id=name) if name in self.views:
                return self.views[name]
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[size, stride, dtype]):
                kind = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
                view = _View("", kind, ast.literal_eval(size), ast.literal_eval(stride))
                return self.allocated(view)
            case ast.Call(
                func=ast.Name(id="reinterpret_tensor"), args=[base, size, stride, offset]
            ):
                of = self.view(base)
                sizes = ast.literal_eval(size), ast.literal_eval(stride)
                return _View(of.root, of.dtype, *sizes, of.offset + ast.literal_eval(offset))
        raise NotALoop(ast.unparse(expression))

    def allocated(self, view: _View) -> _View:
        """The view in a buffer of its own, or in one that is no longer used."""
        root = next((r for r in self.free if self.buffers[r] == view.num_bytes), None)
        if root is None:
            root = f"buffer{len(self.buffers)}"
            self.buffers[root] = view.num_bytes
        else:
            self.free.remove(root)
        return _View(root, view.dtype, view.size, view.stride)


#: The matrix products that a loop may call, with the names of their scalar arguments.
_MATRIX_PRODUCTS: dict[str, tuple[str, ...]] = {
    "extern_kernels.mm": (),
    "extern_kernels.bmm": (),
    "extern_kernels.addmm": ("beta", "alpha"),
    "extern_kernels.baddbmm": ("beta", "alpha"),
}

_HANDLES = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

static void check(AOTITorchError error) {
    if (error) throw std::runtime_error("a matrix product failed");
}

struct Handle {
    AtenTensorHandle handle;
    Handle(char* data, int64_t dim, std::initializer_list<int64_t> size,
           std::initializer_list<int64_t> stride, int32_t dtype) {
        check(aoti_torch_create_tensor_from_blob(
            data, dim, size.begin(), stride.begin(), 0, dtype, aoti_torch_device_type_cpu(), -1,
            &handle));
    }
    ~Handle() { aoti_torch_delete_tensor_object(handle); }
    AtenTensorHandle get() const { return handle; }
};
"""

_LOOP = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

template <int64_t count, int64_t bytes>
static void gather(char* rows, const char* table, const char* at, const char* soon) {
    const int64_t* indices = reinterpret_cast<const int64_t*>(at);
    const int64_t* next = reinterpret_cast<const int64_t*>(soon);
    for (int64_t i = 0; i < count; ++i) {
        __builtin_prefetch(table + next[i] * bytes);  // large tables are in main memory
        std::memcpy(rows + i * bytes, table + indices[i] * bytes, bytes);
    }
}
%(kernels)s

static void run_group(int64_t steps, int64_t left, int64_t every, char** sources,
                      const int64_t* strides, char* positions, char* log_joints, char* last) {
    std::unique_ptr<char, decltype(&std::free)> arena(
        static_cast<char*>(std::aligned_alloc(%(alignment)d, %(arena)d)), &std::free);
    if (!arena) throw std::bad_alloc();
%(pointers)s
    for (int64_t step = 0; step < steps; ++step) {
        const int64_t ahead = step + 1 < steps;
%(step)s
        if (--left == 0) {
            std::memcpy(positions, in%(place)d, %(position)d);
            std::memcpy(log_joints, %(log_joint)s, %(log_joint_bytes)d);
            positions += %(position)d;
            log_joints += %(log_joint_bytes)d;
            left = every;
        }
        if (step + 1 == steps) std::memcpy(last, %(log_joint)s, %(log_joint_bytes)d);
    }
%(home)s
}

extern "C" void run(int64_t groups, int64_t threads, int64_t steps, int64_t left, int64_t every,
                    char** sources, const int64_t* group_strides, const int64_t* step_strides,
                    int64_t kept, char* positions, char* log_joints, char* last, char* error) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t group = 0; group < groups; ++group) {
        char* own[%(sources)d];
        for (int64_t i = 0; i < %(sources)d; ++i) own[i] = sources[i] + group * group_strides[i];
        try {
            run_group(steps, left, every, own, step_strides,
                      positions + group * kept * %(position)d,
                      log_joints + group * kept * %(log_joint_bytes)d,
                      last + group * %(log_joint_bytes)d);
        } catch (const std::exception& caught) {
            #pragma omp critical
            std::strncpy(error, caught.what(), %(error)d - 1);
        }
    }
}
"""
_ERROR_BYTES = 4096


def kinds_of(graph: StepGraph, sources: Sequence[Source]) -> list[str]:
    """What kind of memory each of a step's inputs lies in."""
    num_state, num_last = graph.state_spec.num_leaves, len(sources) + len(graph.constants)
    num_tape = len(graph.examples) - num_state - num_last
    kinds = ["state"] * num_state + ["tape"] * num_tape
    kinds += [_KINDS[type(source)] for source in sources]
    return kinds + ["fixed"] * len(graph.constants)


def write_loop(graph: StepGraph, kinds: Sequence[str], compiled: Compiled) -> str:
    """The C++ of a loop over a compiled step.

    Raises:
        NotALoop: the step does what cannot be written out in C++.
    """
    inputs = [
        _View(f"in{i}", example.dtype, tuple(example.shape), example.stride())
        for i, example in enumerate(graph.examples)
    ]
    plan = _Plan(inputs, compiled.names)
    for statement in _body(compiled.source):
        plan.read(statement)
    return _source(plan, kinds, graph.position)


@dataclass(frozen=True)
class Loop:
    """Steps of independent groups of chains, each group's one after another.

    Attributes:
        graph: one step of a group.
        library: `write_loop`'s, built.
    """

    graph: StepGraph
    library: ctypes.CDLL

    def run(
        self,
        state: list[Tensor],
        tape: list[Tensor],
        sources: Sequence[Source],
        left: int,
        every: int,
        threads: int,
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Runs all steps of a tape.

        Args:
            state: leaves `[groups, chains, ...]`.
            tape: hyperparameters' values and noise, `[groups, steps, ...]`.
            sources: of the batch's tensors, on tapes `[groups, steps, ...]`.
            left: steps until the first draw that is kept.
            every: steps from one kept draw to the next.
            threads: among which groups are shared out.

        Returns:
            The next state; the kept positions `[groups, kept, chains, D]` and log joints `[groups,
            kept, chains]`; the last step's log joint `[groups, chains]`.
        """
        state = [leaf.clone(memory_format=torch.contiguous_format) for leaf in state]
        position = state[self.graph.position]
        (groups, chains, size), steps = position.shape, tape[0].shape[1]
        kept = len(range(left, steps + 1, every))
        positions = position.new_empty(groups, kept, chains, size)
        log_joints = position.new_empty(groups, kept, chains, dtype=self.graph.log_joint_dtype)
        last = log_joints.new_empty(groups, chains)
        pointers = [_Pointer(leaf, leaf.stride(0), 0) for leaf in state]
        pointers += [_on_tape(leaf) for leaf in tape]
        for source in sources:
            pointers += _pointers_of(source)
        pointers += [_Pointer(leaf, 0, 0) for leaf in self.graph.constants]
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.library.run(
            *(ctypes.c_int64(n) for n in (groups, threads, steps, left, every)),
            (ctypes.c_void_p * len(pointers))(*(p.tensor.data_ptr() for p in pointers)),
            (ctypes.c_int64 * len(pointers))(*(p.bytes(p.group_stride) for p in pointers)),
            (ctypes.c_int64 * len(pointers))(*(p.bytes(p.step_stride) for p in pointers)),
            ctypes.c_int64(kept),
            *(ctypes.c_void_p(out.data_ptr()) for out in (positions, log_joints, last)),
            error,
        )
        if error.value:
            raise RuntimeError(error.value.decode())
        return state, positions, log_joints, last


_KINDS = {Fixed: "fixed", Taped: "tape", Gathered: "gathered"}


@dataclass(frozen=True)
class _Pointer:
    """A tensor that the loop reads, and how far it moves on with each group and step."""

    tensor: Tensor
    group_stride: int
    step_stride: int

    def bytes(self, stride: int) -> int:
        return stride * self.tensor.element_size()


def _on_tape(leaf: Tensor) -> _Pointer:
    """A leaf `[groups, steps, ...]`, of which each step's part must be contiguous."""
    leaf = leaf if leaf[0, 0].is_contiguous() else leaf.contiguous()
    return _Pointer(leaf, leaf.stride(0), leaf.stride(1))


def _pointers_of(source: Source) -> list[_Pointer]:
    match source:
        case Taped(tensor):
            return [_on_tape(tensor)]
        case Gathered(table, indices):
            return [_Pointer(table.contiguous(), 0, 0), _on_tape(indices)]
        case Fixed(tensor):
            return [_Pointer(tensor, 0, 0)]


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


def _source(plan: _Plan, kinds: Sequence[str], position: int) -> str:
    """The C++ of a loop around a plan, whose inputs are of these kinds."""
    pointers, before, after, home = [], [], [], []
    places = itertools.count()
    for i, (kind, view) in enumerate(zip(kinds, plan.inputs, strict=True)):
        place = next(places)
        if kind == "gathered":
            table, place = place, next(places)
            count = math.prod(view.size[:2])
            plan.buffers[view.root] = view.num_bytes
            pointers.append(f"const char* table{i} = sources[{table}];")
            pointers.append(f"const char* index{i} = sources[{place}];")
            soon = f"index{i} + ahead * strides[{place}]"
            row = view.num_bytes // count
            before.append(f"gather<{count}, {row}>({view.root}, table{i}, index{i}, {soon});")
            after.append(f"index{i} += strides[{place}];")
            continue
        pointers.append(f"char* {view.root} = sources[{place}];")
        if kind == "tape":
            after.append(f"{view.root} += strides[{place}];")
    *states, log_joint = plan.outputs
    roots = [view.root for view in plan.outputs]
    for i, view in enumerate(states):
        old, size = plan.inputs[i].root, plan.inputs[i].num_bytes
        if not view.is_contiguous or view.root not in plan.buffers:
            raise NotALoop(f"an output in the memory of {view.root}")
        if roots.count(view.root) == 1 and plan.buffers[view.root] == size:
            after.append(f"std::swap({old}, {view.root});")
        else:
            after.append(f"std::memcpy({old}, {view.address}, {size});")
        home.append(f"if ({old} != sources[{i}]) std::memcpy(sources[{i}], {old}, {size});")
    arena = 0
    for root, size in plan.buffers.items():
        pointers.append(f"char* {root} = arena.get() + {arena};")
        arena += -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
    kernels = [_HANDLES] if any(line.startswith("check(") for line in plan.lines) else []
    kernels += [_named(name, kernel.source) for name, kernel in plan.kernels.items()]
    return _LOOP % {
        "kernels": "\n".join(kernels),
        "alignment": _ALIGNMENT,
        "arena": max(arena, _ALIGNMENT),
        "pointers": _indented(pointers, 4),
        "step": _indented([*before, *plan.lines, *after], 8),
        "home": _indented(home, 4),
        "sources": next(places),
        "place": position,
        "position": plan.inputs[position].num_bytes,
        "log_joint": log_joint.address,
        "log_joint_bytes": log_joint.num_bytes,
        "error": _ERROR_BYTES,
    }


def _named(name: str, source: str) -> str:
    """A kernel's source as a function of that name."""
    renamed, count = re.subn(r'extern "C"\s+void\s+kernel\(', f"static void {name}(", source)
    if count != 1:
        raise NotALoop("a kernel that is not one C++ function")
    return renamed


def _indented(lines: list[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)
