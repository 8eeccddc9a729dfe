"""The check that draws cover every mode of the posterior that the searches found."""

from __future__ import annotations

import math

import torch

from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.report import Finding, Verdict
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import some_draws
from pyro_scale.tuning.modes import Mode, Modes

#: Modes whose positions a finding lists.
_MODES_SHOWN = 4


def check_modes(result: PosteriorDraws, modes: Modes) -> list[Finding]:
    """A list with one finding for the report: whether draws are in every mode that the searches
    found, judged by the modes' evidence; empty if only one mode is worth visiting.

    A draw is assigned to the mode whose Gaussian, weighted by its evidence, is densest there. The
    mode at which a chain started is not evidence: the chain may have left a spurious mode, or may
    have broken and continued where others were.

    Args:
        result: draws of a run.
        modes: modes of the posterior that the searches found.
    """
    visited = modes.worth_visiting
    if len(visited) < 2:
        return []
    gaussians = [mode.gaussian for mode in visited]
    draws = some_draws(result.positions, MIXING.draws_at_modes).flatten(0, 1).double().cpu()
    evidence = torch.tensor([mode.log_evidence for mode in visited], dtype=torch.float64)
    size = len(gaussians[0].mean)
    densities = torch.stack(
        [torch.vmap(g.log_prob)(draws[:, :size].to(g.mean)).cpu() for g in gaussians]
    )
    counts = torch.softmax(densities + evidence[:, None], 0).sum(1)
    shares = torch.softmax(evidence, 0)
    empty = [place for place, count in enumerate(counts.tolist()) if count < 0.5]
    missed = [place for place in empty if len(draws) * float(shares[place]) > MIXING.missed_draws]
    unvisited = [id(mode.gaussian) for mode in modes.unvisited(result.num_chains)]
    without_start = [place for place, g in enumerate(gaussians) if id(g) in unvisited]
    site, element = _where_they_differ(result, visited)
    at = ", ".join(
        f"{_value_at(result, mode, site, element):.4g}" for mode in visited[:_MODES_SHOWN]
    )
    below = ", ".join(f"{float(evidence[0] - nats):.1f}" for nats in evidence[1:])
    text = f"{len(visited)} modes, at {at}; the others have {below} nats less evidence"
    verdict: Verdict = "yes"
    share = max((float(shares[place]) for place in missed), default=0.0)
    if missed:
        verdict = "no" if share > MIXING.missed else "unknown"
        text += f"; there is no draw at {len(missed)} of them"
    elif set(without_start) & set(empty):
        verdict = "unknown"
        text += f"; no chain started from {len(without_start)} of them"
    advice = "a model without the other modes (an order, a sign), or more chains (num_chains=8)"
    return [Finding(site, "modes", verdict, text, advice, share / MIXING.missed)]


def _where_they_differ(result: PosteriorDraws, modes: tuple[Mode, ...]) -> tuple[str, int]:
    """The element by which a message tells modes apart: (name of its site; index of the element
    within the site's unconstrained value). At this element some mode is furthest from the best one,
    in sds of the best mode's Gaussian."""
    best = modes[0].gaussian
    means = torch.stack([mode.gaussian.mean for mode in modes])
    distance = (means - best.mean).abs().amax(0) / best.variance.sqrt()
    place = int(distance.argmax())
    site = result.layout.site_at(place)
    return site, place - result.layout.slices()[site].start


def _value_at(result: PosteriorDraws, mode: Mode, site: str, element: int) -> float:
    """The constrained value that an element of a site has at a mode; of the last element if the
    constrained site has fewer elements, NaN if it has none."""
    layout, size = result.layout, len(mode.gaussian.mean)
    position = result.positions[0, -1].clone()
    position[:size] = mode.gaussian.mean.to(position)
    values = result.log_posterior.constrain(layout.unflatten(position))[site].flatten()
    return float(values[min(element, len(values) - 1)]) if len(values) else math.nan
