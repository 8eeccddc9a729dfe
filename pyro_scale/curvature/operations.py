"""Functions that read from autograd's graph how an operation uses an operand (the `Use`): as the
weight of a product, as a table of which entries are read, or element by element.

Each function below reads one kind of node. The use follows from what the node has saved of its
operands, in attributes `node._saved_*` (see PyTorch's notes on autograd mechanics).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.curvature.graph import Node
from pyro_scale.curvature.uses import Elementwise, Lookup, Product, Rows, Use


class Operand(NamedTuple):
    """An operand of an operation in autograd's graph.

    Attributes:
        node: the operation's node.
        number: the operand's number among the operation's operands, from 0.
        shape: the operand's shape.
        output: the shape of the operation's output.
        rows: the dimension of the output that holds the rows of data.
    """

    node: Node
    number: int
    shape: torch.Size
    output: torch.Size
    rows: Rows


def is_readable(node: Node) -> bool:
    """Whether an operation of autograd's graph is of a kind that `use_of` understands, such as a
    matrix product.
    """
    return node.name() in _READERS


def use_of(operand: Operand) -> Use | None:
    """A description of how an operation uses one of its operands: as the weight of a product
    (`Product`), as a table of which entries are read (`Lookup`), or element by element
    (`Elementwise`). None if the operation is not supported, or the tensors that its node has saved
    cannot be read.
    """
    read = _READERS.get(operand.node.name())
    return read(operand) if read is not None and _has_saved(operand.node) else None


def _has_saved(node: Node) -> bool:
    """Whether the tensors that a node has saved can be read: they cannot if they have been
    overwritten, or are recomputed, as with activation checkpointing."""
    try:
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
    except RuntimeError:
        return False
    return True


def _product(operand: Operand) -> Use | None:
    """How a matrix product `[M, K] @ [K, N]` or `[G, M, K] @ [G, K, N]` uses an operand as the
    weight: a `Product`; None if the other matrix does not hold the rows of data.
    """
    is_left = operand.number == 0
    other = operand.node._saved_mat2 if is_left else operand.node._saved_self
    return _product_with(other, operand, is_left)


def _product_and_sum(operand: Operand) -> Use | None:
    """How `beta * bias + alpha * left @ right` (`torch.addmm`) uses an operand: a `Product` for a
    weight, an `Elementwise` for the bias; None for a weight if alpha is not 1.
    """
    node = operand.node
    if operand.number == 0:
        is_bias = operand.shape[-1:] == operand.output[-1:]
        return _broadcast(float(node._saved_beta), operand, is_bias=is_bias)
    if node._saved_alpha != 1:
        return None
    is_left = operand.number == 1
    return _product_with(node._saved_mat2 if is_left else node._saved_mat1, operand, is_left)


def _product_with(other: Tensor | None, operand: Operand, is_left: bool) -> Use | None:
    """How a product with another matrix uses a matrix as the weight: a `Product`; None if the other
    matrix does not hold the rows of data in its outer dimension.

    Args:
        other: the other matrix, as the node has saved it; None if it has not.
        operand: the weight.
        is_left: whether the weight is the left one of the two.
    """
    rows = operand.rows
    if other is None or rows.axis != other.dim() - (1 if is_left else 2):
        return None
    is_batched, group = other.dim() == 3, rows._replace(axis=1)

    def grouped(values: Tensor) -> Tensor:
        return values if is_batched else values.unsqueeze(-3)

    def by_row(gradients: Tensor) -> Tensor:
        outputs = grouped(gradients)
        return group.split(outputs.mT if is_left else outputs, 1).movedim(3, 1)

    def as_used(of_weight: Tensor) -> Tensor:
        turned = of_weight.mT if is_left else of_weight
        return turned if is_batched else turned[0]

    inputs = grouped(other.mT if is_left else other)
    num_outputs = operand.shape[-2 if is_left else -1]
    return Product(group.split(inputs).movedim(2, 0), by_row, num_outputs, as_used)


def _product_with_vector(operand: Operand) -> Use | None:
    """How `matrix @ vector` uses the vector as the weight, with the matrix's rows as rows of data:
    a `Product`; None if the operand is the matrix.
    """
    if operand.number == 0:
        return None
    rows = operand.rows
    return Product(
        rows.split(operand.node._saved_self)[None],
        lambda gradients: rows.split(gradients, 1)[:, None, ..., None],
        1,
        lambda of_weight: of_weight[0, :, 0],
    )


def _convolution(operand: Operand) -> Use | None:
    """How the output of a convolution in one or two dimensions depends on its weight or its bias,
    from which the gradients of single rows follow: as a matrix `Product` or `Elementwise`
    multiplication. None for its input, for a transposed convolution, or if the output's first
    dimension is not that of the rows of data.
    """
    node, _, shape, output, rows = operand
    if rows.axis != 0 or output[0] != rows.num_rows:
        return None
    if operand.number == 2:
        aligned = torch.Size((*shape, *(1,) * (len(output) - 2)))
        return _broadcast(1.0, operand._replace(shape=aligned), shape, is_bias=True)
    if operand.number != 1 or node._saved_transposed or len(shape) not in (3, 4):
        return None
    groups, lift = node._saved_groups, len(shape) == 3  # sequences are images of height 1
    settings = [node._saved_dilation, node._saved_padding, node._saved_stride]
    dilation, padding, stride = (
        (one, *values) if lift else tuple(values)
        for one, values in zip((1, 0, 1), settings, strict=True)
    )
    images, window = node._saved_input, tuple(shape[2:])
    patches = torch.nn.functional.unfold(
        images[:, :, None] if lift else images,
        (1, *window) if lift else window,
        dilation,
        padding,
        stride,
    )  # [B, channels * window, T]
    inputs = patches.unflatten(1, (groups, -1)).permute(1, 0, 3, 2)

    def by_row(gradients: Tensor) -> Tensor:
        return gradients.flatten(3).unflatten(2, (groups, -1)).permute(0, 2, 1, 4, 3)

    return Product(
        inputs, by_row, shape[0] // groups, lambda of_weight: of_weight.mT.reshape(shape)
    )


def _embedding(operand: Operand) -> Use | None:
    node = operand.node
    if node._saved_scale_grad_by_freq or node._saved_padding_idx < operand.shape[0]:
        return None
    return _lookup(node._saved_indices, operand)


def _index(operand: Operand) -> Use | None:
    first, *others = operand.node._saved_indices
    if first is None or first.dtype == torch.bool or any(index is not None for index in others):
        return None
    return _lookup(torch.where(first < 0, first + operand.shape[0], first), operand)


def _index_select(operand: Operand) -> Use | None:
    if operand.node._saved_dim != 0 or not operand.shape:
        return None
    return _lookup(operand.node._saved_index, operand)


def _lookup(indices: Tensor, operand: Operand) -> Use | None:
    rank, rows = indices.dim(), operand.rows
    if rows.axis >= rank:
        return None

    def by_row(gradients: Tensor) -> Tensor:
        # from [C, B, T, other indices, what the table holds]
        return rows.split(gradients, 1).flatten(2, rank + 1)

    return Lookup(rows.split(indices).flatten(1), by_row, operand.shape)


def _elementwise(operand: Operand) -> Use | None:
    """How a sum, a difference, a product, a quotient or `expand` uses an operand element by
    element: an `Elementwise`; None for a divisor.
    """
    node, is_second = operand.node, operand.number == 1
    slope: Tensor | float | None = 1.0
    match node.name():
        case "AddBackward0" if is_second:
            slope = float(node._saved_alpha)
        case "SubBackward0" if is_second:
            slope = -float(node._saved_alpha)
        case "MulBackward0":
            slope = node._saved_self if is_second else node._saved_other
        case "DivBackward0":
            slope = None if is_second else 1 / node._saved_other
    return None if slope is None else _broadcast(slope, operand)


def _broadcast(
    slope: Tensor | float,
    operand: Operand,
    as_used: torch.Size | None = None,
    is_bias: bool = False,
) -> Use:
    shape, output = operand.shape, operand.output
    aligned = torch.Size((1,) * (len(output) - len(shape)) + tuple(shape))
    return Elementwise(slope, operand.rows, aligned, as_used or shape, is_bias)


_READERS: dict[str, Callable[[Operand], Use | None]] = {
    "MmBackward0": _product,
    "BmmBackward0": _product,
    "AddmmBackward0": _product_and_sum,
    "MvBackward0": _product_with_vector,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "IndexBackward0": _index,
    "IndexSelectBackward0": _index_select,
    "AddBackward0": _elementwise,
    "SubBackward0": _elementwise,
    "MulBackward0": _elementwise,
    "DivBackward0": _elementwise,
    "ExpandBackward0": _elementwise,
}
