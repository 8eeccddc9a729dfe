"""The step size of a kernel that accepts or rejects: by the part of proposals that it accepts.

On a standard normal of D dimensions one leapfrog step changes the energy by about (lr^3 / 4) p q in
each, of variance lr^6 / 16.  In many dimensions the sum is normal, and of a variance s^2 the
acceptance is 2 Phi(-s / 2) (Neal 2011, section 5.4.4; Beskos et al. 2013).  Elsewhere s still goes
as lr^3, so that an acceptance that was seen says how much longer or shorter the step should be.
"""

from __future__ import annotations

from statistics import NormalDist

from pyro_scale.engine.draws import Draws
from pyro_scale.run.problem import Problem

#: The part of proposals that are to be accepted.  On five models of benchmarks/exact effective
#: draws a gradient are flat between 0.8 and 0.9 or best at 0.9, and a shorter step goes further into
#: what is narrow.
TARGET = 0.9
#: The least at which draws tell anything of the posterior's geometry.
LEAST = 0.4
#: The factors by which a window may change the step size, and by which it may where it is settled.
_SHORTER, _LONGER, _SETTLED = 0.25, 2.0, 1.25


def first_lr(size: int) -> float:
    """The step size of the acceptance on a standard normal of so many dimensions."""
    return float(f"{(4 * _spread(TARGET) / size**0.5) ** (1 / 3):.3g}")


def rate(draws: Draws) -> float:
    """The part of proposals that were accepted, of chains that are left."""
    accepted = draws.state.accepted[draws.finished].double()
    return float(accepted.mean()) / draws.num_steps if len(accepted) else 0.0


def next_lr(problem: Problem, accepted: float) -> float:
    """The step size after steps of which such a part were accepted."""
    factor = min(max(_factor(accepted), _SHORTER), _LONGER)
    return float(f"{float(problem.engine.kernel.lr) * factor:.3g}")


def is_near(accepted: float) -> bool:
    """Whether the step size would change no more than it does by chance."""
    return 1 / _SETTLED < _factor(accepted) < _SETTLED


def _factor(accepted: float) -> float:
    return float((_spread(TARGET) / _spread(accepted)) ** (1 / 3))


def _spread(accepted: float) -> float:
    """The sd of the energy's change at an acceptance."""
    return -2 * NormalDist().inv_cdf(min(max(accepted, 1e-6), 1 - 1e-6) / 2)
