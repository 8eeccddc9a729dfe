"""How a param enters an operation of which each row has its own part.

Of such an operation, a row's gradient needs no Jacobian: for a matrix product it is the outer
product of the row's input and of the gradient at its output.  A row may pass through a product
several times, as the positions of a sequence or of an image do; its gradient is the sum over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

#: A node of autograd's graph.
Node: TypeAlias = Any

#: Numbers of the rows' own gradients that are held at once.
_BLOCK_NUMBERS = 2**22


class Rows(NamedTuple):
    """Where the rows of an operation's output are.

    Attributes:
        axis: in which of its dimensions.
        num_rows: how many.
        outer: whether a row's places along the axis are side by side.
    """

    axis: int
    num_rows: int
    outer: bool

    def split(self, values: Tensor, lead: int = 0) -> Tensor:
        """Values `[*lead, ..., B * T, ...]` of the output's shape as `[*lead, B, T, ...]`,
        the other dimensions in their order."""
        axis = self.axis + lead
        positions = values.shape[axis] // self.num_rows
        shape = (self.num_rows, positions) if self.outer else (positions, self.num_rows)
        places = (axis, axis + 1) if self.outer else (axis + 1, axis)
        return values.unflatten(axis, shape).movedim(places, (lead, lead + 1))

    def times(self, weights: Tensor, values: Tensor) -> Tensor:
        """Values of the output's shape times weights of the rows, `[C, B]`: `[C, ...]`."""
        positions = values.shape[self.axis] // self.num_rows
        each = (
            weights.repeat_interleave(positions, 1) if self.outer else weights.repeat(1, positions)
        )
        others = (1,) * (values.dim() - self.axis - 1)
        return each.reshape(len(weights), *(1,) * self.axis, -1, *others) * values


def find_rows(plain: Tensor, weighted: Tensor, weights: Tensor) -> Rows | None:
    """Where an operation's rows are: in the dimension along which gradients at its output go with
    the weights of the rows' results.

    Args:
        plain: the gradients of some results of all rows.
        weighted: those of the results times weights, `[P, ...]`.
        weights: of rows, `[P, B]`, by which all are told apart.
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
    """The gradients at an operation's output of each of C results of all rows.

    Attributes:
        each: `[C, ...]`, the rest in the output's shape.
    """

    each: Tensor

    @cached_property
    def squares(self) -> Tensor:
        """Added up over the results, in the output's shape."""
        total = torch.zeros_like(self.each[0])
        for one in self.each:
            total.addcmul_(one, one)
        return total


class Use(Protocol):
    """A param's use in an operation."""

    def squares(self, gradients: Gradients) -> Tensor:
        """The squares of the rows' gradients, added up, in the shape that the param has there."""
        ...


@dataclass(frozen=True)
class Product:
    """The weight of a product, such as a layer's or a convolution's: out = inputs @ weight.

    Attributes:
        inputs: `[G, B, T, in]`, with G products side by side, such as a convolution's groups, and T
            positions a row.
        by_row: takes gradients at the output, `[C, ...]`, to `[C, G, B, T, out]`.
        num_outputs: out.
        as_used: takes `[G, in, out]` to the shape that the weight has in the operation.
    """

    inputs: Tensor
    by_row: Callable[[Tensor], Tensor]
    num_outputs: int
    as_used: Callable[[Tensor], Tensor]

    @property
    def weight_shape(self) -> torch.Size:
        """`[G, in, out]`."""
        return torch.Size((len(self.inputs), self.inputs.shape[-1], self.num_outputs))

    def squares(self, gradients: Gradients) -> Tensor:
        if self.inputs.shape[2] == 1:
            squares = self.by_row(gradients.squares[None])[0, :, :, 0]
            return self.as_used(self.inputs[:, :, 0].square().mT @ squares)
        each = self.by_row(gradients.each)
        size = max(1, _BLOCK_NUMBERS // (each[:, :, 0, 0].numel() * self.inputs.shape[-1]))
        parts = zip(self.inputs.split(size, 1), each.split(size, 2), strict=True)
        of_rows = (torch.einsum("gbti,cgbto->cgbio", a, g) for a, g in parts)
        return self.as_used(sum((row.square().sum((0, 2)) for row in of_rows), torch.zeros(())))


@dataclass(frozen=True)
class Lookup:
    """A table, of which each row reads some places: an embedding, or effects of groups.

    Attributes:
        places: which, `[B, T]`.
        by_row: takes gradients at the output, `[C, ...]`, to `[C, B, T, ...]`.
        shape: the table's.
    """

    places: Tensor
    by_row: Callable[[Tensor], Tensor]
    shape: torch.Size

    def squares(self, gradients: Gradients) -> Tensor:
        each = self.by_row(gradients.each)
        count, size = len(self.places), self.shape[0]
        of_rows = torch.arange(count, device=each.device)[:, None] * size + self.places
        found, where = of_rows.unique(return_inverse=True)  # a row may read a place twice
        summed = each.new_zeros(len(each), len(found), *each.shape[3:])
        summed.index_add_(1, where.flatten(), each.flatten(1, 2))
        total = each.new_zeros(self.shape)
        return total.index_add_(0, found % size, summed.square().sum(0))


@dataclass(frozen=True)
class Elementwise:
    """An operation element by element, in which the param is broadcast over the rows.

    Attributes:
        slope: of the output's elements by the param's; it broadcasts.
        rows: where they are.
        shape: the param's there, with as many dimensions as the output.
        as_used: the same without those that it lacks.
        is_bias: whether it is a layer's, whose positions a row's are as for the layer's weight.
    """

    slope: Tensor | float
    rows: Rows
    shape: torch.Size
    as_used: torch.Size
    is_bias: bool = False

    def squares(self, gradients: Gradients) -> Tensor:
        if not self.is_shared:  # each place is one row's own
            each = self.rows.split(gradients.each * self.slope, 1)
            broadcast = [3 + place for place, size in enumerate(self._others) if size == 1]
            sums = each.sum(broadcast, keepdim=True) if broadcast else each
            squares = sums.square().sum(0)
            places = squares if self.rows.outer else squares.transpose(0, 1)
            return places.flatten(0, 1).movedim(0, self.rows.axis).reshape(self.as_used)
        if self._positions(gradients.each) == 1 and not isinstance(self.slope, Tensor):
            squares = self._by_row(gradients.squares[None]).sum((0, 1, 2)) * self.slope**2
        else:
            sums = self._by_row(gradients.each * self.slope).sum(2)
            squares = sums.square().sum((0, 1))
        return squares.reshape(self.as_used)

    @property
    def is_plain(self) -> bool:
        """Whether the param is added as it is."""
        return not isinstance(self.slope, Tensor) and self.slope == 1

    @property
    def is_shared(self) -> bool:
        """Whether all rows have the same elements."""
        return self.shape[self.rows.axis] == 1

    def by_row(self, gradients: Tensor) -> Tensor:
        """Gradients at the output, `[C, ...]`, as `[C, B, T, n]` by elements that rows share; T is
        1 but for a layer's bias, as sums over positions are exact."""
        each = self._by_row(gradients * self.slope)
        return each if self.is_bias else each.sum(2, keepdim=True)

    def _by_row(self, values: Tensor) -> Tensor:
        each = self.rows.split(values, 1)  # [C, B, T, others]
        size = math.prod(self._others)
        of_elements = [3 + place for place, length in enumerate(self._others) if length > 1]
        of_positions = [place for place in range(3, each.dim()) if place not in of_elements]
        ordered = each.permute(0, 1, 2, *of_positions, *of_elements)
        return ordered.reshape(*each.shape[:2], -1, size)

    def _positions(self, gradients: Tensor) -> int:
        return gradients[0].numel() // self.rows.num_rows // math.prod(self._others)

    @property
    def _others(self) -> list[int]:
        """Sizes of the param's dimensions but the rows'."""
        return [size for axis, size in enumerate(self.shape) if axis != self.rows.axis]
