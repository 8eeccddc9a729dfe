"""The check that gradients are those of the log density: chains follow gradients, and do not see
what these leave out."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.policy import GRADIENTS
from pyro_scale.diagnostics.report import Finding
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import spread


def check_gradients(result: PosteriorDraws) -> list[Finding]:
    """A list with one finding for the report if the gradients are not those of the log density;
    empty if they are, or if that cannot be told.

    The integral of the gradient along the line between two draws is the difference of their log
    densities, unless the log density has jumps or part of its gradient is cut off. Two rules of
    quadrature tell errors of the integral from that. Proposals that are accepted by the log density
    need no right gradients.

    Args:
        result: draws of a run.
    """
    count = _affordable_pairs(result)
    if count < GRADIENTS.fewest_pairs or not isinstance(result.data, TensorData):
        return []
    seed, num_data = int(result.attrs["seed"]), result.log_posterior.num_data
    density = FullDataDensity(result.log_posterior, result.data, result.layout)
    density = density.of_some_rows(GRADIENTS.rows, seed)
    draws = _some_draws(result, 2 * count)
    begin, end = draws[:count], draws[count:]
    at_ends = density.values(torch.cat([begin, end])) * num_data
    difference = at_ends[count:] - at_ends[:count]
    coarse, fine = (
        num_data * _integrals(density, begin, end, nodes) for nodes in GRADIENTS.nodes
    )
    rounding = torch.finfo(draws.dtype).eps * at_ends.abs().amax()
    is_finite = difference.isfinite() & coarse.isfinite() & fine.isfinite()
    if int(is_finite.sum()) < GRADIENTS.fewest_pairs:
        return []
    gap, error = (
        float(each[is_finite].square().mean().sqrt())
        for each in (difference - fine, coarse - fine)
    )
    limit = GRADIENTS.gap + GRADIENTS.errors * (error + float(rounding))
    if gap <= limit:
        return []
    text = (
        f"gradients are not those of the log density: between draws, it differs by {gap:.2g} nats "
        "from the integral of its gradient"
    )
    advice = (
        "no jumps and no cut gradients (comparisons, rounding, .detach() of what depends on a "
        "latent); or GHMC, which needs no right gradients"
    )
    return [Finding("", "gradients", "no", text, advice, gap / limit)]


def _affordable_pairs(result: PosteriorDraws) -> int:
    """The number of pairs of draws between which gradients are integrated: at most so many that
    these gradients are a small fraction of the run's. 0 where they are not checked."""
    attrs, num_data = result.attrs, result.log_posterior.num_data
    if "acceptance_rate" in attrs or result.read_together:
        return 0
    chains, draws = result.positions.shape[:2]
    taken = chains * draws * int(attrs["thinning"]) * int(attrs.get("batch_size", num_data))
    each = len(_edges()) * sum(GRADIENTS.nodes) * min(num_data, GRADIENTS.rows)
    return min(GRADIENTS.pairs, chains * draws // 2, int(GRADIENTS.fraction * taken / each))


def _some_draws(result: PosteriorDraws, count: int) -> Tensor:
    """Evenly spread draws of all chains, one chain after another, `[count, D]`."""
    places = spread(result.positions, math.ceil(count / result.num_chains))
    chains = torch.arange(result.num_chains)[:, None]
    return result.positions[chains, places].flatten(0, 1)[:count]


def _edges() -> Tensor:
    """Panels of a line from 0 to 1, which become narrower to both ends: draws may be where the
    posterior is narrow."""
    halves = 0.5 ** torch.arange(GRADIENTS.halvings, 0, -1, dtype=torch.float64)
    return torch.cat([torch.zeros(1), halves, 1 - halves[:-1].flip(0), torch.ones(1)])


def _integrals(density: FullDataDensity, begin: Tensor, end: Tensor, nodes: int) -> Tensor:
    """Integrals of the gradient from positions `begin` to positions `end`, `[pairs]`, by
    Gauss-Legendre quadrature with as many nodes in each panel."""
    edges = _edges()
    places, weights = (torch.as_tensor(each) for each in np.polynomial.legendre.leggauss(nodes))
    half = edges.diff()[:, None] / 2
    at = (edges[:-1, None] + half * (1 + places)).flatten()
    way = end - begin
    positions = begin[:, None] + at.to(begin)[:, None] * way[:, None]
    _, slopes = density.grads(positions.flatten(0, 1))
    along = (slopes.unflatten(0, (len(begin), len(at))) * way[:, None]).sum(-1)
    return along.double() @ (half * weights).flatten()
