"""The log posterior of a sharded network: gradients are means over ranks, log joints sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.data.loaders import to_device
from pyro_scale.distributed.shares import Rows
from pyro_scale.errors import DataError
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.nn.sharded import ShardedModule, stepping


@dataclass(frozen=True)
class ShardedDensity:
    """The log posterior of a minibatch of which each rank has some rows, at a position of which
    each rank has some elements.

    With W ranks, the log joint is the mean over ranks of log prior + W N/B sum_r, where sum_r is
    the log likelihood of rank r's rows and B counts the rows of all ranks; `fully_shard` leaves
    means of gradients over ranks. The prior of a part of a weight is on its rank alone; the other
    terms of the log prior are the same on all ranks.

    Attributes:
        log_posterior: the model after its preflight.
        rows: the group of ranks over which sums are taken.
        weights: dict from each site that is a part of a weight to (its network, the weight's name
            in it).
        copies: number of ranks that have the same parts.
        counts: one over the number of ranks that have each of this rank's elements, [D]: weights of
            elements in sums over all elements of the chain.
        stand_in: one row, as the model's arguments, for ranks without a row of a minibatch: these
            have to call the network, too.
    """

    log_posterior: LogPosterior
    rows: Rows
    weights: Mapping[str, tuple[ShardedModule, str]]
    copies: int
    counts: Tensor
    stand_in: Arguments

    @property
    def num_data(self) -> int:
        """N, the number of rows of the whole data."""
        return self.log_posterior.num_data

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(This rank's part of the gradient of the log joint, by site; the evaluation with the log
        joint of all ranks, in nats).

        The log joint is NaN on all ranks if it or a weight's gradient is not finite on one.

        Args:
            params: this rank's part of the position, unconstrained, by site.
            batch: the model's arguments, with this rank's rows of the minibatch.
            indices: unused, as models that subsample by themselves are not supported.

        Raises:
            DataError: no rank has a row.
        """
        count, world = rows.count(batch) or 0, self.rows.world
        size = int(self.rows.sum(torch.tensor(count)))
        if size == 0:
            raise DataError("the batch has no rows on any rank; leave it out")
        arguments = to_device(batch if count else self.stand_in, torch.device(self.rows.device))
        with torch.enable_grad(), stepping():
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            sites = self.log_posterior.run(leaves, arguments).sites
            evaluation = self.log_posterior.evaluate(sites, rows.count(arguments) or 0)
            log_lik = evaluation.log_lik.sum() * (self.num_data / size if count else 0.0)
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
        others = {name: part for name, part in gradient.items() if name not in self.weights}
        terms = [part.reshape(-1).double() / world for part in others.values()]
        sums = self.rows.sum(torch.cat([*terms, log_joint.reshape(1)]))
        total = sums[-1]
        if others:
            gradient |= Layout.from_tensors(others).unflatten(sums[:-1])
        return gradient, Evaluation(total, total, total[None])

    grad = plain_grad

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Always raises NotImplementedError: gradients of single rows are not available, as
        `fully_shard` computes the gradient of all rows together."""
        raise NotImplementedError

    def total(self, values: Tensor) -> Tensor:
        """The sum over all elements of the chain, a double scalar that is the same on all ranks.
        Elements that several ranks have are counted once.

        Args:
            values: one number for each element that this rank has, `[D]`.
        """
        return self.rows.sum((values.double() * self.counts.to(values.device)).sum())

    def _log_prior(self, sites: Mapping[str, Any], log_prior: Tensor) -> Tensor:
        """This rank's term of the log prior, in nats; the terms of all ranks add up to the log
        prior of the whole chain.

        Args:
            sites: the sites of a run of the model, by name.
            log_prior: the log prior that this rank's run gave, with its own parts of weights.
        """
        with torch.no_grad():
            log_probs = [
                sites[n].fn.log_prob(sites[n].value) * sites[n].scale for n in self.weights
            ]
            of_weights = torch.stack([values.double().sum() for values in log_probs]).sum()
        of_others = log_prior.detach().double() - of_weights
        return of_weights / self.copies + of_others / self.rows.world
