"""The check that draws cover every mode of the posterior that the searches found."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_scale.curvature.newton import ascend
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.report import Finding, Verdict
from pyro_scale.exact.log_density import LogDensity, TemperedDensity
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.problem import Problem
from pyro_scale.storage.lazy_draws import some_draws
from pyro_scale.tuning.modes import Mode, has_dip, merge, mode_at, worth_visiting
from pyro_scale.tuning.policy import GEOMETRY, SEARCH
from pyro_scale.tuning.search_starts import search_starts

#: Modes whose positions a finding lists.
_MODES_SHOWN = 4
#: Newton steps with which a search by L-BFGS ends, and nats that they may leave to gain.
_NEWTON_STEPS, _NEAR = 3, 0.05
#: Most gradients of a search by L-BFGS.
_MOST_GRADIENTS = 200
#: Such a search ends where the gradient, in nats per sd of the draws, or the relative gain is this
#: small.
_SLOPE, _GAIN = 1e-2, 1e-9
#: The gradient beyond which its end is no mode.
_FLAT = 0.1
#: Nats by which the log density counts as below its lowest where it is not finite.
_WALL = 1e6
#: Differences of latents, in sds of the draws, from whose gradients a Hessian is computed.
_DIFFERENCE = 1e-4


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
        [m.gaussian.log_probs(draws[:, :size].to(m.gaussian.mean)).cpu() for m in modes]
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


def check_modes_of_nuts(
    result: PosteriorDraws,
    latents: Tensor,
    problem: Problem,
    log_density: LogDensity,
    gradients: float,
) -> list[Finding]:
    """A list with one finding for the report of NUTS: whether draws are in every mode that searches
    find, from the draw of the largest density and from the library's own starts; empty if these
    lead to a single mode, or to none.

    Searches by L-BFGS take the compiled gradients of NUTS, a small fraction of its own. Ends count
    as different modes if the log density dips between them; only then are there Hessians.

    Args:
        result: draws of the run.
        latents: draws of the unconstrained latents, `[chains, draws, D]` in float64.
        problem: model, data and chains of the run.
        log_density: log density of the run.
        gradients: number of gradients that the run took.
    """
    size = log_density.layout.size
    num_searches = int(SEARCH.fraction_of_nuts * gradients / _MOST_GRADIENTS)
    if num_searches < 2 or size > GEOMETRY.dense:
        return []
    draws = latents.flatten(0, 1)
    densest, sd = draws[result.sample_stats["lp"].flatten().argmax()], draws.std(0)
    sd = torch.where(sd > 0, sd, 1.0)
    density = TemperedDensity(
        log_posterior=problem.log_posterior,
        data=problem.data,
        layout=log_density.layout,
        function=log_density.function,
        differences=_DIFFERENCE * sd,
    )
    starts = search_starts(problem, density, True, SEARCH.places_one_by_one)
    starts = starts[: num_searches - 1, :size].double().cpu()
    modes = _distinct_modes(density, [densest, *starts], sd)
    if len(modes) < 2:
        return []
    return check_modes(result, modes, (), "BAOA(model), whose chains start at all modes")


def _distinct_modes(density: TemperedDensity, starts: Sequence[Tensor], sd: Tensor) -> list[Mode]:
    """The modes that searches lead to, if the first of them leads to one; empty if these are not
    two or more.

    Args:
        density: log density of the run.
        starts: latents at which searches begin, `[D]` each.
        sd: standard deviations of latents, `[D]`.
    """
    ends, modes = list[Tensor](), list[Mode]()
    for start in starts:
        end = _climb(density, start, sd)
        if end is None and not ends:  # no mode where draws are
            return []
        if end is not None and all(has_dip(density, other, end, 1.0) for other in ends):
            ends.append(end)
    for number, end in enumerate(ends if len(ends) > 1 else ()):
        ascent = ascend(density, end, _NEAR, _NEWTON_STEPS)
        if ascent.is_mode:
            modes.append(mode_at(ascent, 1.0, (number,)))
        elif not modes:
            return []
    return merge(modes)


def _climb(density: TemperedDensity, start: Tensor, sd: Tensor) -> Tensor | None:
    """The latents `[D]` at the end of a search by L-BFGS in units of `sd`; None if the gradient has
    not vanished there.

    Args:
        density: log density of the run.
        start: latents at which the search begins, `[D]`.
        sd: standard deviations of latents, `[D]`.
    """
    from scipy.optimize import minimize  # slow to import

    num_data, highest = density.log_posterior.num_data, 0.0

    def descend(z: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        nonlocal highest
        nats, slope = density.grad(start + sd * torch.from_numpy(z))
        value, downhill = -num_data * float(nats), (-num_data * sd * slope).numpy()
        if not (math.isfinite(value) and math.isfinite(downhill.sum())):
            return highest + _WALL, 0 * z
        highest = max(highest, value)
        return value, downhill

    zero = torch.zeros_like(start).numpy()
    options = {"maxfun": _MOST_GRADIENTS, "ftol": _GAIN, "gtol": _SLOPE, "maxcor": 20}
    end = minimize(descend, zero, jac=True, method="L-BFGS-B", options=options)
    is_flat = math.isfinite(end.fun) and bool(abs(end.jac).max() < _FLAT)
    return start + sd * torch.from_numpy(end.x) if is_flat else None


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
