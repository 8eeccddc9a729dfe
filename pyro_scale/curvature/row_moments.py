"""Sums of the gradients of rows' log likelihoods, and of their squares, without a row's own."""

from __future__ import annotations

import torch

from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.ggn import Curvature
from pyro_scale.model.log_posterior import LogPosterior, Params


def row_moments(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(The sum of rows' gradients, that of their squares) by latent site, in nats, without N/B.

    The squares are the diagonal of the empirical Fisher, which comes from one run of the model.

    Args:
        log_posterior: the model.
        params: unconstrained values of all sites.
        arguments: a batch.
    """
    among = {name: params[name] for name in log_posterior.latents}
    held = {name: value for name, value in params.items() if name not in among}
    curvature = Curvature(log_posterior, "empirical_fisher")
    run = curvature.observe(among, arguments, None, held)
    squares = curvature.diagonal(among, arguments, held=held, run=run)
    leaves = [run.leaves[name] for name in among]
    with torch.enable_grad():
        total = run.outputs.sum()
    sums = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
    return dict(zip(among, sums, strict=True)), squares
