"""The check for stray draws: single draws that the integrator threw far out of the posterior.

Under the posterior, few draws have a log joint far below that of most draws, however heavy the
tails are: a Cauchy's draw at 10,000 scales is 18 nats below its mode (`core/stray.py`).

A wide mode of little mass is as low, but flat.  At most stray draws the log joint falls along the
line from the median.  `-(x - median)' gradient` is the virial of all latents, whose mean is D under
the posterior; for a log-concave posterior, it is at least the fall of the log joint since the
median.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.core.stray import STRAY, usual_fall
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.report import Finding, Verdict
from pyro_scale.errors import DataError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import some_draws, spread
from pyro_scale.tuning.policy import TOLERANCE

#: Sd over median absolute deviation, of a normal.
_SD_OVER_MAD = 1.4826


def check_stray_draws(result: PosteriorDraws) -> list[Finding]:
    """A list with one finding for the report if draws have a log joint that is too low for the
    posterior: "no" if it falls towards one of them, and they change a mean or an sd by more than is
    tolerated, otherwise "unknown". Empty if there are none.

    Candidates are the lowest draws by recorded log joint, which is within the step before a draw,
    and an estimate if batches are part of the rows. All rows are read only if there are candidates.
    If they cannot be read, the finding is "unknown".

    Args:
        result: draws of a run above temperature 0.
    """
    log_joint = result.sample_stats["lp"]
    if result.data is None or log_joint.shape[1] < MIXING.fewest_per_chain:
        return []
    falls, order = (-log_joint.flatten().double().cpu()).sort(descending=True)
    base, most = usual_fall(falls)
    candidates = order[: min(int((falls - base > most).sum()), STRAY.checked)]
    if not len(candidates):
        return []
    chains, places = candidates // log_joint.shape[1], candidates % log_joint.shape[1]
    columns = result.layout.places(result.log_posterior.latents)
    draws = result.positions[chains, places]
    sample = some_draws(result.positions, MIXING.draws_at_modes).flatten(0, 1)
    center = sample.median(0).values
    away = (draws - center)[:, columns].double()
    density = FullDataDensity(result.log_posterior, result.data, result.layout)
    try:
        values, slopes = density.grads(draws)
    except DataError:  # another process has some of the rows, or a stream has ended
        text = f"{len(candidates)} of {len(falls):,} draws may be stray; only all rows can tell"
        return [Finding("", "stray draws", "unknown", text, "data that can be read twice")]
    num_data = result.log_posterior.num_data
    below = (-num_data * values).cpu() - base
    virial = (-num_data * (away * slopes[:, columns])).sum(1).cpu()
    # NaN, where the model fails on all rows, does not contradict the recorded log joint
    is_low = ~(below <= most)
    is_steep = is_low & ~(virial - len(columns) <= most)
    if not bool(is_low.any()):
        return []
    worst, count = int(is_low.int().argmax()), int(is_low.sum())
    spreads = (sample - center)[:, columns].abs().median(0).values
    column = int(columns[int((away[worst].abs() / spreads).nan_to_num(0).argmax())])
    site = result.layout.site_at(column)
    value = result.samples_at(chains[worst], places[worst])[site].flatten()
    element = min(column - result.layout.slices()[site].start, len(value) - 1)
    harms = bool(is_steep.any()) and _change_moments(result, chains[is_low], places[is_low])
    verdict: Verdict = "no" if harms else "unknown"
    which = "" if bool(is_steep.any()) else ", or of a wide mode of little mass"
    text = (
        f"{'at least ' if count == STRAY.checked else ''}{count} of {len(falls):,} draws "
        f"{'is' if count == 1 else 'are'} stray{which}: the lowest, at "
        f"{float(value[element]):.4g}, has a log joint {float(below[worst]):.0f} nats below that "
        f"of {STRAY.upper:.0%} of draws"
    )
    advice = "a smaller lr (lr=), or another parametrization"
    too_low = -log_joint.double().cpu() - base > most
    if bool(too_low[:, 0].any()) and not bool(too_low[:, log_joint.shape[1] // 10 :].any()):
        advice = "more warmup_steps=, as only chains' first draws are"
    return [Finding(site, "stray draws", verdict, text, advice, float(below[worst]) / most)]


def _change_moments(result: PosteriorDraws, chains: Tensor, places: Tensor) -> bool:
    """Whether stray draws change an sd by more than is tolerated, at some element of a latent site.

    If they do not, means are within tolerance too: by the Cauchy-Schwarz inequality, draws of which
    a twentieth are stray then move a mean by at most (2 * 0.05 / 20)^0.5 = 0.07 sds.

    Args:
        result: draws of a run.
        chains: indices of the stray draws' chains.
        places: indices of the draws in their chains.
    """
    count = result.positions.shape[0] * result.positions.shape[1]
    usual, stray = _at_some(result), result.samples_at(chains, places)
    for name in result.log_posterior.latents:
        center = usual[name].median(0).values
        sd = _SD_OVER_MAD * (usual[name] - center).abs().median(0).values
        away = (stray[name].double() - center).abs() / sd
        within = away.square().sum(0) / (2 * count) <= TOLERANCE.sd
        if not bool((within | away.isnan().all(0)).all()):  # NaN at elements that are constant
            return True
    return False


def _at_some(result: PosteriorDraws) -> dict[str, Tensor]:
    """Constrained values at up to 500 draws of every chain, by site, in float64, `[draws, ...]`."""
    places = spread(result.positions, MIXING.draws_at_modes)
    values = result.samples_at(torch.arange(result.num_chains)[:, None], places)
    return {name: value.flatten(0, 1).double() for name, value in values.items()}
