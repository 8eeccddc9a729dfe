"""Kronecker factors of a curvature: K-FAC (Martens and Grosse 2015), of any model.

A row's gradient of a product's weight is a g^T, where a is the row's input and g the gradient at
its output.  So the weight's curvature is the sum of (a a^T) x (g g^T) over rows and results.  K-FAC
takes the mean of the first times the sum of the second.  This is exact for one row, and wherever
the two do not vary together, such as in a deep linear network with Gaussian noise.  If each row
uses a weight at several positions, all of them count as rows ("expand"; Eschenhagen et al. 2023).

In the basis of the factors' eigenvectors, the curvature's own diagonal needs no matrix, either: it
is the sum of the squares of the rows' gradients in that basis (EKFAC; George et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.curvature.graph import Node, to_param
from pyro_scale.curvature.row_wise import Entry, RowWise
from pyro_scale.curvature.uses import Elementwise, Gradients, Product

#: Places are encoded in digits of this base, which the shortest floats represent exactly, and the
#: number of digits.
_BASE, _DIGITS = 2**7, 5


class Part(NamedTuple):
    """The factors a and g of rows' gradients a g^T, for one operation that uses some of a param's
    elements.

    Attributes:
        places: indices of these elements in the flat param, [m, n].
        inputs: a, for B rows of data, each with T positions of a sequence or image, `[B, T, m]`.
        outputs: g, for each of C scalar results of a row (weighted sums of the row's outputs),
            `[C, B, T, n]`.
    """

    places: Tensor
    inputs: Tensor
    outputs: Tensor

    @property
    def factors(self) -> Factors:
        """The Kronecker factors of these elements: the sum of a a^T over rows and positions, the
        sum of g g^T over rows, positions and results."""
        a, g = self.inputs.flatten(0, 1), self.outputs.flatten(0, 2)
        return Factors(self.places, a.mT @ a, g.mT @ g, len(a))


class Basis(NamedTuple):
    """An orthonormal basis for some elements of a param, which form a matrix X [m, n]; the
    coordinates of X are left^T X right.

    Attributes:
        places: indices of the elements in the flat param, [m, n].
        left: orthonormal columns, [m, m].
        right: orthonormal columns, [n, n].
    """

    places: Tensor
    left: Tensor
    right: Tensor

    def squares(self, parts: Sequence[Part]) -> Tensor:
        """The coordinates of rows' gradients in the basis, squared and summed over rows of data and
        results, [m, n].

        A row's gradient of one result is the sum of a g^T over all parts and positions.
        """
        with torch.no_grad():
            inputs = torch.cat([part.inputs for part in parts], 1)
            outputs = torch.cat([part.outputs for part in parts], 2)
            inputs, outputs = inputs @ self.left.to(inputs), outputs @ self.right.to(outputs)
            product = Product(inputs[None], _identity, len(self.right), _identity)
            return product.squares(Gradients(outputs[:, None]))[0]


@dataclass
class Factors:
    """Kronecker factors of a param's curvature: sums over rows, for some elements of the param.

    Attributes:
        places: indices of the elements in the flat param, [m, n].
        inputs: the sum of a a^T, [m, m].
        outputs: the sum of g g^T, [n, n].
        count: the number of terms in the first sum.
    """

    places: Tensor
    inputs: Tensor
    outputs: Tensor
    count: int

    def add_to_each(self, others: list[Factors]) -> None:
        """Adds these factors to a list: in place to the item for the same elements of the param, or
        as a new item at the end if there is none. To sum factors over chunks of rows.
        """
        for other in others:
            if torch.equal(other.places, self.places):
                other.inputs = other.inputs + self.inputs
                other.outputs = other.outputs + self.outputs
                other.count += self.count
                return
        others.append(self)

    @property
    def mean_inputs(self) -> Tensor:
        """The mean of a a^T, [m, m], over rows of data and the places of a layer's input in a row
        (pixels, words), for the m inputs a of a layer at a place."""
        return self.inputs / self.count


def factors_of(
    graph: RowWise,
    columns: Callable[[int, int], Tensor],
    count: int,
    keep: slice,
    among: Container[str],
) -> dict[str, list[Factors]]:
    """The Kronecker factors of the curvature of a batch, for weights of products and for biases
    (whose inputs are 1).

    Args:
        graph: the autograd graph of the K outputs of each of a batch's B rows.
        columns: function (start, stop) -> weights of the outputs, `[stop - start, B, K]`; each
            weighted sum of a row's outputs is one result of the row, whose gradient is taken.
        count: number of results of a row.
        keep: the rows of the batch that are summed over.
        among: names of the params that may have factors.

    Returns:
        A dict from param to the factors of its blocks, which have no element in common and cover
        the param; without params that have no factors.
    """
    entries = {
        name: uses for name, uses in graph.entries.items() if name in among and _has_factors(uses)
    }
    graph = RowWise(graph.outputs, entries, graph.leaves)
    total: dict[str, list[Factors]] = {name: [] for name in entries}
    for number, gradients in enumerate(graph.gradients(columns, count, keep)):
        for name, uses in entries.items():
            for part in _parts(uses, gradients, graph.leaves[name], keep):
                factors = part.factors
                if number:  # more results of the same rows: their inputs have been added already
                    factors.inputs, factors.count = torch.zeros_like(factors.inputs), 0
                factors.add_to_each(total[name])
    return {name: parts for name, parts in total.items() if _covers(parts, graph.leaves[name])}


def eigenvalues_of(
    graph: RowWise,
    columns: Callable[[int, int], Tensor],
    count: int,
    keep: slice,
    bases: Mapping[str, Sequence[Basis]],
) -> dict[str, list[Tensor]]:
    """The diagonal of a batch's curvature in bases of its blocks: a dict from param to a tensor
    `[m, n]` for each of the param's bases.

    Args:
        graph: the autograd graph of the K outputs of each of a batch's B rows.
        columns: function (start, stop) -> weights of the outputs, `[stop - start, B, K]`; each
            weighted sum of a row's outputs is one result of the row, whose gradient is taken.
        count: number of results of a row.
        keep: the rows of the batch that are summed over.
        bases: a dict from param to the bases of its blocks.
    """
    entries = {name: graph.entries[name] for name in bases}
    graph = RowWise(graph.outputs, entries, graph.leaves)
    total = {
        name: [basis.left.new_zeros(basis.places.shape) for basis in bases[name]] for name in bases
    }
    for gradients in graph.gradients(columns, count, keep):
        for name, uses in entries.items():
            parts = list(_parts(uses, gradients, graph.leaves[name], keep))
            for basis, sums in zip(bases[name], total[name], strict=True):
                of_block = [part for part in parts if torch.equal(part.places, basis.places)]
                sums += basis.squares(of_block)
    return total


def _has_factors(entries: tuple[Entry, ...]) -> bool:
    return bool(entries) and all(
        _slope(entry) is not None and (isinstance(entry.use, Product) or _is_bias(entry))
        for entry in entries
    )


def _slope(entry: Entry) -> float | None:
    """The number by which all elements of a param are multiplied before an operation uses them;
    None if it differs among the elements.
    """
    slopes = entry.slope[entry.slope != 0].unique()
    return float(slopes) if len(slopes) == 1 else None


def _is_bias(entry: Entry) -> bool:
    """Whether an operation adds the param itself to every row of data, like a layer's bias: the
    same elements for all rows, not multiplied by anything.
    """
    use = entry.use
    return isinstance(use, Elementwise) and use.is_shared and use.is_plain


def _covers(factors: list[Factors], leaf: Tensor) -> bool:
    """Whether blocks of Kronecker factors cover a param: each element of `leaf` is in exactly one
    block.
    """
    places = torch.cat([block.places.flatten() for block in factors])
    return len(places) == leaf.numel() == len(places.unique()) and int(places.min()) == 0


def _parts(
    entries: Sequence[Entry], gradients: Mapping[Node, Gradients], leaf: Tensor, keep: slice
) -> Iterator[Part]:
    """Yields the factors of which rows' gradients of one param are products (layer inputs, and
    gradients at layer outputs): a part for each operation that uses the param, and for each group
    of a grouped convolution.

    Args:
        entries: the operations that use the param.
        gradients: gradients at the operations' outputs.
        leaf: the param.
        keep: the rows of the batch whose factors are wanted.
    """
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    for entry in entries:
        use, slope = entry.use, _slope(entry)
        assert isinstance(use, Product | Elementwise)
        assert slope is not None
        with torch.no_grad():
            by_row = slope * use.by_row(gradients[entry.node].values)
            if isinstance(use, Product):
                outputs, inputs = by_row[:, :, keep].movedim(1, 0), use.inputs[:, keep]
                shape, as_used = use.weight_shape, use.as_used
            else:
                outputs = by_row[None, :, keep]
                inputs = by_row.new_ones(1, *by_row[0, keep, :, :1].shape)
                shape = torch.Size((1, 1, use.as_used.numel()))
                as_used = partial(Tensor.reshape, shape=use.as_used)
            for places, a, g in zip(
                _places(entry, leaf, shape, as_used), inputs, outputs, strict=True
            ):
                yield Part(places, a.to(dtype), g.to(dtype))


def _places(
    entry: Entry, leaf: Tensor, shape: torch.Size, as_used: Callable[[Tensor], Tensor]
) -> Tensor:
    """The index, in the flattened param, of each element of an operation's weight,
    `[groups, m, n]`; -1 for elements of the weight that are not from the param.

    Args:
        entry: the operation's use of the param as a weight (a matrix product, a convolution, ...).
        leaf: the param.
        shape: `[groups, m, n]`: groups of a convolution (else 1), inputs, outputs.
        as_used: function that reshapes a tensor of this shape to the weight's shape in the
            operation.
    """
    slope = _slope(entry)
    assert slope is not None
    numbers = 1 + torch.arange(shape.numel(), device=leaf.device)
    of_param = torch.zeros(leaf.numel(), dtype=torch.long)
    for place in range(_DIGITS):  # floats do not hold all integers
        digit = (numbers // _BASE**place % _BASE).to(leaf.dtype).reshape(shape)
        numbered = to_param(entry.edge, leaf, as_used(digit))
        of_param += _BASE**place * (numbered / slope).flatten().round().long().cpu()
    places = torch.full((shape.numel(),), -1)
    used = of_param > 0
    places[of_param[used] - 1] = torch.nonzero(used)[:, 0]
    return places.to(leaf.device).reshape(shape)


def _identity(values: Tensor) -> Tensor:
    return values
