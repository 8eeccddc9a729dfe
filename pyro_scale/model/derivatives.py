"""Derivatives of functions of a dict of tensors: by `torch.func`, and by plain autograd for models
that functorch refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyro_scale.model.scaling import Evaluation

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
        found, evaluation = torch.func.grad(log_joint, has_aux=True)(dict(params))
    return found, evaluation


def plain_gradient(
    function: Callable[[Params], Evaluation], params: Params
) -> tuple[Gradient, Evaluation]:
    """The same by `torch.autograd`."""
    with torch.enable_grad():
        leaves = _leaves(params)
        evaluation = function(leaves)
        found = torch.autograd.grad(
            evaluation.log_joint, list(leaves.values()), materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True)), Evaluation(*(e.detach() for e in evaluation))


def row_gradients(function: Callable[[Params], Tensor], params: Params) -> Gradient:
    """The gradient of each of a function's values `[B]`, by entry, `[B, ...]`; one by one for
    models that vmap or functorch's gradient refuses."""
    try:
        with torch.no_grad():
            return torch.func.jacrev(function, chunk_size=256)(dict(params))
    except (RuntimeError, NotImplementedError):
        with torch.enable_grad():
            leaves = _leaves(params)
            entries = list(leaves.values())
            found = [
                torch.autograd.grad(row, entries, retain_graph=True, materialize_grads=True)
                for row in function(leaves)
            ]
    columns = zip(*found, strict=True)
    return {name: torch.stack(of) for name, of in zip(leaves, columns, strict=True)}


def _leaves(params: Params) -> Gradient:
    return {name: value.detach().requires_grad_() for name, value in params.items()}
