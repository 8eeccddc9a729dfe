"""Whether a run's warm-up settled, or its draws did."""

from __future__ import annotations

import math

import torch

from pyro_scale.core.mixing import split_r_hat
from pyro_scale.core.whitening import Whitening
from pyro_scale.diagnostics.modes import check_modes
from pyro_scale.diagnostics.report import Finding
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import some_draws
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.policy import WARM_UP

#: Draws of each chain, at most, that are compared.
_MOST_DRAWS = 1000


def check_warm_up(result: PosteriorDraws, choice: Choice | None) -> list[Finding]:
    """Findings for the report on a warm-up in windows: whether it settled, and whether draws are in
    all modes that the searches found. An empty list for a run without such a warm-up.

    Warm-up has settled if chains agreed in its last window, and the geometry (the whitened
    coordinates) no longer changed. If it did not, the draws decide, which are a longer window: in a
    geometry that does not fit, chains are slow, but right where they mix.
    """
    if choice is None or choice.window is None:
        return []
    window, change = choice.window, "by no more than chance"
    if window.change > 1:
        change = f"{window.change:.2f} times more in some direction's sd than by chance"
    text = (
        f"after {window.steps:,} steps R-hat is {window.r_hat:.3f}, the geometry changes {change}"
    )
    settled, whitening = window.agrees, choice.problem.engine.whitening
    if not settled and whitening is not None:
        r_hat = _r_hat(result, whitening)
        text += f"; R-hat of the draws in this geometry is {r_hat:.3f}"
        settled = r_hat < WARM_UP.most_r_hat
    severity = max(
        (window.r_hat - 1) / (WARM_UP.most_r_hat - 1),
        (window.change - 1) / (WARM_UP.most_change - 1),
    )
    advice = "another parametrization"
    finding = Finding("", "warm-up", "yes" if settled else "unknown", text, advice, severity)
    if (modes := choice.modes) is None:
        return [finding]
    without_start = modes.unvisited(result.num_chains)
    if not modes.elsewhere:
        return [finding, *check_modes(result, modes.worth_visiting, without_start)]
    every, restart = (*modes.modes, *modes.elsewhere), "init_strategy='auto'"
    without_start += modes.elsewhere
    return [finding, *check_modes(result, every, without_start, restart)]


def _r_hat(result: PosteriorDraws, whitening: Whitening) -> float:
    """The largest R-hat of the draws in whitened coordinates, of elements and of their squares, in
    which slow means and slow spreads show; NaN if there are fewer than four draws a chain."""
    params = some_draws(result.positions, _MOST_DRAWS)
    if params.shape[1] < 4:
        return math.nan
    z = whitening.double().to_whitened(params[..., : len(whitening.tensors[0])].double())
    return float(split_r_hat(torch.cat([z, z.square()], -1)).max())
