"""Reuses the steps that earlier runs compiled, of the same object or of another sampler of the same
model, so that the next run need not trace and compile its steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdRef

from pyro_scale.compile.trace import Constant, as_input
from pyro_scale.core.rows import Model
from pyro_scale.data.batches import Batches, WholeData
from pyro_scale.engine.executors import Example, Program, agrees
from pyro_scale.engine.step import Engine

#: Largest constant, in bytes, that is kept although nothing else holds it: a number in the model's
#: code.
_SMALL = 2**16
#: Programs that are kept: one run may train by one, warm up by another, and sample by a third.
_MOST_KEPT = 4
#: (Batches, constants, the whitening's tensors) -> the program on them.
Build: TypeAlias = Callable[[Batches, Sequence[Tensor], Sequence[Tensor]], Program]


@dataclass(frozen=True)
class Blueprint:
    """A compiled step without the tensors that it works on, from which programs are made.

    Attributes:
        build: function (minibatches, constants, tensors of the whitening) -> program.
        constants: tensors that the step reads besides its arguments, such as those in the model's
            code.
        by_column: whether the step reads narrow tables of data that are stored by column.
    """

    build: Build
    constants: Sequence[Constant]
    by_column: bool

    def program(self, example: Example) -> Program:
        """A program that takes this compiled step with the minibatches, constants and whitening of
        an example.
        """
        constants = [constant.tensor for constant in self.constants]
        batches = arrange(example.batches, self.by_column)
        return self.build(batches, constants, whitening_tensors(example.engine))


def whitening_tensors(engine: Engine) -> list[Tensor]:
    """The tensors of an engine's whitening in the order in which compiled steps read them,
    contiguous; empty without a whitening."""
    whitening = engine.whitening
    return [] if whitening is None else [tensor.contiguous() for tensor in whitening.tensors]


def arrange(batches: Batches, by_column: bool) -> Batches:
    """Minibatches stored as a compiled step reads them: if `by_column` and every step has all rows
    of the data, with narrow tables stored by column; otherwise unchanged."""
    return batches.by_column if by_column and isinstance(batches, WholeData) else batches


@dataclass(frozen=True)
class _Kept:
    """A compiled step in the cache of `Earlier`, which keeps none of the user's tensors alive.

    Attributes:
        build: function (minibatches, constants, tensors of the whitening) -> program.
        recall: function that returns the constants, or None once one of them has changed.
        by_column: whether the step reads narrow tables of data that are stored by column.
        facts: kernel, shapes and data on which the compiled step depends, from `_facts`.
    """

    build: Build
    recall: Callable[[], list[Tensor] | None]
    by_column: bool
    facts: Any


class _Programs:
    """The latest programs of one object, or of all samplers of one model.

    Attributes:
        model: weak reference to the model; None for the programs of one object.
        kept: the programs, the latest first.
    """

    def __init__(self, model: Model | None = None):
        self.model = None if model is None else weakref.ref(model)
        self.kept: list[_Kept] = []


#: Programs by the `id` of their model, as long as a sampler of that model exists.
_of_models: weakref.WeakValueDictionary[int, _Programs] = weakref.WeakValueDictionary()


def _programs_of(model: Model) -> _Programs:
    """The programs that a model's samplers share.

    Raises:
        TypeError: there can be no weak reference to the model.
    """
    programs = _of_models.get(id(model))
    if programs is None or programs.model is None or programs.model() is not model:
        programs = _of_models[id(model)] = _Programs(model)
    return programs


class Earlier:
    """A cache of the latest programs (compiled steps or loops), one for each combination of
    sampler's kernel, shapes and data.

    A program is reused if all shapes are the same and the tensors of data and model are the same
    objects, and have not been written to; references to these tensors are weak. Anything else that
    the model reads is checked by its effect: the program is compared with the Python step at a new
    state.

    Args:
        model: a model with whose other samplers programs are shared, as far as they depend on
            nothing but the model and on numbers that are inputs of a step; None for an object that
            shares none.
    """

    def __init__(self, model: Model | None = None) -> None:
        self._own = self._shared = _Programs()
        with contextlib.suppress(TypeError):  # a model without weak references
            self._shared = self._own if model is None else _programs_of(model)

    def __reduce__(self) -> Any:
        return Earlier, ()  # a copy compiles its own

    def keep(self, blueprint: Blueprint, example: Example) -> None:
        """Adds a compiled step to the cache, in place of one with the same kernel, shapes and data.
        The cache holds the latest four."""
        facts, programs = _facts(example), self._programs(example.engine)
        kept = _Kept(blueprint.build, recall(blueprint.constants), blueprint.by_column, facts)
        others = [other for other in programs.kept if other.facts != facts]
        programs.kept = [kept, *others][:_MOST_KEPT]

    def _programs(self, engine: Engine) -> _Programs:
        """Where programs of an engine are: shared with the model's other samplers if nothing of its
        own is in a step, such as control variates or a hyperparameter by site."""
        if self._shared.model is None:
            return self._own
        hyperparameters = engine.kernel.hyperparameters().values()
        is_common = (
            getattr(engine.density, "model", None) is self._shared.model()
            and engine.known_noise is None
            and not engine.kernel.settings
            and all(callable(hyper) or type(hyper) in (int, float) for hyper in hyperparameters)
        )
        return self._shared if is_common else self._own

    def program(self, example: Example) -> Program | None:
        """A program that was compiled in an earlier run and that computes the step of the example,
        with the example's minibatches; None if there is none, and the step has to be compiled.
        """
        facts, programs = _facts(example), self._programs(example.engine)
        kept = next((kept for kept in programs.kept if kept.facts == facts), None)
        constants = None if kept is None else kept.recall()
        if kept is None or constants is None:
            return None
        batches = arrange(example.batches, kept.by_column)
        program = kept.build(batches, constants, whitening_tensors(example.engine))
        with contextlib.suppress(RuntimeError):  # a matrix cannot be factorized at that state
            if agrees(program, example):
                return program
        return None


def _facts(example: Example) -> Any:
    """What a compiled step depends on: kernel, shapes, strides and devices of its inputs, and the
    data's tensors. A program can be reused only for an example with equal facts."""
    engine, batches = example.engine, example.batches
    values, noise, changing = example.block.at(0)
    batch = batches.batch(batches.fixed, changing)
    leaves, state_spec = pytree.tree_flatten(example.state)
    by_chain = [*leaves, noise, *(batch.tensors if batch.per_chain else [])]
    shared = [*values.values(), *whitening_tensors(engine)]
    shared += [] if batch.per_chain else batch.tensors
    count = len(noise)
    if not engine.ties_chains and noise.device.type == "cpu":
        # chains have loops of their own: any number of them, but one, which has all threads
        by_chain, count = [tensor[0] for tensor in by_chain], min(count, 2)
    data = [leaf for leaf in pytree.tree_leaves(batches.fixed) if isinstance(leaf, Tensor)]
    return (
        (type(engine.kernel), type(engine.whitening), engine.layout, engine.num_latents),
        engine.vectorized,
        (engine.num_data, state_spec, list(values), torch.get_num_threads(), count),
        [type(source) for source in batches.sources(changing)],
        [_geometry(tensor) for tensor in (*by_chain, *shared)],
        [mark(tensor) for tensor in data],
    )


def _geometry(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def mark(tensor: Tensor) -> Hashable:
    """A hashable identifier of a tensor and its contents, to find out later whether it has changed:
    two identifiers are equal if they are of the same tensor, which was not written to in between.
    An identifier does not keep the tensor alive.
    """
    version = None if tensor.is_inference() else tensor._version
    return WeakIdRef(tensor), version, _geometry(tensor)


def recall(constants: Sequence[Constant]) -> Callable[[], list[Tensor] | None]:
    """A function without arguments that returns the tensors of these constants (tensors that a
    compiled step reads besides its arguments) when it is called later; None if one of them has
    changed since.

    The function keeps only tensors of at most 64 KiB alive.
    """
    origins = [constant.origin for constant in constants]
    tensors_then = [origin() for origin in origins]
    marks = [None if tensor is None else mark(tensor) for tensor in tensors_then]
    small = [c.tensor if c.tensor.nbytes <= _SMALL else None for c in constants]

    def again() -> list[Tensor] | None:
        tensors = list(map(_if_unchanged, origins, marks, small))
        intact = [tensor for tensor in tensors if tensor is not None]
        return intact if len(intact) == len(tensors) else None

    return again


def _if_unchanged(
    origin: weakref.ref[Tensor], then: Hashable, small: Tensor | None
) -> Tensor | None:
    """The tensor of a constant of a compiled step if it still has the numbers with which the step
    was traced; None if it has changed. If the model's tensor no longer exists: the kept copy, or
    None for a large tensor.

    Args:
        origin: weak reference to the tensor that the model read.
        then: identifier of that tensor and its contents when the step was traced, from `mark`.
        small: the constant's tensor, if it is small enough to be kept; None for a large one.
    """
    tensor = origin()
    if tensor is None:  # the model makes an equal tensor whenever it is run, or has replaced it
        return small
    return as_input(tensor) if mark(tensor) == then else None
