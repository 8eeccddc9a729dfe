"""Calibration of predictive draws: probability integral transform and interval coverage."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks
from pyro_scale.metrics.conformal import Interval


def pit(draws: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The probability integral transform: the rank of each observation among its draws, in (0, 1).

        (draws below y + 1/2) / (draws + 1)

    If y is another draw from the prediction, its draws + 1 possible ranks are equally likely.  So
    the values are uniform on the centers of draws + 1 equal cells of (0, 1), exactly and for any
    number of draws.  A histogram that is high at both ends shows that predictions are too narrow;
    one that is high in the middle, that they are too wide (Gneiting, Balabdaoui and Raftery 2007).

    Draws equal to y, as with counts, count half.  That keeps the mean at 1/2, but the values are
    not uniform.  With a `generator`, y gets a random rank among them, and the values are uniform
    (Czado, Gneiting and Held 2009).

    Args:
        draws: draws of the predictive distribution, noise included, `[draws, rows]`, or with more
            dimensions.
        y: observations, `[rows]`.
        generator: torch generator that breaks ties at random, on the draws' device; None to count
            ties half.

    Returns:
        The transforms, `[rows]`, in (0, 1).

    Raises:
        ArgumentError: shapes that do not match, empty tensors, or values that are not finite.

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

    The interval's ends are the draws' quantiles at (1 - level)/2 and (1 + level)/2.  The k-th
    smallest of S draws is the quantile at k/(S + 1) (Hyndman and Fan's 6th definition, 1996), with
    linear interpolation.  If y is another draw, it is below the k-th with that probability, so the
    expected coverage of a calibrated prediction of a y without ties is `level` (exactly if
    (S + 1)(1 - level)/2 is a whole number).  The default quantiles of NumPy and torch are too
    narrow.

    Args:
        draws: draws of the predictive distribution, noise included, `[draws, rows]`, or with more
            dimensions.
        y: observations, `[rows]`.
        level: probability of the interval, in (0, 1), or a tensor of probabilities.  0.9 needs
            fewer rows and draws than 0.95.

    Returns:
        Fractions in the shape of `level`, a scalar for a number.

    Raises:
        ArgumentError: as `pit`; a level out of range, or above 1 - 2/(S + 1), that of the
            outermost two draws.

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
            f"level={level}: {len(draws)} draws resolve levels up to "
            f"{1 - 2 / (len(draws) + 1):.3g}: pass more draws, or a lower level"
        )
    lower, upper = central(draws, levels.flatten())
    inside = (lower <= y) & (y <= upper)
    return inside.flatten(1).to(draws.dtype).mean(1).reshape(levels.shape)


def central(draws: Tensor, levels: Tensor) -> Interval:
    """Central intervals of draws, lower and upper ends `[levels, ...]`: the quantiles at (1 -
    level)/2 and (1 + level)/2, as in `coverage`.

    Args:
        draws: draws of the predictive distribution, `[draws, ...]`.
        levels: probabilities of the intervals, float64 `[levels]`, at most 1 - 2/(draws + 1).
    """
    ordered, position = draws.sort(0).values, _position(levels, len(draws))
    return Interval(_at(ordered, position), _at(ordered.flip(0), position))


def _position(levels: Tensor, count: int) -> Tensor:
    """The ranks, among `count` sorted draws, of the lower ends of central intervals, float64 in the
    shape of `levels`: counted from 1, with fractions between two draws.

    Args:
        levels: probabilities of the intervals, float64.
        count: number of draws.
    """
    levels = levels.round(decimals=6)  # the digits of a float32, so that 0.9 is 0.9
    return ((1 - levels) / 2 * (count + 1)).round(decimals=9)


def _at(ordered: Tensor, position: Tensor) -> Tensor:
    """The values at fractional ranks among sorted draws, interpolated linearly, `[levels, ...]`.

    Args:
        ordered: draws in ascending or descending order, `[draws, ...]`.
        position: ranks counted from 1, float64 `[levels]`.
    """
    before = position.long()
    weight = (position - before).to(ordered.dtype).reshape(-1, *[1] * (ordered.dim() - 1))
    return torch.lerp(ordered[before - 1], ordered[before.clamp(max=len(ordered) - 1)], weight)


def _check(draws: Tensor, y: Tensor) -> None:
    """Raises an error unless draws `[draws, ...]` and observations `[...]` are tensors of matching
    shapes, not empty, with finite numbers.

    Raises:
        ArgumentError: shapes do not match, a tensor is empty, or a number is not finite.
    """
    checks.floating(draws=draws)
    if not isinstance(y, Tensor) or draws.dim() < 2 or draws.shape[1:] != y.shape:
        description = checks.shape(y) if isinstance(y, Tensor) else type(y).__name__
        raise ArgumentError(
            f"draws has shape {checks.shape(draws)} and y {description}: pass draws [draws, rows] "
            "and y [rows], tensors"
        )
    checks.finite(draws=draws, y=y)
