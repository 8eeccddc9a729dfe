"""The mode of each data set's posterior, all searches side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.calibration.stack import Stack, take_one
from pyro_scale.core.warn import without_vmap_warnings

#: Steps of Levenberg's and Marquardt's at most; the gain in nats that ends a search; the damping
#: at first, and how it changes after a step that is taken or not.
_SEARCH_STEPS, _GAIN_NATS, _DAMPING, _EASED, _DAMPED = 60, 1e-4, 0.1, 0.2, 5.0
#: The least curvature, over the square of the slope.
_SLOPE_CURVATURE = 1e-2


class FoundModes(NamedTuple):
    """What each search found.

    Attributes:
        mean: the mode, or where the search ended, `[chains, D]`.
        precision: minus the Hessian there, in float64, `[chains, D, D]`.
        value: the log joint there, in nats, `[chains]`.
        found: whether it is a mode, `[chains]`.
    """

    mean: Tensor
    precision: Tensor
    value: Tensor
    found: Tensor


def find_modes(stack: Stack, starts: Tensor) -> FoundModes:
    """Newton's method from each start, `[chains, D]`, damped by curvature as it is needed, in units
    of each element's own curvature."""
    position = starts.clone()
    damping = torch.full((stack.num_chains,), _DAMPING, dtype=torch.float64)
    value, slope, curvature = look(stack, position)
    found = torch.zeros(stack.num_chains, dtype=torch.bool)
    for _ in range(_SEARCH_STEPS):
        own = curvature.diagonal(dim1=1, dim2=2).abs()
        # where it is flat, an sd is no distance
        own = torch.maximum(own, _SLOPE_CURVATURE * slope.square())
        units = torch.where(own > 0, own, 1.0).rsqrt()
        scaled = units[:, :, None] * curvature * units[:, None]
        lengths, axes = torch.linalg.eigh(scaled)
        along = (axes.mT @ (units * slope)[..., None])[..., 0]
        gain = (along.square() / lengths.clamp(min=1e-12)).sum(-1) / 2
        found = (lengths[:, 0] > 0) & (gain < _GAIN_NATS)
        if bool(found.all()):
            break
        shift = damping + (-lengths[:, 0]).clamp(min=0) * 1.5
        step = units * (axes @ (along / (lengths + shift[:, None]))[..., None])[..., 0]
        there = position + step.to(position)
        searching = torch.nonzero(~found)[:, 0]
        ahead = look(stack.of(searching), there[searching])
        better = ahead[0] >= (value - 1e-9 * value.abs())[searching]
        damping[searching] *= torch.where(better, _EASED, _DAMPED).to(damping)
        damping.clamp_(1e-9, 1e9)
        taken = searching[better]
        position[taken] = there[taken]
        for kept, new in zip((value, slope, curvature), ahead, strict=True):
            kept[taken] = new[better]
    return FoundModes(position, curvature, value, found)


def look(stack: Stack, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(The log joint `[chains]`, its gradient `[chains, D]`, minus its Hessian `[chains, D, D]`) of
    each data set at a position of its own, in nats and float64; the log joint is minus infinity
    where any of them is not finite."""

    def of_one(number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def log_joint(position: Tensor) -> Tensor:
            return stack.log_joint(position, number)

        def slope_and_both(position: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            slope, value = torch.func.grad_and_value(log_joint)(position)
            return slope, (slope, value)

        here = take_one(positions, number)
        hessian, (slope, value) = torch.func.jacrev(slope_and_both, has_aux=True)(here)
        return value, slope, hessian

    with without_vmap_warnings():
        value, slope, hessian = (each.double() for each in stack.each(of_one))
    finite = value.isfinite() & slope.isfinite().all(-1) & hessian.isfinite().all(-1).all(-1)
    return (
        torch.where(finite, value, -torch.inf),
        torch.where(finite[:, None], slope, 0.0),
        torch.where(finite[:, None, None], -hessian, torch.eye(hessian.shape[-1]).double()),
    )
