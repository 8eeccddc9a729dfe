"""The check for stray draws: single draws that the integrator threw far out of the posterior.

Under the posterior, few draws have a log joint far below that of most draws, however heavy the
tails are: a Cauchy's draw at 10,000 scales is 18 nats below its mode.  Under independent draws of a
log-concave density, and of products of Student's t, the fall of the log joint below its 95% of
largest values has at most an exponential tail, whose scale the draws between 75% and 95% give.
`docs/diagnostics.md` has the false alarms of this rule in simulations.

A wide mode of little mass is that low, too, but flat.  A stray draw is on a slope: along the line
from the median, the log joint falls there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.diagnostics.policy import MIXING, STRAY
from pyro_scale.diagnostics.report import Finding
from pyro_scale.errors import DataError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import spread


def check_stray_draws(result: PosteriorDraws) -> list[Finding]:
    """A list with one finding for the report if draws are stray: too low in log joint for their
    number, and on a slope; empty otherwise.

    Draws are selected by the log joint of their batches. All rows are read only if that selects
    some; the finding is "unknown" if they cannot be read.

    Args:
        result: draws of a run above temperature 0.
    """
    log_joint = result.sample_stats["lp"]
    if result.data is None or log_joint.shape[1] < MIXING.fewest_per_chain:
        return []
    falls, order = (-log_joint.flatten().double().cpu()).sort(descending=True)
    base, most = usual_fall(falls)
    selected = order[: min(int((falls > base + most).sum()), STRAY.checked)]
    if not len(selected):
        return []
    chains, places = selected // log_joint.shape[1], selected % log_joint.shape[1]
    draws, total = result.positions[chains, places], f"{len(falls):,} draws"
    density = FullDataDensity(result.log_posterior, result.data, result.layout)
    try:
        values, slopes = (num * density.log_posterior.num_data for num in density.grads(draws))
    except DataError:  # other processes have some rows, or a stream has ended
        text = f"of {total}, {len(selected)} may be stray: all rows are needed to tell"
        return [Finding("", "stray draws", "unknown", text, "data that can be read again")]
    latents = result.layout.places(result.log_posterior.latents)
    pull = -(slopes * (draws - _medians(result).to(draws)))[:, latents].double().cpu()
    below = -values.cpu() - base
    is_stray = ~(below <= most) & ~(pull.sum(1) <= most)  # of NaN, nothing more is known
    if not bool(is_stray.any()):
        return []
    worst = int(torch.where(is_stray, below.nan_to_num(math.inf), -math.inf).argmax())
    place = int(latents[int(pull[worst].nan_to_num(math.inf).argmax())])
    site = result.layout.site_at(place)
    constrained = result.samples_at(chains[worst], places[worst])[site].flatten()
    element = min(place - result.layout.slices()[site].start, len(constrained) - 1)
    count = int(is_stray.sum())
    text = (
        f"{count} of {total} {'is' if count == 1 else 'are'} stray: it is "
        f"{float(constrained[element]):.4g} where the log joint is {float(below[worst]):.0f} nats "
        f"below that of {STRAY.quantiles[1]:.0%} of draws"
    )
    advice = "a smaller lr (lr=), or another parametrization"
    return [Finding(site, "stray draws", "no", text, advice, float(below[worst]) / most)]


def usual_fall(falls: Tensor) -> tuple[float, float]:
    """(The `STRAY.quantiles[1]` quantile of minus the draws' log joint; how far above it that of
    the lowest draw may be), in nats.

    Args:
        falls: minus the log joint of every draw, in descending order.
    """
    count = len(falls)
    lower, upper = (float(falls[int((1 - level) * count)]) for level in STRAY.quantiles)
    first, second = STRAY.quantiles
    scale = max(1.0, (upper - lower) / math.log((1 - first) / (1 - second)))
    return upper, STRAY.margin * math.log(count) * scale


def _medians(result: PosteriorDraws) -> Tensor:
    """Medians of the unconstrained params, `[D]`, from some draws of every chain."""
    places = spread(result.positions, MIXING.draws_at_modes)
    chains = torch.arange(result.num_chains)[:, None]
    return result.positions[chains, places].flatten(0, 1).median(0).values
