"""How steps are run: one by one, or as one compiled program.

In order of speed, each where the one before it cannot be had:

1. a compiled loop: kernels and loop in C++, no Python between steps;
2. a compiled step: Inductor's kernels, called from Python;
3. the step itself, vmapped over chains;
4. the step itself, chain by chain with plain autograd.

All of them compute the same function, to rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.warn import warn
from pyro_scale.drive.batches import Batches, Gathered, Source, Taped, WholeData
from pyro_scale.drive.engine import Engine
from pyro_scale.drive.inductor import Compiled, build_library, compile_graph
from pyro_scale.drive.libraries import key_of, library_for
from pyro_scale.drive.loop import Loop, kinds_of, write_loop
from pyro_scale.drive.plan import NotALoop
from pyro_scale.drive.tape import Tape
from pyro_scale.drive.trace import StepGraph, trace
from pyro_scale.errors import ArgumentError, CompileWarning

#: Steps of one chain from which compiling repays the few seconds that it takes.
_REPAID_AFTER = 3000
#: Chains that a vmapped step must move to take twice as long as for one.
_CHAINS_FOR_TWICE = 250
#: Where a program is compared with the step itself: about so far away.
_ELSEWHERE = 0.1
#: The most they may differ by: a part of what is compared (or so many roundings of the coarsest
#: site's), and roundings of what it comes from.
_TOLERANCE, _COARSE, _ROUNDINGS = 1e-3, 16, 1e3

#: Steps that this process has compiled, the latest last; loops are kept on disk.
_compiled_before: dict[str, Compiled] = {}
_MOST_KEPT = 16

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


class Kept(NamedTuple):
    """What some steps leave besides the state.

    Attributes:
        positions: of the draws that are kept, `[chains, kept, D]`.
        log_joint: of the steps that led to them, `[chains, kept]`.
        last: of the last step, `[chains]`.
    """

    positions: Tensor
    log_joint: Tensor
    last: Tensor


class Program(Protocol):
    """Runs the steps of a tape.

    Attributes:
        name: what it is, in words.
    """

    @property
    def name(self) -> str: ...

    def run(self, state: Any, tape: Tape, left: int, every: int) -> tuple[Any, Kept]:
        """(The state after the tape, what is kept): the left-th state, and every every-th on."""
        ...


@dataclass(frozen=True)
class OneByOne:
    """Calls a function for every step.

    Attributes:
        step: (state, values, noise, changing) -> (state, log joint `[chains]`).
        name: what it is, in words.
    """

    step: Callable[..., tuple[Any, Tensor]]
    name: str

    def run(self, state: Any, tape: Tape, left: int, every: int) -> tuple[Any, Kept]:
        positions, log_joints = [], []
        for place in range(len(tape)):
            state, log_joint = self.step(state, *tape.at(place))
            left -= 1
            if left == 0:
                positions.append(state.position)
                log_joints.append(log_joint)
                left = every
        if not positions:
            none = state.position[:, None][:, :0], log_joint[:, None][:, :0]
            return state, Kept(*none, log_joint)
        return state, Kept(torch.stack(positions, 1), torch.stack(log_joints, 1), log_joint)


@dataclass(frozen=True)
class ChainByChain:
    """Runs a program of one chain for every chain."""

    program: OneByOne

    @property
    def name(self) -> str:
        return self.program.name

    def run(self, state: Any, tape: Tape, left: int, every: int) -> tuple[Any, Kept]:
        chains = [slice(chain, chain + 1) for chain in range(len(tape.noise))]
        ran = [
            self.program.run(pytree.tree_map(lambda x, c=c: x[c], state), tape.of(c), left, every)
            for c in chains
        ]
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *ran)


@dataclass(frozen=True)
class CompiledLoop:
    """Runs a loop in C++, over chains one after another or all of them at once."""

    loop: Loop
    batches: Batches
    state_spec: Any
    all_at_once: bool
    name: str = "compiled loop"

    def run(self, state: Any, tape: Tape, left: int, every: int) -> tuple[Any, Kept]:
        groups = 1 if self.all_at_once else len(tape.noise)
        leaves = [leaf.unflatten(0, (groups, -1)) for leaf in pytree.tree_leaves(state)]
        columns = [column.expand(groups, *column.shape) for column in tape.values.values()]
        moved, positions, log_joints, last = self.loop.run(
            leaves,
            [*columns, self._by_group(tape.noise)],
            [self._source(source) for source in self.batches.sources(tape.changing)],
            left,
            every,
            threads=min(groups, torch.get_num_threads()),
        )
        kept = Kept(_by_chain(positions), _by_chain(log_joints), last.flatten())
        return pytree.tree_unflatten([x.flatten(0, 1) for x in moved], self.state_spec), kept

    def _source(self, source: Source) -> Source:
        match source:
            case Taped(tensor):
                return Taped(self._by_group(tensor))
            case Gathered(table, indices):
                return Gathered(table, self._by_group(indices))
        return source

    def _by_group(self, drawn: Tensor) -> Tensor:
        """`[chains, steps, ...]` -> `[groups, steps, ...]`."""
        return drawn.transpose(0, 1)[None] if self.all_at_once else drawn


def _by_chain(kept: Tensor) -> Tensor:
    """`[groups, kept, chains, ...]` -> `[all chains, kept, ...]`."""
    return kept.transpose(1, 2).flatten(0, 1)


def eager(engine: Engine, batches: Batches) -> OneByOne:
    """The step itself, for every step."""

    def step(state: Any, values: Any, noise: Tensor, changing: Any) -> tuple[Any, Tensor]:
        batch = batches.batch(batches.fixed, changing)
        with exclusive:  # it runs the model
            state, evaluation = engine.step(state, batch, noise, values)
        return state, evaluation.log_joint

    name = "eager" if engine.vectorised else "eager, chain by chain"
    return OneByOne(step, name)


def program_for(
    engine: Engine,
    batches: Batches,
    state: Any,
    tape: Tape,
    compile: bool | Literal["auto"],
    num_steps: int,
    tell: Callable[[str], object],
    before: str | None = None,
) -> Program:
    """The fastest way of running the steps that the model allows.

    Args:
        engine: says what a step is.
        batches: the chains' batches.
        state: of all chains.
        tape: the first step's.
        compile: `"auto"` compiles runs that are long enough to repay it, and goes on with a run as
            it was, as programs differ by rounding.  It depends on the call alone.
        num_steps: how many steps there will be.
        tell: is told what goes on.
        before: the name of the program that ran the steps until now, if there were any.

    Warns:
        CompileWarning: the model cannot be compiled, or its steps not put into a loop; it says
            what could not be, and by which torch.
    """
    as_it_is = eager(engine, batches)
    if compile == "auto":
        long = _repays(num_steps, len(state.position), engine.vectorised)
        compile = long if before is None else before != as_it_is.name
    if not compile:
        return as_it_is
    tell("compiling")
    try:
        with exclusive:
            if isinstance(batches, WholeData):
                with contextlib.suppress(Exception):  # a model may ask how its rows lie in memory
                    return _checked(engine, batches.by_column(), as_it_is, state, tape)
            return _checked(engine, batches, as_it_is, state, tape)
    except Exception as error:  # of the model, of make_fx, of Inductor, of the C++ compiler
        warn(
            CompileWarning,
            f"the model could not be compiled ({_reason(error)}; torch {torch.__version__}), so "
            "every step runs the model's Python, which takes milliseconds; compile=False silences "
            "this",
        )
        return as_it_is


def _repays(num_steps: int, num_chains: int, vectorised: bool) -> bool:
    """Whether compiling takes less time than it saves, by the call alone: what a cache holds must
    not choose among programs that round differently."""
    others = (num_chains - 1) / (_CHAINS_FOR_TWICE if vectorised else 1)
    return num_steps * (1 + others) >= _REPAID_AFTER


def _checked(
    engine: Engine, batches: Batches, as_it_is: Program, state: Any, tape: Tape
) -> Program:
    """The steps as one program, which has been compared with the steps themselves."""
    program = _compiled(engine, batches, state, tape)
    _check(program, as_it_is, engine, state, tape)
    return program


def _check(program: Program, as_it_is: Program, engine: Engine, state: Any, tape: Tape) -> None:
    """Compares a program with the step itself, at another state and batch than it was traced at.

    What leaves torch on the way (NumPy, lists) is not traced but frozen.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    last = tape.part(len(tape) - 1, len(tape))
    moved = state.position.clone()
    moved[:, : engine.num_latents] += _ELSEWHERE * (1 + last.noise[:, 0].sum(1))
    elsewhere = state._replace(position=moved)
    quiet = dataclasses.replace(last, noise=torch.zeros_like(last.noise))
    (one, mine), (other, theirs) = (p.run(elsewhere, quiet, 1, 1) for p in (program, as_it_is))
    coarsest = max(torch.finfo(dtype).eps for dtype in engine.layout.dtypes)
    part = max(_TOLERANCE, _COARSE * coarsest)
    leaves = [pytree.tree_leaves(each) for each in (elsewhere, one, other)]
    for before, after, expected in zip(*leaves, strict=True):
        _compare(after - before, expected - before, before.abs().amax(), part)
    _compare(mine.last, theirs.last, mine.last.abs().amax(), part)


def _compare(given: Tensor, expected: Tensor, size: Tensor, part: float) -> None:
    eps = torch.finfo(given.dtype).eps if given.is_floating_point() else 0.0
    given, expected, rounding = given.double(), expected.double(), _ROUNDINGS * eps * float(size)
    allowed = part * float(expected.abs().nan_to_num().amax()) + rounding
    if not torch.allclose(given, expected, rtol=0, atol=allowed, equal_nan=True):
        raise RuntimeError(
            "compiled, it gives something else: what the model hands to NumPy or to lists on the "
            "way is frozen when it is compiled; keep to torch"
        )


def _compiled(engine: Engine, batches: Batches, state: Any, tape: Tape) -> Program:
    """The steps as one program: a loop if it can be, else a compiled step.

    On a processor nothing is gained by moving chains together: each has a loop of its own, on one
    thread, or they take turns with a step on all threads.  Points tie them together, and a GPU is
    filled by all of them at once.
    """
    state_spec = pytree.tree_structure(state)
    on_processor = state.position.device.type == "cpu"
    all_at_once = engine.has_points or not on_processor
    single = all_at_once or len(state.position) == 1
    if not all_at_once:
        engine = dataclasses.replace(engine, vectorised=False)
        state = pytree.tree_map(lambda leaf: leaf[:1], state)
        tape = tape.of(slice(0, 1))
    values, noise, changing = tape.at(0)
    graph = trace(engine, batches.batch(batches.fixed, changing), state, noise, values)

    def compiled(threads: int | None) -> Compiled:
        key = key_of(graph, [], threads)
        if key not in _compiled_before:
            if len(_compiled_before) == _MOST_KEPT:
                del _compiled_before[next(iter(_compiled_before))]
            _compiled_before[key] = compile_graph(graph.module, graph.examples, threads)
        return _compiled_before[key]

    if on_processor:
        kinds = kinds_of(graph, batches.sources(tape.changing))
        threads = None if single else 1

        def build() -> str:
            return build_library(write_loop(graph, kinds, compiled(threads)))

        try:
            loop = Loop(graph, library_for(graph, kinds, threads, build))
            return CompiledLoop(loop, batches, state_spec, all_at_once)
        except NotALoop as left:
            warn(
                CompileWarning,
                f"steps are compiled, but called one by one from Python: {_operation(left)} is "
                f"nothing that a compiled loop can call (torch {torch.__version__}).  Write the "
                "model without it, or ignore CompileWarning",
            )
    step = _compiled_step(graph, compiled(threads=None), batches)
    program = OneByOne(step, "compiled step")
    return program if all_at_once else ChainByChain(program)


def _compiled_step(
    graph: StepGraph, compiled: Compiled, batches: Batches
) -> Callable[..., tuple[Any, Tensor]]:
    def step(state: Any, values: Any, noise: Tensor, changing: Any) -> tuple[Any, Tensor]:
        batch = batches.batch(batches.fixed, changing)
        own = [leaf.contiguous() for leaf in batch.tensors] if batch.per_chain else batch.tensors
        inputs = [*pytree.tree_leaves(state), *values.values(), noise.contiguous(), *own]
        *moved, log_joint = compiled.call([*inputs, *graph.constants])
        return pytree.tree_unflatten(moved, graph.state_spec), log_joint

    compiled.call(list(graph.examples))  # builds the kernels, so that what fails does so here
    return step


def _operation(left: NotALoop) -> str:
    """What a loop cannot call, as torch names it, or else the statement."""
    named = re.search(r"(?:torch\.ops|extern_kernels)\.[\w.]+", str(left))
    return named[0] if named else f"'{str(left)[:200]}'"


def _reason(error: Exception) -> str:
    """Why a model cannot be compiled, in one line."""
    first = str(error).strip().partition("\n")[0][:300]
    compilers_own = re.search(r"^.*\berror: .*$", str(error), re.MULTILINE)
    if compilers_own:
        first = f"{first}: {compilers_own[0].strip()[:300]}"
    if "tracing tensor" in first:
        return "it reads a tensor's value in Python: .item(), float(), bool(), an if"
    if "DynamicOutputShape" in type(error).__name__:
        return f"the shape of a result depends on values: {first}"
    return f"{type(error).__name__}: {first}"
