"""Writes a loop over steps in C++, around the C++ kernels that Inductor wrote for one step.

Inductor compiles a step to a few C++ kernels on plain pointers, and a Python function that
allocates buffers and calls them.  For small models, that function takes a hundred times as long as
the kernels.  Here its statements are written as C++: buffers are allocated once, blocks are read by
pointer, rows of data are gathered by index, and the state's memory is swapped with the step's
output.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.compile.cpp_source import (
    indent,
    is_small,
    write_buffers,
    write_kernels,
    write_local_buffers,
)
from pyro_scale.compile.inductor import Compiled
from pyro_scale.compile.lowering import Plan, plan_of
from pyro_scale.compile.operations import NotALoop, View
from pyro_scale.compile.trace import Graph
from pyro_scale.core.rows import Fixed, Gathered, PerStep, Source

_LOOP = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

// Large tables are in main memory, so the next step's rows are asked for ahead.  They go to the
// second-level cache: the first has few places for what is on its way, and loads wait for one.
template <int64_t count, int64_t bytes>
static void gather(char* rows, const char* table, int64_t stride, const char* at,
                   const char* soon) {
    const int64_t* indices = reinterpret_cast<const int64_t*>(at);
    const int64_t* next = reinterpret_cast<const int64_t*>(soon);
    for (int64_t i = 0; i < count; ++i) {
        const char* ahead = table + next[i] * stride;
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
        if (bytes > 8) __builtin_prefetch(ahead + bytes - 1, 0, 2);
        std::memcpy(rows + i * bytes, table + indices[i] * stride, bytes);
    }
}
%(kernels)s

static void run_group(int64_t steps, int64_t left, int64_t every, char** sources,
                      const int64_t* strides, char* positions, char* log_joints, char* last) {
%(buffers)s
%(pointers)s
    const auto move = [&](int64_t ahead) __attribute__((always_inline)) {
%(step)s
    };
    for (int64_t step = 0; step < steps; ++step) {
        const bool ends = step + 1 == steps;
        if (--left > 0 && !ends) {
            move(1);  // a copy of the step, without what only the log joint needs
            continue;
        }
        move(!ends);
        if (left == 0) {
            std::memcpy(positions, in%(place)d, %(position)d);
            std::memcpy(log_joints, %(log_joint)s, %(log_joint_bytes)d);
            positions += %(position)d;
            log_joints += %(log_joint_bytes)d;
            left = every;
        }
        if (ends) std::memcpy(last, %(log_joint)s, %(log_joint_bytes)d);
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


class Inputs(NamedTuple):
    """Where a compiled loop finds each input of a sampler's step: in the state, in tensors with an
    entry for each step, in a table of rows, or in a tensor that never changes.

    Attributes:
        kinds: for each input of the step, `"state"` (a tensor of the state; these come first),
            `"per step"` (a tensor with an entry for each step), `"gathered"` (rows of a table, at
            indices that change from step to step) or `"fixed"` (the same at all steps).
        position: index, among the state's tensors, of the chains' positions `[chains, D]` (params,
            or their whitened coordinates), which are kept as draws.
    """

    kinds: tuple[str, ...]
    position: int


def inputs_of(
    num_state: int, position: int, num_per_step: int, sources: Sequence[Source]
) -> Inputs:
    """An `Inputs`: where a compiled loop finds each input of a sampler's step, except constants
    (tensors that the model reads besides its arguments).

    Args:
        num_state: number of tensors in the state.
        position: index, among these, of the chains' positions `[chains, D]` (params, or their
            whitened coordinates).
        num_per_step: number of tensors with an entry for each step, besides those of the batch
            (hyperparameters, standard normal numbers).
        sources: how each tensor of the minibatch is read: fixed, per step, or gathered from a
            table.
    """
    batch = (_KINDS[type(source)] for source in sources)
    return Inputs(("state",) * num_state + ("per step",) * num_per_step + tuple(batch), position)


def write_loop(graph: Graph, inputs: Inputs, compiled: Compiled) -> str:
    """The C++ source of a loop over a compiled step. The step maps the state and other inputs to
    the next state and each chain's log joint; the loop keeps the chains' positions (params, or
    their whitened coordinates) and log joints after every so many steps.

    Args:
        graph: graph of the step.
        inputs: how the loop reads each input of the step.
        compiled: the graph as Inductor compiled it.

    Raises:
        NotALoop: the step has an operation that cannot be written as C++.
    """
    kinds = inputs.kinds + ("fixed",) * len(graph.constants)
    return _source(plan_of(compiled, graph.examples), kinds, inputs.position)


@dataclass(frozen=True)
class Loop:
    """A compiled loop over the steps of independent groups of chains; a group's steps are taken one
    after another.

    Attributes:
        library: loaded library, built from the source of `write_loop`.
        position: index, among the state's tensors, of the chains' positions `[chains, D]` (params,
            or their whitened coordinates).
        log_joint_dtype: dtype of a step's log joint.
    """

    library: ctypes.CDLL
    position: int
    log_joint_dtype: torch.dtype

    def run(
        self,
        state: list[Tensor],
        block: list[Tensor],
        sources: Sequence[Source],
        constants: Sequence[Tensor],
        left: int,
        every: int,
        threads: int,
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Runs all steps of a block of steps, in each group of chains, and returns the state after
        the last step and the draws that were kept.

        Args:
            state: leaves of the state, `[groups, chains, ...]`.
            block: hyperparameters and standard normal numbers of all steps, `[groups, steps, ...]`.
            sources: how each tensor of the minibatches is read: fixed, or `[groups, steps, ...]`,
                or rows of a table at indices `[groups, steps, B]`.
            constants: tensors that the model reads besides its arguments.
            left: number of steps up to and including the first that leads to a kept draw, at least
                1.
            every: number of steps from one kept draw to the next.
            threads: number of threads that groups are distributed over.

        Returns:
            (Tensors of the state after the block; the kept positions, `[groups, kept, chains, D]`;
            log joints of the steps that led to them, in nats, `[groups, kept, chains]`; log joint
            of the block's last step, `[groups, chains]`).

        Raises:
            RuntimeError: an operation of a step failed.
        """
        state = [leaf.clone(memory_format=torch.contiguous_format) for leaf in state]
        position = state[self.position]
        (groups, chains, size), steps = position.shape, block[0].shape[1]
        kept = len(range(left, steps + 1, every))
        positions = position.new_empty(groups, kept, chains, size)
        log_joints = position.new_empty(groups, kept, chains, dtype=self.log_joint_dtype)
        last = log_joints.new_empty(groups, chains)
        pointers = [_Pointer(leaf, leaf.stride(0), 0) for leaf in state]
        pointers += [_per_step(leaf) for leaf in block]
        for source in sources:
            pointers += _pointers_of(source)
        pointers += [_Pointer(leaf, 0, 0) for leaf in constants]
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


_KINDS = {Fixed: "fixed", PerStep: "per step", Gathered: "gathered"}


@dataclass(frozen=True)
class _Pointer:
    """A tensor that the loop reads, with its strides in elements.

    Attributes:
        tensor: the tensor.
        group_stride: elements from one group to the next; 0 if all groups read the same.
        step_stride: elements from one step to the next; for a table, from one row to the next.
    """

    tensor: Tensor
    group_stride: int
    step_stride: int

    def bytes(self, stride: int) -> int:
        return stride * self.tensor.element_size()


def _per_step(leaf: Tensor) -> _Pointer:
    """A pointer to a tensor `[groups, steps, ...]` for the compiled loop, which reads one entry of
    it at each step. The tensor is copied if its entries are not contiguous.
    """
    leaf = leaf if leaf[0, 0].is_contiguous() else leaf.contiguous()
    return _Pointer(leaf, leaf.stride(0), leaf.stride(1))


def _pointers_of(source: Source) -> list[_Pointer]:
    match source:
        case PerStep(tensor):
            return [_per_step(tensor)]
        case Gathered(table, indices):
            table = table if table[:1].is_contiguous() else table.contiguous()
            return [_Pointer(table, 0, table.stride(0)), _per_step(indices)]
        case Fixed(tensor):
            return [_Pointer(tensor, 0, 0)]


def _source(plan: Plan, kinds: Sequence[str], position: int) -> str:
    """The C++ source of a loop around the statements of a step.

    Args:
        plan: C++ statements of the step.
        kinds: for each input, constants included, whether it is part of the state, per step,
            gathered or fixed (see `Inputs`).
        position: index of the input that holds the chains' positions (params, or their whitened
            coordinates).

    Raises:
        NotALoop: an output of the state is not contiguous.
    """
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
            rows = f"{view.root}, table{i}, strides[{table}]"
            before.append(f"gather<{count}, {row}>({rows}, index{i}, {soon});")
            after.append(f"index{i} += strides[{place}];")
            continue
        pointers.append(f"char* {view.root} = sources[{place}];")
        if kind == "per step":
            after.append(f"{view.root} += strides[{place}];")
    *states, log_joint = outputs = [_in_buffer(plan, view) for view in plan.outputs]
    roots = [view.root for view in outputs]
    for i, view in enumerate(states):
        old, size = plan.inputs[i].root, plan.inputs[i].num_bytes
        if not view.is_contiguous:
            raise NotALoop(f"a state that is not contiguous, in {view.root}")
        if roots.count(view.root) == 1 and plan.buffers[view.root] == size:
            after.append(f"std::swap({old}, {view.root});")
        else:
            after.append(f"std::memcpy({old}, {view.address}, {size});")
        home.append(f"if ({old} != sources[{i}]) std::memcpy(sources[{i}], {old}, {size});")
    small = is_small(plan)
    return _LOOP % {
        "kernels": write_kernels(plan, inline=small),
        "buffers": write_local_buffers(plan) if small else write_buffers(plan),
        "pointers": indent(pointers, 4),
        "step": indent([*before, *plan.lines, *after], 8),
        "home": indent(home, 4),
        "sources": next(places),
        "place": position,
        "position": plan.inputs[position].num_bytes,
        "log_joint": log_joint.address,
        "log_joint_bytes": log_joint.num_bytes,
        "error": _ERROR_BYTES,
    }


def _in_buffer(plan: Plan, view: View) -> View:
    """The tensor `view`, an output of a step, in memory that the step may write to. If an input is
    returned unchanged, such as the old params or a step's standard normal numbers, it is copied to
    a new buffer, because pointers to inputs move on at the end of the step.
    """
    if view.root in plan.buffers:
        return view
    root = f"buffer{len(plan.buffers)}"
    plan.buffers[root] = view.num_bytes
    plan.lines.append(f"std::memcpy({root}, {view.address}, {view.num_bytes});")
    return replace(view, root=root, offset=0)
