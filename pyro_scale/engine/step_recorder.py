"""Records the last steps of a chain that became NaN or infinite, with all of their inputs.

A step is a function of the chain's state, its minibatch, its standard normal numbers and the
hyperparameters. These are enough to rerun the step, without the steps before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.rows import Arguments
from pyro_scale.data.batches import Batches
from pyro_scale.engine.executors import Program
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine, State

#: Chains of a run whose last steps are recorded: the first that break.
MOST_CHAINS = 4
#: Steps that are taken one by one where a chain breaks; halving them further would cost as many.
MOST_STEPS = 64
#: Steps that are recorded before the one that breaks a chain.
_NUM_BEFORE = 15
#: Largest size of a chain's recorded steps in bytes, unless a single step has more.
_RECORD_BYTES = 2**26
#: Largest sizes in bytes, of all chains' states that are held in case a chain breaks, and of a
#: block that is copied for it: copies of large steps would take as long as the steps.
_STATE_BYTES, _BLOCK_BYTES = 2**28, 2**22


class PastStep(NamedTuple):
    """A step that all chains took or tried, with what is needed to rerun it.

    Attributes:
        block: minibatches, random numbers and hyperparameters of this one step.
        state: the state of the sampler's kernel before the step, for all chains.
        log_joint: minibatch log joints at the positions before the step, in nats, `[chains]`; None
            if the step raised an error.
    """

    block: StepInputs
    state: Any
    log_joint: Tensor | None = None


@dataclass(frozen=True)
class RecordedStep:
    """A step of one chain with all of its inputs, in main memory, so that the step can be rerun.

    Attributes:
        number: number of the step.
        state: tensors of the kernel's state before the step, by name.
        values: hyperparameters of the step in the units of the sampler's kernel, by name.
        noise: standard normal numbers of the step, `[normals, latents]`.
        arguments: the model's arguments, with the rows of the minibatch `[B, ...]`; None if every
            step has all rows, or the model subsamples by itself.
        indices: indices of the rows `[B]`, for a model that subsamples by itself; None for others.
        log_joint: minibatch log joint at the position before the step, in nats; None if the step
            raised an error.
    """

    number: int
    state: dict[str, Any]
    values: dict[str, Tensor]
    noise: Tensor
    arguments: Arguments | None
    indices: Tensor | None
    log_joint: float | None

    @property
    def num_bytes(self) -> int:
        """Total size of the step's tensors in bytes."""
        return _num_bytes(vars(self))


class RecentSteps:
    """The latest blocks of steps in which no chain became non-finite, with the states before them.
    They are held so that these steps can be rerun and recorded when a chain stops."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[StepInputs, State]] = deque()

    def add(self, block: StepInputs, state: State) -> None:
        """Holds a block of steps and the state before it, for a replay, and drops the oldest blocks
        that are no longer needed. Drops all blocks if the new one is too large to hold; blocks
        before a gap in the step numbers are dropped, too.
        """
        blocks, state_bytes = self._blocks, _num_bytes(state)
        is_small = len(block) <= MOST_STEPS and state_bytes <= _STATE_BYTES
        is_small = is_small and _num_bytes([block.noise, block.changing]) <= _BLOCK_BYTES
        if (blocks and blocks[-1][0].stop != block.start) or not is_small:
            self.forget()
        if is_small:
            blocks.append((block.copied(), state))
        while blocks and (
            sum(len(later) for later, _ in list(blocks)[1:]) >= _NUM_BEFORE
            or len(blocks) * state_bytes > _STATE_BYTES
        ):
            blocks.popleft()

    def forget(self) -> None:
        """Drops all blocks of steps that are held, so that none of them can be rerun."""
        self._blocks.clear()

    def replay(self, program: Program) -> list[PastStep]:
        """Reruns the blocks that are held, one step at a time. Returns the latest 15 steps, in
        order; fewer if their states are large, or fewer are held."""
        past: deque[PastStep] = deque(maxlen=_NUM_BEFORE)
        for block, before in self._blocks:
            state = before
            for single in block.parts(1):
                moved, kept = program.run(state, single, 1, 1)
                past.append(PastStep(single, state, kept.last))
                state = moved
        most = _STATE_BYTES // max(1, _num_bytes(past[-1].state)) if past else 0
        return list(past)[-most:] if most else []


def record(
    engine: Engine, batches: Batches, past: Sequence[PastStep], chain: int
) -> tuple[RecordedStep, ...]:
    """The past steps of one chain, each with all of its inputs, in order. If they take more than 64
    MiB, only the latest of them are returned, at least one.

    Args:
        engine: the engine, which defines a step.
        batches: the minibatches of the chains.
        past: consecutive steps of all chains, in order.
        chain: index of the chain.
    """
    steps: list[RecordedStep] = []
    room = _RECORD_BYTES
    for step in reversed(past):
        recorded = _record_step(engine, batches, step, chain)
        room -= recorded.num_bytes
        if steps and room < 0:
            break
        steps.insert(0, recorded)
    return tuple(steps)


def _record_step(engine: Engine, batches: Batches, past: PastStep, chain: int) -> RecordedStep:
    values, noise, changing = past.block.of_chains(slice(chain, chain + 1)).at(0)
    batch = batches.batch(batches.fixed, changing)
    arguments, indices = batch.of_chain(0)
    state = pytree.tree_map(lambda leaf: leaf[chain], past.state)
    tensors = {
        "state": state._asdict(),
        "values": engine.subtract_known_noise(engine.kernel_values(values)),
        "noise": noise[0],
        "arguments": arguments if batch.per_chain else None,
        "indices": indices,
    }
    log_joint = None if past.log_joint is None else float(past.log_joint[chain])
    return RecordedStep(number=past.block.start, log_joint=log_joint, **_copy(tensors))


def _copy(values: Any) -> Any:
    """A pytree with copies of its tensors in main memory: the memory of the originals, which
    belongs to a block of steps, is overwritten later.
    """
    return pytree.tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf,
        values,
    )


def _num_bytes(values: Any) -> int:
    leaves = pytree.tree_leaves(values)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
