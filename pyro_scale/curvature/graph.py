"""Autograd's graph of a model: which operations take a tensor, and what they do to its elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

#: A node of autograd's graph.
Node: TypeAlias = Any
#: A tensor of the graph: a node, and the number of the operation's output.
Edge: TypeAlias = tuple[Node, int]
#: Dict from a tensor to the operations that take it, with the operand's number.
Takers: TypeAlias = Mapping[Edge, Sequence[tuple[Node, int]]]

#: Operations that combine their operands element by element.
_ELEMENTWISE = {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0"}
#: Operations that look up entries of a table.
_LOOKUPS = {"EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0"}
#: Operations that return some of a tensor's elements, in another order.
_RESHAPING = {
    "AliasBackward0",
    "CloneBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsafeSplitBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
#: Functions of one element each.
_FUNCTIONS = {
    "ExpBackward0",
    "LogBackward0",
    "NegBackward0",
    "ReciprocalBackward0",
    "RsqrtBackward0",
    "SigmoidBackward0",
    "SoftplusBackward0",
    "SqrtBackward0",
    "TanhBackward0",
}


class CannotRepeat(Exception):
    """The backward pass of a graph cannot be taken again, or in part; Jacobians are computed
    instead."""


def takers_of(last: Node) -> dict[Edge, list[tuple[Node, int]]]:
    """By tensor of the graph below `last`, the operations that take it, and as which operand."""
    takers: dict[Edge, list[tuple[Node, int]]] = defaultdict(list)
    waiting, visited = [last], {last}
    while waiting:
        node = waiting.pop()
        for operand, (source, place) in enumerate(node.next_functions):
            if source is None:
                continue
            takers[source, place].append((node, operand))
            if source not in visited:
                visited.add(source)
                waiting.append(source)
    return takers


def shape_of(edge: Edge) -> torch.Size:
    """The shape of a tensor of the graph."""
    node, place = edge
    return torch.Size(node._input_metadata[place].shape)


def outputs_of(node: Node) -> list[Edge]:
    """All tensors that an operation returns."""
    return [(node, place) for place in range(len(node._input_metadata))]


def is_unary(node: Node) -> bool:
    """Whether an operation moves elements of one tensor, or is a function of each element."""
    return node.name() in _RESHAPING or node.name() in _FUNCTIONS


def is_elementwise(node: Node) -> bool:
    """Whether an operation combines its operands element by element."""
    return node.name() in _ELEMENTWISE


def is_broadcast(edge: Edge, node: Node) -> bool:
    """Whether an operation repeats the elements of a tensor that it takes."""
    return shape_of(edge).numel() != shape_of((node, 0)).numel()


def is_of_params(node: Node) -> bool:
    """Whether an operation depends on params alone.

    Its result is not a row's, though in a batch of one row it may look like one.  A param that is
    repeated for all rows counts as rows.
    """
    if node.name() == "ExpandBackward0":
        return False
    waiting, visited = [node], {node}
    while waiting:
        node = waiting.pop()
        if _reads_data(node):
            return False
        new = {source for source, _ in node.next_functions if source is not None} - visited
        visited |= new
        waiting.extend(new)
    return True


def _reads_data(node: Node) -> bool:
    """Whether an operation takes a tensor that is no param, other than a number; or places of a
    table."""
    if node.name() in _LOOKUPS:
        return True
    others = [place for place, (source, _) in enumerate(node.next_functions) if source is None]
    if node.name() in ("MulBackward0", "DivBackward0") and others:
        factor = node._saved_other if others == [1] else node._saved_self
        return factor is None or factor.dim() > 0
    return bool(others)


def gradients_at(nodes: Sequence[Node], outputs: Tensor, seeds: Tensor) -> Sequence[Tensor]:
    """Gradients at the first output of each operation, `[C, ...]`.

    Args:
        nodes: the operations.
        outputs: of the graph, `[B, K]`.
        seeds: C gradients at these outputs, `[C, B, K]`.

    Raises:
        CannotRepeat: the backward pass cannot be taken.
    """
    edges = [GradientEdge(node, 0) for node in nodes]
    if not edges:
        return []
    try:
        return torch.autograd.grad(outputs, edges, seeds, retain_graph=True, is_grads_batched=True)
    except RuntimeError:  # vmap does not support the backward pass
        try:
            one_by_one = [
                torch.autograd.grad(outputs, edges, seed, retain_graph=True) for seed in seeds
            ]
        except RuntimeError as error:
            raise CannotRepeat(str(error)) from error
        return [torch.stack(column) for column in zip(*one_by_one, strict=True)]


def to_param(edge: Edge, leaf: Tensor, values: Tensor) -> Tensor:
    """Values in the shape of a tensor made from a param, times the slope, in the param's shape.

    Args:
        edge: the tensor, as an operation takes it.
        leaf: the param.
        values: in the tensor's shape.

    Raises:
        CannotRepeat: the backward pass cannot be taken.
    """
    node, place = edge
    if hasattr(node, "variable"):  # the param itself
        return values
    try:
        (gradient,) = torch.autograd.grad(
            [GradientEdge(node, place)], [leaf], [values.to(leaf)], retain_graph=True
        )
    except RuntimeError as error:
        raise CannotRepeat(str(error)) from error
    return gradient
