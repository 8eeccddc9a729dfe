"""The step size of a kernel that accepts or rejects proposals, chosen by its acceptance rate.

On a standard normal of D dimensions, a leapfrog step changes the energy by about (lr^3 / 4) p q in
each dimension, with variance lr^6 / 16.  In many dimensions the sum is normal; if its sd is s, the
acceptance rate is 2 Phi(-s / 2) (Neal 2011, section 5.4.4; Beskos et al. 2013).  On other
posteriors s is still about proportional to lr^3.  So an acceptance rate tells by which factor lr
has to change.
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
    """A BAOA kernel at the same temperature, which replaces a sampler's kernel that accepts or
    rejects proposals during warm-up: BAOA accepts every step, so chains cannot get stuck. Its lr is
    1, a placeholder that the caller replaces."""
    return BAOA(lr=1.0, temperature=kernel.temperature)


def adjust(groups: G, stable: Tensor, limit: Limit, policy: Acceptance) -> tuple[G, Pilot]:
    """Changes step sizes until most groups of chains have about the target acceptance rate, in
    pilots (short runs) that are long enough to show it.

    Args:
        groups: groups of chains in their stationary distribution, in whitened coordinates.
        stable: half of the largest stable step size of each group, `[groups]`; pilots start at no
            more than twice that.
        limit: most steps and time; also number and length of the pilots, if they are set.
        policy: thresholds of these pilots.

    Returns:
        The groups with their new step sizes and the chains after the last pilot; the measurements
        of the pilots.
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
        rates = _acceptance_rates(draws, sound)
        time = math.inf
        if bool(sound.any()):
            kept = groups.sound_draws(draws, sound)[..., : groups.num_latents].double()
            time = slow_time(times_about_mean(kept)) * every
        groups = groups.moved_to(draws, sound)
        if number == most:
            break
        factors = torch.tensor([_factor(rate) for rate in rates.tolist()])
        is_settled = are_most((factors > 1 / policy.settled) & (factors < policy.settled))
        if fixed is None:
            sufficient = length
            if math.isfinite(time):
                sufficient = min(policy.longest, math.ceil(policy.times * time))
            longer = max(length, sufficient) if is_settled else length
            if (is_settled and length >= sufficient) or limit.is_passed(total + longer):
                break
            length = longer
        pairs = zip(lr.tolist(), rates.tolist(), strict=True)
        lr = torch.tensor([next_lr(*pair) for pair in pairs], dtype=torch.float64)
    return groups, Pilot(number, length, total, time, acceptance=rates)


def _acceptance_rates(draws: Draws, sound: Tensor) -> Tensor:
    """The fraction of proposals that were accepted in each group of chains, `[groups]`, averaged
    over the group's sound chains; 0 for a group without sound chains.

    Args:
        draws: a run of all chains.
        sound: whether each chain is finite and has not left the posterior, `[groups, chains]`.
    """
    accepted = draws.state.accepted.double().cpu().view_as(sound)
    rates = torch.where(sound, accepted, math.nan).nanmean(1) / draws.num_steps
    return rates.nan_to_num(0.0)


def acceptance_rate(draws: Draws) -> float:
    """The fraction of proposals that a run's chains accepted, averaged over the chains that
    finished; 0 if none did."""
    accepted = draws.state.accepted[draws.finished].double()
    return float(accepted.mean()) / draws.num_steps if len(accepted) else 0.0


def first_lr(size: int) -> float:
    """The step size at which the target fraction of proposals (`ACCEPTANCE.target`) is accepted on
    a standard normal of `size` dimensions, by theory, rounded to three digits; where the search for
    a step size begins."""
    return _round((4 * _energy_sd(ACCEPTANCE.target) / size**0.5) ** (1 / 3))


def next_lr(lr: float, rate: float) -> float:
    """The step size for the next pilot (a short run that measures the acceptance rate), to three
    digits; at most a bounded factor from the last one.

    Args:
        lr: step size of the last pilot.
        rate: fraction of proposals that were accepted.
    """
    return _round(lr * min(max(_factor(rate), ACCEPTANCE.shorter), ACCEPTANCE.longer))


def _factor(rate: float) -> float:
    """The factor by which to multiply a step size at which the fraction `rate` of proposals was
    accepted, to reach the target fraction: above 1 if too many were accepted."""
    return float((_energy_sd(ACCEPTANCE.target) / _energy_sd(rate)) ** (1 / 3))


def _energy_sd(rate: float) -> float:
    """The sd, in nats, of the change of energy over a proposal at which the fraction `rate` of
    proposals is accepted, by the normal approximation; larger changes are rejected more often."""
    return -2 * NormalDist().inv_cdf(min(max(rate, 1e-6), 1 - 1e-6) / 2)


def _round(number: float) -> float:
    return float(f"{number:.3g}")
