"""Derivatives of functions of a dict of tensors: by `torch.func`, or by plain autograd for models
that functorch refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation

#: Rows of a Jacobian, such as a Hessian, that are computed at once.
_JACOBIAN_ROWS = 64

Params = Mapping[str, Tensor]
Gradient = dict[str, Tensor]


def gradient(
    function: Callable[[Params], Evaluation], params: Params
) -> tuple[Gradient, Evaluation]:
    """The gradient of a log joint density with respect to params, by `torch.func`: works under
    `torch.vmap`.

    Args:
        function: params -> evaluation, whose log joint is differentiated.
        params: unconstrained values by site.

    Returns:
        (The gradient, of each site's shape by site; the evaluation at these params).
    """

    def log_joint(params: Params) -> tuple[Tensor, Evaluation]:
        evaluation = function(params)
        return evaluation.log_joint, evaluation

    with torch.no_grad():  # no graph of weights that are not among the params
        result, evaluation = torch.func.grad(log_joint, has_aux=True)(dict(params))
    return result, evaluation


def plain_gradient(
    function: Callable[[Params], Evaluation], params: Params
) -> tuple[Gradient, Evaluation]:
    """The gradient of a log joint density with respect to params, by `torch.autograd`: for models
    that `torch.func`, with which `gradient` does the same, does not support. Does not work under
    `torch.vmap`.

    Args:
        function: params -> evaluation, whose log joint is differentiated.
        params: unconstrained values by site.

    Returns:
        (The gradient, of each site's shape by site; the evaluation at these params), both detached.
    """
    with torch.enable_grad():
        leaves = _leaves(params)
        evaluation = function(leaves)
        gradients = torch.autograd.grad(
            evaluation.log_joint, list(leaves.values()), materialize_grads=True
        )
    return dict(zip(leaves, gradients, strict=True)), Evaluation(*(e.detach() for e in evaluation))


def gradient_of(value: Tensor, leaves: Params) -> Gradient:
    """The gradient of a scalar with respect to the tensors that it was computed from: a dict like
    `leaves`, zero where the scalar does not depend on a tensor. Autograd's graph is kept, so that
    further gradients can be computed from it.

    Args:
        value: the scalar, with an autograd graph.
        leaves: the tensors by name; they require grad.
    """
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(
        value, list(leaves.values()), retain_graph=True, materialize_grads=True
    )
    return dict(zip(leaves, gradients, strict=True))


def row_gradients(function: Callable[[Params], Tensor], params: Params) -> Gradient:
    """The gradient of each of a function's values with respect to the params: a dict by site, `[B,
    ..., *shape]` for values `[B, ...]` and a site of shape `shape`. The values are differentiated
    one by one if vmap or functorch does not support the model.

    Args:
        function: function from params to values `[B, ...]`, such as the log likelihood of each row.
        params: unconstrained values by site.
    """
    try:
        with torch.no_grad():
            return torch.func.jacrev(function, chunk_size=256)(dict(params))
    except (RuntimeError, NotImplementedError):
        with torch.enable_grad():
            leaves = _leaves(params)
            values = function(leaves)
            gradients = [gradient_of(value, leaves) for value in values.flatten()]
    return {
        name: torch.stack([by_site[name] for by_site in gradients]).reshape(
            values.shape + leaf.shape
        )
        for name, leaf in leaves.items()
    }


def hessian(gradient: Tensor, *leaves: Tensor) -> Tensor:
    """The Hessian `[D, D]` of a function, symmetrized, from the function's gradient.

    Args:
        gradient: the gradient `[D]`, with an autograd graph, in the order of the leaves' elements.
        leaves: tensors that the gradient was computed from, of D elements together.
    """
    matrix = torch.cat([rows for _, rows in jacobian_rows(gradient, leaves)])
    return (matrix + matrix.T) / 2


def hessian_diagonal(gradient: Tensor, *leaves: Tensor) -> Tensor:
    """The diagonal `[D]` of the Hessian of a function, without the matrix in memory. It costs as
    many Hessian-vector products as the whole matrix.

    Args:
        gradient: the function's gradient `[D]`, with an autograd graph, in the order of the leaves'
            elements.
        leaves: tensors that the gradient was computed from, of D elements together.
    """
    rows = jacobian_rows(gradient, leaves)
    return torch.cat([part[:, first:].diagonal() for first, part in rows])


def jacobian_rows(values: Tensor, leaves: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yields the Jacobian of K values with respect to leaves of D elements together, in blocks of
    rows.

    Computed by plain autograd, for many rows at once where vmap supports the model.

    Args:
        values: the values `[K]`, with an autograd graph.
        leaves: tensors that the values were computed from.

    Yields:
        (Number of the block's first row, the block `[k, D]`).
    """
    is_batched = True
    for first in range(0, len(values), _JACOBIAN_ROWS):
        count = min(_JACOBIAN_ROWS, len(values) - first)
        units = values.new_zeros(count, len(values))
        units[:, first : first + count] = torch.eye(count).to(values)
        if is_batched:
            try:
                parts = torch.autograd.grad(
                    values, leaves, units, retain_graph=True, is_grads_batched=True
                )
            except (RuntimeError, NotImplementedError):
                is_batched = False
        if not is_batched:
            rows = [torch.autograd.grad(values, leaves, unit, retain_graph=True) for unit in units]
            parts = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        yield first, torch.cat([part.reshape(len(units), -1) for part in parts], dim=1)


def _leaves(params: Params) -> Gradient:
    return {name: value.detach().requires_grad_() for name, value in params.items()}
