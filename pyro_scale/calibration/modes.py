"""The mode of each data set's posterior, by searches that run together under vmap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.calibration.stack import Stack, take_one
from pyro_scale.core.warn import without_vmap_warnings

#: Largest number of steps of a search.
_MOST_STEPS = 60
#: A search ends where a Newton step promises less than this, in nats.
_NEAR_NATS = 1e-4
#: Damping at first, and factors on it after a step that is taken, and after one that is not.
_DAMPING, _DAMPING_IF_TAKEN, _DAMPING_IF_REFUSED = 0.1, 0.2, 5.0
#: An element's curvature counts as at least this fraction of its squared slope.
_SLOPE_CURVATURE = 1e-2


class FoundModes(NamedTuple):
    """The results of searches for the modes of many data sets' posteriors.

    Attributes:
        mean: unconstrained parameters at the mode, or where the search ended without one, `[data
            sets, D]`.
        precision: minus the Hessian of the log joint there, in nats and float64, `[data sets, D,
            D]`.
        value: log joint there, in nats, `[data sets]`.
        is_mode: True for data sets whose search ended at a mode, booleans `[data sets]`.
    """

    mean: Tensor
    precision: Tensor
    value: Tensor
    is_mode: Tensor


def find_modes(stack: Stack, starts: Tensor) -> FoundModes:
    """Searches for the mode of each data set's posterior, by Levenberg and Marquardt's method, in
    units of each element's curvature. Searches that find no mode do not raise: see `is_mode` of the
    result.

    Args:
        stack: data sets of one model.
        starts: unconstrained parameters at which the searches begin, `[data sets, D]`.
    """
    position = starts.clone()
    damping = torch.full((stack.num_chains,), _DAMPING, dtype=torch.float64)
    value, slope, curvature = evaluate(stack, position)
    is_mode = torch.zeros(stack.num_chains, dtype=torch.bool)
    for _ in range(_MOST_STEPS):
        diagonal = curvature.diagonal(dim1=1, dim2=2).abs()
        # in flat places an sd is too far
        diagonal = torch.maximum(diagonal, _SLOPE_CURVATURE * slope.square())
        units = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
        lengths, axes = torch.linalg.eigh(units[:, :, None] * curvature * units[:, None])
        along = (axes.mT @ (units * slope)[..., None])[..., 0]
        gain = (along.square() / lengths.clamp(min=1e-12)).sum(-1) / 2
        is_mode = (lengths[:, 0] > 0) & (gain < _NEAR_NATS)
        if bool(is_mode.all()):
            break
        shift = damping + (-lengths[:, 0]).clamp(min=0) * 1.5
        step = units * (axes @ (along / (lengths + shift[:, None]))[..., None])[..., 0]
        proposal = position + step.to(position)
        searching = torch.nonzero(~is_mode)[:, 0]
        ahead = evaluate(stack.select(searching), proposal[searching])
        is_taken = ahead[0] >= (value - 1e-9 * value.abs())[searching]
        factor = torch.where(is_taken, _DAMPING_IF_TAKEN, _DAMPING_IF_REFUSED)
        damping[searching] *= factor.to(damping)
        damping.clamp_(1e-9, 1e9)
        moved = searching[is_taken]
        position[moved] = proposal[moved]
        for old, new in zip((value, slope, curvature), ahead, strict=True):
            old[moved] = new[is_taken]
    return FoundModes(position, curvature, value, is_mode)


def evaluate(stack: Stack, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log joint of each data set at its own params, with its gradient and its negative Hessian.

    Args:
        stack: data sets of one model.
        positions: unconstrained parameters for each data set, `[data sets, D]`.

    Returns:
        (The log joint, `[data sets]`; its gradient, `[data sets, D]`; minus its Hessian,
        `[data sets, D, D]`), in nats and float64.  If any of these is not finite for a data set,
            the
        log joint is -infinity, the gradient 0 and the negative Hessian the identity.
    """

    def evaluate_one(number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def log_joint(position: Tensor) -> Tensor:
            return stack.log_joint(position, number)

        def slope_and_both(position: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            slope, value = torch.func.grad_and_value(log_joint)(position)
            return slope, (slope, value)

        differentiate = torch.func.jacrev(slope_and_both, has_aux=True)
        hessian, (slope, value) = differentiate(take_one(positions, number))
        return value, slope, hessian

    with without_vmap_warnings():
        value, slope, hessian = (tensor.double() for tensor in stack.map(evaluate_one))
    finite = value.isfinite() & slope.isfinite().all(-1) & hessian.isfinite().all(-1).all(-1)
    return (
        torch.where(finite, value, -torch.inf),
        torch.where(finite[:, None], slope, 0.0),
        torch.where(finite[:, None, None], -hessian, torch.eye(hessian.shape[-1]).double()),
    )
