"""The search for a mode of a density of all rows: L-BFGS, then Newton's method; where these stall,
a trust region, then Adam."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.newton import ascend
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.model.site_checks import FINITE_DATA

#: Squared distance to a mode, in posterior sds and for each element, that counts as arrived.
NEAR = 0.01
#: Most gradients of all rows in one run of L-BFGS.
_LBFGS_PASSES = 200
#: How far the log joint over N counts as below its highest value where it is NaN or infinite.
_WALL = 1e6
#: The gradient's norm over N at a mode: at most this, or this fraction of the norm at the start.
_GRAD_TOL, _GRAD_FACTOR = 1e-3, 0.1
#: Newton's method needs one step where the log joint is quadratic, and few near a mode.
_NEWTON_STEPS = 10
#: A Newton step below this many roundings of the position changes nothing.
_ROUNDINGS = 10
#: Most dimensions in which a trust region with Hessians is tried.
_TRUST_REGION_SIZE = 50
#: Adam's rounds, as steps: initial step size, which falls to 0.  Smaller step sizes settle where
#: larger ones go on to the next kink.
_ADAM_ROUNDS = {400: 0.05, 800: 0.025, 1600: 0.0125, 3200: 0.006, 6400: 0.003}
#: Fractions of a Newton step at which the log joint is evaluated.
_STEP_FRACTIONS = 0.5 ** torch.arange(12, dtype=torch.float64)
#: Multiples of the distance covered at which the log joint is evaluated to see if it is bounded.
_DISTANCE_FACTORS = 2.0 ** torch.arange(1, 21, dtype=torch.float64)
#: Least rise along a ray, in nats, for a log joint to be called unbounded.
_UNBOUNDED_RISE = 1.0


class LbfgsRun(NamedTuple):
    """The result of a run of L-BFGS; all vectors [D].

    Attributes:
        position: where the run ended.
        first: the gradient of the log joint divided by N at the start.
        slope: the gradient of the log joint divided by N at the end.
    """

    position: Tensor
    first: Tensor
    slope: Tensor


def lbfgs(
    density: FullDataDensity, start: Tensor, advice: str, moves: Tensor | float = 1.0
) -> LbfgsRun:
    """Maximizes the log joint by L-BFGS; the end may not be a mode.

    Args:
        density: the log joint density of all rows.
        start: the first position, a vector [D] of all unconstrained params.
        advice: advice for the error message, on what to try if there is no mode.
        moves: 1 for elements that may move, 0 for those that stay, [D].

    Raises:
        DataError: the log joint is not finite at the start.
        ArgumentError: the log joint is not finite at the end, or rises until numbers overflow.
    """
    value, first = density.grad(start)
    if not bool(torch.isfinite(value)):
        raise DataError(
            "the log joint of the whole data is NaN or infinite where chain 0 starts: "
            + (density.to_clean() or FINITE_DATA),
            code="not-finite",
        )
    highest, overflows = float(value), False
    position = start.detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [position],
        max_iter=_LBFGS_PASSES,
        max_eval=_LBFGS_PASSES,
        tolerance_grad=torch.finfo(start.dtype).eps ** 0.5,
        tolerance_change=torch.finfo(start.dtype).eps,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        nonlocal highest, overflows
        value, gradient = density.grad(position)
        if not bool(torch.isfinite(value) & torch.isfinite(gradient).all()):
            # a wall that the line search turns back from: it cannot interpolate NaN or infinity
            overflows, position.grad = True, torch.zeros_like(position)
            return value.new_tensor(_WALL - highest)
        highest = max(highest, float(value))
        position.grad = -gradient * moves
        return -value

    with contextlib.suppress(RuntimeError):  # L-BFGS fails where numbers overflow
        optimizer.step(closure)
    end = position.detach()
    value, slope = density.grad(end)
    is_finite = bool(torch.isfinite(end).all() and torch.isfinite(value))
    stalls = overflows and not _is_flat(slope * moves, first)
    if not is_finite or (stalls and float(end.abs().max()) > torch.finfo(end.dtype).max ** 0.25):
        raise _no_mode(
            advice,
            f"the log joint rose to {density.log_posterior.num_data * highest:.4g} nats, and is "
            "NaN or infinite further on, so it grows without bounds or overflows",
        )
    return LbfgsRun(end, first, slope)


def find_mode(
    density: FullDataDensity, start: Tensor, advice: str = "start nearer (init_strategy=)"
) -> Tensor:
    """The mode of the log joint that L-BFGS reaches from `start`, both vectors [D] of all
    unconstrained params; `advice` says in the error message what to try.

    Raises:
        ArgumentError: L-BFGS stalled elsewhere, or the log joint has no mode.
        DataError: the log joint is not finite at the start.
    """
    run = lbfgs(density, start, advice)
    if not _is_flat(run.slope, run.first):
        num_data = density.log_posterior.num_data
        raise _no_mode(
            advice,
            f"L-BFGS ended where the gradient's norm is {num_data * run.slope.norm():.2g} nats, "
            f"{num_data * run.first.norm():.2g} at the start",
        )
    return run.position


def _is_flat(slope: Tensor, first: Tensor) -> bool:
    """Whether a search has ended at a point where the gradient is small enough for a mode: the norm
    of `slope` (the gradient there, divided by N) is at most 1e-3, or a tenth of the norm of `first`
    (the gradient at the start).
    """
    return bool(slope.norm() <= max(_GRAD_FACTOR * float(first.norm()), _GRAD_TOL))


class Refined(NamedTuple):
    """The result of Newton's method near a mode.

    Attributes:
        position: where the method ended, [D].
        distance: the position's squared distance from the mode, in posterior sds; infinite if
            unknown.
        value: the log joint divided by N there.
    """

    position: Tensor
    distance: float
    value: float


def newton_refine(
    density: FullDataDensity,
    position: Tensor,
    precision: Callable[[Tensor], Tensor],
    places: Tensor,
    near: float = 0.0,
) -> Refined:
    """Moves a position near a mode by Newton's method, as long as steps bring it nearer.

    Distances are measured by the curvature, because a gradient's norm is dominated by the stiffest
    direction.

    Args:
        density: the log joint of all rows.
        position: where to start, [D].
        precision: position -> minus the Hessian divided by N, or an approximation of it, [d, d].
        places: indices, in a position, of the d elements that move.
        near: the squared distance from the mode, in posterior sds, at which to stop.
    """
    distance, num_data = math.inf, density.log_posterior.num_data
    value, slope = density.grad(position)
    for _ in range(_NEWTON_STEPS):
        factor, failed = torch.linalg.cholesky_ex(precision(position))
        if bool(failed):
            break
        step = torch.zeros_like(position).index_put((places,), _solve(factor, slope[places]))
        distance = num_data * float(slope @ step)
        next_value, next_slope = density.grad(position + step)
        left = num_data * float(next_slope[places] @ _solve(factor, next_slope[places]))
        del factor  # before the next precision is computed
        if not left < distance:
            break
        position, slope, distance, value = position + step, next_slope, left, next_value
        rounding = _ROUNDINGS * torch.finfo(step.dtype).eps * position.norm()
        if left <= near or step.norm() <= rounding:
            break
    return Refined(position, distance, float(value))


def _solve(factor: Tensor, vector: Tensor) -> Tensor:
    """The solution x of A x = vector, for a positive definite matrix A with the lower Cholesky
    factor `factor`.
    """
    return torch.cholesky_solve(vector[:, None], factor)[:, 0]


class Candidate(NamedTuple):
    """A possible mode, with the Gaussian that approximates the density there.

    Attributes:
        center: the point, a vector [D] of all unconstrained params.
        gaussian: the Laplace approximation at the point, over some sites.
        log_evidence: Laplace's approximation of the log evidence, in nats.
        distance: the squared distance to the mode, in the Gaussian's sds, estimated by a step of
            Newton's method.
    """

    center: Tensor
    gaussian: Gaussian
    log_evidence: float
    distance: float


def climb_to_mode(
    density: FullDataDensity,
    start: Tensor,
    refine: Callable[[Tensor], Candidate],
    places: Tensor,
    moves: Tensor,
    advice: str,
) -> Candidate:
    """Searches for a mode; returns the mode found, with the Gaussian there and an estimate of the
    squared distance from the exact mode.

    L-BFGS and Newton's method come first.  Where they stall, a trust region with Hessians (in few
    dimensions), then rounds of Adam, each followed by L-BFGS and Newton's method.  At a kink, as
    networks of ReLUs have at their modes, the gradient does not vanish.  So a point is a mode, too,
    if neither a round of Adam nor any fraction of a Newton step gains more than `NEAR` allows.

    Args:
        density: the log joint of all rows.
        start: the first position, [D].
        refine: function from a point [D] to the point that Newton's method reaches from there,
            with its Gaussian.
        places: indices of the elements that the Gaussian is over.
        moves: 1 for elements that may move, 0 for those that stay, [D].
        advice: what to try if there is no mode, for the error message.

    Raises:
        ArgumentError: no mode was found; the message reports where the search ended.
        DataError: the log joint is not finite at the start.
    """
    num_data, near = density.log_posterior.num_data, NEAR * len(places)
    candidate = refine(lbfgs(density, start, advice, moves).position)
    if candidate.distance <= near:
        return candidate
    _check_bounded(density, start, candidate.center, advice)
    if len(start) <= _TRUST_REGION_SIZE and bool(moves.all()):
        ascent = ascend(density, candidate.center)
        if ascent.is_mode:
            candidate = refine(ascent.position)
            if candidate.distance <= near:
                return candidate
    best, gain = _value(density, candidate.center), math.inf
    for steps, lr in _ADAM_ROUNDS.items():
        highest = _run_adam(density, candidate.center, moves, steps, lr)
        candidate = refine(lbfgs(density, highest, advice, moves).position)
        value = _value(density, candidate.center)
        gain, best = num_data * (value - best), max(value, best)
        if candidate.distance <= near:
            return candidate
        left = 2 * max(gain, _gain_along_newton(density, candidate, places))
        if left <= near:
            return candidate._replace(distance=left)
        _check_bounded(density, start, candidate.center, advice)
    slope = num_data * float((density.grad(candidate.center)[1] * moves).norm())
    raise _no_mode(
        advice,
        f"after L-BFGS and {sum(_ADAM_ROUNDS):,} steps of Adam the gradient's norm is "
        f"{slope:.2g} nats, the mode {candidate.distance**0.5:.2g} sds away by Newton's method, "
        f"and the last {max(_ADAM_ROUNDS):,} steps gained {gain:.2g} nats",
    )


def _run_adam(
    density: FullDataDensity, start: Tensor, moves: Tensor, steps: int, lr: float
) -> Tensor:
    """The position of largest log joint on a path of Adam on all rows, with a step size that falls
    to 0. Elements of `moves` are 1 for elements that may move, otherwise 0."""
    position, highest, best = start.clone(), -math.inf, start
    adam = Adam([position], lr=lr, eps=torch.finfo(start.dtype).tiny, maximize=True)
    schedule = LinearLR(adam, 1.0, 0.0, steps)
    for _ in range(steps):
        value, slope = density.grad(position)
        if not bool(torch.isfinite(value) & torch.isfinite(slope).all()):
            break
        if float(value) > highest:
            highest, best = float(value), position.clone()
        position.grad = slope * moves
        adam.step()
        schedule.step()
    return best


def _value(density: FullDataDensity, position: Tensor) -> float:
    """The log joint divided by N at a position [D]. Computed by `grad`, because several processes
    share that sum."""
    return float(density.grad(position)[0])


def _gain_along_newton(density: FullDataDensity, candidate: Candidate, places: Tensor) -> float:
    """The largest rise of the log joint, in nats, that a fraction 1, 1/2, 1/4, ... of a Newton step
    of the elements `places` brings from the candidate; 0 if the log joint is NaN at all of these
    points. A small number means that the candidate is a mode.
    """
    num_data = density.log_posterior.num_data
    value, slope = density.grad(candidate.center)
    step = torch.zeros_like(candidate.center)
    step[places] = candidate.gaussian.covariance_times(num_data * slope[places])
    ends = [candidate.center + float(fraction) * step for fraction in _STEP_FRACTIONS]
    gains = [_value(density, end) - float(value) for end in ends]
    return num_data * max([gain for gain in gains if not math.isnan(gain)], default=0.0)


def _check_bounded(density: FullDataDensity, start: Tensor, end: Tensor, advice: str) -> None:
    """Checks that the log joint does not rise forever in the direction that a search took.

    Raises:
        ArgumentError: the log joint rises without bounds; the message names the site, by how much
            it rose and how far out.
    """
    way, num_data = end - start, density.log_posterior.num_data
    if not bool(torch.isfinite(way).all()) or not bool(way.norm() > 0):
        return
    last = first = num_data * _value(density, end)
    factor = 1.0
    for next_factor in _DISTANCE_FACTORS.tolist():
        value = num_data * _value(density, start + next_factor * way)
        if not value > last:
            break
        last, factor = value, next_factor
    rounding = 8 * torch.finfo(start.dtype).eps * abs(first)
    is_endless = factor == float(_DISTANCE_FACTORS[-1]) or not math.isfinite(value)
    if is_endless and last - first > max(_UNBOUNDED_RISE, rounding) and factor > 1:
        site = density.layout.site_at(int(way.abs().argmax()))
        raise _no_mode(
            advice,
            f"the log density grows without bounds: in a direction of site '{site}' it rises by "
            f"{last - first:.3g} nats and more, out to {factor:,.0f} times as far as the search "
            "went",
        )


def _no_mode(advice: str, reason: str) -> ArgumentError:
    return ArgumentError(f"no mode of the posterior could be found: {reason}; {advice}")
