"""Records the last steps of a chain that became NaN or infinite, with all of their inputs.

A step is a function of the chain's state, its batch, its noise and the kernel's values.  These are
enough to take the step again, without the steps before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.rows import Arguments
from pyro_scale.data.batches import Batches
from pyro_scale.engine.executors import Program
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine

#: Chains of a run whose last steps are kept: the first that break.
MOST_CHAINS = 4
#: Steps that are taken one by one where a chain breaks; to halve them further costs as many.
FEW = 64
#: Steps that are kept before the one that breaks a chain.
_BEFORE = 15
#: Bytes of a chain's last steps, unless a single one has more.
_BYTES = 2**26
#: Bytes of states of all chains that are held for the case that one of them breaks, and of a block
#: that is copied for it: where steps are large, copies would cost as much as they do.
_HELD, _COPIED = 2**28, 2**22


class Past(NamedTuple):
    """A step that all chains have taken.

    Attributes:
        block: of that step.
        state: of all chains, before it.
        log_joint: its evaluation, `[chains]`; None while there is none.
    """

    block: StepInputs
    state: Any
    log_joint: Tensor | None = None


@dataclass(frozen=True)
class RecordedStep:
    """A step of one chain, in the processor's memory.

    Attributes:
        number: of the step.
        state: the kernel's before it, by name.
        values: the hyperparameters', as the kernel takes them.
        noise: standard normals, `[normals, latents]`.
        arguments: the model's, `[B, ...]`; None where all steps have those of the whole data.
        indices: `[B]`, for a model that subsamples by itself.
        log_joint: the batch's estimate where the step took it, in nats; None if it raised.
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
        """What its tensors take."""
        return _num_bytes(vars(self))


class Recent:
    """The latest steps, as stretches of them that broke no chain."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[StepInputs, Any]] = deque()

    def add(self, block: StepInputs, state: Any) -> None:
        """Remembers some steps and the state before them, if they are few."""
        stretches, held = self._stretches, _num_bytes(state)
        is_small = len(block) <= FEW and held <= _HELD
        is_small = is_small and _num_bytes([block.noise, block.changing]) <= _COPIED
        if (stretches and stretches[-1][0].stop != block.start) or not is_small:
            self.forget()
        if is_small:
            stretches.append((block.copied(), state))
        while stretches and (self._without_first >= _BEFORE or len(stretches) * held > _HELD):
            stretches.popleft()

    def forget(self) -> None:
        """Remembers nothing."""
        self._stretches.clear()

    def steps(self, program: Program) -> list[Past]:
        """The steps one by one, taken again."""
        past: deque[Past] = deque(maxlen=_BEFORE)
        for block, before in self._stretches:
            state = before
            for single in block.parts(1):
                moved, kept = program.run(state, single, 1, 1)
                past.append(Past(single, state, kept.last))
                state = moved
        most = _HELD // max(1, _num_bytes(past[-1].state)) if past else 0
        return list(past)[-most:] if most else []

    @property
    def _without_first(self) -> int:
        return sum(len(block) for block, _ in list(self._stretches)[1:])


def recorded(
    engine: Engine, batches: Batches, past: Iterable[Past], chain: int
) -> tuple[RecordedStep, ...]:
    """One chain's part of the steps up to its last, as many of these as there is room for."""
    steps: list[RecordedStep] = []
    room = _BYTES
    for each in reversed(list(past)):
        step = _of_chain(engine, batches, each, chain)
        room -= step.num_bytes
        if steps and room < 0:
            break
        steps.insert(0, step)
    return tuple(steps)


def _of_chain(engine: Engine, batches: Batches, past: Past, chain: int) -> RecordedStep:
    values, noise, changing = past.block.of(slice(chain, chain + 1)).at(0)
    batch = batches.batch(batches.fixed, changing)
    arguments, indices = batch.of_chain(0)
    state = pytree.tree_map(lambda leaf: leaf[chain], past.state)
    own = {
        "state": state._asdict(),
        "values": engine.subtract_known_noise(engine.kernel_values(values)),
        "noise": noise[0],
        "arguments": arguments if batch.per_chain else None,
        "indices": indices,
    }
    log_joint = None if past.log_joint is None else float(past.log_joint[chain])
    return RecordedStep(number=past.block.start, log_joint=log_joint, **_copy(own))


def _copy(values: Any) -> Any:
    """With tensors of their own: blocks are written over."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf,
        values,
    )


def _num_bytes(values: Any) -> int:
    leaves = pytree.tree_leaves(values)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
