"""Warm-up in windows (stretches of steps): after each window, chains get the geometry of its draws.

As in Stan's warm-up, but for all chains of a group together, the covariance of a window's draws
becomes the geometry of the next window, until a window's draws have the geometry that it was run
with.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from pyro_scale.core.gaussian import triangular
from pyro_scale.core.mixing import by_group, split_r_hat
from pyro_scale.core.whitening import (
    DenseWhitening,
    DiagonalWhitening,
    KroneckerWhitening,
    LowRankWhitening,
    Whitening,
)
from pyro_scale.engine.draws import Steps
from pyro_scale.rng.seeds import Purpose
from pyro_scale.tuning.groups import (
    Groups,
    Limit,
    WindowDraws,
    are_most,
    slow_time,
    times_of,
)
from pyro_scale.tuning.low_rank import learn as learn_low_rank
from pyro_scale.tuning.policy import WARM_UP, WarmUp

G = TypeVar("G", bound=Groups)


@dataclass(frozen=True)
class Window:
    """Measurements of the last window of a warm-up (the steps between two updates of the geometry,
    the whitened coordinates).

    Attributes:
        number: number of windows.
        steps: steps of each chain in all windows.
        looks: evaluations of the curvature per group in all windows.
        agrees: whether most groups mix and have the geometry that the window was run with.
        r_hat: the largest R-hat of a whitened element.
        change: the largest factor by which the sd of a direction changes beyond chance.
        time: autocorrelation time in steps, of the slowest whitened element or its square.
        stable_lr: half of the largest stable step size, `[groups]`.
    """

    number: int
    steps: int
    looks: int
    agrees: bool
    r_hat: float
    change: float
    time: float
    stable_lr: Tensor


class NoStableStep(Exception):
    """Raised by `warm_up` if all chains break at every step size that it tries; its arguments are
    the groups of chains and the draws of the last window."""


def warm_up(groups: G, limit: Limit, policy: WarmUp) -> tuple[G, Window]:
    """Runs windows of warm-up until, in most groups, chains mix and the geometry (the whitened
    coordinates) no longer changes. Returns the groups after the last window, and its measurements.

    After each window, a group gets the geometry of its draws and a stable step size.  A group with
    a broken chain restarts at half its step size.  If all groups break, the window is repeated,
    unless the number of windows is set.

    Args:
        groups: chains at their starts, with a first geometry and the longest step size.
        limit: most steps and time, and the number of windows if it is set.
        policy: lengths and thresholds of windows.

    Raises:
        NoStableStep: all chains break at any step.
    """
    total = looks = halvings = 0
    most = policy.most_windows if limit.lengths is None else max(1, limit.lengths.windows)
    number, length = 0, policy.first_window
    at_first = longest = groups.lr if groups.learns else torch.ones(())
    for run in itertools.count():
        every = max(1, length // policy.draws)
        draws = groups.run(Steps(length // every, 0, every), Purpose.WINDOW, run)
        total += draws.num_steps
        sound = groups.are_sound(draws)
        usable = sound.all(1) if groups.learns else sound.any(1)
        if limit.lengths is None and not bool(usable.any()):
            if not groups.learns or halvings == policy.halvings:
                raise NoStableStep(groups, draws)
            halvings, longest = halvings + 1, groups.lr / 2
            length = max(policy.first_window, length // 2)  # repeating long ones would take all
            groups = groups.moved_to(draws, sound).with_lr(longest)
            continue
        kept = groups.sound_draws(draws, sound)
        kept = kept[:, :, int(policy.left_out * kept.shape[2]) :]
        z = groups.to_whitened(kept)
        times, r_hat = times_of(z, 0.0), by_group(split_r_hat, z).amax(1)
        groups = groups.moved_to(draws, sound)
        change, stable = torch.ones_like(r_hat), torch.full_like(r_hat, math.inf)
        if groups.learns:
            num_looks = policy.looks if groups.num_latents < policy.wide else policy.looks_if_wide
            shown = WindowDraws(_pick_evenly(kept, num_looks), z, times, r_hat, usable)
            groups, change, curvatures = groups.learn(shown)
            stable = _stable_lr(curvatures, policy.steepest)
            lr = torch.where(usable, torch.minimum(longest, stable), groups.lr / 2)
            # chains may have broken only on the way to the posterior
            longest = torch.where(usable, torch.minimum(at_first, 2 * longest), lr)
            groups, looks = groups.with_lr(lr), looks + num_looks
        agree = usable & (r_hat < policy.most_r_hat) & (change < policy.most_change)
        number, time = number + 1, slow_time(times.amax(1)) * every
        worst = float(r_hat.max()), float(change.max())
        window = Window(number, total, looks, are_most(agree), *worst, time, stable)
        if number == most:
            break
        if limit.lengths is None and (window.agrees or limit.is_passed(total + 2 * length)):
            break
        length *= 2
    return groups, window


def _pick_evenly(kept: Tensor, count: int) -> Tensor:
    """`count` draws of each group, evenly spread over its chains, `[groups, count, D]`, at which
    the curvature is evaluated.

    Args:
        kept: draws of all chains, `[groups, chains, draws, D]`.
        count: number of draws to pick.
    """
    flat = kept.flatten(1, 2)
    return flat[:, torch.linspace(0, flat.shape[1] - 1, count).round().long()]


def _stable_lr(curvatures: Tensor, steepest: float) -> Tensor:
    """A step size that is surely stable for each group, `[groups]`, float64: half of the largest
    that is stable at the group's curvatures; infinite if none of these is finite.

    Args:
        curvatures: largest curvature divided by N at each of some draws, `[groups, places]`.
        steepest: quantile of these curvatures that must be stable.
    """
    finite = torch.where(curvatures.isfinite(), curvatures, math.nan)
    lengths = finite.nanquantile(steepest, 1).tolist()
    stable = [math.inf if math.isnan(length) else max(1e-12, length) ** -0.5 for length in lengths]
    return torch.tensor(stable, dtype=torch.float64)


def learn(old: Whitening, z: Tensor, num_data: int, count: Tensor) -> tuple[Tensor, Whitening]:
    """Updates one group's geometry (the whitened coordinates in which its chains move) to the
    spread and the mean of its draws.

    `torch.vmap` updates many groups at once, for diagonal maps and for matrices of at most
    `WARM_UP.matrix` dimensions. The rank of other maps depends on the draws: one group only.

    Args:
        old: geometry in which the window was run.
        z: draws in that geometry, `[chains, draws, d]`; of variance 1/N if the geometry is right.
        num_data: N, rows of the data.
        count: effective number of draws, 0-d.

    Returns:
        The largest factor by which the sd of a direction changes beyond chance; the new geometry.
    """
    z = _without_far_draws(z)
    change, new = learn_spread(old, z * num_data**0.5, count)
    center = z.flatten(0, 1).mean(0).to(old.tensors[0])
    return change, new.with_tensors([old.to_params(center), *new.tensors[1:]])


def _without_far_draws(z: Tensor) -> Tensor:
    """Draws `[chains, draws, d]` whose elements are moved to the nearest place that is not far from
    the median: within `WARM_UP.far` sds, by the quantiles of a normal. A step that throws a chain
    into a long tail would otherwise stretch the coordinates, and longer steps throw it further."""
    ordered = z.flatten(0, 1).sort(0).values
    low, median, high = (ordered[int(part * (len(ordered) - 1))] for part in (0.16, 0.5, 0.84))
    far = WARM_UP.far * (high - low) / 2
    return torch.maximum(torch.minimum(z, median + far), median - far)


def learn_spread(old: Whitening, z: Tensor, count: Tensor) -> tuple[Tensor, Whitening]:
    """Updates the spread of one group's geometry (whitened coordinates), but not its center, to the
    spread of its draws.

    Args:
        old: geometry in which the window was run.
        z: draws in that geometry, `[chains, draws, d]`; of variance 1 if the geometry is right.
        count: effective number of draws, 0-d.

    Returns:
        The largest factor by which the sd of a direction changes beyond chance; the new geometry.
    """
    flat = z.flatten(0, 1)
    size, new = flat.shape[1], old
    share, chance = count / (count + 2), torch.ones_like(count)
    if isinstance(old, DenseWhitening) and size > WARM_UP.matrix:
        lengths, new = _learn_directions(old, flat, float(count))
    elif isinstance(old, DenseWhitening):
        share, chance = count / (count + size + 1), 1 + 2 * (size / count).sqrt()
        covariance = torch.cov(flat.mT).reshape(size, size)
        eye = torch.eye(size, dtype=flat.dtype)
        lengths, axes = torch.linalg.eigh(share * covariance + (1 - share) * eye)
        bounded = lengths.clamp(WARM_UP.largest_change**-2, WARM_UP.largest_change**2)
        root = torch.linalg.cholesky((axes * bounded) @ axes.mT)
        factor = (old.factor.double() @ root).to(old.factor)
        new = DenseWhitening(old.center, factor)
    elif isinstance(old, LowRankWhitening):
        lengths, new = learn_low_rank(old, flat, float(count), WARM_UP.largest_change)
    else:
        # maps with independent elements of z
        assert isinstance(old, DiagonalWhitening | KroneckerWhitening)
        lengths = share * flat.var(0) + 1 - share
        bounded = lengths.clamp(WARM_UP.largest_change**-2, WARM_UP.largest_change**2)
        new = dataclasses.replace(old, scale=old.scale * bounded.sqrt().to(old.scale))
    # chance: three standard errors of an sd, and Marchenko and Pastur's edges for a covariance
    chance = chance + 3 / count.sqrt()
    sds = lengths.clamp(min=1e-300).sqrt()
    return torch.maximum(sds, 1 / sds).max() / chance**share, new


def _learn_directions(
    old: DenseWhitening, z: Tensor, count: float
) -> tuple[Tensor, DenseWhitening]:
    """Updates whitened coordinates that are a matrix of many dimensions to the spread of draws, but
    only by scales of elements and a few directions, as the covariance of few draws is mostly
    chance.

    Args:
        old: geometry in which the window was run.
        z: draws in that geometry, `[draws, d]`; of variance 1 if the geometry is right.
        count: effective number of draws.

    Returns:
        (Variances of the draws in the old geometry, of elements and along directions, in one
        vector; the new geometry).
    """
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    plain = LowRankWhitening(torch.zeros_like(z[0]), torch.ones_like(z[0]), eye[:, :1], eye[0, :1])
    variances, learned = learn_low_rank(plain, z, count, WARM_UP.largest_change)
    root = old.factor.double() @ learned.push_forward(eye).mT
    variances = torch.cat([variances, learned.stretch.square()])
    return variances, DenseWhitening(old.center, triangular(root).to(old.factor))
