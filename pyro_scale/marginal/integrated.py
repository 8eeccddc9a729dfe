"""A Pyro model with its local latents summed out: an ordinary row-wise model with more columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_scale.core.rows import Arguments, call
from pyro_scale.marginal.local_sites import LocalSites
from pyro_scale.marginal.nodes import Expansion, Gaussians, gauss_hermite, place
from pyro_scale.model.sites import without_validation
from pyro_scale.model.transforms import bijection


class Integrated:
    """A Pyro model whose local latents are summed out over nodes:

        log p(y_i | globals) = log sum_k exp(log p(y_i, z_ik | globals) + log w_k) + log volume_i,

    where the nodes z_ik are those of the product of the prior at the current globals and the
    likelihood's expansion at an anchor. It is called with (a batch of units, the columns of the
    expansion).

    Args:
        local: the local part of the user's model.
        count: K, nodes of a dimension; a member has K^d.
        description: how the nodes were chosen, for reports.
    """

    def __init__(self, local: LocalSites, count: int, description: str = ""):
        self.local, self.count, self.description = local, count, description
        self._nodes, self._log_weights = gauss_hermite(count, local.num_dims)

    def __call__(self, arguments: Arguments, columns: Mapping[str, Tensor]) -> None:
        """Runs the integrated model: the globals' sites, and a factor of every unit."""
        members = self.local.model.members(arguments)
        values, priors = self.sample_globals(arguments, columns)
        around = self.gaussians(values, arguments, columns, priors)
        log_lik = self.log_marginal(values, arguments, around).reshape(members.units, -1)
        if (slots := self.local.model.used_slots(arguments)) is not None:
            log_lik = torch.where(slots, log_lik, 0.0)
        with pyro.plate("units", members.units):
            pyro.factor(self.local.observed, log_lik.sum(1))

    @property
    def num_nodes(self) -> int:
        """The number of nodes of a member."""
        return len(self._nodes)

    def sample_globals(
        self, arguments: Arguments, columns: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs the model for its globals, which are sites of the run that goes on. Returns the
        values of latents and params, and the distributions of the local latents, by site."""
        given = _Given(self.local.split(flat_columns(columns).center))
        with poutine.block(hide=list(self.local.hidden)), given:
            call(self.local.model, arguments)
        return given.values, given.priors

    def log_marginal(
        self, values: Mapping[str, Tensor], arguments: Arguments, around: Gaussians
    ) -> Tensor:
        """log p(data | globals) of every member, `[n]` in nats.

        Args:
            values: constrained values of the globals and params, by site.
            arguments: a batch of units.
            around: the Gaussians on which the nodes lie.
        """
        nodes, log_weights = self._nodes.to(around.center), self._log_weights.to(around.center)

        def log_joint(x: Tensor) -> Tensor:
            return self.local.log_joint(values, around.points(x), arguments)

        terms = torch.vmap(log_joint)(nodes) + log_weights[:, None]
        return torch.logsumexp(terms, 0) + around.log_volume

    def gaussians(
        self,
        values: Mapping[str, Tensor],
        arguments: Arguments,
        columns: Mapping[str, Tensor],
        priors: Mapping[str, Any] | None = None,
    ) -> Gaussians:
        """The Gaussians on which the members' nodes lie.

        Args:
            values: constrained values of the globals and params, by site.
            arguments: a batch of units.
            columns: the likelihoods' expansion at the anchor, as `columns_of` makes it.
            priors: the distributions of the local latents at these values; None to run the model.
        """
        expansion = flat_columns(columns)
        if priors is None:
            sites = self.local.run(values, expansion.center, arguments)
            priors = {latent.name: sites[latent.name].fn for latent in self.local.latents}
        prior = self.local.prior_of(values, arguments, priors)
        return place(prior, expansion, self.local.is_gaussian)


def columns_of(expansion: Expansion, units: int) -> dict[str, Tensor]:
    """The expansion of all members as columns of the data, `[units, slots * ...]`."""
    return {
        name: value.reshape(units, -1, *value.shape[1:])
        for name, value in expansion._asdict().items()
    }


def flat_columns(columns: Mapping[str, Tensor]) -> Expansion:
    """The expansion of a batch's members, from the columns of its units."""
    return Expansion(**{name: value.flatten(0, 1) for name, value in columns.items()})


class _Given(Messenger):
    """Pyro handler that gives local latents their values, and keeps those of all other latents and
    params.

    Args:
        unconstrained: unconstrained values of the local latents, by site.

    Attributes:
        values: constrained values of latents and params after the run, by site.
        priors: distributions of the local latents, by site.
    """

    def __init__(self, unconstrained: Mapping[str, Tensor]):
        super().__init__()
        self._unconstrained = unconstrained
        self.values: dict[str, Any] = {}
        self.priors: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self._unconstrained:
            self.priors[msg["name"]] = without_validation(msg["fn"])
            transform = bijection(msg["fn"].support)
            msg["value"], msg["done"] = transform(self._unconstrained[msg["name"]]), True

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] not in self._unconstrained and not msg["is_observed"]:
            self.values[msg["name"]] = msg["value"]

    def _pyro_post_param(self, msg: Any) -> None:
        self.values[msg["name"]] = msg["value"]
