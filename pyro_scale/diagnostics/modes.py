"""The check that draws cover every mode of the posterior that the searches found."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.report import Finding, Verdict
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import some_draws
from pyro_scale.tuning.modes import Mode, worth_visiting

#: Modes whose positions a finding lists.
_MODES_SHOWN = 4


def check_modes(
    result: PosteriorDraws, modes: Sequence[Mode], without_start: Sequence[Mode], restart: str = ""
) -> list[Finding]:
    """A list with one finding for the report: whether draws are in every mode that the searches
    found, judged by the modes' evidence; empty if only one mode is worth visiting, and has draws.

    A draw is assigned to the mode whose Gaussian, weighted by its evidence, is densest there. The
    mode at which a chain started is not evidence: the chain may have left a spurious mode, or may
    have broken and continued where others were.

    Args:
        result: draws of a run.
        modes: modes of the posterior that the searches found.
        without_start: those of them from which no chain started.
        restart: what to try so that chains start at all modes; empty if they did.
    """
    modes = sorted(modes, key=lambda mode: -mode.log_evidence)
    worth = len(worth_visiting(modes))
    evidence = torch.tensor([mode.log_evidence for mode in modes], dtype=torch.float64)
    draws = some_draws(result.positions, MIXING.draws_at_modes).flatten(0, 1).double().cpu()
    size = len(modes[0].gaussian.mean)
    densities = torch.stack(
        [torch.vmap(m.gaussian.log_prob)(draws[:, :size].to(m.gaussian.mean)).cpu() for m in modes]
    )
    counts = torch.softmax(densities + evidence[:, None], 0).sum(1)
    shares = torch.softmax(evidence[:worth], 0)
    empty = [place for place in range(worth) if float(counts[place]) < 0.5]
    if worth < 2 and not empty:
        return []
    missed = [place for place in empty if len(draws) * float(shares[place]) > MIXING.missed_draws]
    not_begun = [p for p in range(worth) if any(modes[p] is mode for mode in without_start)]
    told = modes[: max(2, worth)]
    site, element = _where_they_differ(result, told)
    at = ", ".join(f"{_value_at(result, mode, site, element):.4g}" for mode in told[:_MODES_SHOWN])
    below = ", ".join(f"{float(evidence[0] - nats):.1f}" for nats in evidence[1 : len(told)])
    text = f"{len(told)} modes, at {at}; the others have {below} nats less evidence"
    verdict: Verdict = "yes"
    share = max((float(shares[place]) for place in missed), default=0.0)
    if missed:
        verdict = "no" if share > MIXING.missed else "unknown"
        text += f"; there is no draw at {len(missed)} of them"
    elif set(not_begun) & set(empty):
        verdict = "unknown"
        text += f"; no chain started from {len(not_begun)} of them"
    advice = "a model without the other modes (an order, a sign)"
    advice += "" if restart else ", or more chains (num_chains=8)"
    if len(empty) == worth:  # draws are at modes without mass
        advice = restart
    return [Finding(site, "modes", verdict, text, advice, share / MIXING.missed)]


def _where_they_differ(result: PosteriorDraws, modes: Sequence[Mode]) -> tuple[str, int]:
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
