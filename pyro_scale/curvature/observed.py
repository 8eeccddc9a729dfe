"""A run of the model on a batch, with all that its rows' curvature is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.curvature import fisher
from pyro_scale.curvature.observations import Observation, Total, broadcast, drawn, exact
from pyro_scale.errors import ModelError, SiteError
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import Rule
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import terms_of

#: Draws of a row where a distribution's Fisher information is estimated, unless the user says.
_DRAWS = 100


@dataclass(frozen=True)
class Observed:
    """A run of the model on a batch.

    Attributes:
        leaves: the params that it can be differentiated in.
        sites: of the run, with their graph.
        observations: those that depend on these params.
    """

    leaves: Params
    sites: Mapping[str, Site]
    observations: Sequence[Observation]

    @cached_property
    def outputs(self) -> Tensor:
        """All of each row, `[B, K]`, with their graph."""
        each = [one.outputs(self.sites, one.known) for one in self.observations]
        return torch.cat(each, dim=1) if each else torch.zeros(0, 0)

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns of a factor of all that is between, of each row: `[stop - start, B, K]`."""
        found, first, place = [], 0, 0
        widths = [one.width for one in self.observations]
        for one, width in zip(self.observations, widths, strict=True):
            begin, end = max(start - first, 0), min(stop - first, one.num_columns)
            if begin < end:
                own = one.columns(begin, end)
                found.append(torch.nn.functional.pad(own, (place, sum(widths) - place - width)))
            first, place = first + one.num_columns, place + width
        return torch.cat(found)

    def between(self, outputs: Tensor) -> Tensor:
        """What is between, of each row, times `[B, K]`."""
        parts = outputs.split([one.width for one in self.observations], dim=1)
        pairs = zip(self.observations, parts, strict=True)
        each = [one.times(part[..., None], one.known)[..., 0] for one, part in pairs]
        return torch.cat(each, dim=1)

    @property
    def num_columns(self) -> int:
        """Columns of that factor."""
        return sum(one.num_columns for one in self.observations)


def observe(
    log_posterior: LogPosterior,
    params: Params,
    arguments: Arguments,
    indices: Tensor | None,
    kind: str,
    num_draws: int,
) -> Observed:
    """The observations of a batch, for a kind of curvature in those params that require grad.

    Raises:
        SiteError: a GGN of what has no distribution.
        ModelError: no site follows the rows.
    """
    if torch.is_inference_mode_enabled():
        raise ModelError(
            "torch.inference_mode() leaves no derivatives: leave it out, or use torch.no_grad()"
        )
    scaling = log_posterior.model_info.scaling
    ruled = {name: rule for name, rule in scaling.rules.items() if rule.role == "rows"}
    if not ruled:
        raise ModelError(
            f"curvature='{kind}' is a sum over rows, and no site of the model follows them: use "
            "curvature='hessian'"
        )
    with torch.enable_grad():
        sites = log_posterior.run(params, arguments, indices).sites
    leaves = {name: value for name, value in params.items() if value.requires_grad}
    if kind == "empirical_fisher":
        count, first = log_posterior.batch_size(arguments), next(iter(params.values()))
        return Observed(leaves, sites, [Total(scaling, first.new_zeros(count, 0))])
    summed = set() if log_posterior.model_info.enum_dim is None else _enumerated_terms(sites)
    observations = []
    for name, rule in ruled.items():
        if name in summed or name not in sites or sites[name].kind != "observed":
            is_factor = name in sites and name not in summed
            what = "a pyro.factor" if is_factor else "a sum over enumerated sites"
            raise SiteError(
                f"site '{name}': {what} has no distribution, hence no Fisher information: use "
                "curvature='empirical_fisher' or 'hessian'"
            )
        observations.append(_observation(sites[name], rule, kind, num_draws))
    return Observed(leaves, sites, [each for each in observations if each is not None])


def _enumerated_terms(sites: Mapping[str, Site]) -> set[str]:
    """The terms that are sums over enumerated sites."""
    return {name for name, term in terms_of(sites).items() if term.site is None}


def _observation(site: Site, rule: Rule, kind: str, num_draws: int) -> Observation | None:
    """A site's, if it depends on the params."""
    fn = broadcast(site)
    try:
        base = fisher.base_of(fn)
        arguments = fisher.own_arguments(base)
        names = tuple(name for name, value in arguments.items() if value.requires_grad)
        if arguments and not names:
            return None
        if kind == "monte_carlo" or not arguments:
            raise fisher.NoInformation(type(base).__name__)
        return exact(site, rule, names)
    except fisher.NoInformation:
        return drawn(site, rule, num_draws if kind == "monte_carlo" else max(num_draws, _DRAWS))
