"""Which sites a prediction has, and where the rows are in their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyro_scale.errors import ArgumentError
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import unwrap
from pyro_scale.posterior.draws import PosteriorDraws


def data_sites(result: PosteriorDraws) -> dict[str, int]:
    """Observed sites that have a value a row -> the rows' axis in their value, from the right."""
    return data_axes(result.log_posterior.model_info)


def data_axes(info: ModelInfo, apart: bool = False) -> dict[str, int]:
    """Observed sites of a model -> the rows' axis in their value, from the right.

    Args:
        info: of the model.
        apart: leaves out sites whose rows depend on each other.
    """
    axes = {}
    for name, rule in info.scaling.rules.items():
        if rule.dim is not None and (rule.role == "rows" or not apart):
            for part in name.split("+"):
                site = info.sites[part]
                if site.kind == "observed":
                    axes[part] = rule.dim - len(unwrap(site.fn, rule.depth).event_shape)
    return axes


def row_axes(result: PosteriorDraws) -> dict[str, int]:
    """Sites that have a value a row -> the rows' axis in it, from the right."""
    return {**result.log_posterior.model_info.row_axes, **data_sites(result)}


def chosen_sites(
    result: PosteriorDraws, sites: Mapping[str, Site], return_sites: Sequence[str] | None
) -> Sequence[str]:
    """What `predict` returns; unless it is told, neither latents nor what `get_samples` has.

    Raises:
        ArgumentError: a site that is not in the model.
    """
    if isinstance(return_sites, str):
        raise ArgumentError(f"return_sites={return_sites!r}: pass a list of sites' names")
    for name in return_sites or ():
        if name not in sites:
            raise ArgumentError(f"return_sites: no site '{name}'; the model has {sorted(sites)}")
    if return_sites is not None:
        return return_sites
    latents, steady = result.log_posterior.latents, result.log_posterior.model_info.steady
    hidden = {"observed": latents, "deterministic": {*latents, *steady}}
    return [name for name, site in sites.items() if name not in hidden.get(site.kind, sites)]
