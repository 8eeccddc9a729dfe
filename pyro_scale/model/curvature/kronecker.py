"""Kronecker factors of a curvature: K-FAC (Martens and Grosse 2015), of any model.

A row's gradient of a product's weight is a g^T, with a the row's input and g the gradient at its
output, so that the curvature of the weight is the sum of (a a^T) x (g g^T) over rows and results.
K-FAC takes the mean of the first times the sum of the second: exact for one row, and wherever the
two do not vary together, such as in a deep linear network with Gaussian noise.  A weight that each
row uses at several positions has them all for rows ("expand"; Eschenhagen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyro_scale.model.curvature.row_wise import Entry, RowWise, to_param
from pyro_scale.model.curvature.uses import Elementwise, Gradients, Product

_BASE = 2**12


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
    graph: RowWise, columns: Callable[[int, int], Tensor], count: int, keep: slice
) -> dict[str, list[Factors]]:
    """The factors of the params that have them, of some rows: weights of products, and biases,
    whose inputs are 1; by param, of parts that have no element in common.

    Args:
        graph: of the rows' outputs.
        columns: weights of the rows' results by their outputs, as for `RowWise.squares`.
        count: of a row's results.
        keep: which rows count.
    """
    of_param = {name: own for name, own in graph.entries.items() if _has_factors(own)}
    total: dict[str, list[Factors]] = {name: [] for name in of_param}
    graph = RowWise(graph.outputs, of_param, graph.leaves)
    for start, found in enumerate(graph.gradients(columns, count, keep)):
        for name, own in of_param.items():
            for entry in own:
                for each in _of_entry(entry, found[entry.node], graph.leaves[name], keep):
                    if start:  # more results of the same rows
                        each.inputs, each.count = torch.zeros_like(each.inputs), 0
                    each.add_to_each(total[name])
    return {name: found for name, found in total.items() if _covers(found, graph.leaves[name])}


def _has_factors(entries: tuple[Entry, ...]) -> bool:
    return bool(entries) and all(
        bool(((entry.slope == 1) | (entry.slope == 0)).all())
        and (isinstance(entry.use, Product) or _is_bias(entry))
        for entry in entries
    )


def _is_bias(entry: Entry) -> bool:
    """Whether a param is added to each row."""
    use = entry.use
    return isinstance(use, Elementwise) and use.is_shared and use.is_plain


def _covers(found: list[Factors], leaf: Tensor) -> bool:
    """Whether each element is in one block."""
    places = torch.cat([each.places.flatten() for each in found])
    return len(places) == leaf.numel() == len(places.unique())


def _of_entry(entry: Entry, gradients: Gradients, leaf: Tensor, keep: slice) -> Iterator[Factors]:
    """One use's, by group of a grouped product."""
    use = entry.use
    assert isinstance(use, Product | Elementwise)
    with torch.no_grad():
        each = use.by_row(gradients.each)
        if isinstance(use, Product):
            outputs, inputs = each[:, :, keep].movedim(1, 0), use.inputs[:, keep]
        else:
            outputs, inputs = each[None, :, keep], each.new_ones(1, *each[0, keep, :, :1].shape)
        groups = zip(_places(entry, leaf), inputs, outputs, strict=True)
        for places, of_inputs, of_outputs in groups:
            a, g = of_inputs.flatten(0, 1), of_outputs.flatten(0, 2)
            yield Factors(places, a.mT @ a, g.mT @ g, len(a))


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
    digits = [numbers % _BASE, numbers // _BASE]  # floats do not hold all integers
    low, high = (
        to_param(entry.edge, leaf, as_used(digit.to(leaf.dtype).reshape(shape))).flatten().long()
        for digit in digits
    )
    of_param = low + _BASE * high
    used = of_param > 0
    places = torch.empty(shape.numel(), dtype=torch.long, device=leaf.device)
    places[of_param[used] - 1] = torch.nonzero(used)[:, 0]
    return places.reshape(shape)
