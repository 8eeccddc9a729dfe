"""Finds out whether a network has hidden layers, from its autograd graph.

Weights of hidden layers have many equivalent modes: units can be permuted, signs can be flipped.
Weights of heads, all on the same inputs, are the coefficients of a generalized linear model.
"""

from __future__ import annotations

import torch

from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.graph import Node, is_of_params, shape_of, takers_of
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Operations that multiply matrices. A recurrent layer is one operation, in which matrices multiply
#: each other's results from the second time step on.
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
    """Whether the model has a network with a hidden layer, so that its posterior has many
    equivalent modes: a weight multiplies the result of another weight, or of itself.

    That is true for hidden layers, recurrent layers and the two factors of a low-rank adapter. It
    is false for heads side by side, whatever their links and likelihood, and for weights between
    frozen layers.

    Args:
        log_posterior: the model.
        params: any unconstrained values of the sites, by name.
        arguments: the model's arguments of a batch.
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
    weights = {id(leaf) for leaf in leaves.values()}  # frozen weights may take gradients, too
    pending = [edge for edge in takers if id(getattr(edge[0], "variable", None)) in weights]
    dependent = {node for node, _ in pending}
    while pending:
        for node, _ in takers.get(pending.pop(), ()):
            if node not in dependent:
                dependent.add(node)
                pending.extend((node, place) for place in range(len(node._input_metadata)))
    return any(_multiplies(node, dependent) for node in dependent)


def _multiplies(node: Node, dependent: set[Node]) -> bool:
    """Whether an operation multiplies a matrix that is made of weights with another matrix that
    depends on weights, as a hidden layer does.

    Args:
        node: autograd node of the operation.
        dependent: autograd nodes that depend on weights, those of the weights included.
    """
    if node.name() not in _PRODUCTS:
        return False
    matrices = [  # not a layer's bias, which is added
        edge[0] for edge in node.next_functions if edge[0] in dependent and len(shape_of(edge)) > 1
    ]
    return len(matrices) > 1 and any(map(is_of_params, matrices))
