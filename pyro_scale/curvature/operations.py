"""Operations of autograd's graph as uses of their operands.

Each function below is one kind of node: what it has saved of its operands, as PyTorch names it
(`node._saved_*`; see its notes on autograd mechanics), says what the use is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_scale.curvature.uses import Elementwise, Lookup, Node, Product, Rows, Use


def use_of(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    """The use of a node's operand; None of an operation that is not known.

    Args:
        node: of autograd's graph.
        operand: which of the operation's arguments.
        shape: the operand's.
        output: the shape of the operation's output.
        rows: where its rows are.
    """
    make = _MAKERS.get(node.name())
    if make is None or not _has_saved(node):
        return None
    return make(node, operand, shape, output, rows)


def _has_saved(node: Node) -> bool:
    """Whether what a node has saved can be read: it was not written to since, nor is it computed
    anew, as checkpoints of activations are."""
    try:
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
    except RuntimeError:
        return False
    return True


def is_expansion(node: Node) -> bool:
    """Whether a node repeats a tensor."""
    return node.name() == "ExpandBackward0"


def reads_data(node: Node) -> bool:
    """Whether a node takes a tensor that is no param's, but for a number; or reads places of a
    table, which are none either."""
    if node.name() in _LOOKUPS:
        return True
    others = [place for place, (source, _) in enumerate(node.next_functions) if source is None]
    if node.name() in ("MulBackward0", "DivBackward0") and others:
        factor = node._saved_other if others == [1] else node._saved_self
        return factor is None or factor.dim() > 0
    return bool(others)


def is_elementwise(node: Node) -> bool:
    """Whether a node combines its operands element by element."""
    return node.name() in _ELEMENTWISE


def _matrix_product(
    left: Tensor | None, right: Tensor | None, is_left: bool, shape: torch.Size, rows: Rows
) -> Use | None:
    """Of [M, K] @ [K, N], or [G, M, K] @ [G, K, N], given the weight's shape and the other factor:
    the rows are among M of a weight on the right, among N of one on the left."""
    other = right if is_left else left
    if other is None or rows.axis != other.dim() - (1 if is_left else 2):
        return None
    batched, group = other.dim() == 3, rows._replace(axis=1)

    def grouped(values: Tensor) -> Tensor:
        return values if batched else values.unsqueeze(-3)

    def by_row(gradients: Tensor) -> Tensor:
        each = grouped(gradients)
        return group.split(each.mT if is_left else each, 1).movedim(3, 1)

    def as_used(of_weight: Tensor) -> Tensor:
        turned = of_weight.mT if is_left else of_weight
        return turned if batched else turned[0]

    inputs = grouped(other.mT if is_left else other)
    num_outputs = shape[-2 if is_left else -1]
    return Product(group.split(inputs).movedim(2, 0), by_row, num_outputs, as_used)


def _product(node: Node, operand: int, shape: torch.Size, _: torch.Size, rows: Rows) -> Use | None:
    return _matrix_product(
        None if operand == 0 else node._saved_self,
        None if operand == 1 else node._saved_mat2,
        operand == 0,
        shape,
        rows,
    )


def _product_and_sum(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    if operand == 0:
        is_bias = shape[-1:] == output[-1:]
        return _broadcast(float(node._saved_beta), shape, output, rows, is_bias=is_bias)
    if node._saved_alpha != 1:
        return None
    return _matrix_product(
        None if operand == 1 else node._saved_mat1,
        None if operand == 2 else node._saved_mat2,
        operand == 1,
        shape,
        rows,
    )


def _product_with_vector(
    node: Node, operand: int, shape: torch.Size, _: torch.Size, rows: Rows
) -> Use | None:
    if operand == 0:
        return None
    return Product(
        rows.split(node._saved_self)[None],
        lambda gradients: rows.split(gradients, 1)[:, None, ..., None],
        1,
        lambda of_weight: of_weight[0, :, 0],
    )


def _convolution(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    if rows.axis != 0 or output[0] != rows.num_rows:
        return None
    if operand == 2:
        aligned = torch.Size((*shape, *(1,) * (len(output) - 2)))
        return _broadcast(1.0, aligned, output, rows, shape, is_bias=True)
    if operand != 1 or node._saved_transposed or len(shape) not in (3, 4):
        return None
    groups, lift = node._saved_groups, len(shape) == 3  # images of height 1
    settings = [node._saved_dilation, node._saved_padding, node._saved_stride]
    neutral = (1, 0, 1)
    dilation, padding, stride = (
        (one, *values) if lift else tuple(values)
        for one, values in zip(neutral, settings, strict=True)
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


def _embedding(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    if node._saved_scale_grad_by_freq or node._saved_padding_idx < shape[0]:
        return None
    return _lookup(node._saved_indices, shape, rows)


def _index(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    first, *others = node._saved_indices
    if first is None or first.dtype == torch.bool or any(each is not None for each in others):
        return None
    return _lookup(torch.where(first < 0, first + shape[0], first), shape, rows)


def _index_select(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    if node._saved_dim != 0 or not shape:
        return None
    return _lookup(node._saved_index, shape, rows)


def _lookup(indices: Tensor, shape: torch.Size, rows: Rows) -> Use | None:
    if rows.axis >= indices.dim():
        return None
    rank = indices.dim()

    def by_row(gradients: Tensor) -> Tensor:
        each = rows.split(gradients, 1)  # [C, B, T, other indices, what the table holds]
        return each.flatten(2, rank + 1)

    return Lookup(rows.split(indices).flatten(1), by_row, shape)


def _sum(node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows) -> Use | None:
    return _broadcast(float(node._saved_alpha) if operand else 1.0, shape, output, rows)


def _difference(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    return _broadcast(-float(node._saved_alpha) if operand else 1.0, shape, output, rows)


def _times(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    return _broadcast(node._saved_self if operand else node._saved_other, shape, output, rows)


def _over(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    if operand:
        return None
    return _broadcast(1 / node._saved_other, shape, output, rows)


def _expand(
    node: Node, operand: int, shape: torch.Size, output: torch.Size, rows: Rows
) -> Use | None:
    return _broadcast(1.0, shape, output, rows)


def _broadcast(
    slope: Tensor | float | None,
    shape: torch.Size,
    output: torch.Size,
    rows: Rows,
    as_used: torch.Size | None = None,
    is_bias: bool = False,
) -> Use | None:
    if slope is None:
        return None
    aligned = torch.Size((1,) * (len(output) - len(shape)) + tuple(shape))
    return Elementwise(slope, rows, aligned, shape if as_used is None else as_used, is_bias)


_LOOKUPS = {"EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0"}
_ELEMENTWISE = {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0"}
_MAKERS: dict[str, Callable[[Node, int, torch.Size, torch.Size, Rows], Use | None]] = {
    "MmBackward0": _product,
    "BmmBackward0": _product,
    "AddmmBackward0": _product_and_sum,
    "MvBackward0": _product_with_vector,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "IndexBackward0": _index,
    "IndexSelectBackward0": _index_select,
    "AddBackward0": _sum,
    "SubBackward0": _difference,
    "MulBackward0": _times,
    "DivBackward0": _over,
    "ExpandBackward0": _expand,
}


def has_rows_to_find(node: Node) -> bool:
    """Whether a node may be a use."""
    return node.name() in _MAKERS
