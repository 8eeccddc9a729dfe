"""The log posterior of a sharded network: gradients are means over ranks, log joints sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.distributed.shards import Holders
from pyro_scale.errors import DataError
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.nn.sharded import ShardedModule, stepping
from pyro_scale.model.scaling import Evaluation


@dataclass(frozen=True)
class ShardedDensity:
    """The log posterior, of a batch of which each rank has some rows, for a chain of which each
    has some elements.

    The mean over ranks of log prior + W N/B sum_r, with W ranks and the sum of rank r's rows, is
    the log joint, and `fully_shard` leaves means of gradients over ranks.  B is counted over
    ranks.  The prior of a part of a weight is its rank's alone; everything else of the log prior
    is the same on all ranks.

    Attributes:
        log_posterior: the model, understood.
        holders: the ranks.
        weights: which sites are parts of weights, and of which.
        is_own: of a position's elements, by which this rank is the one that counts them: 1, or a
            part of 1 where others have the same.
        stand_in: a row for ranks that have none of a batch: they, too, have to call the network.
    """

    log_posterior: LogPosterior
    holders: Holders
    weights: Mapping[str, tuple[ShardedModule, str]]
    is_own: Tensor
    stand_in: Arguments

    @property
    def num_data(self) -> int:
        """N."""
        return self.log_posterior.num_data

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(This rank's part of the gradient of the log joint by site, the evaluation).

        Args:
            params: this rank's part of the position, by site.
            batch: this rank's rows of the batch.
            indices: none.

        Raises:
            DataError: no rank has a row.
        """
        world = self.holders.rows.world
        own = rows.count(batch) or 0
        size = int(self.holders.total(torch.tensor(own)))
        if size == 0:
            raise DataError("the batch has no rows on any rank; leave it out")
        arguments = batch if own else self.stand_in
        with torch.enable_grad(), stepping():
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            sites = self.log_posterior.run(leaves, arguments).sites
            evaluation = self.log_posterior.evaluate(sites, rows.count(arguments) or 0)
            log_lik = evaluation.log_lik.sum() * (self.num_data / size if own else 0.0)
            # not autograd.grad, which would leave out what fully_shard does after it
            (evaluation.log_prior + world * log_lik).backward()
        gradient = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in leaves.items()
        }
        modules = {module for module, _ in self.weights.values()}
        of_networks = {module: module.gradients() for module in modules}
        for name, (module, weight) in self.weights.items():
            gradient[name] = gradient[name] + of_networks[module][weight].to(gradient[name])
        log_prior = self._log_prior(sites, evaluation.log_prior)
        is_sound = all(bool(torch.isfinite(gradient[name]).all()) for name in self.weights)
        log_joint = log_prior + log_lik.detach().double() if is_sound else log_prior * torch.nan
        others = {name: of for name, of in gradient.items() if name not in self.weights}
        layout = Layout.from_tensors(others)
        parts = [of.reshape(-1).double() / world for of in others.values()]
        vector = self.holders.total(torch.cat([*parts, log_joint.reshape(1)]))
        total = vector[-1]
        if others:
            gradient |= layout.unflatten(vector[:-1])
        return gradient, Evaluation(total, total, total[None])

    grad = plain_grad

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """None: rows are evaluated together."""
        raise NotImplementedError

    def total(self, values: Tensor) -> Tensor:
        """The sum of a value for each element of this rank's part, over all ranks."""
        return self.holders.total((values.double() * self.is_own.to(values.device)).sum())

    def _log_prior(self, sites: Mapping[str, Any], log_prior: Tensor) -> Tensor:
        """This rank's part of the log prior."""
        with torch.no_grad():
            log_probs = [
                sites[n].fn.log_prob(sites[n].value) * sites[n].scale for n in self.weights
            ]
            of_weights = torch.stack([each.double().sum() for each in log_probs]).sum()
        of_others = log_prior.detach().double() - of_weights
        return of_weights / self.holders.copies + of_others / self.holders.rows.world
