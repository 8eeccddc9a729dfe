"""A step as a graph of tensor operations.

Pyro's handlers cannot be traced by Dynamo, but run as they are under `make_fx`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.drive.batches import Batches
from pyro_scale.drive.engine import Engine
from pyro_scale.drive.tape import Tape


@dataclass(frozen=True)
class StepGraph:
    """One step of a group of chains: flat tensors in, flat tensors out.

    Inputs are the state's leaves, the tape's (hyperparameters' values, noise, what changes of
    the batch), and what stays.  Outputs are the next state's leaves and the log joint.

    Attributes:
        module: the graph.
        state_spec: how the state is built from its leaves.
        fixed: the inputs that stay the same.
        examples: one for every input.
    """

    module: fx.GraphModule
    state_spec: Any
    fixed: list[Tensor]
    examples: list[Tensor]


def tape_leaves(tape: Tape, all_at_once: bool) -> list[Tensor]:
    """The tape's part of a step graph's inputs, `[groups, steps, ...]`."""
    groups = 1 if all_at_once else len(tape.noise)
    columns = [column.expand(groups, -1) for column in tape.values.values()]
    drawn = [tape.noise, *pytree.tree_leaves(tape.changing)]
    return columns + ([leaf.transpose(0, 1)[None] for leaf in drawn] if all_at_once else drawn)


def trace(engine: Engine, batches: Batches, state: Any, tape: Tape) -> StepGraph:
    """The graph of a step, traced at a state and the first step of a tape.

    Raises:
        Exception: whatever the model raises when it cannot be traced.
    """
    state_leaves, state_spec = pytree.tree_flatten(state)
    names = list(tape.values)
    changing_leaves, changing_spec = pytree.tree_flatten(tape.at(0)[2])
    fixed_leaves, fixed_spec = pytree.tree_flatten(batches.fixed)
    moved = [place for place, leaf in enumerate(fixed_leaves) if rows.is_rows(leaf)]
    sizes = [len(state_leaves), len(names), 1, len(changing_leaves), len(moved)]

    def step(*flat: Tensor) -> list[Tensor]:
        state_in, values, (noise,), changing, fixed_in = _split(flat, sizes)
        fixed = list(fixed_leaves)
        for place, leaf in zip(moved, fixed_in, strict=True):
            fixed[place] = leaf
        batch = batches.batch(
            pytree.tree_unflatten(fixed, fixed_spec),
            pytree.tree_unflatten(changing, changing_spec),
        )
        following, evaluation = engine.step(
            pytree.tree_unflatten(state_in, state_spec),
            batch,
            noise,
            dict(zip(names, values, strict=True)),
        )
        # what is carried on and what is given out must not share memory
        return [leaf.clone() for leaf in [*pytree.tree_leaves(following), evaluation.log_joint]]

    values, noise, _ = tape.at(0)
    fixed = [fixed_leaves[place] for place in moved]
    inputs = [*state_leaves, *values.values(), noise, *changing_leaves]
    # make_fx knows tensors by identity: one that came twice, or that the model holds too,
    # would silently be taken for the other
    examples = [leaf.detach().clone() for leaf in inputs] + [leaf.detach() for leaf in fixed]
    with torch.no_grad():
        module = make_fx(step, tracing_mode="real")(*examples)
    constants = _lift_constants(module)
    return StepGraph(module, state_spec, [*fixed, *constants], [*examples, *constants])


def _split(flat: tuple[Tensor, ...], sizes: list[int]) -> list[list[Tensor]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(flat[start : start + size]))
        start += size
    return parts


def _held(module: fx.GraphModule) -> list[tuple[str, Tensor]]:
    return [*module.named_buffers(), *module.named_parameters()]


def _lift_constants(module: fx.GraphModule) -> list[Tensor]:
    """Makes inputs of the tensors that the graph holds: frozen weights, buffers, constants."""
    graph = module.graph
    constants: list[Tensor] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        with graph.inserting_after(last):
            last = graph.placeholder(f"constant_{len(constants)}")
        constants.append(getattr(module, node.target).detach())
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    for name in {name.partition(".")[0] for name, _ in _held(module)}:
        delattr(module, name)  # or Inductor makes inputs of them once more
    module.recompile()
    return constants
