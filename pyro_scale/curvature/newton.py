"""Newton's method in a trust region: modes of log densities in whatever units they come.

Each step maximizes the quadratic model of the log joint inside of a ball, exactly (Moré and
Sorensen, Computing a trust region step, SIAM J. Sci. Stat. Comput. 1983).  The ball is one of
elements over their own curvatures, so that a change of units changes nothing, and a direction in
which the log joint is not concave is a way to go, not an obstacle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity

#: Steps at most; each takes a Hessian.
MOST_STEPS = 200
#: The radius at first and at most, in sds for the root of each element; and below which a step is
#: nothing but rounding.
_RADIUS, _LARGEST, _SMALLEST = 1.0, 1e8, 1e-12
#: The gain that the quadratic model still promises, in nats, at what counts as a mode, unless
#: rounding is larger; and steps that are taken without telling what they gain.
_NEAR, _MOST_STALLED = 1e-6, 20
#: Curvatures below this part of the gradient's square count as that.
_FLATTEST = 1e-8
#: Of the actual gain over the promised one: the least to take a step, to widen the region.
_TAKEN, _GOOD = 1e-4, 0.75


class Ascent(NamedTuple):
    """Where Newton's method ended.

    Attributes:
        position: the end, [D].
        value: the log joint there, in nats.
        precision: minus the Hessian there, [D, D], in nats.
        is_mode: whether the log joint is concave there, and nothing is left to gain.
        path: where it was on its way, `[steps, D]`.
    """

    position: Tensor
    value: float
    precision: Tensor
    is_mode: bool
    path: Tensor


def ascend(
    density: FullDataDensity,
    start: Tensor,
    near: float = _NEAR,
    most_steps: int = MOST_STEPS,
    check: Callable[[float], None] | None = None,
) -> Ascent:
    """The way up from a start, [D], in the precision of its dtype.

    Args:
        density: the log joint of all rows.
        start: where it begins, and ends if the log joint is not finite there.
        near: the gain that is still promised, in nats, at what counts as a mode.
        most_steps: how many there are at most.
        check: is told of the passes through the rows before each step, and may end them by raising.
    """
    num_data = density.log_posterior.num_data
    position, radius, path = start, _RADIUS * len(start) ** 0.5, [start]
    look = _look(density, position, num_data)
    if look is None:
        nothing = torch.zeros(len(start), len(start), dtype=torch.float64)
        return Ascent(start, -float("inf"), nothing, False, start[None])
    value, slope, curvature = look
    units = _units(slope, curvature)
    is_mode, stalled = False, 0
    for _ in range(most_steps):
        if check is not None:
            check(len(path) * density.passes)
        units = torch.maximum(units / 2, _units(slope, curvature))
        scale = units.rsqrt()
        lengths, axes = torch.linalg.eigh(scale[:, None] * curvature * scale)
        along = axes.mT @ (scale * slope)
        rounding = 8 * torch.finfo(start.dtype).eps * abs(value)
        left = float((along.square() / lengths).sum()) / 2
        if lengths.min() > 0 and left < max(near, rounding):
            is_mode = True
            break
        if len(path) == 1:  # where it is steep, an sd is no distance
            far = along / lengths.abs().clamp(min=_FLATTEST * float(lengths.abs().max()))
            radius = min(max(radius, float(far.norm())), _LARGEST)
        while radius > _SMALLEST:
            step = _within(lengths, along, radius)
            promised = float(along @ step - (lengths * step.square()).sum() / 2)
            there = position + (scale * (axes @ step)).to(position)
            ahead = _look(density, there, num_data)
            gained = ahead[0] - value if ahead is not None else -float("inf")
            if gained >= _TAKEN * promised or (promised < rounding and gained > -rounding):
                break
            radius = min(radius, float(step.norm())) / 4
        else:
            break
        if gained > _GOOD * promised:
            radius = min(max(radius, 3 * float(step.norm())), _LARGEST)
        assert ahead is not None
        position = there
        value, slope, curvature = ahead
        path.append(position)
        stalled += gained < _TAKEN * promised
        if stalled > _MOST_STALLED:
            break
    return Ascent(position, value, curvature, is_mode, torch.stack(path))


def _units(slope: Tensor, curvature: Tensor) -> Tensor:
    """One over the square of a length for each element, as its own curvature has it."""
    own = torch.maximum(curvature.diagonal().abs(), _FLATTEST * slope.square())
    return torch.where(own > 0, own, 1.0)


def _look(
    density: FullDataDensity, position: Tensor, num_data: int
) -> tuple[float, Tensor, Tensor] | None:
    """(The log joint, its gradient, minus its Hessian) in nats and float64; None where one is not
    finite, or a matrix of the model's cannot be factorized."""
    try:
        value, gradient, hessian = density.derivatives(position)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    if not bool(torch.isfinite(value) and torch.isfinite(hessian).all()):
        return None
    if not bool(torch.isfinite(gradient).all()):
        return None
    curvature = -num_data * hessian.double()
    return num_data * float(value), num_data * gradient.double(), curvature


def _within(lengths: Tensor, along: Tensor, radius: float) -> Tensor:
    """The step of norm at most `radius` with the largest gain, in the axes of the curvature."""
    least = max(0.0, -float(lengths.min()))
    if lengths.min() > 0:
        step = along / lengths
        if step.norm() <= radius:
            return step
    low, high = least, least + float(along.norm()) / radius + 1e-300
    for _ in range(100):
        shift = (low + high) / 2
        denominator = lengths + shift
        step = along / denominator.clamp(min=1e-300)
        low, high = (shift, high) if step.norm() > radius else (low, shift)
        if high - low <= 1e-10 * high:
            break
    step = along / (lengths + high).clamp(min=1e-300)
    short = radius**2 - float(step.square().sum())
    if lengths.min() < 0 and short > 1e-3 * radius**2:  # nothing to gain along the steepest axis
        step = step.clone()
        step[0] += short**0.5
    return step
