"""Where params enter operations of which each row has its own part, in autograd's graph of a model.

What a model computes is in the graph that autograd records of it, whoever wrote it: a module, a
Pyro model by hand, effects of groups.  The gradients of all rows at an operation's output come from
one backward pass, as no row's result depends on another's; with what the operation has saved, they
say what the rows' gradients are (`operations.py`, `uses.py`), without a Jacobian of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pyro_scale.curvature.operations import (
    has_rows_to_find,
    is_elementwise,
    is_expansion,
    reads_data,
    use_of,
)
from pyro_scale.curvature.uses import Gradients, Node, Rows, Use, find_rows

#: Numbers of gradients at outputs that are held at once.
_BLOCK_NUMBERS = 2**23
#: Exponents of two among which rows are told apart, so that float32 does not overflow.
_MOST_EXPONENT = 64
#: Ways of a param into the graph, beyond which it is not followed.
_MOST_ENTRIES = 64

#: A node, and which of its operation's outputs.
_Edge: TypeAlias = tuple[Node, int]


class CannotRepeat(Exception):
    """A graph whose backward pass cannot be taken again, or in part: the general way takes it."""


class Entry(NamedTuple):
    """A way of a param into the graph.

    Attributes:
        node: of the operation.
        use: what the operation does with it.
        edge: the param, as the operation takes it.
        slope: of what the operation takes by the param, in the param's shape; 0 where the operation
            does not take the element.
    """

    node: Node
    use: Use
    edge: _Edge
    slope: Tensor


@dataclass(frozen=True)
class RowWise:
    """The graph of a model's outputs.

    Attributes:
        outputs: of each row, `[B, K]`, with their graph.
        entries: of the params whose every way into the graph is known.
        leaves: the params.
        slopes: where rows have a single output, its gradients at operations' outputs, of all rows,
            and where the rows are: those of any results are multiples of them.
    """

    outputs: Tensor
    entries: Mapping[str, tuple[Entry, ...]]
    leaves: Mapping[str, Tensor] = field(repr=False)
    slopes: Mapping[Node, tuple[Tensor, Rows]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, outputs: Tensor, leaves: Mapping[str, Tensor]) -> RowWise:
        """The graph of outputs `[B, K]`, in which params are leaves.

        Raises:
            CannotRepeat: its backward pass cannot be taken again.
        """
        if not outputs.requires_grad:  # no row depends on the params
            return cls(outputs, dict.fromkeys(leaves, ()), leaves)
        takers = takers_of(outputs.grad_fn)
        roots = {id(node.variable): node for node, _ in takers if hasattr(node, "variable")}
        followed = {
            name: _candidates((roots[id(leaf)], 0), takers) if id(leaf) in roots else set()
            for name, leaf in leaves.items()
        }
        asked = {node for nodes in followed.values() for node in nodes}
        uses = [node for node in asked if has_rows_to_find(node) and not is_of_params(node)]
        plain, rows = _rows_of(uses, outputs)
        entries = {}
        for name, leaf in leaves.items():
            root = roots.get(id(leaf))
            if len(followed[name]) > _MOST_ENTRIES:
                continue
            own = () if root is None else _entries((root, 0), leaf, takers, rows)
            if own is not None:
                entries[name] = tuple(own)
        if outputs.shape[1] > 1:
            return cls(outputs, entries, leaves)
        slopes = {node: (plain[node], found) for node, found in rows.items() if found is not None}
        return cls(outputs, entries, leaves, slopes)

    def squares(
        self, columns: Callable[[int, int], Tensor], count: int, keep: slice
    ) -> dict[str, Tensor]:
        """By param, the squares of the gradients of the rows' results, added up; of those whose
        elements each enter once, as gradients of several uses would have to be summed first.

        Args:
            columns: some of the results' weights, by the rows' outputs `[C, B, K]`: a result is the
                weighted sum of its row's outputs.
            count: of a row's results.
            keep: which rows count.
        """
        once = {name: own for name, own in self.entries.items() if _are_disjoint(own)}
        total = {name: torch.zeros_like(self.leaves[name].detach()) for name in once}
        for found in replace(self, entries=once).gradients(columns, count, keep):
            for name, own in once.items():
                for entry in own:
                    with torch.no_grad():
                        squares = entry.use.squares(found[entry.node])
                    total[name] += to_param(entry.edge, self.leaves[name], squares) * entry.slope
        return total

    def gradients(
        self, columns: Callable[[int, int], Tensor], count: int, keep: slice
    ) -> Iterator[dict[Node, Gradients]]:
        """The gradients at the outputs of all entries' operations, of some results at a time."""
        nodes = list({entry.node for own in self.entries.values() for entry in own})
        if not nodes:
            return
        size = max(1, _BLOCK_NUMBERS // sum(shape_of((node, 0)).numel() for node in nodes))
        kept = torch.zeros(len(self.outputs), 1).to(self.outputs)
        kept[keep] = 1
        for start in range(0, count, size):
            seeds = columns(start, min(start + size, count)).to(self.outputs) * kept
            if self.slopes:
                places = [self.slopes[node] for node in nodes]
                found: Sequence[Tensor] = [rows.times(seeds[..., 0], each) for each, rows in places]
            else:
                found = _gradients(self.outputs, nodes, seeds)
            yield {node: Gradients(each) for node, each in zip(nodes, found, strict=True)}


# ------------------------------------------------------------------ the graph


def takers_of(last: Node) -> dict[_Edge, list[tuple[Node, int]]]:
    """By a tensor of the graph, which operations take it, and as which operand."""
    takers: dict[_Edge, list[tuple[Node, int]]] = defaultdict(list)
    waiting, seen = [last], {last}
    while waiting:
        node = waiting.pop()
        for operand, (source, place) in enumerate(node.next_functions):
            if source is None:
                continue
            takers[source, place].append((node, operand))
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return takers


def shape_of(edge: _Edge) -> torch.Size:
    """The shape of a tensor of the graph."""
    node, place = edge
    return torch.Size(node._input_metadata[place].shape)


def _outputs(node: Node) -> list[_Edge]:
    return [(node, place) for place in range(len(node._input_metadata))]


def _candidates(edge: _Edge, takers: Mapping[_Edge, Sequence[tuple[Node, int]]]) -> set[Node]:
    """The operations that may be a param's."""
    waiting, found = [edge], set[Node]()
    while waiting and len(found) <= _MOST_ENTRIES:
        edge = waiting.pop()
        for node, _ in takers.get(edge, ()):
            found.add(node)
            if _passes_on(node) or (is_elementwise(node) and _keeps_size(edge, node)):
                waiting.extend(_outputs(node))
    return found


def _entries(
    root: _Edge,
    leaf: Tensor,
    takers: Mapping[_Edge, Sequence[tuple[Node, int]]],
    rows: Mapping[Node, Rows | None],
) -> list[Entry] | None:
    """A param's ways into the graph; None where one of them is not known."""
    waiting, found, followed = [root], list[Entry](), 0
    while waiting:
        edge, followed = waiting.pop(), followed + 1
        if followed > _MOST_ENTRIES:
            return None
        for node, operand in takers.get(edge, ()):
            where = rows.get(node)
            if _passes_on(node) or (where is None and is_elementwise(node)):
                if not _passes_on(node) and not _keeps_size(edge, node):
                    return None
                waiting.extend(_outputs(node))
                continue
            use = where and use_of(node, operand, shape_of(edge), shape_of((node, 0)), where)
            if use is None:
                return None
            slope = to_param(edge, leaf, torch.ones(shape_of(edge)).to(leaf))
            found.append(Entry(node, use, edge, slope))
    return found


def _are_disjoint(entries: Sequence[Entry]) -> bool:
    """Whether no element of a param enters twice: its gradients would have to be summed first."""
    if len(entries) < 2:
        return True
    return int(torch.stack([each.slope != 0 for each in entries]).sum(0).max()) == 1


def to_param(edge: _Edge, leaf: Tensor, values: Tensor) -> Tensor:
    """Values in the shape in which an operation takes a param, times the slope, in the param's.

    Raises:
        CannotRepeat: the way back cannot be taken.
    """
    node, place = edge
    if hasattr(node, "variable"):
        return values
    try:
        (found,) = torch.autograd.grad(
            [GradientEdge(node, place)], [leaf], [values.to(leaf)], retain_graph=True
        )
    except RuntimeError as error:
        raise CannotRepeat(str(error)) from error
    return found


def _rows_of(
    nodes: Sequence[Node], outputs: Tensor
) -> tuple[dict[Node, Tensor], dict[Node, Rows | None]]:
    """(The gradients of some results at operations' outputs, of the outputs themselves where a row
    has one; where the rows are, by how gradients there go with weights of rows).

    Weights are powers of two, by which all rounding goes, too, so that gradients that are small
    differences of large numbers do as well.  Those have few exponents, so a row's number is written
    in several digits.
    """
    generator = torch.Generator().manual_seed(0)
    left, digits = torch.randperm(len(outputs), generator=generator), list[Tensor]()
    while not digits or bool(left.any()):
        digits.append(left % _MOST_EXPONENT)
        left = left // _MOST_EXPONENT
    weights = 2.0 ** torch.stack(digits).to(outputs)
    some = torch.ones_like(outputs)
    if outputs.shape[1] > 1:  # so that nothing cancels
        some += torch.rand(outputs.shape, generator=generator).to(outputs)
    found = _gradients(outputs, nodes, torch.cat([some[None], weights[..., None] * some]))
    plain = {node: each[0] for node, each in zip(nodes, found, strict=True)}
    pairs = zip(nodes, found, strict=True)
    return plain, {node: find_rows(each[0], each[1:], weights) for node, each in pairs}


def is_of_params(node: Node) -> bool:
    """Whether an operation is of params alone: what it gives is no row's, though of one row it
    looks like that.  Repeating a param for all rows makes it theirs."""
    if is_expansion(node):
        return False
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if reads_data(node):
            return False
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        waiting.extend(new)
    return True


def _gradients(outputs: Tensor, nodes: Sequence[Node], seeds: Tensor) -> Sequence[Tensor]:
    """The gradients at operations' outputs, `[C, ...]`, of results `[C, B, K]`.

    Raises:
        CannotRepeat: there is no such pass.
    """
    edges = [GradientEdge(node, 0) for node in nodes]
    if not edges:
        return []
    try:
        return torch.autograd.grad(outputs, edges, seeds, retain_graph=True, is_grads_batched=True)
    except RuntimeError:  # a backward pass that vmap refuses
        try:
            each = [torch.autograd.grad(outputs, edges, seed, retain_graph=True) for seed in seeds]
        except RuntimeError as error:
            raise CannotRepeat(str(error)) from error
        return [torch.stack(column) for column in zip(*each, strict=True)]


# ------------------------------------------------------------------ what leads to an operation

#: Operations that give some of a tensor's elements, in another order.
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
#: Functions of each element.
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


def _passes_on(node: Node) -> bool:
    return node.name() in _RESHAPING or node.name() in _FUNCTIONS


def _keeps_size(edge: _Edge, node: Node) -> bool:
    """Whether an operation does not broadcast what it takes."""
    return shape_of(edge).numel() == shape_of((node, 0)).numel()
