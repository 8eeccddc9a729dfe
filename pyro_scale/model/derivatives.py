"""Derivatives of functions of a dict of tensors, by `torch.func`; by plain autograd for models that
functorch refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyro_scale.model.scaling import Evaluation

#: Rows of a Jacobian, such as a Hessian, that are computed at once.
_JACOBIAN_ROWS = 64

Params = Mapping[str, Tensor]
Gradient = dict[str, Tensor]


def gradient(
    function: Callable[[Params], Evaluation], params: Params
) -> tuple[Gradient, Evaluation]:
    """(The gradient of the log joint, the evaluation); it goes through `torch.vmap`."""

    def log_joint(params: Params) -> tuple[Tensor, Evaluation]:
        evaluation = function(params)
        return evaluation.log_joint, evaluation

    with torch.no_grad():  # no graph of weights that are not among the params
        result, evaluation = torch.func.grad(log_joint, has_aux=True)(dict(params))
    return result, evaluation


def plain_gradient(
    function: Callable[[Params], Evaluation], params: Params
) -> tuple[Gradient, Evaluation]:
    """The same by `torch.autograd`."""
    with torch.enable_grad():
        leaves = _leaves(params)
        evaluation = function(leaves)
        gradients = torch.autograd.grad(
            evaluation.log_joint, list(leaves.values()), materialize_grads=True
        )
    return dict(zip(leaves, gradients, strict=True)), Evaluation(*(e.detach() for e in evaluation))


def gradient_of(value: Tensor, leaves: Params) -> Gradient:
    """The gradient of a value with its history, which stays, zero where it has none."""
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(
        value, list(leaves.values()), retain_graph=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def row_gradients(function: Callable[[Params], Tensor], params: Params) -> Gradient:
    """The gradient of each of a function's values `[B, ...]`, by entry, `[B, ..., *shape]`; one by
    one for models that vmap or functorch's gradient refuses."""
    try:
        with torch.no_grad():
            return torch.func.jacrev(function, chunk_size=256)(dict(params))
    except (RuntimeError, NotImplementedError):
        with torch.enable_grad():
            leaves = _leaves(params)
            entries, values = list(leaves.values()), function(leaves)
            gradients = [
                torch.autograd.grad(value, entries, retain_graph=True, materialize_grads=True)
                for value in values.flatten()
            ]
    columns = (torch.stack(of) for of in zip(*gradients, strict=True))
    return {
        name: column.reshape(values.shape + leaves[name].shape)
        for name, column in zip(leaves, columns, strict=True)
    }


def hessian(slope: Tensor, *here: Tensor) -> Tensor:
    """The derivative of a gradient [D], with its history, by the leaf [D], or the leaves of D
    elements, that it is taken at: [D, D], symmetric."""
    matrix = torch.cat([rows for _, rows in jacobian_rows(slope, here)])
    return (matrix + matrix.T) / 2


def hessian_diagonal(slope: Tensor, *here: Tensor) -> Tensor:
    """The diagonal of the same, [D], from as many products, without the matrix."""
    return torch.cat([rows[:, first:].diagonal() for first, rows in jacobian_rows(slope, here)])


def jacobian_rows(values: Tensor, here: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The derivative of values [K], with their history, by the leaf [D], or the leaves of D
    elements, that they are taken at: (the number of the first, some rows `[k, D]`), by plain
    autograd, many at once where vmap takes the model."""
    at_once = True
    for first in range(0, len(values), _JACOBIAN_ROWS):
        count = min(_JACOBIAN_ROWS, len(values) - first)
        units = values.new_zeros(count, len(values))
        units[:, first : first + count] = torch.eye(count).to(values)
        if at_once:
            try:
                found = torch.autograd.grad(
                    values, here, units, retain_graph=True, is_grads_batched=True
                )
            except (RuntimeError, NotImplementedError):
                at_once = False
        if not at_once:
            each = [torch.autograd.grad(values, here, unit, retain_graph=True) for unit in units]
            found = tuple(torch.stack(column) for column in zip(*each, strict=True))
        yield first, torch.cat([each.reshape(len(units), -1) for each in found], dim=1)


def _leaves(params: Params) -> Gradient:
    return {name: value.detach().requires_grad_() for name, value in params.items()}
