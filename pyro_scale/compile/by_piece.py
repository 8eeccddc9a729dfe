"""Splits a graph's elementwise operations on a long concatenated vector into operations on the
vectors ("pieces") that were concatenated.

The gradient of a step is computed site by site, concatenated, and read again by the update of
position and momentum. The update is elementwise, so it can read each site's gradient from the
memory where it was written. For large networks this avoids three copies of the whole gradient.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
#: Smallest number of elements of a vector that is split, and of its pieces on average: shorter
#: vectors stay in the nearest caches, and kernels for short pieces take long to compile.
_LONG, _PIECE = 2**16, 2**13
#: Operations that are elementwise, but that torch does not mark as such.
_COPIES = (_ATEN.clone.default, _ATEN.detach.default)


def update_by_piece(module: fx.GraphModule) -> None:
    """Rewrites a graph in place, to make it faster: elementwise operations on a concatenation of
    long vectors (such as all D params) become operations on the vectors that were concatenated.
    Results are concatenated where other operations read them.
    """
    cats = [node for node in module.graph.nodes if _is_long_cat(node)]
    for cat in cats:
        _take_apart(module.graph, cat)
    if cats:
        module.graph.eliminate_dead_code()
        module.recompile()


def _take_apart(graph: fx.Graph, cat: fx.Node) -> None:
    """Rewrites a graph in place: each elementwise operation on the result of `cat`, a concatenation
    of vectors, becomes one operation for each of these vectors.
    """
    vectors: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
    size = len(cat.meta["val"])
    bounds = list(accumulate((len(vector.meta["val"]) for vector in vectors), initial=0))
    pieces = {cat: [_flatten_terms(graph, vector) for vector in vectors]}

    def of_piece(arg: fx.Node, place: int) -> fx.Node:
        shape = arg.meta["val"].shape
        if arg not in pieces and (not shape or shape[-1] != size):
            return arg  # one number for all elements
        if arg not in pieces and _is_by_element(arg, size):
            split(arg)
        if arg not in pieces:
            ends = bounds[place], bounds[place + 1]
            return graph.call_function(_ATEN.slice.Tensor, (arg, -1, *ends))
        return pieces[arg][place]

    def split(node: fx.Node) -> None:
        arguments = [
            fx.map_arg((node.args, node.kwargs), partial(of_piece, place=place))
            for place in range(len(vectors))
        ]
        target: Any = node.target
        pieces[node] = [graph.call_function(target, *call) for call in arguments]

    for node in list(graph.nodes):
        if any(arg in pieces for arg in node.all_input_nodes) and _is_by_element(node, size):
            with graph.inserting_before(node):
                split(node)
    for node, parts in list(pieces.items())[1:]:
        readers = [user for user in node.users if user not in pieces]
        if readers:
            with graph.inserting_before(readers[0]):
                joined = graph.call_function(_ATEN.cat.default, (parts, -1))
            for reader in readers:
                reader.replace_input_with(node, joined)


def _is_long_cat(node: fx.Node) -> bool:
    """Whether a node of a graph concatenates vectors that are long enough, on average, for
    `update_by_piece` to be worth it; the result must be long, too.
    """
    if node.target is not _ATEN.cat.default:
        return False
    value = node.meta["val"]
    return value.dim() == 1 and len(value) >= max(_LONG, _PIECE * len(node.args[0]))  # type: ignore[arg-type]


def _is_by_element(node: fx.Node, size: int) -> bool:
    """Whether a node of a graph is an elementwise operation whose result has the shape `[...,
    size]`.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.dim() or value.shape[-1] != size:
        return False
    # the operation is on one tensor: a leading dimension is allowed
    if node.target is _ATEN.stack.default:
        return len(node.args[0]) == 1 and node.args[1:] in ((), (0,))  # type: ignore[arg-type]
    tags = getattr(node.target, "tags", ())
    return node.target in _COPIES or torch.Tag.pointwise in tags


def _flatten_terms(graph: fx.Graph, vector: fx.Node) -> fx.Node:
    """A node of the graph that computes the same as `vector`. If `vector` is the flattened sum of
    two matrices, this is a new node, the sum of the flattened matrices: Inductor would fuse the sum
    of matrices with a matrix product, which copies the other term first. Otherwise it is `vector`.
    """
    if vector.target is not _ATEN.view.default:
        return vector
    total, shape = vector.args
    if not isinstance(total, fx.Node) or total.target is not _ATEN.add.Tensor or total.kwargs:
        return vector
    terms, size = total.args[:2], total.meta["val"].shape
    if not all(isinstance(t, fx.Node) and _is_plain(t.meta["val"], size) for t in terms):
        return vector
    with graph.inserting_before(vector):
        flat = [graph.call_function(_ATEN.view.default, (term, shape)) for term in terms]
        return graph.call_function(_ATEN.add.Tensor, tuple(flat))


def _is_plain(value: Tensor, shape: torch.Size) -> bool:
    return value.shape == shape and value.is_contiguous()
