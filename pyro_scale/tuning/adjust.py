"""The step size of a kernel that accepts or rejects: by the part of proposals that it accepts.

On a standard normal of D dimensions one leapfrog step changes the energy by about (lr^3 / 4) p q in
each, of variance lr^6 / 16.  In many dimensions the sum is normal, and where its sd is s the
acceptance is 2 Phi(-s / 2) (Neal 2011, section 5.4.4; Beskos et al. 2013).  Elsewhere s still goes
about as lr^3, so that an acceptance that was seen says how much longer or shorter a step should be.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeVar

import torch
from torch import Tensor

from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import BAOA, Kernel
from pyro_scale.rng.seeds import Purpose
from pyro_scale.tuning.groups import Groups, Limit, are_most, slow_time, times_about_mean
from pyro_scale.tuning.pilot import Pilot
from pyro_scale.tuning.policy import ACCEPTANCE, PILOTS, Acceptance

G = TypeVar("G", bound=Groups)


def without_adjustment(kernel: Kernel) -> BAOA:
    """The kernel that warm-up takes instead: it does not get stuck."""
    return BAOA(lr=1.0, temperature=kernel.temperature)


def adjust(groups: G, stable: Tensor, limit: Limit, policy: Acceptance) -> tuple[G, Pilot]:
    """Adjusts step sizes until most groups have about the target acceptance rate, in a pilot of
    sufficient length.

    Args:
        groups: chains in their stationary distribution, in whitened coordinates.
        stable: half of the largest stable step size, `[groups]`; pilots start at no more than twice
            that.
        limit: most steps and time, and number and length of pilots if they are set.
        policy: the numbers of these pilots.

    Returns:
        The groups with their step sizes, after the last pilot; its measurements.
    """
    fixed, total = limit.lengths, 0
    most, length = (policy.most, PILOTS.least) if fixed is None else (fixed.pilots, fixed.pilot)
    lr = (policy.longer * stable).clamp(max=first_lr(groups.num_latents))
    for number in range(1, most + 1):
        groups = groups.with_lr(lr)
        every = max(1, length // policy.draws)
        draws = groups.run(Steps(length // every, 0, every), Purpose.PILOT, number - 1)
        total += draws.num_steps
        sound = groups.are_sound(draws)
        accepted = _acceptance(draws, sound)
        time = math.inf
        if bool(sound.any()):
            kept = groups.sound_draws(draws, sound)[..., : groups.num_latents].double()
            time = slow_time(times_about_mean(kept)) * every
        groups = groups.moved_to(draws, sound)
        if number == most:
            break
        factors = torch.tensor([_factor(each) for each in accepted.tolist()])
        is_settled = are_most((factors > 1 / policy.settled) & (factors < policy.settled))
        if fixed is None:
            wanted = length
            if math.isfinite(time):
                wanted = min(policy.longest, math.ceil(policy.times * time))
            longer = max(length, wanted) if is_settled else length
            if (is_settled and length >= wanted) or limit.is_passed(total + longer):
                break
            length = longer
        sizes = zip(lr.tolist(), accepted.tolist(), strict=True)
        lr = torch.tensor([next_lr(*each) for each in sizes], dtype=torch.float64)
    return groups, Pilot(number, length, total, time, acceptance=accepted)


def _acceptance(draws: Draws, sound: Tensor) -> Tensor:
    """Acceptance rate of each group's sound chains, `[groups]`; 0 if it has none."""
    accepted = draws.state.accepted.double().cpu().view_as(sound)
    accepted = torch.where(sound, accepted, math.nan).nanmean(1) / draws.num_steps
    return accepted.nan_to_num(0.0)


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
