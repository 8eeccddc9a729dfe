"""The step size of a kernel that accepts or rejects: by the part of proposals that it accepts.

On a standard normal of D dimensions one leapfrog step changes the energy by about (lr^3 / 4) p q in
each, of variance lr^6 / 16.  In many dimensions the sum is normal, and where its sd is s the
acceptance is 2 Phi(-s / 2) (Neal 2011, section 5.4.4; Beskos et al. 2013).  Elsewhere s still goes
about as lr^3, so that an acceptance that was seen says how much longer or shorter a step should be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

from torch import Tensor

from pyro_scale.core.autocorrelation import autocorrelation_time
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import BAOA, Kernel
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.policy import ACCEPTANCE, PILOTS

#: Runs chains: (problem, steps, seed) -> draws.
Run = Callable[[Problem, Steps, int], Draws]


class Adjusted(NamedTuple):
    """What pilots have come to.

    Attributes:
        problem: with the step size, and the chains' positions after them.
        steps: taken by each chain.
        acceptance: the part of proposals that were accepted in the last pilot.
        time: steps per independent draw, of the slowest element or its square.
    """

    problem: Problem
    steps: int
    acceptance: float
    time: float

    @property
    def reason(self) -> str:
        """What was chosen, in words."""
        lr = float(self.problem.engine.kernel.lr)
        return (
            f"lr={lr:.3g} in whitened coordinates: {self.acceptance:.0%} of proposals were "
            f"accepted (about {ACCEPTANCE.target:.0%} are to be)"
        )


def without_adjustment(kernel: Kernel) -> BAOA:
    """The kernel that warm-up takes instead: it does not get stuck."""
    return BAOA(lr=1.0, temperature=kernel.temperature)


def adjust(problem: Problem, run: Run, stable: float, most_steps: int, budget: Budget) -> Adjusted:
    """Pilots until about as many proposals are accepted as are to be, in one that is long enough.

    Args:
        problem: chains in their stationary law, in whitened coordinates.
        run: takes steps.
        stable: about half of the step size that is stable, where that is little: the first is at
            most twice that.
        most_steps: of each chain.
        budget: whose time may be over.
    """
    total, length, accepted, time = 0, PILOTS.least, math.nan, math.inf
    lr = min(first_lr(problem.engine.num_latents), ACCEPTANCE.longer * stable)
    for number in range(ACCEPTANCE.most):
        problem = problem.with_lr(lr)
        every = max(1, length // ACCEPTANCE.draws)
        steps = Steps(length // every, 0, every)
        draws = run(problem, steps, derived_seed(problem.seed, number, Purpose.PILOT))
        if draws.error is not None:
            raise draws.error
        total += draws.num_steps
        problem = problem.moved_to(draws, draws.finished)
        accepted = acceptance_rate(draws)
        time = _time(draws.positions[draws.finished][..., : problem.engine.num_latents]) * every
        wanted = length
        if math.isfinite(time):
            wanted = min(ACCEPTANCE.longest, math.ceil(ACCEPTANCE.times * time))
        is_settled = 1 / ACCEPTANCE.settled < _factor(accepted) < ACCEPTANCE.settled
        if is_settled and length >= wanted:
            break
        longer = max(length, wanted) if is_settled else length
        if total + longer > most_steps or budget.is_over_for_all:
            break
        if number < ACCEPTANCE.most - 1:
            length, lr = longer, next_lr(lr, accepted)
    return Adjusted(problem, total, accepted, time)


def acceptance_rate(draws: Draws) -> float:
    """The part of proposals that were accepted, of chains that are left."""
    accepted = draws.state.accepted[draws.finished].double()
    return float(accepted.mean()) / draws.num_steps if len(accepted) else 0.0


def first_lr(size: int) -> float:
    """The step size of the acceptance on a standard normal of so many dimensions."""
    return _short((4 * _spread(ACCEPTANCE.target) / size**0.5) ** (1 / 3))


def next_lr(lr: float, accepted: float) -> float:
    """The step size after one at which such a part of proposals were accepted."""
    return _short(lr * min(max(_factor(accepted), ACCEPTANCE.shorter), ACCEPTANCE.longer))


def _factor(accepted: float) -> float:
    return float((_spread(ACCEPTANCE.target) / _spread(accepted)) ** (1 / 3))


def _spread(accepted: float) -> float:
    """The sd of the energy's change at an acceptance."""
    return -2 * NormalDist().inv_cdf(min(max(accepted, 1e-6), 1 - 1e-6) / 2)


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def _time(draws: Tensor) -> float:
    """Draws per independent one, of the slowest element or its square."""
    if not len(draws):
        return math.inf
    z = draws.double()
    squares = (z - z.mean((0, 1))).square()
    return max(float(autocorrelation_time(each).max()) for each in (z, squares))
