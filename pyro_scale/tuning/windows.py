"""Warm-up in windows: chains move, and what they have seen becomes their geometry.

As in Stan's warm-up, but for all chains together: after each window the covariance of its draws
takes the whitening's place, until a window's draws have the geometry that it was run with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.autocorrelation import autocorrelation_time, split_r_hat
from pyro_scale.core.semidefinite import triangular
from pyro_scale.core.whitening import (
    DenseWhitening,
    DiagonalWhitening,
    KroneckerWhitening,
    LowRankWhitening,
    Whitening,
    whiten,
)
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.gauss_newton import AnchoredDensity, anchored
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.curvature import steepest_by_products
from pyro_scale.tuning.low_rank import learn as learn_low_rank
from pyro_scale.tuning.low_rank import with_axes
from pyro_scale.tuning.modes import gaussian_at
from pyro_scale.tuning.policy import GEOMETRY, WARM_UP


@dataclass(frozen=True)
class Window:
    """What the windows of a warm-up have come to.

    Attributes:
        problem: with the geometry, the step size and the chains' positions after them.
        steps: taken by each chain.
        hessians: at how many places the curvature was looked at.
        agrees: whether the last window's draws have the geometry that it was run with.
        r_hat: the largest, of whitened elements.
        change: the largest factor of a direction's sd.
        time: steps per independent draw, of whitened elements and their squares, at most.
        stable_lr: the step size that is half of what is stable.
        draws: of the last window, of params, `[chains, draws, D]`.
    """

    problem: Problem
    steps: int
    hessians: int
    agrees: bool
    r_hat: float
    change: float
    time: float
    stable_lr: float
    draws: Tensor


class NoStableStep(Exception):
    """Chains break at any step size; its argument is the sites whose log density did, by chain."""


#: Runs chains: (problem, steps, seed) -> draws.
Run = Callable[[Problem, Steps, int], Draws]


def warm_up(
    problem: Problem,
    run: Run,
    density: FullDataDensity | None,
    whole: FullDataDensity,
    most_steps: int,
    budget: Budget,
) -> Window:
    """Windows until they agree, or there are no more.

    Args:
        problem: chains at their starts, with a first geometry and the longest step size.
        run: takes steps.
        density: whose curvature can be looked at often; None where geometry and step size are set,
            and windows only tell how long they take.
        whole: that of all rows.
        most_steps: of each chain.
        budget: whose time may be over.

    Raises:
        NoStableStep: all chains break at any step.
    """
    total = hessians = halvings = 0
    at_first = 1.0 if density is None else float(problem.engine.kernel.lr)
    length = WARM_UP.first_window
    longest, window = at_first, None
    for number in range(WARM_UP.most_windows + WARM_UP.halvings):
        every = max(1, length // WARM_UP.draws)
        steps = Steps(length // every, 0, every)
        draws = run(problem, steps, derived_seed(problem.seed, number, Purpose.WINDOW))
        if draws.error is not None:
            raise draws.error
        total += draws.num_steps
        sound = draws.finished if density is None else _sound_chains(problem, draws, density)
        if len(sound) < len(draws.positions) and density is not None:
            halvings += 1
            if halvings > WARM_UP.halvings:
                raise NoStableStep(broken_sites(problem, draws))
            longest = float(problem.engine.kernel.lr) / 2
            problem = _restart(problem, draws, sound).with_lr(longest)
            continue
        if not sound:
            raise NoStableStep(broken_sites(problem, draws))
        window = _learn(problem, draws, sound, every, adapts=density is not None)
        if density is not None:
            window, density = _look_again(window, density, whole)
            stable = _stable_lr(density, window)
            moved = window.problem.with_lr(min(longest, stable))
            window = dataclasses.replace(window, problem=moved, stable_lr=stable)
            hessians += _num_looks(problem)
            longest = min(at_first, 2 * longest)  # what broke was perhaps the way there
        window = dataclasses.replace(window, steps=total, hessians=hessians)
        problem = window.problem
        if window.agrees or length >= WARM_UP.first_window * 2 ** (WARM_UP.most_windows - 1):
            break
        if total + 2 * length > most_steps or budget.is_over_for_all:
            break
        length *= 2
    if window is None:
        raise NoStableStep({})
    return window


def to_whitened(whitening: Whitening, params: Tensor) -> Tensor:
    """Params `[..., d]` in whitened coordinates, in double precision."""
    return whitening.double().to_whitened(params)


def _sound_chains(problem: Problem, draws: Draws, density: FullDataDensity) -> list[int]:
    """The chains that have neither broken nor fallen to where the posterior is not."""
    kept, latents = draws.log_joint[draws.finished], problem.engine.num_latents
    if not len(kept):
        return []
    if problem.data.batch_size is None:
        fallen = (kept.cummax(1).values - kept)[:, int(WARM_UP.left_out * kept.shape[1]) :].amax(1)
    else:  # whose estimates of it scatter
        ends = draws.positions[draws.finished][:, [0, -1], :latents].to(problem.positions)
        values = density.values(ends.flatten(0, 1)).double() * problem.log_posterior.num_data
        values = values.nan_to_num(-math.inf).unflatten(0, (-1, 2))
        fallen = values[:, 0] - values[:, 1]
    sound = fallen < WARM_UP.depth(latents)
    return [chain for chain, good in zip(draws.finished, sound.tolist(), strict=True) if good]


def _restart(problem: Problem, draws: Draws, sound: list[int]) -> Problem:
    """Sound chains go on; the others begin where one of those is, or halfway to the center."""
    positions, whitening = problem.positions.clone(), problem.engine.whitening
    for chain in range(len(positions)):
        if sound:
            positions[chain] = draws.positions[sound[chain % len(sound)], -1].to(positions)
        elif whitening is not None:
            center = whitening.tensors[0]
            positions[chain, : len(center)] = (positions[chain, : len(center)] + center) / 2
    return dataclasses.replace(problem, positions=positions).moved_to(draws, sound)


def _learn(problem: Problem, draws: Draws, sound: list[int], every: int, adapts: bool) -> Window:
    """What the draws of a window say."""
    engine, old = problem.engine, problem.engine.whitening
    kept = draws.positions[sound]
    kept = kept[:, int(WARM_UP.left_out * kept.shape[1]) :]
    params = kept[..., : engine.num_latents].double()
    z = params if old is None else to_whitened(old, params)
    times = torch.maximum(autocorrelation_time(z), autocorrelation_time(z.square()))
    r_hat = float(split_r_hat(z).max())
    problem, change = problem.moved_to(draws, sound), 1.0
    if adapts and old is not None:
        count = z.shape[0] * z.shape[1] / float(times.mean())
        change, new = _update(old, z * problem.log_posterior.num_data**0.5, count)
        center = z.flatten(0, 1).mean(0).to(old.tensors[0])
        problem = problem.with_engine(
            whitening=new.with_tensors([old.to_params(center), *new.tensors[1:]])
        )
    agrees = r_hat < WARM_UP.most_r_hat and change < WARM_UP.most_change
    time = float(times.max()) * every
    return Window(problem, 0, 0, agrees, r_hat, change, time, math.inf, kept)


def _look_again(
    window: Window, density: FullDataDensity, whole: FullDataDensity
) -> tuple[Window, FullDataDensity]:
    """(The window in the directions that the curvature has where its draws are, the density whose
    curvature is right there), if chains have left the place whose curvature was looked at and do
    not agree: such draws do not tell which directions are stiff.

    So it is where the mode is far from the posterior: in hierarchies of many groups.
    """
    problem, whitening = window.problem, window.problem.engine.whitening
    if window.r_hat < WARM_UP.most_r_hat or window.change < WARM_UP.largest_change:
        return window, density
    temperature = float(problem.engine.kernel.values(0)["temperature"])
    num_data, like = problem.log_posterior.num_data, problem.positions
    if isinstance(whitening, LowRankWhitening):
        # with their whole variance for scale: of some rows' axes, none must make elements longer
        elements = DiagonalWhitening(whitening.center, whitening.variance.sqrt())
        new: Whitening = with_axes(elements, density, temperature)
    elif isinstance(whitening, DenseWhitening):
        some = whole.of_some_rows(GEOMETRY.most_rows, problem.seed)
        precision = -num_data * some.hessian(whitening.center).double()
        if not bool(torch.isfinite(precision).all()):
            return window, density
        if isinstance(density, AnchoredDensity):
            density = anchored(density, whitening.center, precision)
        if problem.engine.num_latents <= WARM_UP.matrix:
            return window, density
        new = whiten(gaussian_at(whitening.center, precision, temperature), num_data, like)
    else:
        return window, density
    moved = problem.with_engine(whitening=new)
    return dataclasses.replace(window, problem=moved), density


def _update(old: Whitening, z: Tensor, count: float) -> tuple[float, Whitening]:
    """(The largest factor by which a direction's sd changes beyond chance, the new geometry about
    the old center).

    Args:
        old: the geometry of the window.
        z: its draws in that, `[chains, draws, d]`, of variance 1 where the geometry is right.
        count: how many independent ones they are worth.
    """
    flat = z.flatten(0, 1)
    size, new = flat.shape[1], old
    if isinstance(old, DenseWhitening) and size > WARM_UP.matrix:
        share, chance = count / (count + 2), 1.0
        lengths, new = _learn_directions(old, flat, count)
    elif isinstance(old, DenseWhitening):
        share, chance = count / (count + size + 1), 1 + 2 * (size / count) ** 0.5
        covariance = torch.cov(flat.mT).reshape(size, size)
        eye = torch.eye(size, dtype=flat.dtype)
        lengths, axes = torch.linalg.eigh(share * covariance + (1 - share) * eye)
        bounded = lengths.clamp(WARM_UP.largest_change**-2, WARM_UP.largest_change**2)
        root = torch.linalg.cholesky((axes * bounded) @ axes.mT)
        factor = (old.factor.double() @ root).to(old.factor)
        new = DenseWhitening(old.center, factor)
    elif isinstance(old, LowRankWhitening):
        share, chance = count / (count + 2), 1.0
        lengths, new = learn_low_rank(old, flat, count, WARM_UP.largest_change)
    else:
        assert isinstance(old, DiagonalWhitening | KroneckerWhitening)  # of independent z
        share, chance = count / (count + 2), 1.0
        lengths = share * flat.var(0) + 1 - share
        bounded = lengths.clamp(WARM_UP.largest_change**-2, WARM_UP.largest_change**2)
        new = dataclasses.replace(old, scale=old.scale * bounded.sqrt().to(old.scale))
    chance += 3 / count**0.5  # of sds, and Marchenko and Pastur's edges of a covariance's
    sds = lengths.clamp(min=1e-300).sqrt()
    return float(torch.maximum(sds, 1 / sds).max()) / chance**share, new


def _learn_directions(
    old: DenseWhitening, z: Tensor, count: float
) -> tuple[Tensor, DenseWhitening]:
    """(Variances of draws in whitened coordinates, the matrix with the scales and the few
    directions that these say): their whole covariance is mostly chance."""
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    plain = LowRankWhitening(torch.zeros_like(z[0]), torch.ones_like(z[0]), eye[:, :1], eye[0, :1])
    seen, learned = learn_low_rank(plain, z, count, WARM_UP.largest_change)
    root = old.factor.double() @ learned.push_forward(eye).mT
    variances = torch.cat([seen, learned.stretch.square()])
    return variances, DenseWhitening(old.center, triangular(root).to(old.factor))


def _stable_lr(density: FullDataDensity, window: Window) -> float:
    """The step size that is half of what is stable at all but the steepest of the draws."""
    problem, flat = window.problem, window.draws.flatten(0, 1)
    whitening = problem.engine.whitening
    assert whitening is not None
    places = torch.linspace(0, len(flat) - 1, _num_looks(problem)).round().long()
    steepest = _steepest if isinstance(whitening, DenseWhitening) else steepest_by_products
    lengths = [steepest(density, whitening, flat[place].to(problem.positions)) for place in places]
    finite = [length for length in lengths if math.isfinite(length)]
    if not finite:
        return math.inf
    return max(1e-12, float(torch.tensor(finite).quantile(WARM_UP.steepest))) ** -0.5


def _num_looks(problem: Problem) -> int:
    """At how many places the curvature is looked at after a window."""
    return WARM_UP.looks if problem.engine.num_latents < WARM_UP.wide else WARM_UP.looks_if_wide


def _steepest(density: FullDataDensity, whitening: Whitening, position: Tensor) -> float:
    """The largest curvature over N at a position, in whitened coordinates."""
    curvature = -density.hessian(position)
    if not bool(torch.isfinite(curvature).all()):
        return math.nan
    whitened = whitening.pull_back(whitening.pull_back(curvature).mT).double()
    return float(torch.linalg.eigvalsh(whitened).max())
