"""Chooses the program that runs the steps: the fastest that the model allows.

A program is a way to run steps: Python code, a compiled step called from Python, or a compiled loop
in C++. Steps are traced and compiled here, as a loop in C++ if possible.
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
from pyro_scale.core.thread_count import Arithmetic
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
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.reuse import Blueprint, arrange, whitening_tensors
from pyro_scale.engine.step import Engine, State
from pyro_scale.errors import ArgumentError, CompileWarning

#: Times in calls of a torch operation on few numbers, which take 7 us each in an eager step on a
#: quiet machine (2.1 to 2.5 GHz).  What compiling takes: for any step, and for each of its
#: operations.
_COMPILING, _COMPILING_EACH = 500_000, 260
#: What an eager step takes besides its operations, for Pyro's and torch.func's Python.
_PYTHON = 350
#: Elements that an operation computes in the time of a call, if they are not in the cache: 2 in a
#: nanosecond.
_ELEMENTS = 14_000
if hasattr(os, "register_at_fork"):
    # OpenMP's threads do not come along when a process is forked, and torch's operations and loops
    # would wait for them forever; torch's loaders do the same in their workers
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def check_compile(compile: object) -> None:
    """Raises an `ArgumentError` if the user's argument `compile` is neither a bool nor "auto";
    otherwise returns None.

    Raises:
        ArgumentError: `compile` has another value.
    """
    if not isinstance(compile, bool) and compile != "auto":
        raise ArgumentError(f"compile={compile!r}: pass True, False or 'auto'")


def choose_program(
    plan: StepPlan, example: Example, before: str | None, say: Callable[[str], object]
) -> Program:
    """The program that runs the steps of a run: compiled code if compiling is asked for and
    succeeds, otherwise the step's Python code.

    Args:
        plan: the chains and their steps. With `compile="auto"`, steps are compiled if the run is
            long enough to repay it. A resumed run continues as it was, compiled or not, as programs
            differ by rounding. The choice depends on the call alone, not on what a cache holds.
        example: the first steps, on which the step is traced.
        before: name of the program that ran the steps of the run that is resumed; None for a new
            run.
        say: function that shows a text, such as "compiling", in the progress bar.

    Warns:
        CompileWarning: the model cannot be compiled, or its steps cannot be put into a C++ loop.
            The message names the operation that prevents it, and torch's version.
    """
    compile, eager = plan.compile, example.eager
    if compile == "auto":
        compile = _repays(plan, example) if before is None else before != eager.name
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


def _repays(plan: StepPlan, example: Example) -> bool:
    """Whether compiling is expected to save more time than it takes, judged by the numbers of
    steps, chains, and torch operations and elements of an eager step, never by a clock. Decides for
    `compile="auto"`.

    Assumes that compiled code saves all Python, all calls of operations and all passes through
    memory of elementwise operations and sums, which it fuses, but nothing of products and
    factorizations of matrices, for which it calls the same library.
    """
    engine, state, block, chains = plan.engine, example.state, example.block, plan.count
    if engine.ties_chains:
        chains = 1  # the first step counts all of them
    else:
        state, block = _first_chain(state, block)
    with Arithmetic() as step:
        example.eager.run(state, block.part(0, 1), 1, 1)
    calls = (_PYTHON + step.operations) * (1 if engine.vectorized else chains)
    saved = plan.steps.total * (calls + chains * step.elements / _ELEMENTS)
    repays = saved >= _COMPILING + _COMPILING_EACH * step.operations
    return repays if plan.agree is None else plan.agree(repays)


def share_of_calls(step: Arithmetic) -> float:
    """The part of an eager step's time that Python and the calls of operations take, which compiled
    code saves in any case.

    Args:
        step: the counted operations and elements of the step.
    """
    calls = _PYTHON + step.operations
    return calls / (calls + step.elements / _ELEMENTS)


def _common_program(example: Example, num_chains: int, agree: Callable[[bool], bool]) -> Program:
    """The compiled step that all processes run, called from Python at each step. For processes that
    take steps together.

    A loop in C++ cannot sum over processes, and a sum takes longer than the call from Python.

    Args:
        example: the first steps, on which the step is traced.
        num_chains: number of chains of the whole run.
        agree: function that says whether a condition holds on all processes.

    Raises:
        RuntimeError: another process could not compile the step, or the compiled step gives other
            values than the Python code.
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
    """A compiled step for the chains and data of an example, without the tensors that it works on,
    after its results were compared with those of the Python step. Raises a RuntimeError if the two
    differ.
    """

    def compile_and_check(by_column: bool) -> Blueprint:
        blueprint = _compile(example, num_chains, by_column)
        check(blueprint.program(example), example)
        return blueprint

    if isinstance(example.batches, WholeData):
        with contextlib.suppress(Exception):  # a model may ask how its rows lie in memory
            return compile_and_check(by_column=True)
    return compile_and_check(by_column=False)


def _compile(example: Example, num_chains: int, by_column: bool, as_loop: bool = True) -> Blueprint:
    """A compiled step, without the tensors that it works on: a C++ loop over steps if possible and
    `as_loop`, otherwise a function for one step.

    On a CPU, moving chains together gains nothing. Each chain has its own loop on one thread; steps
    called from Python move one chain after another, on all threads. Chains move together where they
    share point-estimated parameters or the sampler's kernel couples them, and on a GPU, which needs
    all of them to be busy.

    Args:
        example: the steps on which the step is traced.
        num_chains: number of chains of the whole run.
        by_column: whether narrow tables of data are stored by column.
        as_loop: False for a function that is called at each step from Python.

    Warns:
        CompileWarning: a C++ loop was asked for, but the step contains an operation that it cannot
            call.
    """
    engine, state, block = example.engine, example.state, example.block
    on_cpu = state.position.device.type == "cpu"
    all_at_once = engine.ties_chains or not on_cpu
    if not all_at_once:
        engine = dataclasses.replace(engine, vectorized=False)
        state, block = _first_chain(state, block)
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


def _first_chain(state: State, block: StepInputs) -> tuple[State, StepInputs]:
    """The state and the inputs of steps of the first chain, for a program of a single chain."""
    return pytree.tree_map(lambda leaf: leaf[:1], state), block.of_chains(slice(0, 1))


def _as_function(
    engine: Engine, batch: Batch, state: State, noise: Tensor, values: Mapping[str, Tensor]
) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """A step as a function of a flat list of tensors, as tracing needs it.

    The function's arguments are the tensors of the state, the hyperparameters, the standard normal
    numbers, and the tensors of the whitening and of the minibatch. It returns the tensors of the
    next state, then the log joint `[chains]`.

    Returns:
        (The function, example tensors for its arguments).
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
    state_spec: pytree.TreeSpec,
    batches: Batches,
    constants: Sequence[Tensor],
    whitening: Sequence[Tensor],
) -> Callable[..., tuple[State, Tensor]]:
    """A function of (state, hyperparameters, standard normal numbers, changing tensors of the
    minibatches) that takes one step by a compiled function, and returns (next state, log joint
    `[chains]`).

    Args:
        call: the compiled function of a flat list of tensors.
        state_spec: pytree structure of a state.
        batches: the minibatches of the chains.
        constants: tensors that the model reads besides its arguments.
        whitening: tensors of the whitening; empty without one.
    """

    def step(
        state: State, values: Mapping[str, Tensor], noise: Tensor, changing: Any
    ) -> tuple[State, Tensor]:
        batch = batches.batch(batches.fixed, changing)
        changed = [*pytree.tree_leaves(state), *values.values(), noise.contiguous()]
        *moved, log_joint = call([*changed, *whitening, *_inputs_from(batch), *constants])
        return pytree.tree_unflatten(moved, state_spec), log_joint

    return step


def _inputs_from(batch: Batch) -> list[Tensor]:
    """The tensors of a minibatch, as a list in the order in which compiled code reads them; made
    contiguous if each chain has its own.
    """
    return [leaf.contiguous() for leaf in batch.tensors] if batch.per_chain else batch.tensors


def _operation(error: NotALoop) -> str:
    """The name of the operation that a C++ loop cannot call, such as `torch.ops.aten.sort`; the
    quoted statement, cut to 200 characters, if the error names no operation."""
    name = re.search(r"(?:torch\.ops|extern_kernels)\.[\w.]+", str(error))
    return name[0] if name else f"'{str(error)[:200]}'"
