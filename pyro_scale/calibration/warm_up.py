"""Warm-up of chains that have a data set each: every chain learns a geometry and a step size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyro_scale.calibration.modes import find_modes, look
from pyro_scale.calibration.stack import Coordinates, Stack
from pyro_scale.core.autocorrelation import autocorrelation_time, split_r_hat
from pyro_scale.core.whitening import DenseWhitening, DiagonalWhitening
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.rng.streams import RefinedNoise
from pyro_scale.tuning.pilot import bias_of
from pyro_scale.tuning.policy import GEOMETRY, PILOTS, SINGLE_PILOTS, SINGLE_WARM_UP, WARM_UP

Kind = Literal["dense", "diag"]


@dataclass(frozen=True)
class Lengths:
    """How long the stages are: the same for all data sets, as some of them have shown.

    Attributes:
        windows: of warm-up.
        pilots: of the step size, and the steps of each.
        pilot: steps of one.
        thinning: steps from one draw to the next.
    """

    windows: int = 0
    pilots: int = 0
    pilot: int = PILOTS.least
    thinning: int = 1


@dataclass(frozen=True)
class Warm:
    """Chains after warm-up.

    Attributes:
        kernel: with the longest step size.
        positions: `[chains, D]`, in their coordinates.
        coordinates: of each chain; None where they move in params.
        lengths: of what there was, and of what comes.
        steps: taken by each chain.
        level: the log joint at the center of each chain's first coordinates, `[chains]`; None where
            they move in params.
    """

    kernel: Kernel
    positions: Tensor
    coordinates: Coordinates | None
    lengths: Lengths
    steps: int
    level: Tensor | None = None

    def of(self, chains: Tensor) -> Warm:
        """Some of the chains."""
        return dataclasses.replace(
            self,
            positions=self.positions[chains],
            coordinates=None if self.coordinates is None else self.coordinates.of(chains),
            level=None if self.level is None else self.level[chains],
        )

    def after(self, steps: int, **lengths: int) -> Warm:
        """After so many more steps of each chain, with what they showed of the stages' lengths."""
        shown = dataclasses.replace(self.lengths, **lengths)
        return dataclasses.replace(self, steps=self.steps + steps, lengths=shown)

    def with_factors(self, chains: Tensor, own: Warm) -> Warm:
        """With the step sizes that some of the chains have by now."""
        if self.coordinates is None or own.coordinates is None:
            return self
        factor = self.coordinates.factor.index_copy(0, chains, own.coordinates.factor)
        coordinates = dataclasses.replace(self.coordinates, factor=factor)
        return dataclasses.replace(self, coordinates=coordinates)


def start_at_modes(stack: Stack, kernel: Kernel, starts: Tensor, kind: Kind) -> Warm:
    """Chains around the modes of their posteriors, in coordinates in which these are isotropic.

    Args:
        stack: the data sets.
        kernel: with the longest step size.
        starts: where searches begin, `[chains, D]`.
        kind: what coordinates are stretched by: a matrix, or elements.
    """
    gaussians, units = find_modes(stack, starts), stack.num_data**0.5
    covariance = torch.linalg.inv(gaussians.precision)
    temperature = float(kernel.values(0)["temperature"])
    if kind == "dense":
        root = torch.linalg.cholesky(temperature * (covariance + covariance.mT) / 2)
        whitening: DenseWhitening | DiagonalWhitening = DenseWhitening(
            gaussians.mean, (units * root).to(starts)
        )
    else:
        sd = (temperature * covariance.diagonal(dim1=1, dim2=2)).sqrt()
        whitening = DiagonalWhitening(gaussians.mean, (units * sd).to(starts))
    coordinates = Coordinates(whitening, torch.ones(stack.num_chains, dtype=starts.dtype))
    size = starts.shape[1]
    away = torch.stack([_noise(seed, size) for seed in stack.seeds]).to(starts)
    away = GEOMETRY.dispersion * away / units
    lowest = gaussians.value - GEOMETRY.depth(size)
    for _ in range(GEOMETRY.halvings):
        params = coordinates.mapped("to_params", away)
        deep = ~(stack.log_joints(params).double() > lowest)
        if not bool(deep.any()):
            break
        away = torch.where(deep[:, None], away / 2, away)
    return Warm(kernel, away, coordinates, Lengths(), 0, gaussians.value)


def move_in_windows(
    stack: Stack, warm: Warm, lengths: Lengths | None, adapts: bool, adapts_lr: bool
) -> Warm:
    """Chains after windows, each of which is twice as long as the one before, and after each of
    which a chain's coordinates become what its draws say.

    Args:
        stack: the data sets.
        warm: chains at their starts.
        lengths: how many windows; None goes on until most chains' halves agree.
        adapts: whether coordinates are learned.
        adapts_lr: whether a chain's step size may be shortened.
    """
    most = WARM_UP.most_windows if lengths is None else lengths.windows
    for number in range(most):
        length = WARM_UP.first_window * 2**number
        every = max(1, length // WARM_UP.draws)
        steps = Steps(length // every, 0, every)
        draws = stack.run(
            warm.kernel, warm.positions, steps, (Purpose.WINDOW, number), warm.coordinates
        )
        warm, times, agree = _learn(stack, warm, draws, adapts, adapts_lr)
        thinning = math.ceil(float(times.quantile(0.95)) * every)
        warm = warm.after(length, windows=number + 1, thinning=thinning)
        if lengths is None and float(agree.double().mean()) >= WARM_UP.most_chains:
            break
    return warm


def shorten_steps(stack: Stack, warm: Warm, order: int, lengths: Lengths | None) -> Warm:
    """Chains whose step sizes leave little bias, as pilots at the step and at half of it tell, on
    the same noise.

    Args:
        stack: the data sets.
        warm: chains after their windows.
        order: the power of lr with which the bias falls.
        lengths: how many pilots, and how long; None goes on until most chains need no shorter step.
    """
    assert warm.coordinates is not None
    wanted = max(PILOTS.least, math.ceil(PILOTS.times * warm.lengths.thinning))
    length = wanted if lengths is None else lengths.pilot
    most = SINGLE_PILOTS.most if lengths is None else lengths.pilots
    every = max(1, length // PILOTS.draws)
    for number in range(most):
        stage = Purpose.PILOT, number
        steps = Steps(length // every, 0, every)
        own = stack.run(warm.kernel, warm.positions, steps, stage, warm.coordinates)
        half = _at_half_step(stack, warm, steps, stage)
        factor, times = _factors(stack, warm, own, half, order)
        coordinates = dataclasses.replace(
            warm.coordinates, factor=warm.coordinates.factor * factor.to(warm.positions)
        )
        thinning = math.ceil(float((times * every / factor).quantile(0.95)))
        positions = last_positions(stack, warm, own)
        warm = dataclasses.replace(warm, positions=positions, coordinates=coordinates)
        warm = warm.after(3 * length, pilots=number + 1, pilot=length, thinning=thinning)
        if lengths is None and float((factor == 1).double().mean()) >= WARM_UP.most_chains:
            break
    return warm


def _noise(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=generator(seed, 0, Purpose.INIT, 1), dtype=torch.float64)


def are_sound(stack: Stack, warm: Warm, draws: Draws) -> Tensor:
    """Which chains are finite and have not left the posterior, `[chains]`."""
    values = draws.log_joint
    sound = draws.positions.isfinite().all(-1).all(-1) & values.isfinite().all(-1)
    if stack.batch_size is not None or warm.level is None:  # estimates of it scatter
        return sound
    lowest = values[:, int(WARM_UP.left_out * values.shape[1]) :].amin(1)
    return sound & (lowest > warm.level - WARM_UP.depth(draws.positions.shape[-1]))


def last_positions(stack: Stack, warm: Warm, draws: Draws) -> Tensor:
    """Where chains are; of those that have left the posterior, the center of their coordinates, or
    where they were."""
    last, sound = draws.positions[:, -1].to(warm.positions), are_sound(stack, warm, draws)
    otherwise = warm.positions if warm.coordinates is None else torch.zeros_like(last)
    return torch.where(sound[:, None], last, otherwise)


def _at_half_step(stack: Stack, warm: Warm, steps: Steps, stage: tuple[Purpose, int]) -> Draws:
    twice = Steps(steps.num_samples, 0, 2 * steps.thinning)
    columns: dict[str, Tensor] = dict(warm.kernel.columns(twice.total))
    columns["lr"] = columns["lr"] / 2
    return stack.run(
        warm.kernel, warm.positions, twice, stage, warm.coordinates, columns, RefinedNoise
    )


def _factors(
    stack: Stack, warm: Warm, own: Draws, half: Draws, order: int
) -> tuple[Tensor, Tensor]:
    """(What each chain's step is multiplied by, draws per independent one), `[chains]`."""
    factors, times = [], []
    sound = (are_sound(stack, warm, own) & are_sound(stack, warm, half)).tolist()
    pairs = zip(own.positions.double(), half.positions.double(), sound, strict=True)
    for one, other, is_sound in pairs:
        if not is_sound:
            factors.append(PILOTS.shorter)
            times.append(1.0)
            continue
        factors.append(bias_of(one[None], other[None], order).factor(order))
        times.append(float(autocorrelation_time(one[None]).max()))
    return torch.tensor(factors, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)


def _learn(
    stack: Stack, warm: Warm, draws: Draws, adapts: bool, adapts_lr: bool
) -> tuple[Warm, Tensor, Tensor]:
    """(Chains with what a window's draws say; draws per independent one, `[chains]`; whether each
    chain's halves agree, on the geometry that it was run with)."""
    z, sound = draws.positions.double(), are_sound(stack, warm, draws)
    kept = z[:, int(WARM_UP.left_out * z.shape[1]) :]
    kept = torch.where(sound[:, None, None], kept, 0.0)
    times, r_hat = mixing_of(kept)
    agree = sound & (r_hat < WARM_UP.most_r_hat)
    positions, coordinates = last_positions(stack, warm, draws), warm.coordinates
    if coordinates is None or not adapts:
        return dataclasses.replace(warm, positions=positions), times, agree
    count = kept.shape[1] / times.clamp(min=1)
    change, coordinates = _update(stack, coordinates, kept, count, sound)
    agree &= change < WARM_UP.most_change
    assert warm.coordinates is not None
    if adapts_lr:
        looks = kept[:, torch.linspace(0, kept.shape[1] - 1, SINGLE_WARM_UP.looks).round().long()]
        at = warm.coordinates.mapped("to_params", looks.to(positions))
        stable = _stable_steps(stack, coordinates, at) / float(warm.kernel.lr)
        factor = torch.where(sound, stable.clamp(max=1.0), coordinates.factor / 2)
        coordinates = dataclasses.replace(coordinates, factor=factor.to(positions))
    there = warm.coordinates.mapped("to_params", positions)
    positions = coordinates.mapped("to_whitened", there[:, None])[:, 0].to(positions)
    return dataclasses.replace(warm, positions=positions, coordinates=coordinates), times, agree


def mixing_of(z: Tensor) -> tuple[Tensor, Tensor]:
    """(Draws per independent one, split R-hat), the largest of each chain's own, of draws
    `[chains, draws, D]` and their squares."""
    squares = (z - z.mean(1, keepdim=True)).square()
    times = torch.maximum(*(of_each(autocorrelation_time, series) for series in (z, squares)))
    return times.amax(1), of_each(split_r_hat, z).amax(1)


def of_each(statistic: Callable[[Tensor], Tensor], series: Tensor) -> Tensor:
    """A statistic of elements, of each chain by itself: `[chains, draws, elements]` -> `[chains,
    elements]`."""
    chains, _, size = series.shape
    side_by_side = series.permute(1, 0, 2).flatten(1)[None]
    return statistic(side_by_side).view(chains, size)


def _update(
    stack: Stack, old: Coordinates, z: Tensor, count: Tensor, sound: Tensor
) -> tuple[Tensor, Coordinates]:
    """(The largest factor by which a direction's sd changes beyond chance, `[chains]`; coordinates
    that the draws make isotropic).

    Args:
        stack: the data sets.
        old: coordinates of the draws.
        z: the draws, `[chains, draws, D]`, of variance 1/N where the coordinates are right.
        count: how many independent ones each chain's are worth, `[chains]`.
        sound: whose draws count.
    """
    size, units = z.shape[-1], stack.num_data**0.5
    center = old.mapped("to_params", z.mean(1).to(old.factor))
    away = (z - z.mean(1, keepdim=True)) * units
    if isinstance(old.whitening, DenseWhitening):
        share, chance = count / (count + size + 1), 1 + 2 * (size / count).sqrt()
        covariance = away.mT @ away / (z.shape[1] - 1)
        eye = torch.eye(size, dtype=z.dtype)
        mixed = share[:, None, None] * covariance + (1 - share)[:, None, None] * eye
        mixed = torch.where(sound[:, None, None], mixed, eye)
        lengths, axes = torch.linalg.eigh(mixed)
        bounded = lengths.clamp(WARM_UP.largest_change**-2, WARM_UP.largest_change**2)
        root = torch.linalg.cholesky((axes * bounded[:, None]) @ axes.mT)
        factor = old.whitening.factor.double() @ root
        whitening: DenseWhitening | DiagonalWhitening = DenseWhitening(
            center, factor.to(old.factor)
        )
    else:
        assert isinstance(old.whitening, DiagonalWhitening)
        share, chance = count / (count + 2), torch.ones_like(count)
        lengths = share[:, None] * away.square().mean(1) + (1 - share)[:, None]
        lengths = torch.where(sound[:, None], lengths, 1.0)
        bounded = lengths.clamp(WARM_UP.largest_change**-2, WARM_UP.largest_change**2)
        whitening = DiagonalWhitening(center, old.whitening.scale * bounded.sqrt().to(old.factor))
    chance = chance + 3 / count.sqrt()
    sds = lengths.clamp(min=1e-300).sqrt()
    change = torch.maximum(sds, 1 / sds).amax(1) / chance**share
    kept = torch.where(sound[:, None], center, old.whitening.center)
    tensors = [kept.to(center), *whitening.tensors[1:]]
    return change, Coordinates(whitening.with_tensors(tensors), old.factor)


def _stable_steps(stack: Stack, coordinates: Coordinates, at: Tensor) -> Tensor:
    """The step size of each chain that is half of what is stable at some params of its own,
    `[chains, looks, D]`: `[chains]`."""
    steepest = torch.zeros(stack.num_chains, dtype=torch.float64)
    for place in range(at.shape[1]):
        _, _, curvature = look(stack, at[:, place])
        pulled = coordinates.mapped("pull_back", curvature.to(at))
        pulled = coordinates.mapped("pull_back", pulled.mT.contiguous()).double()
        steepest = torch.maximum(steepest, torch.linalg.eigvalsh(pulled / stack.num_data)[:, -1])
    return steepest.clamp(min=1e-12).rsqrt()
