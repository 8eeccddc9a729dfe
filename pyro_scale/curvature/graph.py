"""Autograd's graph of a model: which operations take a tensor, and what they do to its elements.

A node is a backward function, `tensor.grad_fn`. A tensor of the graph is an output of a node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

#: A node of autograd's graph: an operation that was run, as its backward function.
Node: TypeAlias = Any
#: A tensor of the graph: the node of the operation that returned it, and the output's number.
Edge: TypeAlias = tuple[Node, int]
#: A dict from each tensor to the operations that take it as an operand: (node, operand number).
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
    """Raised if autograd cannot run a graph's backward pass again, or to nodes inside the graph.
    Callers catch it and compute Jacobians instead."""


def takers_of(last: Node) -> dict[Edge, list[tuple[Node, int]]]:
    """A dict from each tensor of a graph to the operations that take it, as (node, number of the
    operand).

    Args:
        last: the node of the graph's result (`result.grad_fn`); the graph is everything that the
            result was computed from.
    """
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
    """The shape of a tensor in autograd's graph. `edge` is (node of the operation that made the
    tensor, number of the operation's output).
    """
    node, place = edge
    return torch.Size(node._input_metadata[place].shape)


def outputs_of(node: Node) -> list[Edge]:
    """All tensors that an operation of autograd's graph returns: a list of edges, (node, number of
    the output).
    """
    return [(node, place) for place in range(len(node._input_metadata))]


def is_unary(node: Node) -> bool:
    """Whether an operation keeps the elements of one tensor apart: it reshapes, reorders or selects
    elements, or applies a function to each element. Decided by a list of known operations, so False
    for others.
    """
    return node.name() in _RESHAPING or node.name() in _FUNCTIONS


def is_elementwise(node: Node) -> bool:
    """Whether an operation is a sum, difference, product or quotient of two operands, element by
    element."""
    return node.name() in _ELEMENTWISE


def is_broadcast(edge: Edge, node: Node) -> bool:
    """Whether an operation broadcasts one of its operands: the operand and the operation's output
    differ in the number of elements.

    Args:
        edge: the operand.
        node: the operation.
    """
    return shape_of(edge).numel() != shape_of((node, 0)).numel()


def is_of_params(node: Node) -> bool:
    """Whether an operation's result depends on the model's params and constants alone, and not on
    the data.

    Such a result has no dimension of data rows, even if a dimension has as many elements as the
    batch has rows.  False for an operation that expands a param, because the expanded dimension may
    be that of the rows.
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
    """Whether an operation itself takes data: a tensor that does not require grad, other than a
    scalar factor; or indices into a table."""
    if node.name() in _LOOKUPS:
        return True
    others = [place for place, (source, _) in enumerate(node.next_functions) if source is None]
    if node.name() in ("MulBackward0", "DivBackward0") and others:
        factor = node._saved_other if others == [1] else node._saved_self
        return factor is None or factor.dim() > 0
    return bool(others)


def gradients_at(nodes: Sequence[Node], outputs: Tensor, seeds: Tensor) -> Sequence[Tensor]:
    """C vector-Jacobian products: the gradients of C weighted sums of a graph's outputs with
    respect to the first output of each operation.

    Args:
        nodes: the operations, nodes of the graph.
        outputs: the graph's outputs, `[B, K]` for B rows of data.
        seeds: the weights of the outputs in each of the C sums, `[C, B, K]`.

    Returns:
        For each operation, a tensor `[C, *shape of its first output]`.

    Raises:
        CannotRepeat: autograd cannot run the backward pass.
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
    """Pulls a tensor back from an operation's operand to the param that the operand was made from:
    the vector-Jacobian product, in the param's shape.

    Args:
        edge: the operand, such as a transposed or scaled param.
        leaf: the param, a leaf of the graph.
        values: the tensor to pull back, in the operand's shape; returned as it is if the operand is
            the param itself.

    Raises:
        CannotRepeat: autograd cannot run the backward pass.
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
