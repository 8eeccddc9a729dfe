"""The check that gradients are those of the log density: chains follow gradients, and do not see
what these leave out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.policy import GRADIENTS
from pyro_scale.diagnostics.report import Finding
from pyro_scale.errors import DataError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import some_draws

#: Gauss-Lobatto quadrature on (-1, 1), exact up to the fifth degree.
_NODES = -1.0, -(0.2**0.5), 0.2**0.5, 1.0
_WEIGHTS = 1 / 6, 5 / 6, 5 / 6, 1 / 6


def check_gradients(result: PosteriorDraws) -> list[Finding]:
    """A list with one finding for the report if the gradients are not those of the log density;
    empty if they are, or if that cannot be told.

    The integral of the gradient along the line between two draws is the difference of their log
    densities, unless the log density has jumps or part of its gradient is cut off. Where proposals
    are accepted or rejected by the log density, draws are right whatever the gradients are.

    Args:
        result: draws of a run.
    """
    count = _affordable_pairs(result)
    if count < GRADIENTS.fewest_pairs or not isinstance(result.data, TensorData):
        return []
    density = FullDataDensity(result.log_posterior, result.data, result.layout)
    density = density.of_some_rows(GRADIENTS.rows, int(result.attrs["seed"]))
    each = math.ceil(2 * count / result.num_chains)
    draws = some_draws(result.positions, each).flatten(0, 1)
    try:
        gap, error = gap_between(density, draws[:count], draws[count : 2 * count])
    except DataError:  # the data are only some of the N rows
        return []
    limit = GRADIENTS.gap + GRADIENTS.errors * error
    if not gap > limit:
        return []
    text = (
        f"gradients are not those of the log density, whose differences between draws are {gap:.2g}"
        " nats off from the integrals of its gradient"
    )
    advice = (
        "a model without jumps and cut gradients (comparisons, rounding, .detach() of what depends "
        "on a latent); or GHMC, which proposes by gradients and accepts by the density"
    )
    return [Finding("", "gradients", "no", text, advice, gap / limit)]


def gap_between(density: FullDataDensity, begin: Tensor, end: Tensor) -> tuple[float, float]:
    """By how much the difference of log densities between two positions differs from the integral
    of the gradient along the line between them, over pairs of positions whose log densities are
    finite.

    If some pair's gap is above the limit, the panel of each line whose gap is largest is halved,
    and so on. Gaps that are errors of quadrature, at kinks and narrow places, become small; those
    of jumps and cut gradients stay.

    Args:
        density: log density, and its gradient.
        begin: the pairs' first positions, `[pairs, D]`.
        end: their second positions.

    Returns:
        (Root mean square of the pairs' gaps, in nats; that of the errors of integrals, by what the
        last halvings changed, and of rounding). NaN if fewer than `GRADIENTS.fewest_pairs` pairs
        are finite.
    """
    edges = torch.linspace(0, 1, GRADIENTS.panels + 1, dtype=torch.float64).repeat(len(begin), 1)
    left, right = edges[:, :-1], edges[:, 1:]
    gaps, largest = _gaps_of_panels(density, begin, end, left, right)
    totals = [gaps.sum(1)]
    is_suspect = not bool((totals[0].abs() <= GRADIENTS.gap).all())
    for _ in range(GRADIENTS.halvings if is_suspect else 0):
        worst = gaps.abs().argmax(1, keepdim=True)
        low, high = left.gather(1, worst), right.gather(1, worst)
        middle = (low + high) / 2
        halves = torch.cat([low, middle], 1), torch.cat([middle, high], 1)
        new, _ = _gaps_of_panels(density, begin, end, *halves)
        gaps, left, right = (
            torch.cat([old.scatter(1, worst, both[:, :1]), both[:, 1:]], 1)
            for old, both in ((gaps, new), (left, halves[0]), (right, halves[1]))
        )
        totals.append(gaps.sum(1))
    rounding = torch.finfo(begin.dtype).eps * largest
    errors = (totals[-1] - totals[len(totals) // 2]).abs() + rounding
    is_finite = totals[-1].isfinite() & errors.isfinite()
    if int(is_finite.sum()) < GRADIENTS.fewest_pairs:
        return math.nan, math.nan
    gap, error = (float(v[is_finite].square().mean().sqrt()) for v in (totals[-1], errors))
    return gap, error


def _affordable_pairs(result: PosteriorDraws) -> int:
    """The number of pairs of draws between which gradients are integrated: at most so many that
    these gradients, if no line has to be refined, are a small fraction of the run's. 0 where they
    are not checked."""
    attrs, num_data = result.attrs, result.log_posterior.num_data
    if "acceptance_rate" in attrs or result.read_together:
        return 0
    chains, draws = result.positions.shape[:2]
    taken = chains * draws * int(attrs["thinning"]) * int(attrs.get("batch_size", num_data))
    each = GRADIENTS.panels * len(_NODES) * min(num_data, GRADIENTS.rows)
    return min(GRADIENTS.pairs, chains * draws // 2, int(GRADIENTS.fraction * taken / each))


def _gaps_of_panels(
    density: FullDataDensity, begin: Tensor, end: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    """Differences of the log density less integrals of its gradient, by Gauss-Lobatto quadrature.

    Args:
        density: log density, and its gradient.
        begin: where each pair's line begins, `[pairs, D]`.
        end: where it ends.
        left: fraction of the line at which each panel begins, `[pairs, panels]`.
        right: that at which it ends.

    Returns:
        (Each panel's gap, in nats, `[pairs, panels]`; the pairs' largest absolute log densities).
    """
    width = (right - left)[..., None]
    at = (left[..., None] + width * (1 + left.new_tensor(_NODES)) / 2).to(begin)
    way = (end - begin)[:, None, None]
    positions = begin[:, None, None] + at[..., None] * way
    values, slopes = density.grads(positions.flatten(0, 2))
    num_data = density.log_posterior.num_data
    values = num_data * values.view(at.shape)
    along = num_data * (slopes.view(positions.shape) * way).sum(-1).double()
    integrals = (width * along) @ left.new_tensor(_WEIGHTS) / 2
    return values[..., -1] - values[..., 0] - integrals, values.abs().amax((1, 2))
