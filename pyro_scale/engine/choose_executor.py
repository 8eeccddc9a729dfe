"""Chooses the program that runs the steps: the fastest that the model allows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.compile.compiled import compile_function, compile_loop
from pyro_scale.compile.cpp_loop import inputs_of
from pyro_scale.compile.trace import trace
from pyro_scale.compile.views import NotALoop
from pyro_scale.compile.why_not import section_on, why_not
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.signals import raise_if_from_handler
from pyro_scale.core.step_inputs import Fixed
from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batch, Batches, WholeData
from pyro_scale.engine.agreement import check
from pyro_scale.engine.executors import ChainByChain, CompiledLoop, OneByOne, Program, eager
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.reuse import Blueprint, Earlier, arrange, whitening_of
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, CompileWarning

#: Steps of one chain from which compiling repays the few seconds that it takes.
_REPAID_AFTER = 3000
#: Chains that a vmapped step must move to take twice as long as for one.
_CHAINS_FOR_TWICE = 250
if hasattr(os, "register_at_fork"):
    # OpenMP's threads do not come along when a process is forked, and it would wait for them
    # forever: in torch's operations and in loops.  torch's loaders do the same in their workers
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def check_compile(compile: object) -> None:
    """Refuses what `compile` cannot be.

    Raises:
        ArgumentError: it is not a bool, nor "auto".
    """
    if not isinstance(compile, bool) and compile != "auto":
        raise ArgumentError(f"compile={compile!r}: pass True, False or 'auto'")


def program_for(
    engine: Engine,
    batches: Batches,
    state: Any,
    block: StepInputs,
    compile: bool | Literal["auto"],
    num_steps: int,
    tell: Callable[[str], object],
    before: str | None,
    earlier: Earlier,
    num_chains: int,
    agree: Callable[[bool], bool] | None = None,
) -> Program:
    """The fastest way of running the steps that the model allows.

    Args:
        engine: says what a step is.
        batches: the chains' batches.
        state: of all chains.
        block: the first step's.
        compile: `"auto"` compiles runs that are long enough to repay it, and goes on with a run as
            it was, as programs differ by rounding.  It depends on the call alone.
        num_steps: how many steps there will be.
        tell: is told what goes on.
        before: the name of the program that ran the steps until now, if there were any.
        earlier: what the same object has compiled before, and where what it compiles is kept.
        num_chains: how many there are in all.
        agree: whether something holds on all processes, where they take steps together.

    Warns:
        CompileWarning: the model cannot be compiled, or its steps not put into a loop; it says
            what could not be, and by which torch.
    """
    as_it_is = eager(engine, batches)
    if compile == "auto":
        long = _repays(num_steps, num_chains, engine.vectorized)
        compile = long if before is None else before != as_it_is.name
    if not compile:
        return as_it_is
    tell("compiling")
    try:
        with exclusive:
            if agree is not None:
                return _common_program(engine, batches, as_it_is, state, block, num_chains, agree)
            program = earlier.program(engine, batches, as_it_is, state, block)
            if program is not None:
                return program
            blueprint = _blueprint(engine, batches, as_it_is, state, block, num_chains)
            earlier.keep(blueprint, engine, batches, state, block)
            return blueprint.program(engine, batches)
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
        return as_it_is


def _repays(num_steps: int, num_chains: int, vectorized: bool) -> bool:
    """Whether compiling takes less time than it saves, by the call alone: what a cache holds must
    not choose among programs that round differently."""
    others = (num_chains - 1) / (_CHAINS_FOR_TWICE if vectorized else 1)
    return num_steps * (1 + others) >= _REPAID_AFTER


def _common_program(
    engine: Engine,
    batches: Batches,
    as_it_is: Program,
    state: Any,
    block: StepInputs,
    num_chains: int,
    agree: Callable[[bool], bool],
) -> Program:
    """The program of steps that processes take together, which all of them have, or none: it is
    compared with the steps, which they have to take as often.

    A sum over processes is nothing for a loop in C++, and takes longer than a call from Python.
    """
    how = {"by_column": False, "as_loop": False}
    try:
        compiled = _compile(engine, batches, state, block, num_chains, **how)
    except BaseException:
        agree(False)
        raise
    if not agree(True):
        raise RuntimeError("another process could not compile it")
    program = compiled.program(engine, batches)
    check(program, as_it_is, engine, state, block)
    return program


def _blueprint(
    engine: Engine,
    batches: Batches,
    as_it_is: Program,
    state: Any,
    block: StepInputs,
    num_chains: int,
) -> Blueprint:
    """The steps as one program, which has been compared with the steps themselves."""

    def checked(by_column: bool) -> Blueprint:
        blueprint = _compile(engine, batches, state, block, num_chains, by_column)
        check(blueprint.program(engine, batches), as_it_is, engine, state, block)
        return blueprint

    if isinstance(batches, WholeData):
        with contextlib.suppress(Exception):  # a model may ask how its rows lie in memory
            return checked(by_column=True)
    return checked(by_column=False)


def _compile(
    engine: Engine,
    batches: Batches,
    state: Any,
    block: StepInputs,
    num_chains: int,
    by_column: bool,
    as_loop: bool = True,
) -> Blueprint:
    """The steps as one program: a loop if it can be and is asked for, else a compiled step.

    On a processor nothing is gained by moving chains together: each has a loop of its own, on one
    thread, or they take turns with a step on all threads.  Points and kernels may tie them
    together, and a GPU is filled by all of them at once.
    """
    on_processor = state.position.device.type == "cpu"
    all_at_once = engine.ties_chains or not on_processor
    single = all_at_once or num_chains == 1
    if not all_at_once:
        engine = dataclasses.replace(engine, vectorized=False)
        state = pytree.tree_map(lambda leaf: leaf[:1], state)
        block = block.of(slice(0, 1))
    batches = arrange(batches, by_column)
    values, noise, changing = block.at(0)
    batch = batches.batch(batches.fixed, changing)
    leaves, state_spec = pytree.tree_flatten(state)
    graph = trace(*_as_function(engine, batch, state, noise, values))
    if on_processor and as_loop:
        position = next(place for place, leaf in enumerate(leaves) if leaf is state.position)
        sources = [*map(Fixed, whitening_of(engine)), *batches.sources(block.changing)]
        inputs = inputs_of(len(leaves), position, len(values) + 1, sources)
        try:
            loop = compile_loop(graph, inputs, threads=None if single else 1)
            build = functools.partial(CompiledLoop, loop, state_spec, all_at_once)
            return Blueprint(build, graph.constants, by_column)
        except NotALoop as left:
            warn(
                CompileWarning,
                f"steps are compiled, but called one by one from Python: {_operation(left)} is "
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
    """(A step as a function of flat tensors, examples of them): the state's leaves, the
    hyperparameters' values, the noise, the whitening's and the batch's tensors in; the next state's
    leaves and the log joint `[chains]` out."""
    leaves, state_spec = pytree.tree_flatten(state)
    whitening = engine.whitening

    def step(*flat: Tensor) -> list[Tensor]:
        remaining = iter(flat)
        state_in = pytree.tree_unflatten([next(remaining) for _ in leaves], state_spec)
        values_in = {name: next(remaining) for name in values}
        noise_in, mover = next(remaining), engine
        if whitening is not None:
            given = whitening.with_tensors([next(remaining) for _ in whitening.tensors])
            mover = dataclasses.replace(engine, whitening=given)
        moved, evaluation = mover.step(
            state_in, batch.with_tensors(list(remaining)), noise_in, values_in
        )
        return [*pytree.tree_leaves(moved), evaluation.log_joint]

    # make_fx knows tensors by identity: one that came twice, or that the model holds too,
    # would silently be taken for the other
    changing = [*leaves, *values.values(), noise, *whitening_of(engine)]
    own = [leaf.contiguous() for leaf in batch.tensors] if batch.per_chain else batch.tensors
    return step, [
        *(leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in changing),
        *(leaf.detach() for leaf in own),
    ]


def _compiled_step(
    call: Callable[[list[Tensor]], Any],
    state_spec: Any,
    batches: Batches,
    constants: Sequence[Tensor],
    whitening: Sequence[Tensor],
) -> Callable[..., tuple[Any, Tensor]]:
    def step(state: Any, values: Any, noise: Tensor, changing: Any) -> tuple[Any, Tensor]:
        batch = batches.batch(batches.fixed, changing)
        own = [leaf.contiguous() for leaf in batch.tensors] if batch.per_chain else batch.tensors
        changed = [*pytree.tree_leaves(state), *values.values(), noise.contiguous()]
        inputs = [*changed, *whitening, *own]
        *moved, log_joint = call([*inputs, *constants])
        return pytree.tree_unflatten(moved, state_spec), log_joint

    return step


def _operation(left: NotALoop) -> str:
    """What a loop cannot call, as torch names it, or else the statement."""
    named = re.search(r"(?:torch\.ops|extern_kernels)\.[\w.]+", str(left))
    return named[0] if named else f"'{str(left)[:200]}'"
