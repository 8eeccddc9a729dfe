"""Whether nodes sum local latents out where the draws are, tails included."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.validation import evenly
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.policy import NODES
from pyro_scale.diagnostics.report import Finding, Verdict
from pyro_scale.marginal.integrated import Integrated, integrated_of
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.tuning.policy import TOLERANCE


def check_local_latents(result: PosteriorDraws) -> list[Finding]:
    """One finding, whether the nodes bias means and sds; none if no latents were summed out.

    At some draws, the log density is compared with that of 2K + 1 nodes that are placed at the draw
    itself. Its difference e is the log of the ratio of the two posteriors, so the bias of an
    element x is Cov(x, e) to first order, and at most sd(e) posterior sds.
    """
    model, data = integrated_of(result.log_posterior), result.data
    if model is None or not isinstance(data, TensorData):
        return []
    count = min(NODES.draws, result.positions.shape[:2].numel())
    chosen = evenly(result.positions.shape[:2].numel(), count)
    positions = torch.cat(list(result.blocks()))[chosen]
    error = _log_density_errors(result, model, data, positions)
    spread = float(error.std())
    centered = positions.double() - positions.double().mean(0)
    of_means = (centered * (error - error.mean())[:, None]).mean(0) / centered.std(0)
    chance = NODES.errors * spread / math.sqrt(count)
    mean_bias = min(spread, float(of_means.abs().max()) + chance)
    is_seen = model.unseen_bias <= TOLERANCE.mean
    is_small = is_seen and mean_bias <= TOLERANCE.mean and spread <= NODES.spread
    latents = model.local.names
    text = (
        f"{latents}: summed out over {model.num_nodes} nodes a {model.local.unit}; against more "
        f"nodes, placed at {count} draws, means are off by less than {mean_bias:.2g} sds"
    )
    if not is_seen:
        text = (
            f"{latents}: some {model.local.unit}s have modes that nodes do not reach, or none, so "
            f"means could be off by {model.unseen_bias:.2g} sds"
        )
    advice = "" if is_small else "pass all rows to NUTS, which samples these latents"
    verdict: Verdict = "yes" if is_small else "unknown"
    severity = max(spread / NODES.spread, model.unseen_bias / TOLERANCE.mean)
    return [Finding("", "local latents", verdict, text, advice, severity)]


def _log_density_errors(
    result: PosteriorDraws, model: Integrated, data: TensorData, positions: Tensor
) -> Tensor:
    """The log density over the run's nodes minus that over more of them, which are placed anew, at
    positions `[draws, D]`: `[draws]` in nats, estimated from a sample of the units."""
    num_units = rows.count(data.arguments) or 1
    source = generator(int(result.attrs.get("seed", 0)), 0, Purpose.SEARCH)
    picked = torch.randperm(num_units, generator=source)[: NODES.units].sort().values
    taken: Any = rows.take(data.arguments, picked)
    units, modes = taken
    finer = Integrated(model.local, 2 * model.count + 1, is_far=True)
    errors = []
    with torch.no_grad():
        for position in positions:
            values = result.log_posterior.constrain(result.layout.unflatten(position))
            own, best = (
                each.log_marginal(values, units, each.gaussians(values, units, modes))
                for each in (model, finer)
            )
            errors.append((own - best).sum(dtype=torch.float64))
    return torch.stack(errors) * (num_units / len(picked))
