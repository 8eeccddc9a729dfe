"""Records the last steps of a chain that became NaN or infinite, with all of their inputs.

A step is a function of the chain's state, its batch, its noise and the kernel's values.  These are
enough to rerun the step, without the steps before it.
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
from pyro_scale.engine.step import Engine

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
    """A step that all chains have taken.

    Attributes:
        block: its inputs.
        state: of all chains, before it.
        log_joint: `[chains]`; None if the step raised an error.
    """

    block: StepInputs
    state: Any
    log_joint: Tensor | None = None


@dataclass(frozen=True)
class RecordedStep:
    """A step of one chain, in the processor's memory.

    Attributes:
        number: of the step.
        state: the kernel's state before it, by name.
        values: the hyperparameters' values, as the kernel takes them.
        noise: standard normals, `[normals, latents]`.
        arguments: of the model, `[B, ...]`; None if every step has all rows.
        indices: `[B]`, for a model that subsamples by itself.
        log_joint: the batch's estimate at the position before the step, in nats; None if the step
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
        """Size of its tensors."""
        return _num_bytes(vars(self))


class RecentSteps:
    """The latest blocks in which no chain broke, with the states before them."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[StepInputs, Any]] = deque()

    def add(self, block: StepInputs, state: Any) -> None:
        """Holds a block, if it is small, and the state before it."""
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
        """Drops all blocks."""
        self._blocks.clear()

    def replay(self, program: Program) -> list[PastStep]:
        """Reruns the latest steps one by one."""
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
    """One chain's part of these steps, up to `_RECORD_BYTES` of the latest."""
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
    """A pytree with copies of its tensors, as blocks are written over."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf,
        values,
    )


def _num_bytes(values: Any) -> int:
    leaves = pytree.tree_leaves(values)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
