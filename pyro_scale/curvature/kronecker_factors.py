"""Kronecker factors of a curvature: K-FAC (Martens and Grosse 2015), of any model.

A row's gradient of a product's weight is a g^T, with a the row's input and g the gradient at its
output, so that the curvature of the weight is the sum of (a a^T) x (g g^T) over rows and results.
K-FAC takes the mean of the first times the sum of the second: exact for one row, and wherever the
two do not vary together, such as in a deep linear network with Gaussian noise.  A weight that each
row uses at several positions has them all for rows ("expand"; Eschenhagen et al. 2023).

In the basis of the factors' eigenvectors, the curvature's own diagonal is known without a matrix,
too: the squares of the rows' gradients in it (EKFAC; George et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.curvature.row_wise import Entry, RowWise, to_param
from pyro_scale.curvature.uses import Elementwise, Gradients, Product

#: Digits of places, each of which the shortest floats hold.
_BASE, _DIGITS = 2**7, 5


class Part(NamedTuple):
    """What rows' gradients consist of, in one use of some elements of a param.

    Attributes:
        places: where they are in the flat param, [m, n].
        inputs: a, of T positions a row, `[B, T, m]`.
        outputs: g, of C results a row, `[C, B, T, n]`.
    """

    places: Tensor
    inputs: Tensor
    outputs: Tensor

    @property
    def factors(self) -> Factors:
        """Sums over rows, positions and results."""
        a, g = self.inputs.flatten(0, 1), self.outputs.flatten(0, 2)
        return Factors(self.places, a.mT @ a, g.mT @ g, len(a))


class Basis(NamedTuple):
    """Of some elements of a param, as a matrix.

    Attributes:
        places: where they are in the flat param, [m, n].
        left: orthonormal, [m, m].
        right: orthonormal, [n, n].
    """

    places: Tensor
    left: Tensor
    right: Tensor

    def squares(self, parts: Sequence[Part]) -> Tensor:
        """The squares of the rows' gradients in it, added up, [m, n]; a row's gradient is the sum
        over all uses and positions."""
        with torch.no_grad():
            inputs = torch.cat([part.inputs for part in parts], 1)
            outputs = torch.cat([part.outputs for part in parts], 2)
            inputs, outputs = inputs @ self.left.to(inputs), outputs @ self.right.to(outputs)
            product = Product(inputs[None], _as_it_is, len(self.right), _as_it_is)
            return product.squares(Gradients(outputs[:, None]))[0]


@dataclass
class Factors:
    """Sums over rows, of some elements of a param.

    Attributes:
        places: where they are in the flat param, [m, n].
        inputs: the sum of a a^T, [m, m].
        outputs: the sum of g g^T, [n, n].
        count: of rows' positions in the first.
    """

    places: Tensor
    inputs: Tensor
    outputs: Tensor
    count: int

    def add(self, other: Factors) -> None:
        """Adds other rows', or other uses' of the same elements."""
        self.inputs = self.inputs + other.inputs
        self.outputs = self.outputs + other.outputs
        self.count += other.count

    def add_to_each(self, found: list[Factors]) -> None:
        """Adds these to those of the same elements among others, or puts them there."""
        for each in found:
            if each.places.shape == self.places.shape and torch.equal(each.places, self.places):
                return each.add(self)
        found.append(self)
        return None

    @property
    def mean_inputs(self) -> Tensor:
        """The mean of a a^T."""
        return self.inputs / self.count


def factors_of(
    graph: RowWise,
    columns: Callable[[int, int], Tensor],
    count: int,
    keep: slice,
    among: Container[str],
) -> dict[str, list[Factors]]:
    """The factors of the params that have them, of some rows: weights of products, and biases,
    whose inputs are 1; by param, of parts that have no element in common.

    Args:
        graph: of the rows' outputs.
        columns: weights of the rows' results by their outputs, as for `RowWise.squares`.
        count: of a row's results.
        keep: which rows count.
        among: which params are asked for.
    """
    of_param = {
        name: own for name, own in graph.entries.items() if name in among and _has_factors(own)
    }
    total: dict[str, list[Factors]] = {name: [] for name in of_param}
    graph = RowWise(graph.outputs, of_param, graph.leaves)
    for start, found in enumerate(graph.gradients(columns, count, keep)):
        for name, own in of_param.items():
            for entry in own:
                for part in _parts(entry, found[entry.node], graph.leaves[name], keep):
                    each = part.factors
                    if start:  # more results of the same rows
                        each.inputs, each.count = torch.zeros_like(each.inputs), 0
                    each.add_to_each(total[name])
    return {name: found for name, found in total.items() if _covers(found, graph.leaves[name])}


def eigenvalues_of(
    graph: RowWise,
    columns: Callable[[int, int], Tensor],
    count: int,
    keep: slice,
    bases: Mapping[str, Sequence[Basis]],
) -> dict[str, list[Tensor]]:
    """The diagonal of the curvature in bases of its blocks, of some rows; by param, `[m, n]` for
    each block.  Arguments as for `factors_of`."""
    own = {name: graph.entries[name] for name in bases}
    graph = RowWise(graph.outputs, own, graph.leaves)
    total = {
        name: [each.left.new_zeros(each.places.shape) for each in bases[name]] for name in bases
    }
    for found in graph.gradients(columns, count, keep):
        for name, entries in own.items():
            leaf = graph.leaves[name]
            parts = [part for e in entries for part in _parts(e, found[e.node], leaf, keep)]
            for basis, sums in zip(bases[name], total[name], strict=True):
                sums += basis.squares([p for p in parts if torch.equal(p.places, basis.places)])
    return total


def _has_factors(entries: tuple[Entry, ...]) -> bool:
    return bool(entries) and all(
        _slope(entry) is not None and (isinstance(entry.use, Product) or _is_bias(entry))
        for entry in entries
    )


def _slope(entry: Entry) -> float | None:
    """The number that a param is multiplied by on its way, if it is but one."""
    slopes = entry.slope[entry.slope != 0].unique()
    return float(slopes) if len(slopes) == 1 else None


def _is_bias(entry: Entry) -> bool:
    """Whether a param is added to each row."""
    use = entry.use
    return isinstance(use, Elementwise) and use.is_shared and use.is_plain


def _covers(found: list[Factors], leaf: Tensor) -> bool:
    """Whether each element is in one block."""
    places = torch.cat([each.places.flatten() for each in found])
    return len(places) == leaf.numel() == len(places.unique()) and int(places.min()) == 0


def _parts(entry: Entry, gradients: Gradients, leaf: Tensor, keep: slice) -> Iterator[Part]:
    """One use's, by group of a grouped product."""
    use, slope = entry.use, _slope(entry)
    assert isinstance(use, Product | Elementwise)
    assert slope is not None
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    with torch.no_grad():
        each = slope * use.by_row(gradients.each)
        if isinstance(use, Product):
            outputs, inputs = each[:, :, keep].movedim(1, 0), use.inputs[:, keep]
        else:
            outputs, inputs = each[None, :, keep], each.new_ones(1, *each[0, keep, :, :1].shape)
        for places, a, g in zip(_places(entry, leaf), inputs, outputs, strict=True):
            yield Part(places, a.to(dtype), g.to(dtype))


def _as_it_is(values: Tensor) -> Tensor:
    return values


def _places(entry: Entry, leaf: Tensor) -> Tensor:
    """Where the elements of a use are in the flat param, `[groups, m, n]`."""
    use = entry.use
    if isinstance(use, Product):
        shape, as_used = use.weight_shape, use.as_used
    else:
        assert isinstance(use, Elementwise)
        shape = torch.Size((1, 1, use.as_used.numel()))
        as_used = partial(Tensor.reshape, shape=use.as_used)
    numbers = 1 + torch.arange(shape.numel(), device=leaf.device)
    slope = _slope(entry)
    assert slope is not None
    of_param = torch.zeros(leaf.numel(), dtype=torch.long)
    for place in range(_DIGITS):  # floats do not hold all integers
        digit = (numbers // _BASE**place % _BASE).to(leaf.dtype).reshape(shape)
        found = to_param(entry.edge, leaf, as_used(digit)) / slope
        of_param += _BASE**place * found.flatten().round().long().cpu()
    places = torch.full((shape.numel(),), -1)
    used = of_param > 0
    places[of_param[used] - 1] = torch.nonzero(used)[:, 0]
    return places.to(leaf.device).reshape(shape)
