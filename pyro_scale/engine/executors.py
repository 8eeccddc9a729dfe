"""The ways to run steps: one by one, or as one compiled program.

From the fastest to the slowest; each is used where the one before is not available:

1. a compiled loop: kernels and loop in C++, no Python between steps;
2. a compiled step: Inductor's kernels, called from Python;
3. the step itself, vmapped over chains;
4. the step itself, chain by chain with plain autograd.

All of them compute the same function, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.compile.cpp_loop import Loop
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.step_inputs import Fixed, Gathered, PerStep, Source
from pyro_scale.data.batches import Batches
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine


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
    """Runs the steps of a block.

    Attributes:
        name: what it is, in words.
    """

    @property
    def name(self) -> str: ...

    def run(self, state: Any, block: StepInputs, left: int, every: int) -> tuple[Any, Kept]:
        """(The state after the block, what is kept): the left-th state, and every every-th on."""
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

    def run(self, state: Any, block: StepInputs, left: int, every: int) -> tuple[Any, Kept]:
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
    """Runs a program of one chain for every chain."""

    program: OneByOne

    @property
    def name(self) -> str:
        return self.program.name

    def run(self, state: Any, block: StepInputs, left: int, every: int) -> tuple[Any, Kept]:
        chains = [slice(chain, chain + 1) for chain in range(len(block.noise))]
        ran = [
            self.program.run(pytree.tree_map(lambda x, c=c: x[c], state), block.of(c), left, every)
            for c in chains
        ]
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *ran)


@dataclass(frozen=True)
class CompiledLoop:
    """Runs a loop in C++, over chains one after another or all of them at once."""

    loop: Loop
    state_spec: Any
    all_at_once: bool
    batches: Batches
    constants: Sequence[Tensor]
    whitening: Sequence[Tensor] = ()
    name: str = "compiled loop"

    def run(self, state: Any, block: StepInputs, left: int, every: int) -> tuple[Any, Kept]:
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
            threads=min(groups, torch.get_num_threads()),
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

    name = "eager" if engine.vectorized else "eager, chain by chain"
    return OneByOne(step, name)
