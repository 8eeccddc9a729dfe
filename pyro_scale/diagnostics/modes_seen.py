"""Whether draws are at every mode that the posterior has."""

from __future__ import annotations

import math

import torch

from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.run_report import Finding, Verdict
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import spread
from pyro_scale.tuning.modes import Mode, Modes

#: Modes of which it is said where they are.
_MODES_SHOWN = 4
#: What to try.
_ADVICE = "a model without the other modes (an order, a sign), or more chains (num_chains=8)"


def modes_seen(result: PosteriorDraws, modes: Modes) -> list[Finding]:
    """What there is to say of a posterior of several modes; nothing of one with one.

    A draw is at the mode whose Gaussian, weighed by its evidence, is densest there.  Chains that
    started at a mode may have left it: for nothing, if it is none, or because they broke and
    went on from where others were.
    """
    kept = modes.worth_visiting
    if len(kept) < 2:
        return []
    gaussians = [mode.gaussian for mode in kept]
    places = spread(result.positions, MIXING.draws_at_modes)
    chains = torch.arange(result.positions.shape[0])[:, None]
    draws = result.positions[chains, places].flatten(0, 1).double().cpu()
    evidence = torch.tensor([mode.log_evidence for mode in kept], dtype=torch.float64)
    size = len(kept[0].gaussian.mean)
    densities = torch.stack(
        [torch.vmap(g.log_prob)(draws[:, :size].to(g.mean)).cpu() for g in gaussians]
    )
    counts = torch.softmax(densities + evidence[:, None], 0).sum(1)
    shares = torch.softmax(evidence, 0)
    unseen = [place for place, count in enumerate(counts.tolist()) if count < 0.5]
    missed = [place for place in unseen if len(draws) * float(shares[place]) > MIXING.missed_draws]
    elsewhere = [mode.gaussian for mode in modes.unvisited(result.num_chains)]
    never = [place for place, g in enumerate(gaussians) if any(g is each for each in elsewhere)]
    site, element = _where_they_differ(result, kept)
    at = ", ".join(f"{_value(result, mode, site, element):.4g}" for mode in kept[:_MODES_SHOWN])
    below = ", ".join(f"{float(evidence[0] - each):.1f}" for each in evidence[1:])
    told = f"{len(kept)} modes, at {at}; the others have {below} nats less evidence"
    verdict: Verdict = "yes"
    if missed:
        most = max(float(shares[place]) for place in missed)
        verdict = "no" if most > MIXING.missed else "unknown"
        told += f"; there is no draw at {len(missed)} of them"
    elif set(never) & set(unseen):
        verdict, told = "unknown", f"{told}; no chain started from {len(never)} of them"
    return [Finding(site, "modes", verdict, told, _ADVICE)]


def _where_they_differ(result: PosteriorDraws, modes: tuple[Mode, ...]) -> tuple[str, int]:
    """The site, and its element, at which modes are furthest apart, in the best one's sds."""
    best = modes[0].gaussian
    means = torch.stack([mode.gaussian.mean for mode in modes])
    apart = (means - best.mean).abs().amax(0) / best.variance.sqrt()
    place = int(apart.argmax())
    site = result.layout.site_at(place)
    return site, place - result.layout.slices()[site].start


def _value(result: PosteriorDraws, mode: Mode, site: str, element: int) -> float:
    """A site's element at a mode, as the model has it; the last one where it has fewer."""
    layout, size = result.layout, len(mode.gaussian.mean)
    position = result.positions[0, -1].clone()
    position[:size] = mode.gaussian.mean.to(position)
    values = result.log_posterior.constrain(layout.unflatten(position))[site].flatten()
    return float(values[min(element, len(values) - 1)]) if len(values) else math.nan
