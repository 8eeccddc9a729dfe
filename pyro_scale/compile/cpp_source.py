"""C++ source that compiled loops and compiled functions have in common: Inductor's C++ kernels,
calls of ATen operations, buffers.
"""

from __future__ import annotations

import re
from collections.abc import Set

from pyro_scale.compile.lowering import Plan
from pyro_scale.compile.operations import ATEN, SUBSTITUTION, NotALoop

#: Alignment of buffers, in bytes.
_ALIGNMENT = 64
#: Largest total size in bytes of buffers on a thread's stack.
_MOST_ON_STACK = 2**16

_ARENA = """
    // kept from one call to the next, for clearing new pages takes longer than a step
    static thread_local std::unique_ptr<char, decltype(&std::free)> arena(
        static_cast<char*>(std::aligned_alloc(%(alignment)d, %(bytes)d)), &std::free);
    if (!arena) throw std::bad_alloc();
    char* base = arena.get();
    // g++ 12 takes the alignment of the whole for that of every part, and crashes
    asm volatile("" : "+r"(base));
"""


def is_small(plan: Plan) -> bool:
    """Whether the buffers (intermediate tensors) of a step are small enough for local variables of
    a C++ function. A compiler sees all uses of these, and leaves out computations whose results are
    not used.

    Args:
        plan: C++ statements of the step.
    """
    return not plan.calls_aten and sum(map(_aligned, plan.buffers.values())) <= _MOST_ON_STACK


def write_kernels(plan: Plan, inline: bool = False) -> str:
    """C++ source of the kernels that a step calls, and of the helpers that its calls of ATen need.

    Args:
        plan: C++ statements of the step.
        inline: whether to force the C++ compiler to inline the kernels.

    Raises:
        NotALoop: a kernel is not one C++ function.
    """
    parts = [ATEN] if plan.calls_aten else []
    parts += [SUBSTITUTION] if plan.substitutes else []
    static = "__attribute__((always_inline)) static inline" if inline else "static"
    parts += [
        _rename(name, kernel.source, static, plan.shared[name])
        for name, kernel in plan.kernels.items()
    ]
    return "\n".join(parts)


def write_local_buffers(plan: Plan) -> str:
    """C++ source that declares the buffers of a step as arrays on the stack, each with a pointer to
    it. For small buffers (see `is_small`).
    """
    lines = []
    for root, num_bytes in plan.buffers.items():
        lines.append(f"alignas({_ALIGNMENT}) char {root}_memory[{_aligned(num_bytes)}];")
        lines.append(f"char* {root} = {root}_memory;")
    return indent(lines, 4)


def write_buffers(plan: Plan) -> str:
    """C++ source that declares a pointer to each buffer of a step, in memory that each thread keeps
    from call to call. For large buffers (see `is_small`).
    """
    pointers, size = [], 0
    for root, num_bytes in plan.buffers.items():
        pointers.append(f"char* {root} = base + {size};")
        size += _aligned(num_bytes)
    arena = {"alignment": _ALIGNMENT, "bytes": max(size, _ALIGNMENT)}
    return _ARENA.strip("\n") % arena + "\n" + indent(pointers, 4)


def indent(lines: list[str], by: int) -> str:
    """The lines joined by newlines, each after `by` spaces."""
    return "\n".join(" " * by + line for line in lines)


def _aligned(num_bytes: int) -> int:
    """The number of bytes to reserve for a buffer of `num_bytes`: rounded up so that the next
    buffer begins at an aligned address.
    """
    return -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT


def _rename(name: str, source: str, static: str, shared: Set[int]) -> str:
    """The source of a C++ kernel, with its function renamed.

    Arguments that share no memory are marked `__restrict__`.  Otherwise a compiler must assume that
    any store may change, say, the step size, and loads it again for each element.

    Args:
        name: new name of the function.
        source: Inductor's source of the kernel.
        static: declaration to put before the function, such as "static inline".
        shared: indices of the kernel's arguments that, in some call, share memory with another
            argument.

    Raises:
        NotALoop: the kernel is not one C++ function.
    """
    match = re.search(r'extern "C"\s+void\s+kernel\(([^)]*)\)', source)
    if match is None:
        raise NotALoop("a kernel that is not one C++ function")
    arguments = ", ".join(
        argument if place in shared else argument.replace("*", "* __restrict__")
        for place, argument in enumerate(match[1].split(","))
    )
    return f"{source[: match.start()]}{static} void {name}({arguments}){source[match.end() :]}"
