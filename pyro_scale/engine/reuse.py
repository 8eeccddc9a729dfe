"""Reuses what an object's earlier runs compiled, so that the next run need not trace its steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdRef

from pyro_scale.compile.trace import Constant, as_input
from pyro_scale.data.batches import Batches, WholeData
from pyro_scale.engine.agreement import agrees
from pyro_scale.engine.executors import Program
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine

#: Bytes of a constant, such as a number in the model's code, that is kept though nobody holds it.
_SMALL = 2**16
#: Programs that are kept: one run trains by one, warms up by another, and samples by a third.
_MOST_KEPT = 4
#: Puts a program together.
Build: TypeAlias = Callable[[Batches, Sequence[Tensor], Sequence[Tensor]], Program]


@dataclass(frozen=True)
class Blueprint:
    """A compiled step without what it works on.

    Attributes:
        build: (batches, constants, the whitening's tensors) -> the program.
        constants: what the step reads besides its arguments.
        by_column: how it takes narrow tables.
    """

    build: Build
    constants: Sequence[Constant]
    by_column: bool

    def program(self, engine: Engine, batches: Batches) -> Program:
        """The step's program on batches."""
        constants = [constant.tensor for constant in self.constants]
        return self.build(arrange(batches, self.by_column), constants, whitening_of(engine))


def whitening_of(engine: Engine) -> list[Tensor]:
    """The tensors of an engine's whitening, as compiled steps take them."""
    whitening = engine.whitening
    return [] if whitening is None else [tensor.contiguous() for tensor in whitening.tensors]


def arrange(batches: Batches, by_column: bool) -> Batches:
    """Batches as a compiled step takes them."""
    return batches.by_column if by_column and isinstance(batches, WholeData) else batches


@dataclass(frozen=True)
class _Kept:
    """A blueprint that holds nobody's tensors.

    Attributes:
        build, by_column: the blueprint's.
        constants: what gives the constants, or None once one is not what it was.
        facts: what the blueprint is for.
    """

    build: Build
    constants: Callable[[], list[Tensor] | None]
    by_column: bool
    facts: Any


class Earlier:
    """Keeps what an object compiled last, a program for each kind of step.

    One serves again where all shapes are the same, and the tensors of data and model are the very
    same and have not been written to; references to them are weak.  What else the model reads is
    compared by what comes of it: a step at a new point.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def __reduce__(self) -> Any:
        return Earlier, ()  # a copy compiles its own

    def keep(
        self, blueprint: Blueprint, engine: Engine, batches: Batches, state: Any, block: StepInputs
    ) -> None:
        """Keeps what a run has compiled."""
        facts = _facts(engine, batches, state, block)
        kept = _Kept(blueprint.build, recall(blueprint.constants), blueprint.by_column, facts)
        others = [other for other in self._kept if other.facts != facts]
        self._kept = [kept, *others][:_MOST_KEPT]

    def program(
        self, engine: Engine, batches: Batches, as_it_is: Program, state: Any, block: StepInputs
    ) -> Program | None:
        """The program of these steps, if it is kept."""
        facts = _facts(engine, batches, state, block)
        kept = next((each for each in self._kept if each.facts == facts), None)
        if kept is None:
            return None
        constants = kept.constants()
        if constants is None:
            return None
        program = kept.build(arrange(batches, kept.by_column), constants, whitening_of(engine))
        with contextlib.suppress(RuntimeError):  # a matrix that cannot be factorized at that point
            if agrees(program, as_it_is, engine, state, block):
                return program
        return None


def _facts(engine: Engine, batches: Batches, state: Any, block: StepInputs) -> Any:
    """What a compiled step is for: the engine's kind, the inputs' geometry, the very data."""
    values, noise, changing = block.at(0)
    batch = batches.batch(batches.fixed, changing)
    leaves, state_spec = pytree.tree_flatten(state)
    of_chains = [*leaves, noise, *(batch.tensors if batch.per_chain else [])]
    of_all = [*values.values(), *whitening_of(engine), *([] if batch.per_chain else batch.tensors)]
    count = len(noise)
    if not engine.ties_chains and noise.device.type == "cpu":
        # chains have loops of their own: any number of them, but one, which has all threads
        of_chains, count = [tensor[0] for tensor in of_chains], min(count, 2)
    held = [leaf for leaf in pytree.tree_leaves(batches.fixed) if isinstance(leaf, Tensor)]
    return (
        (type(engine.kernel), type(engine.whitening), engine.layout, engine.num_latents),
        engine.vectorized,
        (engine.num_data, state_spec, list(values), torch.get_num_threads(), count),
        [type(source) for source in batches.sources(changing)],
        [_geometry(tensor) for tensor in (*of_chains, *of_all)],
        [mark(tensor) for tensor in held],
    )


def _geometry(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def mark(tensor: Tensor) -> Any:
    """What is equal of the same tensor, until it is written to; it does not keep it alive."""
    version = None if tensor.is_inference() else tensor._version
    return WeakIdRef(tensor), version, _geometry(tensor)


def recall(constants: Sequence[Constant]) -> Callable[[], list[Tensor] | None]:
    """Gives what a step reads besides its arguments once more, or None where any of it is not what
    it was; it keeps nothing alive."""
    every = [_again(constant) for constant in constants]

    def now() -> list[Tensor] | None:
        tensors = [tensor for again in every if (tensor := again()) is not None]
        return tensors if len(tensors) == len(every) else None

    return now


def _again(constant: Constant) -> Callable[[], Tensor | None]:
    """Gives a constant once more, or None where it is not what it was."""
    origin, small = constant.origin(), constant.tensor.nbytes <= _SMALL
    then = None if origin is None else mark(origin)
    return partial(_is_unchanged, constant.origin, then, constant.tensor if small else None)


def _is_unchanged(origin: weakref.ref[Tensor], then: Any, small: Tensor | None) -> Tensor | None:
    tensor = origin()
    if tensor is None:  # the model makes its like whenever it is run, or has another by now
        return small
    return as_input(tensor) if mark(tensor) == then else None
