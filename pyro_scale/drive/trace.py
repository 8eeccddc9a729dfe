"""A step as a graph of tensor operations.

Pyro's handlers cannot be traced by Dynamo, but run as they are under `make_fx`.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pyro_scale.core.onednn import without_onednn
from pyro_scale.drive.batches import Batch
from pyro_scale.drive.engine import Engine


class Constant(NamedTuple):
    """A tensor that a step reads besides its arguments: a frozen weight, a buffer, a number.

    Attributes:
        tensor: as compiled code reads it.
        origin: what the model gave, which is gone by now if it was made when the model was run.
    """

    tensor: Tensor
    origin: weakref.ref[Tensor]


@dataclass(frozen=True)
class StepGraph:
    """One step of a group of chains: flat tensors in, flat tensors out.

    Inputs are the state's leaves, the hyperparameters' values, the noise, the batch's tensors
    and the constants.  Outputs are the next state's leaves and the log joint `[chains]`.

    Attributes:
        module: the graph.
        state_spec: how the state is built from its leaves.
        position: which of them is the position.
        log_joint_dtype: of the last output.
        constants: what else the step reads.
        examples: one tensor for every input.
    """

    module: fx.GraphModule
    state_spec: Any
    position: int
    log_joint_dtype: torch.dtype
    constants: list[Constant]
    examples: list[Tensor]


def trace(
    engine: Engine, batch: Batch, state: Any, noise: Tensor, values: Mapping[str, Tensor]
) -> StepGraph:
    """The graph of `engine.step` for arguments like these.

    Raises:
        Exception: whatever the model raises when it cannot be traced.
    """
    leaves, state_spec = pytree.tree_flatten(state)
    changing = [*leaves, *values.values(), noise]

    found: list[Tensor] = []

    def step(*flat: Tensor) -> list[Tensor]:
        given = iter(flat)
        state_in = pytree.tree_unflatten([next(given) for _ in leaves], state_spec)
        values_in = {name: next(given) for name in values}
        noise_in = next(given)
        moved, evaluation = engine.step(
            state_in, batch.with_tensors(list(given)), noise_in, values_in
        )
        found.append(evaluation.log_joint)
        # what is carried on and what is given out must not share memory
        return [leaf.clone() for leaf in [*pytree.tree_leaves(moved), evaluation.log_joint]]

    # make_fx knows tensors by identity: one that came twice, or that the model holds too,
    # would silently be taken for the other
    examples = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in changing]
    own = batch.tensors if not batch.per_chain else [leaf.contiguous() for leaf in batch.tensors]
    examples += [leaf.detach() for leaf in own]
    with torch.no_grad(), without_onednn():
        traced = make_fx(step, tracing_mode="real", decomposition_table=_DECOMPOSITIONS)
        module = traced(*examples)
    constants = _lift_constants(module)
    position = next(place for place, leaf in enumerate(leaves) if leaf is state.position)
    examples += [constant.tensor for constant in constants]
    return StepGraph(module, state_spec, position, found[0].dtype, constants, examples)


def as_input(constant: Tensor) -> Tensor:
    """A constant as compiled code reads it, in the same memory where that can be."""
    return constant.detach().resolve_conj().resolve_neg()


def _running(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A running sum or product, element by element: Inductor has no kernel for it."""

    def decomposed(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if x.dim() == 0 or not x.is_floating_point() or not 0 < x.shape[dim] <= _MOST_RUNNING:
            return NotImplemented
        first, *others = x.to(dtype or x.dtype).unbind(dim)
        return torch.stack(list(itertools.accumulate(others, combine, initial=first)), dim)

    return decomposed


#: Elements of a running sum or product that is written out.
_MOST_RUNNING = 32
_DECOMPOSITIONS = {
    torch.ops.aten.cumsum.default: _running(operator.add),
    torch.ops.aten.cumprod.default: _running(operator.mul),
}


def _lift_constants(module: fx.GraphModule) -> list[Constant]:
    """Makes inputs of the tensors that the graph holds."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[str, fx.Node] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in inputs:
            with graph.inserting_after(last):
                last = inputs[node.target] = graph.placeholder(f"constant_{len(inputs)}")
        node.replace_all_uses_with(inputs[node.target])
        graph.erase_node(node)
    origins = [operator.attrgetter(name)(module) for name in inputs]
    constants = [Constant(as_input(origin), weakref.ref(origin)) for origin in origins]
    held = [*module.named_buffers(), *module.named_parameters()]
    for name in {name.partition(".")[0] for name, _ in held}:
        delattr(module, name)  # or Inductor makes inputs of them once more
    module.recompile()
    return constants
