"""The search for a mode where L-BFGS stalls: a trust region, then Adam; and what it saw if there is
none."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.curvature.density import NEAR, FullDataDensity, no_mode
from pyro_scale.curvature.newton import ascend

#: Dimensions up to which a trust region with Hessians is tried.
_FEW = 50
#: Steps of Adam, one round after another, and its step size at first in each, which falls to 0:
#: smaller steps settle where longer ones go on to the next kink.
_ROUNDS = {400: 0.05, 800: 0.025, 1600: 0.0125, 3200: 0.006, 6400: 0.003}
#: Parts of a Newton step at which the log joint is looked at, and of how far a search went.
_PARTS = 0.5 ** torch.arange(12, dtype=torch.float64)
_FURTHER = 2.0 ** torch.arange(1, 21, dtype=torch.float64)
#: Nats by which a log joint has to rise along a ray before it is called unbounded.
_RISE = 1.0


class Place(Protocol):
    """A point [D], and how far Newton's method has it from a mode: the square of that, in sds."""

    @property
    def center(self) -> Tensor:
        """The point."""
        ...

    @property
    def gaussian(self) -> Gaussian:
        """Around it."""
        ...

    @property
    def distance(self) -> float:
        """The square, in the Gaussian's sds."""
        ...


P = TypeVar("P", bound=Place)


class Best(NamedTuple):
    """The highest point of a search, [D], and the log joint over N there."""

    position: Tensor
    value: float


def climb_to_mode(
    density: FullDataDensity,
    start: Tensor,
    place_near: Callable[[Tensor], P],
    places: Tensor,
    moves: Tensor,
    otherwise: str,
) -> tuple[P, float]:
    """(A mode, the square of its distance from the density's, in sds).

    L-BFGS and Newton's method come first.  Where they stall, a trust region with Hessians (in few
    dimensions), and rounds of Adam, each followed by them.  At a kink, as networks of ReLUs have
    at their modes, the gradient does not vanish: a point is a mode, too, if neither a round of
    Adam nor any part of a Newton step gains more than counts as being there.

    Args:
        density: the log joint of all rows.
        start: where it begins, [D].
        place_near: a point -> the place that Newton's method finds from there.
        places: of the elements that have a Gaussian.
        moves: 1 for elements that may move, 0 for those that stay, [D].
        otherwise: what to do if there is none.

    Raises:
        ArgumentError: there is none that could be found, and what was seen instead.
        DataError: the log joint is not finite at the start.
    """
    num_data, near = density.log_posterior.num_data, NEAR * len(places)
    place = place_near(density.lbfgs(start, otherwise, moves).position)
    if place.distance <= near:
        return place, place.distance
    _check_bounded(density, start, place.center, otherwise)
    if len(start) <= _FEW and bool(moves.all()):
        found = ascend(density, place.center)
        if found.is_mode:
            place = place_near(found.position)
            if place.distance <= near:
                return place, place.distance
    best, gain = _value(density, place.center), float("inf")
    for steps, lr in _ROUNDS.items():
        adam = by_adam(density, place.center, moves, steps, lr)
        there = place_near(density.lbfgs(adam.position, otherwise, moves).position)
        value = _value(density, there.center)
        gain, best = num_data * (value - best), max(value, best)
        place = there
        if place.distance <= near:
            return place, place.distance
        left = 2 * max(gain, _gain_along_newton(density, place, places))
        if left <= near:
            return place, left
        _check_bounded(density, start, place.center, otherwise)
    slope = num_data * float((density.grad(place.center)[1] * moves).norm())
    raise no_mode(
        otherwise,
        f"after L-BFGS and {sum(_ROUNDS):,} steps of Adam the gradient's norm is {slope:.2g} nats, "
        f"the mode {place.distance**0.5:.2g} sds away by Newton's method, and the last "
        f"{max(_ROUNDS):,} steps gained {gain:.2g} nats",
    )


def by_adam(density: FullDataDensity, start: Tensor, moves: Tensor, steps: int, lr: float) -> Best:
    """The highest point of a run of Adam on all rows, whose step size falls to 0."""
    position, best = start.clone(), Best(start, -float("inf"))
    adam = Adam([position], lr=lr, eps=torch.finfo(start.dtype).tiny, maximize=True)
    schedule = LinearLR(adam, 1.0, 0.0, steps)
    for _ in range(steps):
        value, slope = density.grad(position)
        if not bool(torch.isfinite(value) & torch.isfinite(slope).all()):
            break
        if float(value) > best.value:
            best = Best(position.clone(), float(value))
        position.grad = slope * moves
        adam.step()
        schedule.step()
    return best


def _value(density: FullDataDensity, position: Tensor) -> float:
    """The log joint over N there: by `grad`, as ranks share out the rows of no other sum."""
    return float(density.grad(position)[0])


def _gain_along_newton(density: FullDataDensity, place: Place, places: Tensor) -> float:
    """By how many nats the log joint rises at most on the way of a Newton step."""
    num_data = density.log_posterior.num_data
    value, slope = density.grad(place.center)
    step = torch.zeros_like(place.center)
    step[places] = place.gaussian.covariance_times(num_data * slope[places])
    gains = [_value(density, place.center + float(part) * step) - float(value) for part in _PARTS]
    return num_data * max([gain for gain in gains if gain == gain], default=0.0)


def _check_bounded(density: FullDataDensity, start: Tensor, end: Tensor, otherwise: str) -> None:
    """Refuses a log joint that rises on along the way that a search took, however far.

    Raises:
        ArgumentError: names the site, by how much it rose and how far out.
    """
    way, num_data = end - start, density.log_posterior.num_data
    if not bool(torch.isfinite(way).all()) or not bool(way.norm() > 0):
        return
    last = first = num_data * _value(density, end)
    factor = 1.0
    for further in _FURTHER.tolist():
        value = num_data * _value(density, start + further * way)
        if not value > last:
            break
        last, factor = value, further
    rounding = 8 * torch.finfo(start.dtype).eps * abs(first)
    ends = factor == float(_FURTHER[-1]) or value != value or abs(value) == float("inf")
    if ends and last - first > max(_RISE, rounding) and factor > 1:
        site = density.layout.site_at(int(way.abs().argmax()))
        raise no_mode(
            otherwise,
            f"the log density grows without bounds: in a direction of site '{site}' it rises by "
            f"{last - first:.3g} nats and more, out to {factor:,.0f} times as far as the search "
            "went",
        )
