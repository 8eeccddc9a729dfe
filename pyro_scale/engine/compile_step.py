"""Chooses the program that runs the steps: the fastest that the model allows.

Steps are traced and compiled here, as a loop in C++ if possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.compile.compiled import compile_function, compile_loop, section_on, why_not
from pyro_scale.compile.cpp_loop import inputs_of
from pyro_scale.compile.operations import NotALoop
from pyro_scale.compile.trace import trace
from pyro_scale.core.exclusive import exclusive, raise_if_from_handler
from pyro_scale.core.rows import Fixed
from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batch, Batches, WholeData
from pyro_scale.engine.executors import (
    ChainByChain,
    CompiledLoop,
    Example,
    OneByOne,
    Program,
    check,
)
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.reuse import Blueprint, arrange, whitening_tensors
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, CompileWarning

#: Steps of one chain from which compiling repays the few seconds that it takes.
_REPAID_AFTER = 3000
#: Chains that a vmapped step must move to take twice as long as for one.
_CHAINS_FOR_TWICE = 250
if hasattr(os, "register_at_fork"):
    # OpenMP's threads do not come along when a process is forked, and torch's operations and loops
    # would wait for them forever; torch's loaders do the same in their workers
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def check_compile(compile: object) -> None:
    """Checks the argument `compile`.

    Raises:
        ArgumentError: it is not a bool, nor "auto".
    """
    if not isinstance(compile, bool) and compile != "auto":
        raise ArgumentError(f"compile={compile!r}: pass True, False or 'auto'")


def choose_program(
    plan: StepPlan, example: Example, before: str | None, say: Callable[[str], object]
) -> Program:
    """The fastest program for a plan's steps that the model allows.

    Args:
        plan: the steps.  With `compile="auto"`, runs are compiled that are long enough to repay it,
            and a resumed run continues as it was, as programs differ by rounding.  The choice
            depends on the call alone, not on what a cache holds.
        example: the first steps.
        before: name of the program that ran the steps of the resumed run; None for a new run.
        say: shows the current activity.

    Warns:
        CompileWarning: the model cannot be compiled, or its steps cannot be put into a loop; it
            names the operation that prevents it, and the version of torch.
    """
    compile, eager = plan.compile, example.eager
    if compile == "auto":
        is_long = _repays(plan.steps.total, plan.count, plan.engine.vectorized)
        compile = is_long if before is None else before != eager.name
    if not compile:
        return eager
    say("compiling")
    try:
        with exclusive:
            if plan.agree is not None:
                return _common_program(example, plan.count, plan.agree)
            program = plan.earlier.program(example)
            if program is not None:
                return program
            blueprint = _blueprint(example, plan.count)
            plan.earlier.keep(blueprint, example)
            return blueprint.program(example)
    except Exception as error:  # of the model, of make_fx, of Inductor, of the C++ compiler
        raise_if_from_handler(error)
        reason = why_not(error)
        warn(
            CompileWarning,
            f"the model could not be compiled ({reason}; torch {torch.__version__}), so "
            "every step runs the model's Python, which takes milliseconds; compile=False silences "
            "this",
            code=section_on(reason),
        )
        return eager


def _repays(num_steps: int, num_chains: int, vectorized: bool) -> bool:
    """Whether compiling takes less time than it saves."""
    others = (num_chains - 1) / (_CHAINS_FOR_TWICE if vectorized else 1)
    return num_steps * (1 + others) >= _REPAID_AFTER


def _common_program(example: Example, num_chains: int, agree: Callable[[bool], bool]) -> Program:
    """The compiled step that all processes have, if all of them could compile it.

    They call it from Python: a loop in C++ cannot sum over processes, and a sum takes longer than
    the call.
    """
    try:
        blueprint = _compile(example, num_chains, by_column=False, as_loop=False)
    except BaseException:
        agree(False)
        raise
    if not agree(True):
        raise RuntimeError("another process could not compile it")
    program = blueprint.program(example)
    check(program, example)  # every process takes these steps
    return program


def _blueprint(example: Example, num_chains: int) -> Blueprint:
    """The compiled step, compared with the eager one."""

    def compile_and_check(by_column: bool) -> Blueprint:
        blueprint = _compile(example, num_chains, by_column)
        check(blueprint.program(example), example)
        return blueprint

    if isinstance(example.batches, WholeData):
        with contextlib.suppress(Exception):  # a model may ask how its rows lie in memory
            return compile_and_check(by_column=True)
    return compile_and_check(by_column=False)


def _compile(example: Example, num_chains: int, by_column: bool, as_loop: bool = True) -> Blueprint:
    """Compiles a step: as a loop if possible and `as_loop`, else as a function.

    On a CPU, moving chains together gains nothing: each has a loop of its own, on one thread, or,
    called from Python, they take turns with a step on all threads.  Chains move together where
    points or a kernel tie them, and on a GPU, which all of them fill.
    """
    engine, state, block = example.engine, example.state, example.block
    on_cpu = state.position.device.type == "cpu"
    all_at_once = engine.ties_chains or not on_cpu
    if not all_at_once:
        engine = dataclasses.replace(engine, vectorized=False)
        state = pytree.tree_map(lambda leaf: leaf[:1], state)
        block = block.of_chains(slice(0, 1))
    batches = arrange(example.batches, by_column)
    values, noise, changing = block.at(0)
    batch = batches.batch(batches.fixed, changing)
    leaves, state_spec = pytree.tree_flatten(state)
    graph = trace(*_as_function(engine, batch, state, noise, values))
    if on_cpu and as_loop:
        position = next(place for place, leaf in enumerate(leaves) if leaf is state.position)
        sources = [*map(Fixed, whitening_tensors(engine)), *batches.sources(block.changing)]
        inputs = inputs_of(len(leaves), position, len(values) + 1, sources)
        threads = None if all_at_once or num_chains == 1 else 1
        try:
            loop = compile_loop(graph, inputs, threads)
            build = functools.partial(CompiledLoop, loop, state_spec, all_at_once)
            return Blueprint(build, graph.constants, by_column)
        except NotALoop as error:
            warn(
                CompileWarning,
                f"steps are compiled, but called one by one from Python: {_operation(error)} is "
                f"nothing that a compiled loop can call (torch {torch.__version__}).  Write the "
                "model without it, or ignore CompileWarning",
            )
    call = compile_function(graph)

    def one_by_one(
        batches: Batches, constants: Sequence[Tensor], whitening: Sequence[Tensor]
    ) -> Program:
        step = _compiled_step(call, state_spec, batches, constants, whitening)
        program = OneByOne(step, "compiled step")
        return program if all_at_once else ChainByChain(program)

    return Blueprint(one_by_one, graph.constants, by_column)


def _as_function(
    engine: Engine, batch: Batch, state: Any, noise: Tensor, values: Mapping[str, Tensor]
) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """(A step as a function of flat tensors, examples of its arguments).

    Its arguments are the state's leaves, the hyperparameters' values, the noise, and the tensors of
    the whitening and of the batch.  It returns the next state's leaves and the log joint
    `[chains]`.
    """
    leaves, state_spec = pytree.tree_flatten(state)
    whitening = engine.whitening

    def step(*flat: Tensor) -> list[Tensor]:
        tensors = iter(flat)
        state_in = pytree.tree_unflatten([next(tensors) for _ in leaves], state_spec)
        values_in = {name: next(tensors) for name in values}
        noise_in, mover = next(tensors), engine
        if whitening is not None:
            traced = whitening.with_tensors([next(tensors) for _ in whitening.tensors])
            mover = dataclasses.replace(engine, whitening=traced)
        moved, evaluation = mover.step(
            state_in, batch.with_tensors(list(tensors)), noise_in, values_in
        )
        return [*pytree.tree_leaves(moved), evaluation.log_joint]

    # make_fx knows tensors by identity: one that came twice, or that the model holds too,
    # would silently be confused with the other
    changing = [*leaves, *values.values(), noise, *whitening_tensors(engine)]
    return step, [
        *(leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in changing),
        *(leaf.detach() for leaf in _inputs_from(batch)),
    ]


def _compiled_step(
    call: Callable[[list[Tensor]], Any],
    state_spec: Any,
    batches: Batches,
    constants: Sequence[Tensor],
    whitening: Sequence[Tensor],
) -> Callable[..., tuple[Any, Tensor]]:
    """The step that calls a compiled function."""

    def step(state: Any, values: Any, noise: Tensor, changing: Any) -> tuple[Any, Tensor]:
        batch = batches.batch(batches.fixed, changing)
        changed = [*pytree.tree_leaves(state), *values.values(), noise.contiguous()]
        *moved, log_joint = call([*changed, *whitening, *_inputs_from(batch), *constants])
        return pytree.tree_unflatten(moved, state_spec), log_joint

    return step


def _inputs_from(batch: Batch) -> list[Tensor]:
    """A batch's tensors as compiled code reads them."""
    return [leaf.contiguous() for leaf in batch.tensors] if batch.per_chain else batch.tensors


def _operation(error: NotALoop) -> str:
    """The operation that a loop cannot call, as torch names it, or else the statement."""
    name = re.search(r"(?:torch\.ops|extern_kernels)\.[\w.]+", str(error))
    return name[0] if name else f"'{str(error)[:200]}'"
