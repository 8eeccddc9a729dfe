"""Which latents are centered: their prior's scale is a function of other latents.

Of such a pair little data make a funnel, which no step size fits (Betancourt and Girolami,
Hamiltonian Monte Carlo for hierarchical models, 2015).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params

#: By how much a latent is moved, unconstrained, to see what depends on it.
_MOVE = 0.5


def centered_latents(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> dict[str, list[str]]:
    """Latents of location-scale families, by name, with the latents that their scale depends on.

    Args:
        log_posterior: the model, understood.
        params: unconstrained values of all latents.
        arguments: a batch.
    """
    latents, indices = list(log_posterior.latents), log_posterior.first_indices()
    with torch.no_grad():
        here = _scales(log_posterior.run(params, arguments, indices).sites, latents)

        def changed(moved: Params) -> list[str]:
            there = _scales(
                log_posterior.run({**params, **moved}, arguments, indices).sites, latents
            )
            return [name for name, scale in there.items() if not torch.equal(scale, here[name])]

        # each by another length, so that no two cancel
        moves = {name: _MOVE * (1 + place / len(latents)) for place, name in enumerate(latents)}
        parents: dict[str, list[str]] = {}
        if changed({name: params[name] + move for name, move in moves.items()}):
            for parent in latents:
                for name in changed({parent: params[parent] + _MOVE}):
                    if name != parent:
                        parents.setdefault(name, []).append(parent)
    return parents


def how_to_non_center(site: str, parents: list[str]) -> str:
    """What to do about a centered latent, in words."""
    names = " and ".join(f"'{parent}'" for parent in parents)
    return (
        f"a non-centered '{site}', whose prior's scale is {names}: pyro.poutine.reparam(model, "
        f"{{'{site}': LocScaleReparam(0.0)}}), from pyro.infer.reparam"
    )


def _scales(sites: Any, latents: list[str]) -> dict[str, Tensor]:
    """The scales of the latents that have a location and a scale."""
    found = {}
    for name in latents:
        fn = sites[name].fn
        while hasattr(fn, "base_dist") and not hasattr(fn, "scale"):
            fn = fn.base_dist
        if hasattr(fn, "loc") and isinstance(getattr(fn, "scale", None), Tensor):
            found[name] = fn.scale
    return found
