"""Whether a network has hidden layers, from what it computes.

Weights of hidden layers have many equivalent modes: units can change places, signs can be turned
around.  Those of heads, all on the same inputs, are the coefficients of a generalized linear model.
"""

from __future__ import annotations

import torch

from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.graph import Node, is_of_params, outputs_of, shape_of, takers_of
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Operations that multiply matrices.  The matrices of a recurrent layer in one operation multiply
#: each other's results from the second time on.
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
    """Whether some weight of a network multiplies what comes of a weight, of another or its own.

    Hidden layers, recurrent ones and both factors of an adapter of low rank do; heads side by side
    do not, whatever their links and likelihood, nor do weights between frozen layers.

    Args:
        log_posterior: the model.
        params: unconstrained values; which ones does not matter.
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
    own = {id(leaf) for leaf in leaves.values()}  # frozen weights may take gradients, too
    waiting = [edge for edge in takers if id(getattr(edge[0], "variable", None)) in own]
    of_weights = {node for node, _ in waiting}
    while waiting:
        for node, _ in takers.get(waiting.pop(), ()):
            if node not in of_weights:
                of_weights.add(node)
                waiting.extend(outputs_of(node))
    return any(_multiplies(node, of_weights) for node in of_weights)


def _multiplies(node: Node, of_weights: set[Node]) -> bool:
    """Whether an operation takes a weight, and something else that comes of weights."""
    if node.name() not in _PRODUCTS:
        return False
    matrices = [  # not a layer's bias, which is added
        edge[0] for edge in node.next_functions if edge[0] in of_weights and len(shape_of(edge)) > 1
    ]
    return len(matrices) > 1 and any(is_of_params(each) for each in matrices)
