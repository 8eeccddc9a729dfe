"""The ways ("programs") to run steps: one by one, or as one compiled loop.

From the fastest to the slowest; each is used where the one before is not available:

1. a compiled loop: kernels and loop in C++, no Python between steps;
2. a compiled step: Inductor's kernels, called from Python;
3. the step itself, vmapped over chains;
4. the step itself, chain by chain with plain autograd.

All of them compute the same function, to rounding: `check` and `agrees` compare two of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.compile.cpp_loop import Loop
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.rows import Fixed, Gathered, PerStep, Source
from pyro_scale.core.thread_count import available_threads
from pyro_scale.data.batches import Batches
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine, State

#: Why a program computes something else than the step.
IS_FROZEN = (
    "compiled, it gives other values: values that the model passes through NumPy or lists are "
    "frozen when it is compiled; use torch operations only"
)
#: Approximate distance between the state at which programs are traced and the state at which they
#: are compared.
_DISTANCE = 0.1
#: Largest difference between a program and the step: relative to the change that the step makes
#: (at least so many roundings of the coarsest site's dtype), and roundings of the state before it.
_TOLERANCE, _COARSE, _ROUNDINGS = 1e-3, 16, 1e3
#: The same in roundings, for a program that an earlier run compiled.  Rejecting a correct program
#: only costs the time of tracing the step again.
_EARLIER_ROUNDINGS = 32


class Kept(NamedTuple):
    """What a program keeps of the steps of a block, besides the chains' state.

    Attributes:
        positions: the kept draws, as positions of the sampler's kernel, `[chains, kept draws, D]`.
        log_joint: log joints of the steps that led to these draws, in nats, `[chains, kept draws]`.
        last: log joints of the block's last step, kept or not, `[chains]`.
    """

    positions: Tensor
    log_joint: Tensor
    last: Tensor


class Program(Protocol):
    """Protocol of a way to run the steps of a block: Python code, a compiled step, or a compiled
    loop.
    """

    @property
    def name(self) -> str:
        """The program's name in messages, such as "compiled loop"."""
        ...

    def run(self, state: State, block: StepInputs, left: int, every: int) -> tuple[State, Kept]:
        """Takes the steps of a block.

        Args:
            state: the state of the sampler's kernel before the block, for all chains.
            block: the steps' minibatches, random numbers and hyperparameters.
            left: number of steps up to and including the first that leads to a kept draw, at least
                1.
            every: number of steps from one kept draw to the next.

        Returns:
            (State after the block; the kept draws and log joints).
        """
        ...


@dataclass(frozen=True)
class OneByOne:
    """A program that takes one step at a time, by a call from Python of a Python function or a
    compiled function.

    Attributes:
        step: function (state, hyperparameters, standard normal numbers, changing tensors of the
            minibatches) -> (next state, log joint `[chains]`).
        name: the program's name in messages.
    """

    step: Callable[..., tuple[State, Tensor]]
    name: str

    def run(self, state: State, block: StepInputs, left: int, every: int) -> tuple[State, Kept]:
        positions, log_joints = [], []
        for place in range(len(block)):
            state, log_joint = self.step(state, *block.at(place))
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
    """A program that moves one chain after another through a block of steps, by a program for a
    single chain.
    """

    program: OneByOne

    @property
    def name(self) -> str:
        return self.program.name

    def run(self, state: State, block: StepInputs, left: int, every: int) -> tuple[State, Kept]:
        chains = [slice(chain, chain + 1) for chain in range(len(block.noise))]
        results = [
            self.program.run(
                pytree.tree_map(lambda x, c=c: x[c], state), block.of_chains(c), left, every
            )
            for c in chains
        ]
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *results)


@dataclass(frozen=True)
class CompiledLoop:
    """A program that takes the steps of a block in a C++ loop, without Python between steps.

    Attributes:
        loop: the compiled C++ loop.
        state_spec: pytree structure of a state.
        all_at_once: whether a step of the loop moves all chains; if False, each chain has its own
            loop.
        batches: the minibatches of the chains.
        constants: tensors that the model reads besides its arguments.
        whitening: tensors of the whitening; empty without one.
        name: the program's name in messages.
    """

    loop: Loop
    state_spec: pytree.TreeSpec
    all_at_once: bool
    batches: Batches
    constants: Sequence[Tensor]
    whitening: Sequence[Tensor] = ()
    name: str = "compiled loop"

    def run(self, state: State, block: StepInputs, left: int, every: int) -> tuple[State, Kept]:
        groups = 1 if self.all_at_once else len(block.noise)
        leaves = [leaf.unflatten(0, (groups, -1)) for leaf in pytree.tree_leaves(state)]
        columns = [column.expand(groups, *column.shape) for column in block.values.values()]
        moved, positions, log_joints, last = self.loop.run(
            leaves,
            [*columns, self._by_group(block.noise)],
            [
                *map(Fixed, self.whitening),
                *(self._source(source) for source in self.batches.sources(block.changing)),
            ],
            self.constants,
            left,
            every,
            threads=min(groups, available_threads()),
        )
        kept = Kept(_by_chain(positions), _by_chain(log_joints), last.flatten())
        return pytree.tree_unflatten([x.flatten(0, 1) for x in moved], self.state_spec), kept

    def _source(self, source: Source) -> Source:
        match source:
            case PerStep(tensor):
                return PerStep(self._by_group(tensor))
            case Gathered(table, indices):
                return Gathered(table, self._by_group(indices))
        return source

    def _by_group(self, drawn: Tensor) -> Tensor:
        """Tensors of a block of steps, `[chains, steps, ...]`, as the C++ loop reads them, with
        groups of chains first: `[1, steps, chains, ...]` if the loop moves all chains as one group;
        unchanged if each chain is a group of its own.
        """
        return drawn.transpose(0, 1)[None] if self.all_at_once else drawn


def _by_chain(kept: Tensor) -> Tensor:
    """Results of the C++ loop, `[groups, kept, chains of a group, ...]`, reordered to `[all chains,
    kept, ...]`.
    """
    return kept.transpose(1, 2).flatten(0, 1)


def eager(engine: Engine, batches: Batches) -> OneByOne:
    """The program that needs no compiler: it runs the step's Python code, and with it the model, at
    every step.
    """

    def step(
        state: State, values: Mapping[str, Tensor], noise: Tensor, changing: Any
    ) -> tuple[State, Tensor]:
        batch = batches.batch(batches.fixed, changing)
        with exclusive:  # it runs the model
            state, evaluation = engine.step(state, batch, noise, values)
        return state, evaluation.log_joint

    return OneByOne(step, "eager" if engine.vectorized else "eager, chain by chain")


@dataclass(frozen=True)
class Example:
    """The first steps of a run, on which programs are traced and compared with the Python step.

    Attributes:
        engine: the engine, which defines a step.
        batches: the minibatches of the chains.
        state: the state of the sampler's kernel before these steps, for all chains.
        block: minibatches, random numbers and hyperparameters of one step or more.
    """

    engine: Engine
    batches: Batches
    state: Any
    block: StepInputs

    @functools.cached_property
    def eager(self) -> OneByOne:
        """The program that runs the step's Python code, with which compiled programs are
        compared.
        """
        return eager(self.engine, self.batches)


def check(program: Program, example: Example) -> None:
    """Raises if a program computes something else than the Python step that it was compiled from.

    The two take one step with all random numbers 0, as noise would hide a small gradient. State and
    minibatch differ from those on which the program was traced: values that leave torch (NumPy,
    lists) are frozen by tracing.

    Raises:
        RuntimeError: the results differ by more than rounding that a model may magnify.
    """
    last = example.block.part(len(example.block) - 1, len(example.block))
    quiet = dataclasses.replace(last, noise=torch.zeros_like(last.noise))
    coarsest = max(torch.finfo(dtype).eps for dtype in example.engine.layout.dtypes)
    tolerance = max(_TOLERANCE, _COARSE * coarsest)
    if not _agree(program, example, last.noise, quiet, tolerance, _ROUNDINGS):
        raise RuntimeError(IS_FROZEN)


def agrees(program: Program, example: Example) -> bool:
    """True if a program that an earlier run compiled gives the same results as this run's Python
    step, up to rounding. The two are compared on the last step of the example, with its random
    numbers, at a state displaced from the example's.
    """
    last = example.block.part(len(example.block) - 1, len(example.block))
    tolerance = _EARLIER_ROUNDINGS * torch.finfo(example.engine.layout.dtype).eps
    return _agree(program, example, last.noise, last, tolerance, _EARLIER_ROUNDINGS)


def _agree(
    program: Program,
    example: Example,
    noise: Tensor,
    step: StepInputs,
    tolerance: float,
    roundings: float,
) -> bool:
    """True if a program and the Python step give the same results for one step, which begins at the
    example's state displaced by about 0.1.

    Args:
        program: the program to compare.
        example: the state, and the engine that defines the Python step.
        noise: standard normal numbers by which the state is displaced, `[chains, 1, normals,
            latents]`.
        step: the one step that both take.
        tolerance: largest difference, relative to the largest element of the change that the step
            makes, or of its log joint.
        roundings: largest difference that is added to this, in units of rounding of the state
            before the step.
    """
    position = example.state.position.clone()
    position[:, : example.engine.num_latents] += _DISTANCE * (1 + noise[:, 0].sum(1))
    state = example.state._replace(position=position)
    (one, mine), (other, theirs) = (p.run(state, step, 1, 1) for p in (program, example.eager))
    compared = [(mine.last, theirs.last, mine.last)]
    leaves = [pytree.tree_leaves(tree) for tree in (state, one, other)]
    for before, after, expected in zip(*leaves, strict=True):
        compared.append((after - before, expected - before, before))
    return all(
        is_close(actual, expected, tolerance, roundings * float(size.abs().nan_to_num(0, 0).amax()))
        for actual, expected, size in compared
    )


def is_close(actual: Tensor, expected: Tensor, tolerance: float, roundings: float) -> bool:
    """True if no element of `actual` differs from `expected` by more than the sum of two
    tolerances. NaN equals NaN.

    Args:
        actual: tensor to check.
        expected: tensor of the same shape.
        tolerance: difference relative to the largest absolute element of `expected`.
        roundings: absolute difference in multiples of the dtype's machine epsilon.
    """
    eps = torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
    allowed = tolerance * float(expected.abs().nan_to_num().amax()) + roundings * eps
    return torch.allclose(actual, expected, rtol=0, atol=allowed, equal_nan=True)
