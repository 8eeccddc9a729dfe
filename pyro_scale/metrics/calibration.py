"""Calibration of predictive draws: probability integral transform and interval coverage."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks
from pyro_scale.metrics.conformal import Interval


def pit(draws: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The probability integral transform: where each observation lies among its draws.

        (draws below y + 1/2) / (draws + 1)

    If y is one more draw from the prediction then it has each of the draws + 1 ranks with the same
    probability, so these values are uniform on the middles of as many equal cells of (0, 1),
    exactly and for any number of draws.  A histogram that is high at both ends says that
    predictions are too narrow, one that is high in the middle that they are too wide (Gneiting,
    Balabdaoui and Raftery 2007).

    Draws equal to y, as counts have them, count half.  That keeps the mean at 1/2 but not the
    distribution uniform; with a `generator` y takes a random place among them, which does (Czado,
    Gneiting and Held 2009).

    Args:
        draws: from the predictive distribution, noise included, `[draws, rows]`, or with more
            dimensions.
        y: what was observed, `[rows]`.
        generator: breaks ties at random; on the draws' device.

    Returns:
        `[rows]`, in (0, 1).

    Raises:
        ArgumentError: shapes that do not fit, nothing in them, or values that are not finite.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> draws = torch.tensor([[1.0], [2.0], [3.0]])
        >>> ps.metrics.pit(draws.expand(3, 3), torch.tensor([0.0, 2.0, 2.5]))
        tensor([0.1250, 0.5000, 0.6250])
    """
    _check(draws, y)
    below, equal = (draws < y).sum(0), (draws == y).sum(0).to(draws.dtype)
    if generator is None:
        place = equal / 2
    else:
        uniform = torch.rand(y.shape, generator=generator, dtype=draws.dtype, device=draws.device)
        place = (uniform * (equal + 1)).floor().minimum(equal)  # the product may round up
    return (below + place + 0.5) / (len(draws) + 1)


def coverage(draws: Tensor, y: Tensor, level: float | Tensor = 0.9) -> Tensor:
    """The fraction of observations inside the central interval of their draws.

    The interval's ends are the draws' quantiles at (1 - level)/2 and (1 + level)/2, where the
    k-th smallest of S draws is the quantile at k/(S + 1) (Hyndman and Fan's 6th definition, 1996),
    straight lines between.  If y is one more draw, it is below the k-th with that probability, so
    a calibrated prediction's coverage of a y without ties is `level` in expectation: exactly if
    (S + 1)(1 - level)/2 is a whole number.  numpy's and torch's own quantiles are too narrow.

    Args:
        draws: from the predictive distribution, noise included, `[draws, rows]`, or with more
            dimensions.
        y: what was observed, `[rows]`.
        level: the interval's probability, in (0, 1), or a tensor of them; 0.9 can be told from
            fewer rows and draws than 0.95.

    Returns:
        Fractions in the shape of `level`, a scalar for a number.

    Raises:
        ArgumentError: as `pit`; a level out of its range, or too near 1 for the number of draws,
            of which the outermost two have the level 1 - 2/(S + 1).

    Examples:
        >>> import torch, pyro_scale as ps
        >>> draws = torch.arange(1.0, 20.0)[:, None].expand(19, 4)
        >>> ps.metrics.coverage(draws, torch.tensor([0.5, 1.0, 12.0, 19.5]))
        tensor(0.5000)
    """
    _check(draws, y)
    levels = torch.as_tensor(level, dtype=torch.float64, device=draws.device)
    if not ((levels > 0) & (levels < 1)).all():
        raise ArgumentError(f"level={level}: pass probabilities in (0, 1)")
    if (_position(levels, len(draws)) < 1).any():
        raise ArgumentError(
            f"level={level}: {len(draws)} draws tell levels up to "
            f"{1 - 2 / (len(draws) + 1):.3g}: pass more draws, or a lower level"
        )
    lower, upper = central(draws, levels.flatten())
    inside = (lower <= y) & (y <= upper)
    return inside.flatten(1).to(draws.dtype).mean(1).reshape(levels.shape)


def central(draws: Tensor, levels: Tensor) -> Interval:
    """The central intervals of draws `[draws, ...]`, `[levels, ...]`, as `coverage` has them.

    Args:
        draws: from the predictive distribution.
        levels: in float64; at most 1 - 2/(draws + 1).
    """
    ordered, position = draws.sort(0).values, _position(levels, len(draws))
    return Interval(_at(ordered, position), _at(ordered.flip(0), position))


def _position(levels: Tensor, count: int) -> Tensor:
    """Where the lower ends are among so many ordered draws, counted from 1."""
    levels = levels.round(decimals=6)  # the digits that a float32 has: its 0.9 is meant to be 0.9
    return ((1 - levels) / 2 * (count + 1)).round(decimals=9)


def _at(ordered: Tensor, position: Tensor) -> Tensor:
    """Ordered draws `[draws, ...]` at positions `[levels]`, counted from 1: `[levels, ...]`."""
    before = position.long()
    weight = (position - before).to(ordered.dtype).reshape(-1, *[1] * (ordered.dim() - 1))
    return torch.lerp(ordered[before - 1], ordered[before.clamp(max=len(ordered) - 1)], weight)


def _check(draws: Tensor, y: Tensor) -> None:
    checks.floating(draws=draws)
    if not isinstance(y, Tensor) or draws.dim() < 2 or draws.shape[1:] != y.shape:
        description = checks.shape(y) if isinstance(y, Tensor) else type(y).__name__
        raise ArgumentError(
            f"draws has shape {checks.shape(draws)} and y {description}: pass draws [draws, rows] "
            "and y [rows], tensors"
        )
    checks.finite(draws=draws, y=y)
