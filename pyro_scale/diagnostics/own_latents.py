"""Which rows have a latent of their own, of which no other row says anything."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.curvature.chunks import chunks_of
from pyro_scale.data.sources import Data
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import log_likelihood_of_rows

#: By how much what is equal may differ, relatively: rounding of float32, and less than rows do.
_TOL = 1e-5


def own_latents(result: PosteriorDraws, data: Data, num_rows: int) -> dict[str, Tensor]:
    """Latent sites with an element that is one row's alone -> these rows, booleans `[N]`.

    Each row has a weight w of its own.  With g its log likelihood's gradient in an element, the
    sums over rows of g, w g and w^2 g obey (sum of w g)^2 = (sum of g) (sum of w^2 g) where only
    one row has a gradient, whose weight is (sum of w g) / (sum of g).

    Args:
        result: of the run, whose first draw is looked at.
        data: all rows.
        num_rows: N.
    """
    here = result.positions[0, 0].detach().clone().requires_grad_()
    sums = torch.zeros(3, len(here), dtype=torch.float64)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    weights = 1 + order / num_rows
    for chunk in chunks_of(result.log_posterior, data):
        with torch.enable_grad():
            log_lik = log_likelihood_of_rows(result, result.layout.unflatten(here), chunk)
        own, weights = weights[: len(log_lik)].to(log_lik), weights[len(log_lik) :]
        if log_lik.requires_grad:
            for power in range(3):
                total = log_lik @ own**power
                sums[power] += torch.autograd.grad(total, here, retain_graph=True)[0].double().cpu()
    plain, first, second = sums
    is_own = (plain != 0) & ((plain * second - first**2).abs() <= _TOL * first**2)
    ranks = ((first / plain - 1) * num_rows).round().nan_to_num(0).long().clamp(0, num_rows - 1)
    rows = order.argsort()[ranks]
    owners = {}
    for name in result.log_posterior.latents:
        places = result.layout.places([name])
        owners[name] = torch.zeros(num_rows, dtype=torch.bool)
        owners[name][rows[places][is_own[places]]] = True
    return {name: rows for name, rows in owners.items() if rows.any()}
