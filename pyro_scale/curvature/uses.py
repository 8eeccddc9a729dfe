"""How an operation uses a param, where each row of data has its own part of the operation's output.

The gradient of a row then needs no Jacobian: for a matrix product it is the outer product of the
row's input and the gradient at its output.  A row may pass through a product several times, as
positions of a sequence or an image do; its gradient is the sum over them.

Shapes below: B rows of data, T positions of a sequence or an image in each row, and C results
(scalar functions of a row's outputs) whose gradients are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

#: Numbers of rows' gradients in memory at once.
_BLOCK_NUMBERS = 2**22


class Rows(NamedTuple):
    """The dimension of an operation's output that holds the rows of data.

    Attributes:
        axis: the dimension of the output that holds the rows, of size B * T for T positions (of a
            sequence or an image) in each row.
        num_rows: B, the number of rows of data.
        outer: whether a row's T positions are contiguous along the axis, as in a flattened
            `[B, T]`; False for a flattened `[T, B]`.
    """

    axis: int
    num_rows: int
    outer: bool

    def split(self, values: Tensor, lead: int = 0) -> Tensor:
        """A tensor of the output's shape, reshaped so that rows come first: `[B, T, ...]` for B
        rows of data and T positions a row; the other dimensions keep their order.

        Args:
            values: the tensor, with `lead` extra dimensions before those of the output.
            lead: the number of extra dimensions, which stay in front.
        """
        axis = self.axis + lead
        positions = values.shape[axis] // self.num_rows
        shape = (self.num_rows, positions) if self.outer else (positions, self.num_rows)
        places = (axis, axis + 1) if self.outer else (axis + 1, axis)
        return values.unflatten(axis, shape).movedim(places, (lead, lead + 1))

    def times(self, weights: Tensor, values: Tensor) -> Tensor:
        """A tensor of the output's shape with every row multiplied by the row's weight, for each
        of C sets of weights `[C, B]`: `[C, *output shape]`."""
        positions = values.shape[self.axis] // self.num_rows
        repeated = (
            weights.repeat_interleave(positions, 1) if self.outer else weights.repeat(1, positions)
        )
        others = (1,) * (values.dim() - self.axis - 1)
        return repeated.reshape(len(weights), *(1,) * self.axis, -1, *others) * values


def find_rows(plain: Tensor, weighted: Tensor, weights: Tensor) -> Rows | None:
    """Finds the dimension of an operation's output that holds the rows of data: the one along which
    gradients scale with the weights that the rows had in the sum that was differentiated. None if
    no dimension does.

    Args:
        plain: the gradient, at the operation's output, of the sum of all rows' outputs.
        weighted: the gradients of P weighted sums of all rows' outputs, `[P, *shape of plain]`.
        weights: the weight of each row in these P sums, `[P, B]`; no two rows have the same P
            weights.
    """
    count, numbers = weights.shape[1], torch.finfo(plain.dtype)
    rounding = numbers.tiny * weights  # of gradients so small that they have few digits
    axes = [axis for axis, size in enumerate(plain.shape) if size and size % count == 0]
    for axis in sorted(axes, key=lambda axis: plain.shape[axis] != count):
        for outer in (True, False):
            rows = Rows(axis, count, outer)
            expected = rows.split(plain).flatten(1) * weights[..., None]
            apart = (rows.split(weighted, 1).flatten(2) - expected).abs().amax(2)
            if bool((apart <= numbers.eps**0.5 * expected.abs().amax(2) + rounding).all()):
                return rows
    return None


@dataclass(frozen=True)
class Gradients:
    """Gradients of C results of all rows of data with respect to an operation's output.

    Attributes:
        values: the gradients, `[C, *shape of the operation's output]`.
    """

    values: Tensor

    @cached_property
    def squares(self) -> Tensor:
        """The squares of the gradients, summed over the C results: a tensor of the shape of the
        operation's output.
        """
        total = torch.zeros_like(self.values[0])
        for result in self.values:
            total.addcmul_(result, result)
        return total


@dataclass(frozen=True)
class Product:
    """A param that is the weight of a product, such as a linear layer's or a convolution's: out =
    inputs @ weight.

    Attributes:
        inputs: the inputs, `[G, B, T, in]`: G products side by side, such as a convolution's
            groups, B rows of data, T positions of a sequence or an image in each row.
        by_row: function that reshapes gradients at the operation's output, `[C, ...]`, to
            `[C, G, B, T, out]`.
        num_outputs: the size of `out`.
        as_used: function that reshapes a tensor `[G, in, out]` to the shape that the weight has in
            the operation.
    """

    inputs: Tensor
    by_row: Callable[[Tensor], Tensor]
    num_outputs: int
    as_used: Callable[[Tensor], Tensor]

    @property
    def weight_shape(self) -> torch.Size:
        """The shape `[G, in, out]` of the weight as G matrices, for G products side by side (such
        as a convolution's groups).
        """
        return torch.Size((len(self.inputs), self.inputs.shape[-1], self.num_outputs))

    def squares(self, gradients: Gradients) -> Tensor:
        """The squares of each row's gradients with respect to the weight, summed over rows of data:
        element by element, in the shape that the weight has in the operation.

        Args:
            gradients: gradients of C scalar results of each row, at the operation's output; squares
                are summed over these results, too.
        """
        if self.inputs.shape[2] == 1:
            squares = self.by_row(gradients.squares[None])[0, :, :, 0]
            return self.as_used(self.inputs[:, :, 0].square().mT @ squares)
        outputs = self.by_row(gradients.values)
        size = max(1, _BLOCK_NUMBERS // (outputs[:, :, 0, 0].numel() * self.inputs.shape[-1]))
        parts = zip(self.inputs.split(size, 1), outputs.split(size, 2), strict=True)
        of_rows = (torch.einsum("gbti,cgbto->cgbio", a, g) for a, g in parts)
        return self.as_used(sum((row.square().sum((0, 2)) for row in of_rows), torch.zeros(())))


@dataclass(frozen=True)
class Lookup:
    """A param that is a table of which each row of data reads T entries by index: an embedding, or
    effects of groups.

    Attributes:
        places: the indices that each row reads along the table's first dimension, `[B, T]`.
        by_row: function that reshapes gradients at the operation's output, `[C, ...]`, to
            `[C, B, T, *shape of an entry]`.
        shape: the table's shape.
    """

    places: Tensor
    by_row: Callable[[Tensor], Tensor]
    shape: torch.Size

    def squares(self, gradients: Gradients) -> Tensor:
        """The squares of each row's gradients with respect to the table, summed over rows of data:
        element by element, in the table's shape; 0 for entries that no row reads.

        Args:
            gradients: gradients of C scalar results of each row, at the operation's output; squares
                are summed over these results, too.
        """
        by_row = self.by_row(gradients.values)
        count, size = len(self.places), self.shape[0]
        of_rows = torch.arange(count, device=by_row.device)[:, None] * size + self.places
        unique, where = of_rows.unique(return_inverse=True)  # a row may read a place twice
        summed = by_row.new_zeros(len(by_row), len(unique), *by_row.shape[3:])
        summed.index_add_(1, where.flatten(), by_row.flatten(1, 2))
        total = by_row.new_zeros(self.shape)
        return total.index_add_(0, unique % size, summed.square().sum(0))


@dataclass(frozen=True)
class Elementwise:
    """A param that is an operand of a sum, difference, product or quotient, element by element,
    where the other operand or the output has rows of data.

    Attributes:
        slope: the derivative of the output with respect to the param, element by element; a
            tensor that broadcasts to the output's shape, or a number.
        rows: the dimension of the output that holds the rows of data.
        shape: the param's shape with as many dimensions as the output (ones in front).
        as_used: the param's shape as the operation takes it.
        is_bias: whether the param is a layer's bias, for which `by_row` keeps the T positions
            apart, as for the layer's weight.
    """

    slope: Tensor | float
    rows: Rows
    shape: torch.Size
    as_used: torch.Size
    is_bias: bool = False

    def squares(self, gradients: Gradients) -> Tensor:
        """The squares of each row's gradients with respect to the param, summed over rows of data:
        element by element, in the shape that the param has in the operation.

        Args:
            gradients: gradients of C scalar results of each row, at the operation's output; squares
                are summed over these results, too.
        """
        if not self.is_shared:  # every place belongs to one row
            by_row = self.rows.split(gradients.values * self.slope, 1)
            broadcast = [3 + place for place, size in enumerate(self._others) if size == 1]
            sums = by_row.sum(broadcast, keepdim=True) if broadcast else by_row
            squares = sums.square().sum(0)
            places = squares if self.rows.outer else squares.transpose(0, 1)
            return places.flatten(0, 1).movedim(0, self.rows.axis).reshape(self.as_used)
        row_size = gradients.values[0].numel() // self.rows.num_rows
        if row_size == math.prod(self._others) and not isinstance(self.slope, Tensor):
            squares = self._by_row(gradients.squares[None]).sum((0, 1, 2)) * self.slope**2
        else:
            sums = self._by_row(gradients.values * self.slope).sum(2)
            squares = sums.square().sum((0, 1))
        return squares.reshape(self.as_used)

    @property
    def is_plain(self) -> bool:
        """Whether the operation adds the param without multiplying it by anything: the slope
        (derivative of the output with respect to the param) is the number 1, as for a layer's bias.
        """
        return not isinstance(self.slope, Tensor) and self.slope == 1

    @property
    def is_shared(self) -> bool:
        """Whether all rows of data use the same elements of the param, as of a layer's bias; False
        if each row has elements of its own, as of a local effect.
        """
        return self.shape[self.rows.axis] == 1

    def by_row(self, gradients: Tensor) -> Tensor:
        """The gradients of C scalar results of each row of data with respect to a param that all
        rows share, such as a layer's bias: `[C, B, T, n]`, for n elements of the param and B rows.

        For a layer's bias, T is the number of positions a row, because K-FAC treats positions as
        rows of their own.  Otherwise T is 1: gradients are summed over positions.

        Args:
            gradients: the gradients at the operation's output, `[C, *output shape]`.
        """
        by_row = self._by_row(gradients * self.slope)
        return by_row if self.is_bias else by_row.sum(2, keepdim=True)

    def _by_row(self, values: Tensor) -> Tensor:
        by_row = self.rows.split(values, 1)  # [C, B, T, others]
        of_elements = [3 + place for place, length in enumerate(self._others) if length > 1]
        of_positions = [place for place in range(3, by_row.dim()) if place not in of_elements]
        ordered = by_row.permute(0, 1, 2, *of_positions, *of_elements)
        return ordered.reshape(*by_row.shape[:2], -1, math.prod(self._others))

    @property
    def _others(self) -> list[int]:
        """A list of the sizes of the param's dimensions, broadcast dimensions (size 1) included,
        without the dimension that holds the rows of data.
        """
        return [size for axis, size in enumerate(self.shape) if axis != self.rows.axis]


#: How an operation uses a param: as the weight of a product, as a table, or element by element.
Use: TypeAlias = Product | Lookup | Elementwise
