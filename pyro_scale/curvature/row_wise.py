"""Gradients of rows without their Jacobians, from autograd's graph of a model.

The graph records what a model computes, whoever wrote it: a module, a Pyro model by hand, effects
of groups.  No row's result depends on another's, so one backward pass gives the gradients of all
rows at an operation's output.  With what the operation has saved, they say what the rows' gradients
in its operands are (`operations.py`, `uses.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.curvature.graph import (
    Edge,
    Node,
    Takers,
    gradients_at,
    is_broadcast,
    is_elementwise,
    is_of_params,
    is_unary,
    outputs_of,
    shape_of,
    takers_of,
    to_param,
)
from pyro_scale.curvature.operations import Operand, is_readable, use_of
from pyro_scale.curvature.uses import Gradients, Rows, Use, find_rows

#: Numbers of gradients at operations' outputs in memory at once.
_BLOCK_NUMBERS = 2**23
#: Powers of two that tell rows apart have exponents below this, so that float32 does not overflow.
_MOST_EXPONENT = 64
#: Most operations on the paths from a param into the graph.
_MOST_ENTRIES = 64


class Entry(NamedTuple):
    """An operation of the graph that takes a param (or a tensor made from it), and of whose output
    each row of data has its own part.

    Attributes:
        node: the operation's node in autograd's graph.
        use: how the operation uses the param.
        edge: the operand made from the param, for example its transpose.
        slope: derivative of the operand's elements with respect to the param's, in the param's
            shape; 0 for elements of the param that are not in the operand.
    """

    node: Node
    use: Use
    edge: Edge
    slope: Tensor


@dataclass(frozen=True)
class RowWise:
    """Autograd's graph of the outputs of each row of data, read so that sums of squares of rows'
    gradients need no Jacobian.

    Attributes:
        outputs: the outputs of each row, `[B, K]`, with an autograd graph.
        entries: a dict from param to its entries; empty tuple for a param that no row depends on.
            A param is missing if it is used in a way that is not supported.
        leaves: the params by name, as leaves of the graph.
        slopes: a dict from an operation to (the gradient of the sum of all rows' outputs with
            respect to the operation's output, the dimension of that gradient that holds the rows),
            if K = 1, where gradients of other results are multiples of it; empty if K > 1.
    """

    outputs: Tensor
    entries: Mapping[str, tuple[Entry, ...]]
    leaves: Mapping[str, Tensor] = field(repr=False)
    slopes: Mapping[Node, tuple[Tensor, Rows]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_outputs(cls, outputs: Tensor, leaves: Mapping[str, Tensor]) -> RowWise:
        """Reads autograd's graph of rows' outputs: finds how each param is used there.

        Args:
            outputs: K outputs of each row of data, `[B, K]`, with an autograd graph.
            leaves: the params by name, as leaves of the graph.

        Raises:
            CannotRepeat: autograd cannot run the graph's backward pass again.
        """
        if not outputs.requires_grad:  # no row depends on the params
            return cls(outputs, dict.fromkeys(leaves, ()), leaves)
        takers = takers_of(outputs.grad_fn)
        roots = {id(node.variable): node for node, _ in takers if hasattr(node, "variable")}
        edges = {name: (roots[id(leaf)], 0) for name, leaf in leaves.items() if id(leaf) in roots}
        candidates = {name: _candidates(edge, takers) for name, edge in edges.items()}
        nodes = {node for of_param in candidates.values() for node in of_param}
        uses = [node for node in nodes if is_readable(node) and not is_of_params(node)]
        plain, rows = _rows_of(uses, outputs)
        entries: dict[str, tuple[Entry, ...]] = {}
        for name, leaf in leaves.items():
            if name not in edges:
                entries[name] = ()
            elif len(candidates[name]) <= _MOST_ENTRIES:
                of_param = _entries(edges[name], leaf, takers, rows)
                if of_param is not None:
                    entries[name] = tuple(of_param)
        if outputs.shape[1] > 1:
            return cls(outputs, entries, leaves)
        slopes = {node: (plain[node], place) for node, place in rows.items() if place is not None}
        return cls(outputs, entries, leaves, slopes)

    def squares(
        self, columns: Callable[[int, int], Tensor], count: int, keep: slice
    ) -> dict[str, Tensor]:
        """For each param, element by element, the sum over rows of data of the squared gradients of
        a row's results: a dict from param to a tensor of the param's shape.

        A result is a weighted sum of a row's K outputs. Params are left out that are missing in
        `entries`, or have an element in two entries, because gradients of both uses would have to
        be summed before they are squared.

        A result is a weighted sum of a row's K outputs.  Without the params that are missing in
        `entries`, and without params that have an element in two entries, because gradients of both
        uses would have to be summed before they are squared.

        Args:
            columns: function (start, stop) -> the weights of results start to stop, `[C, B, K]`.
            count: the number of results of each row.
            keep: the rows of the batch that are summed over.
        """
        once = {name: entries for name, entries in self.entries.items() if _are_disjoint(entries)}
        total = {name: torch.zeros_like(self.leaves[name].detach()) for name in once}
        for gradients in replace(self, entries=once).gradients(columns, count, keep):
            for name, entries in once.items():
                for entry in entries:
                    with torch.no_grad():
                        squares = entry.use.squares(gradients[entry.node])
                    total[name] += to_param(entry.edge, self.leaves[name], squares) * entry.slope
        return total

    def gradients(
        self, columns: Callable[[int, int], Tensor], count: int, keep: slice
    ) -> Iterator[dict[Node, Gradients]]:
        """Yields the gradients of a few results (weighted sums of a row's outputs) at a time: dicts
        from each operation that takes a param to the gradients at that operation's output. Nothing
        is yielded if there are no such operations.

        Args:
            columns: function (start, stop) -> the weights of results start to stop, `[C, B, K]`.
            count: the number of results of each row.
            keep: the rows of the batch that are summed over.
        """
        nodes = list({entry.node for entries in self.entries.values() for entry in entries})
        if not nodes:
            return
        size = max(1, _BLOCK_NUMBERS // sum(shape_of((node, 0)).numel() for node in nodes))
        kept = torch.zeros(len(self.outputs), 1).to(self.outputs)
        kept[keep] = 1
        for start in range(0, count, size):
            seeds = columns(start, min(start + size, count)).to(self.outputs) * kept
            gradients: Sequence[Tensor]
            if self.slopes:
                slopes = [self.slopes[node] for node in nodes]
                gradients = [rows.times(seeds[..., 0], slope) for slope, rows in slopes]
            else:
                gradients = gradients_at(nodes, self.outputs, seeds)
            yield {node: Gradients(values) for node, values in zip(nodes, gradients, strict=True)}


def _candidates(edge: Edge, takers: Takers) -> set[Node]:
    """The operations whose gradients may be needed for a param: those that take the param itself,
    or what is left of it after operations that keep its elements apart (reshapes, functions of one
    element). Stops at about `_MOST_ENTRIES`.
    """
    waiting, nodes = [edge], set[Node]()
    while waiting and len(nodes) <= _MOST_ENTRIES:
        edge = waiting.pop()
        for node, _ in takers.get(edge, ()):
            nodes.add(node)
            if is_unary(node) or (is_elementwise(node) and not is_broadcast(edge, node)):
                waiting.extend(outputs_of(node))
    return nodes


def _entries(
    root: Edge, leaf: Tensor, takers: Takers, rows: Mapping[Node, Rows | None]
) -> list[Entry] | None:
    """A param's entries: the operations that take the param, or a tensor made from it, and have
    rows of data in their output. None if the param is used in a way that is not supported.

    Args:
        root: the param in the graph.
        leaf: the param.
        takers: the operations that take each tensor of the graph.
        rows: a dict from an operation to the dimension of its output that holds the rows of data;
            None for an output without rows.
    """
    waiting, entries, followed = [root], list[Entry](), 0
    while waiting:
        edge, followed = waiting.pop(), followed + 1
        if followed > _MOST_ENTRIES:
            return None
        for node, number in takers.get(edge, ()):
            place = rows.get(node)
            if is_unary(node) or (place is None and is_elementwise(node)):
                if not is_unary(node) and is_broadcast(edge, node):
                    return None
                waiting.extend(outputs_of(node))
                continue
            if place is None:
                return None
            use = use_of(Operand(node, number, shape_of(edge), shape_of((node, 0)), place))
            if use is None:
                return None
            slope = to_param(edge, leaf, torch.ones(shape_of(edge)).to(leaf))
            entries.append(Entry(node, use, edge, slope))
    return entries


def _are_disjoint(entries: Sequence[Entry]) -> bool:
    """Whether every element of a param is used by at most one of the operations `entries`; only
    then do squares of their gradients add up.
    """
    if len(entries) < 2:
        return True
    return int(torch.stack([entry.slope != 0 for entry in entries]).sum(0).max()) == 1


def _rows_of(
    nodes: Sequence[Node], outputs: Tensor
) -> tuple[dict[Node, Tensor], dict[Node, Rows | None]]:
    """Finds the rows of data in operations' outputs.

    Returns:
        (A dict from operation to the gradient, at its output, of a sum over rows of randomly
        weighted outputs (weight 1 if rows have a single output); a dict from operation to the
        dimension of its output that holds the rows, None if no single dimension does).

    Rows are found by how gradients change with weights of rows.  Weights are powers of two, which
    multiply rounding errors, too, so gradients that are small differences of large numbers still
    match.  There are few such powers, so a row's number is written in several digits.
    """
    random = torch.Generator().manual_seed(0)
    left, digits = torch.randperm(len(outputs), generator=random), list[Tensor]()
    while not digits or bool(left.any()):
        digits.append(left % _MOST_EXPONENT)
        left = left // _MOST_EXPONENT
    weights = 2.0 ** torch.stack(digits).to(outputs)
    seed = torch.ones_like(outputs)
    if outputs.shape[1] > 1:  # outputs must not cancel each other
        seed += torch.rand(outputs.shape, generator=random).to(outputs)
    seeds = torch.cat([seed[None], weights[..., None] * seed])
    gradients = dict(zip(nodes, gradients_at(nodes, outputs, seeds), strict=True))
    plain = {node: values[0] for node, values in gradients.items()}
    return plain, {n: find_rows(values[0], values[1:], weights) for n, values in gradients.items()}
