"""Whether a network has hidden layers, from autograd's graph of what it computes.

Weights of hidden layers have many equivalent modes: units can be permuted, and signs flipped.  The
weights of heads on the same inputs are coefficients of a generalized linear model.
"""

from __future__ import annotations

import torch

from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.graph import Node, is_of_params, outputs_of, shape_of, takers_of
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Operations that multiply matrices.  A recurrent layer may be one operation, whose matrices
#: multiply each other's results from the second time step on.
_PRODUCTS = {
    "AddmmBackward0",
    "BaddbmmBackward0",
    "BmmBackward0",
    "ConvolutionBackward0",
    "CudnnRnnBackward0",
    "MiopenRnnBackward0",
    "MkldnnRnnLayerBackward0",
    "MmBackward0",
    "TrilinearBackward0",
}


def has_hidden_layer(log_posterior: LogPosterior, params: Params, arguments: Arguments) -> bool:
    """Whether a weight of a network multiplies a result of a weight, another one or the same.

    This is so for hidden layers, recurrent layers and the two factors of a low-rank adapter.  It is
    not so for heads side by side, whatever their links and likelihood, nor for a single layer
    between frozen ones.

    Args:
        log_posterior: the model.
        params: any unconstrained values.
        arguments: a batch.
    """
    leaves = {
        name: value.detach().clone().requires_grad_(name in log_posterior.model_info.weights)
        for name, value in params.items()
    }
    with torch.enable_grad():
        value = log_posterior(leaves, arguments, log_posterior.first_indices()).log_joint
    if not value.requires_grad:
        return False
    takers = takers_of(value.grad_fn)
    ids = {id(leaf) for leaf in leaves.values()}  # frozen weights may require grad, too
    waiting = [edge for edge in takers if id(getattr(edge[0], "variable", None)) in ids]
    of_weights = {node for node, _ in waiting}
    while waiting:
        for node, _ in takers.get(waiting.pop(), ()):
            if node not in of_weights:
                of_weights.add(node)
                waiting.extend(outputs_of(node))
    return any(_multiplies(node, of_weights) for node in of_weights)


def _multiplies(node: Node, of_weights: set[Node]) -> bool:
    """Whether an operation multiplies a weight and another result of weights."""
    if node.name() not in _PRODUCTS:
        return False
    matrices = [  # without a layer's bias, which is added
        edge[0] for edge in node.next_functions if edge[0] in of_weights and len(shape_of(edge)) > 1
    ]
    return len(matrices) > 1 and any(is_of_params(matrix) for matrix in matrices)
