"""A Pyro model with its local latents summed out: a row-wise model with one more column of data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_scale.core.rows import Arguments, call
from pyro_scale.marginal.local_sites import LocalSites
from pyro_scale.marginal.nodes import Gaussians, gauss_hermite, place
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.transforms import bijection


class Integrated:
    """The user's model with its local latents summed out over nodes, as a Pyro model of the global
    latents:

        log p(y_i | globals) = log sum_k exp(log p(y_i, z_ik | globals) + log w_k) + log volume_i,

    It is called with (a batch of units, the modes of its members' latents at an anchor, as
    `column_of` makes them).

    Args:
        local: the local part of the user's model.
        count: K, nodes of a dimension; a member has K^d.
        is_far: whether the globals may be far from the anchor, as for `nodes.place`.
        description: how the nodes were chosen, for reports.
        unseen_bias: about the largest bias of a mean, in posterior sds, from modes of members that
            the nodes do not reach: as many members' worth of mass as is not seen moves the
            gradient, whose sd is the root of the number of members.
    """

    def __init__(
        self,
        local: LocalSites,
        count: int,
        is_far: bool,
        description: str = "",
        unseen_bias: float = 0.0,
    ):
        self.local, self.count, self.is_far = local, count, is_far
        self.description, self.unseen_bias = description, unseen_bias
        self._nodes, self._log_weights = gauss_hermite(count, local.num_dims)

    def __call__(self, arguments: Arguments, modes: Tensor) -> None:
        """Runs the integrated model: the globals' sites, and a factor of every unit."""
        members = self.local.model.members(arguments)
        values = self.sample_globals(arguments, modes)
        around = self.gaussians(values, arguments, modes)
        log_lik = self.log_marginal(values, arguments, around).reshape(members.units, -1)
        if (slots := self.local.model.used_slots(arguments)) is not None:
            log_lik = torch.where(slots, log_lik, 0.0)
        with pyro.plate("units", members.units):
            pyro.factor(self.local.observed, log_lik.sum(1))

    @property
    def num_nodes(self) -> int:
        """The number of nodes of a member."""
        return len(self._nodes)

    def sample_globals(self, arguments: Arguments, modes: Tensor) -> dict[str, Any]:
        """The constrained values of the global latents and the params, by site, from a run of the
        user's model inside of the integrated model's: the outer run records the globals as its own
        sites."""
        given = _Given(self.local.split(modes.flatten(0, 1)), self.local.hidden)
        with poutine.block(hide=list(self.local.hidden)), given:
            call(self.local.model, arguments)
        return given.values

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
        self, values: Mapping[str, Tensor], arguments: Arguments, modes: Tensor
    ) -> Gaussians:
        """The Gaussians on which the members' nodes lie, detached from the globals.

        Args:
            values: constrained values of the globals and params, by site.
            arguments: a batch of units.
            modes: modes of the members' latents at the anchor, `[units, slots, d]`.
        """
        fixed = {name: value.detach() for name, value in values.items()}
        log_joint = partial(self.local.log_joint, fixed, arguments=arguments)
        around = place(log_joint, modes.flatten(0, 1), self.is_far)
        return Gaussians(around.center.detach(), around.root.detach())


def integrated_of(log_posterior: LogPosterior) -> Integrated | None:
    """The integrated model that a log posterior was made from; None if it was made from a model
    whose latents are all sampled."""
    model = log_posterior.model
    return model if isinstance(model, Integrated) else None


def column_of(modes: Tensor, units: int) -> Tensor:
    """The modes of all members' latents, `[n, d]`, as a column of the data, `[units, slots, d]`."""
    return modes.unflatten(0, (units, -1))


class _Given(Messenger):
    """Pyro handler that gives local latents their values, and keeps those of the globals.

    Args:
        unconstrained: unconstrained values of the continuous local latents, by site.
        hidden: names of all local sites.

    Attributes:
        values: constrained values of global latents and params after the run, by site.
    """

    def __init__(self, unconstrained: Mapping[str, Tensor], hidden: frozenset[str]):
        super().__init__()
        self._unconstrained, self._hidden = unconstrained, hidden
        self.values: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self._unconstrained:
            transform = bijection(msg["fn"].support)
            msg["value"], msg["done"] = transform(self._unconstrained[msg["name"]]), True
        elif msg["infer"].get("enumerate") and msg["name"] in self._hidden:  # any value: no draws
            msg["value"], msg["done"] = msg["fn"].enumerate_support()[0], True

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] not in self._hidden and not msg["is_observed"]:
            self.values[msg["name"]] = msg["value"]

    def _pyro_post_param(self, msg: Any) -> None:
        self.values[msg["name"]] = msg["value"]
