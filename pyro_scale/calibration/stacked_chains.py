"""One chain on each of many data sets. For the package `tuning`, each chain is a group of its own,
with its own warm-up and its own pilots (short runs from which the step size is tuned).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyro_scale.calibration.modes import evaluate, find_modes
from pyro_scale.calibration.stack import Stack, StackedDensity
from pyro_scale.core.gaussian import as_structure
from pyro_scale.core.whitening import Whitening, whiten
from pyro_scale.data.stacked import StackedBatches
from pyro_scale.engine.checkpoint import Checkpoint
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.step import Engine
from pyro_scale.kernels import Kernel
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.rng.streams import NoiseStream, RefinedNoise
from pyro_scale.tuning.geometry import disperse, standard_normal
from pyro_scale.tuning.groups import WindowDraws, halve_step_size, have_left
from pyro_scale.tuning.modes import gaussian_at
from pyro_scale.tuning.policy import GEOMETRY
from pyro_scale.tuning.windows import learn

#: How coordinates are whitened: by a matrix ("dense"), or by a scale for each element ("diag").
Kind = Literal["dense", "diag"]


@dataclass(frozen=True)
class StackedChains:
    """One chain on each data set of a stack.

    Attributes:
        stack: data sets of one model.
        kernel: sampler, with the longest step size that a chain may have.
        positions: position of each chain, in the chain's coordinates, `[chains, D]`.
        whitening: linear maps from each chain's whitened coordinates to unconstrained parameters,
            as one map with tensors `[chains, ...]`; None if chains move in the parameters
            themselves.
        learned_lr: step size of each chain, `[chains]`, float64; None if the user set the step
            size.
    """

    stack: Stack
    kernel: Kernel
    positions: Tensor
    whitening: Whitening | None = None
    learned_lr: Tensor | None = None

    @property
    def learns(self) -> bool:
        return self.learned_lr is not None

    @property
    def num_latents(self) -> int:
        return self.positions.shape[1]

    @property
    def lr(self) -> Tensor:
        if self.learned_lr is None:
            return torch.ones(len(self.positions))
        return self.learned_lr

    @property
    def lr_factor(self) -> Tensor:
        """The factor by which each chain multiplies the kernel's step size, `[chains]`; 1 for all
        if the user set the step size."""
        if self.learned_lr is None:
            return self.positions.new_ones(len(self.positions))
        return (self.learned_lr / float(self.kernel.lr)).to(self.positions)

    def with_lr(self, lr: Tensor) -> StackedChains:
        return dataclasses.replace(self, learned_lr=lr)

    def select(self, chains: Tensor) -> StackedChains:
        """A copy with these chains only, and their data sets.

        Args:
            chains: numbers of the chains to keep, int64 `[n]`.
        """
        whitening, lr = self.whitening, self.learned_lr
        if whitening is not None:
            whitening = whitening.with_tensors([tensor[chains] for tensor in whitening.tensors])
        return dataclasses.replace(
            self,
            stack=self.stack.select(chains),
            positions=self.positions[chains],
            whitening=whitening,
            learned_lr=None if lr is None else lr[chains],
        )

    def to_params(self, positions: Tensor) -> Tensor:
        """Unconstrained parameters of the model, `[chains, ..., D]`, from points in each chain's
        own whitened coordinates, of the same shape."""
        if self.whitening is None:
            return positions
        return map_vectors(self.whitening, "to_params", positions)

    def simulate(
        self,
        steps: Steps,
        seeds: Sequence[int] | None = None,
        columns: Mapping[str, Tensor] | None = None,
        noise_class: type[RefinedNoise] | None = None,
        last: Callable[[StackedBatches], Checkpoint] | None = None,
    ) -> Draws:
        """Moves all chains from their positions, and returns their draws, in the chains' own
        coordinates.

        Args:
            steps: how many steps to take, and which draws to keep.
            seeds: seed of each chain; None for those of the stack.
            columns: hyperparameters at all steps, by name, `[steps, ...]`; None for those of the
                sampler.
            noise_class: class that draws the standard normal numbers of the steps; None for the
                usual one.
            last: function from the chains' batches to a checkpoint from which to continue; None to
                start at the positions.

        Raises:
            Exception: whatever ended the run before its last step.
        """
        stack, kernel, positions = self.stack, self.kernel, self.positions
        seeds, numbers = stack.seeds if seeds is None else seeds, [0] * stack.num_chains
        constants = []
        if self.whitening is not None:
            constants = [*self.whitening.tensors, self.lr_factor]
        batches = stack.batches(seeds, constants)
        in_batches = stack.batch_size is not None
        density = StackedDensity(stack.log_posterior, stack.layout, self.whitening, in_batches)
        noise: NoiseStream | None = None
        if noise_class is not None:
            shape = kernel.normals, stack.layout.size
            noise = noise_class(seeds, numbers, shape, positions.dtype, positions.device)
        plan = StepPlan(
            Engine(kernel, density, stack.layout, stack.layout.size, stack.vectorized),
            positions,
            batches,
            kernel.columns(steps.total) if columns is None else columns,
            steps,
            list(seeds),
            stack.compile,
            stack.earlier,
            noise=noise,
            numbers=numbers,
        )
        draws = simulate(plan, stack.bar, last=None if last is None else last(batches))
        if draws.error is not None:
            raise draws.error
        return draws

    def run(self, steps: Steps, purpose: Purpose, number: int, halved: bool = False) -> Draws:
        seeds = [derived_seed(seed, number, purpose) for seed in self.stack.seeds]
        if not halved:
            return self.simulate(steps, seeds)
        steps, columns = halve_step_size(self.kernel, steps)
        return self.simulate(steps, seeds, columns, RefinedNoise)

    def are_sound(self, draws: Draws) -> Tensor:
        log_joint = draws.log_joint
        sound = draws.positions.isfinite().all(-1).all(-1) & log_joint.isfinite().all(-1)
        if self.learns and self.stack.batch_size is None:  # on batches, the log joint is noisy
            sound &= ~have_left(log_joint, self.num_latents)
        return sound[:, None]

    def moved_to(self, draws: Draws, sound: Tensor) -> StackedChains:
        """The chains at their last draws, if these are sound (finite, and the chain has not left
        the posterior). Other chains restart halfway between their earlier position and the center
        of their coordinates; if the user set the step size, they keep their earlier position.

        Args:
            draws: draws of all chains.
            sound: True for chains with sound draws, booleans `[chains, 1]`.
        """
        last, before = draws.positions[:, -1].to(self.positions), self.positions
        positions = torch.where(sound, last, before / 2 if self.learns else before)
        return dataclasses.replace(self, positions=positions)

    def sound_draws(self, draws: Draws, sound: Tensor) -> Tensor:
        return torch.where(sound[..., None, None], draws.positions[:, None], 0.0)

    def to_values(self, latents: Tensor) -> Tensor:
        return latents

    def to_whitened(self, kept: Tensor) -> Tensor:
        return kept.double()

    def learn(self, draws: WindowDraws) -> tuple[StackedChains, Tensor, Tensor]:
        old, num_data = self.whitening, self.stack.num_data
        assert old is not None

        def learn_one(
            tensors: Sequence[Tensor], z: Tensor, count: Tensor, is_usable: Tensor
        ) -> tuple[Tensor, list[Tensor]]:
            change, new = learn(old.with_tensors(tensors), z, num_data, count)
            pairs = zip(new.tensors, tensors, strict=True)
            return change, [torch.where(is_usable, *pair) for pair in pairs]

        chains = list(old.tensors), draws.z, draws.counts, draws.usable
        change, tensors = torch.vmap(learn_one)(*chains)
        new = old.with_tensors(tensors)
        params = map_vectors(old, "to_params", self.positions[:, None])
        positions = map_vectors(new, "to_whitened", params)[:, 0].to(self.positions)
        places = map_vectors(old, "to_params", draws.places.to(positions))
        curvatures = [self._steepest(new, place) for place in places.unbind(1)]
        learned = dataclasses.replace(self, positions=positions, whitening=new)
        return learned, change, torch.stack(curvatures, 1)

    def _steepest(self, whitening: Whitening, params: Tensor) -> Tensor:
        """The largest curvature, in whitened coordinates, of each data set's negative log joint
        divided by N, float64 `[chains]`, which limits the step size; NaN if the Hessian is not
        finite. N is the number of rows of a data set.

        Args:
            whitening: maps of all chains, with tensors `[chains, ...]`.
            params: unconstrained parameters at which to compute the Hessians, `[chains, D]`.
        """
        _, _, curvature = evaluate(self.stack, params)
        whitened = map_vectors(whitening, "pull_back", curvature.to(params))
        whitened = map_vectors(whitening, "pull_back", whitened.mT.contiguous()).double()
        finite = whitened.isfinite().all(-1).all(-1)  # eigvalsh fails if any matrix is not
        matrices = torch.where(finite[:, None, None], whitened, 0.0) / self.stack.num_data
        return torch.where(finite, torch.linalg.eigvalsh(matrices)[:, -1], torch.nan)


def map_vectors(
    whitening: Whitening,
    method: Literal["to_params", "to_whitened", "pull_back"],
    vectors: Tensor,
) -> Tensor:
    """The chains' vectors after the map, or the inverse or transposed map, between whitened
    coordinates and params that each chain has of its own, `[chains, ..., D]`.

    Args:
        whitening: maps of all chains, with tensors `[chains, ...]`.
        method: name of the method, which maps vectors `[..., D]` to vectors.
        vectors: vectors of each chain, `[chains, ..., D]`.
    """

    def map_one(tensors: list[Tensor], vectors: Tensor) -> Tensor:
        mapped: Tensor = getattr(whitening.with_tensors(tensors), method)(vectors)
        return mapped

    return torch.vmap(map_one)(list(whitening.tensors), vectors)


def start_at_modes(
    stack: Stack, kernel: Kernel, starts: Tensor, kind: Kind, learns: bool
) -> StackedChains:
    """Finds the mode of every data set's posterior, and starts a chain around it, in coordinates
    that whiten the Gaussian approximation at the mode.

    Args:
        stack: data sets of one model.
        kernel: sampler, with the longest step size that a chain may have.
        starts: unconstrained parameters at which the searches begin, `[chains, D]`.
        kind: "dense" to whiten by the whole covariance, "diag" to whiten by the sds alone.
        learns: True if the warm-up is to update coordinates and step sizes; False if the user set
            the step size.
    """
    modes, size = find_modes(stack, starts), starts.shape[1]
    temperature = float(kernel.values(0)["temperature"])

    def whitening_at(mean: Tensor, precision: Tensor) -> Whitening:
        gaussian = as_structure(gaussian_at(mean, precision, temperature), dense=kind == "dense")
        return whiten(gaussian, stack.num_data, starts)

    whitenings = []
    for mean, precision in zip(modes.mean, modes.precision, strict=True):
        whitening = whitening_at(mean, precision)
        if not all(bool(tensor.isfinite().all()) for tensor in whitening.tensors):
            # the search ended in a spike: the run tells whether the chain breaks there
            whitening = whitening_at(mean, torch.eye(size, dtype=precision.dtype))
        whitenings.append(whitening)
    by_tensor = zip(*(whitening.tensors for whitening in whitenings), strict=True)
    stacked = whitenings[0].with_tensors([torch.stack(tensors) for tensors in by_tensor])
    lowest = modes.value - GEOMETRY.depth(size)

    def is_deep(away: Tensor) -> Tensor:
        params = map_vectors(stacked, "to_params", away)
        return ~(stack.log_joints(params).double() > lowest)

    noise = torch.stack([standard_normal(seed, 0, size) for seed in stack.seeds]).to(starts)
    away = disperse(noise / stack.num_data**0.5, is_deep)
    lr = None
    if learns:
        lr = torch.full((len(starts),), float(kernel.lr), dtype=torch.float64)
    return StackedChains(stack, kernel, away, stacked, lr)
