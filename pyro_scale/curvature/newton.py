"""Newton's method in a trust region: modes of log densities, whatever the units of their elements.

Each step maximizes the quadratic model of the log joint inside a ball, exactly (Moré and Sorensen,
Computing a trust region step, SIAM J. Sci. Stat. Comput. 1983).  Lengths in the ball are relative
to each element's own curvature, so a change of units changes nothing.  Where the log joint is not
concave, a step goes along the direction of positive curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity

Result = TypeVar("Result")

#: Most steps; each takes a Hessian.
MOST_STEPS = 200
#: The first radius and the largest, in sds for the root of each element.
_RADIUS, _LARGEST_RADIUS = 1.0, 1e8
#: Radius below which a step is nothing but rounding.
_SMALLEST_RADIUS = 1e-12
#: At a mode, the quadratic model promises at most this gain in nats, unless rounding is larger.
_GAIN_TOL = 1e-6
#: Most steps whose gain cannot be told from rounding.
_MOST_STALLED = 20
#: Least curvature that is used for units, relative to the squared gradient.
_LEAST_CURVATURE = 1e-8
#: Ratio of the actual gain to the promised one: the least to take a step, and to widen the region.
_TAKE_RATIO, _WIDEN_RATIO = 1e-4, 0.75


class Ascent(NamedTuple):
    """The result of a search for a mode by Newton's method.

    Attributes:
        position: where the search ended, a vector [D] of unconstrained params.
        value: the log joint there, in nats; minus infinity if not finite at the start.
        precision: minus the Hessian of the log joint there, [D, D], in nats.
        is_mode: whether the log joint is concave there and a Newton step promises no gain.
        path: the start and the positions after each step, `[steps + 1, D]`.
    """

    position: Tensor
    value: float
    precision: Tensor
    is_mode: bool
    path: Tensor


class Quadratic(NamedTuple):
    """Quadratic model of the log joint around a position: the log joint, its gradient [D] and minus
    its Hessian [D, D], in nats and float64.
    """

    value: float
    slope: Tensor
    curvature: Tensor


#: A search that has not ended: it yields where it needs the log joint's expansion, is sent that
#: (None if it is not finite), and returns its result.
Search: TypeAlias = Generator[Tensor, "Quadratic | None", Result]


def ascend(
    density: FullDataDensity,
    start: Tensor,
    near: float = _GAIN_TOL,
    most_steps: int = MOST_STEPS,
    is_over: Callable[[], bool] | None = None,
) -> Ascent:
    """Searches for a mode of the log joint by Newton's method in a trust region. Arguments as for
    `ascent`."""
    return run_together(density, [ascent(start, near, most_steps, is_over)])[0]


def run_together(density: FullDataDensity, searches: Sequence[Search[Result]]) -> list[Result]:
    """The results of searches, in their order. The Hessians that they ask for at a time are
    computed together, which is several times faster than one by one for small models."""
    results = dict[int, Result]()
    positions = {number: next(search) for number, search in enumerate(searches)}
    while positions:
        models = _expand(density, torch.stack(list(positions.values())))
        for number, model in zip(list(positions), models, strict=True):
            try:
                positions[number] = searches[number].send(model)
            except StopIteration as end:
                results[number] = end.value
                del positions[number]
    return [results[number] for number in range(len(searches))]


def ascent(
    start: Tensor,
    near: float = _GAIN_TOL,
    most_steps: int = MOST_STEPS,
    is_over: Callable[[], bool] | None = None,
) -> Search[Ascent]:
    """A search for a mode of the log joint by Newton's method in a trust region.

    Args:
        start: the first position, [D], whose dtype is used; the search ends there if the log joint
            is not finite at it.
        near: the gain of a Newton step, in nats, below which a position counts as a mode.
        most_steps: the largest number of steps.
        is_over: function that is called before each step, and ends the search there if it returns
            True.
    """
    position, radius, path = start, _RADIUS * len(start) ** 0.5, [start]
    model = yield position
    if model is None:
        zeros = torch.zeros(len(start), len(start), dtype=torch.float64)
        return Ascent(start, -math.inf, zeros, False, start[None])
    units = _units(model)
    is_mode, stalled = False, 0
    for _ in range(most_steps):
        units = torch.maximum(units / 2, _units(model))
        scale = units.rsqrt()
        eigenvalues, axes = torch.linalg.eigh(scale[:, None] * model.curvature * scale)
        slope = axes.mT @ (scale * model.slope)
        rounding = 8 * torch.finfo(start.dtype).eps * abs(model.value)
        left = float((slope.square() / eigenvalues).sum()) / 2
        if eigenvalues.min() > 0 and left < max(near, rounding):
            is_mode = True
            break
        if is_over is not None and is_over():
            break
        if len(path) == 1:  # the first radius covers a Newton step, however steep the start is
            least = _LEAST_CURVATURE * float(eigenvalues.abs().max())
            newton = slope / eigenvalues.abs().clamp(min=least)
            radius = min(max(radius, float(newton.norm())), _LARGEST_RADIUS)
        while radius > _SMALLEST_RADIUS:
            step = _best_step(eigenvalues, slope, radius)
            promised = float(slope @ step - (eigenvalues * step.square()).sum() / 2)
            end = position + (scale * (axes @ step)).to(position)
            ahead = yield end
            gain = ahead.value - model.value if ahead is not None else -math.inf
            if gain >= _TAKE_RATIO * promised or (promised < rounding and gain > -rounding):
                break
            radius = min(radius, float(step.norm())) / 4
        else:
            break
        if gain > _WIDEN_RATIO * promised:
            radius = min(max(radius, 3 * float(step.norm())), _LARGEST_RADIUS)
        assert ahead is not None
        position, model = end, ahead
        path.append(position)
        stalled += gain < _TAKE_RATIO * promised
        if stalled > _MOST_STALLED:
            break
    return Ascent(position, model.value, model.curvature, is_mode, torch.stack(path))


def _units(model: Quadratic) -> Tensor:
    """Each element's curvature in nats, positive, [D]. One over its root is the element's unit of
    length in the trust region, so that stiff elements move less.
    """
    least = _LEAST_CURVATURE * model.slope.square()
    units = torch.maximum(model.curvature.diagonal().abs(), least)
    return torch.where(units > 0, units, 1.0)


def _expand(density: FullDataDensity, positions: Tensor) -> list[Quadratic | None]:
    """The log joint, its gradient and minus its Hessian at each of the positions [P, D]; None where
    any of them is not finite, or a matrix of the model cannot be factorized."""
    values, gradients, hessians = density.derivatives_at(positions)
    num_data, finite = density.log_posterior.num_data, torch.isfinite(hessians).all(-1).all(-1)
    finite &= torch.isfinite(gradients).all(-1) & torch.isfinite(values)
    parts = zip(values, num_data * gradients.double(), -num_data * hessians.double(), strict=True)
    return [
        Quadratic(num_data * float(value), slope, curvature) if bool(is_finite) else None
        for (value, slope, curvature), is_finite in zip(parts, finite, strict=True)
    ]


def _best_step(eigenvalues: Tensor, slope: Tensor, radius: float) -> Tensor:
    """The step [D] of norm at most `radius` that maximizes a quadratic model, in the coordinates of
    the curvature's eigenvectors.

    Args:
        eigenvalues: eigenvalues of the curvature (minus the Hessian), ascending, [D].
        slope: the gradient in these coordinates, [D].
        radius: the trust region's radius.
    """
    least = max(0.0, -float(eigenvalues.min()))
    if eigenvalues.min() > 0:
        step = slope / eigenvalues
        if step.norm() <= radius:
            return step
    low, high = least, least + float(slope.norm()) / radius + 1e-300
    for _ in range(100):
        shift = (low + high) / 2
        step = slope / (eigenvalues + shift).clamp(min=1e-300)
        low, high = (shift, high) if step.norm() > radius else (low, shift)
        if high - low <= 1e-10 * high:
            break
    step = slope / (eigenvalues + high).clamp(min=1e-300)
    missing = radius**2 - float(step.square().sum())
    if eigenvalues.min() < 0 and missing > 1e-3 * radius**2:  # no slope along the first axis
        step = step.clone()
        step[0] += missing**0.5
    return step
