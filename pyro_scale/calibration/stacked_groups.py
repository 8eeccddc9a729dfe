"""The chains of many data sets as groups of one chain each, for warm-up and pilots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyro_scale.calibration.modes import find_modes, look
from pyro_scale.calibration.stack import Coordinates, Stack
from pyro_scale.core.gaussian import as_structure
from pyro_scale.core.whitening import Whitening, whiten
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import RefinedNoise
from pyro_scale.tuning.geometry import disperse, standard_normal
from pyro_scale.tuning.groups import WindowDraws, halve_step_size, have_left
from pyro_scale.tuning.modes import gaussian_at
from pyro_scale.tuning.policy import GEOMETRY
from pyro_scale.tuning.windows import learn

Kind = Literal["dense", "diag"]


@dataclass(frozen=True)
class StackedGroups:
    """A chain of each data set.

    Attributes:
        stack: the data sets.
        kernel: the sampler, with the longest step size.
        positions: positions in each chain's coordinates, `[chains, D]`.
        coordinates: coordinates of each chain; None if chains move in params.
        lr: step size of each chain, `[chains]`; 1 if the step size is set.
        learns: whether windows update coordinates and step sizes.
    """

    stack: Stack
    kernel: Kernel
    positions: Tensor
    coordinates: Coordinates | None
    lr: Tensor
    learns: bool

    @property
    def num_latents(self) -> int:
        return self.positions.shape[1]

    def with_lr(self, lr: Tensor) -> StackedGroups:
        coordinates = self.coordinates
        if coordinates is not None:
            factor = (lr / float(self.kernel.lr)).to(self.positions)
            coordinates = dataclasses.replace(coordinates, factor=factor)
        return dataclasses.replace(self, lr=lr, coordinates=coordinates)

    def of(self, chains: Tensor) -> StackedGroups:
        """The groups of these chains only."""
        return dataclasses.replace(
            self,
            stack=self.stack.of(chains),
            positions=self.positions[chains],
            coordinates=None if self.coordinates is None else self.coordinates.of(chains),
            lr=self.lr[chains],
        )

    def run(self, steps: Steps, purpose: Purpose, number: int, halved: bool = False) -> Draws:
        columns, noise = None, None
        if halved:
            (steps, columns), noise = halve_step_size(self.kernel, steps), RefinedNoise
        where = self.positions, steps, (purpose, number), self.coordinates
        return self.stack.run(self.kernel, *where, columns, noise)

    def are_sound(self, draws: Draws) -> Tensor:
        log_joint = draws.log_joint
        sound = draws.positions.isfinite().all(-1).all(-1) & log_joint.isfinite().all(-1)
        if self.learns and self.stack.batch_size is None:  # estimates of it scatter
            sound &= ~have_left(log_joint, self.num_latents)
        return sound[:, None]

    def moved_to(self, draws: Draws, sound: Tensor) -> StackedGroups:
        """The groups with sound chains at their last draws.  Broken chains restart halfway to the
        center; they stay if the step size is set."""
        last, before = draws.positions[:, -1].to(self.positions), self.positions
        positions = torch.where(sound, last, before / 2 if self.learns else before)
        return dataclasses.replace(self, positions=positions)

    def select(self, draws: Draws, sound: Tensor) -> Tensor:
        return torch.where(sound[..., None, None], draws.positions[:, None], 0.0)

    def to_whitened(self, kept: Tensor) -> Tensor:
        return kept.double()

    def learn(self, draws: WindowDraws) -> tuple[StackedGroups, Tensor, Tensor]:
        old, num_data = self.coordinates, self.stack.num_data
        assert old is not None

        def of_group(
            tensors: Sequence[Tensor], z: Tensor, count: Tensor, is_usable: Tensor
        ) -> tuple[Tensor, list[Tensor]]:
            change, new = learn(old.whitening.with_tensors(tensors), z, num_data, count)
            pairs = zip(new.tensors, tensors, strict=True)
            return change, [torch.where(is_usable, *pair) for pair in pairs]

        groups = list(old.whitening.tensors), draws.z, draws.counts, draws.usable
        change, tensors = torch.vmap(of_group)(*groups)
        new = dataclasses.replace(old, whitening=old.whitening.with_tensors(tensors))
        there = old.mapped("to_params", self.positions[:, None])
        positions = new.mapped("to_whitened", there)[:, 0].to(self.positions)
        places = old.mapped("to_params", draws.places.to(positions))
        curvatures = [self._steepest(new, place) for place in places.unbind(1)]
        learned = dataclasses.replace(self, positions=positions, coordinates=new)
        return learned, change, torch.stack(curvatures, 1)

    def _steepest(self, coordinates: Coordinates, params: Tensor) -> Tensor:
        """Largest curvature over N of each data set at params `[chains, D]`, in `coordinates`."""
        _, _, curvature = look(self.stack, params)
        pulled = coordinates.mapped("pull_back", curvature.to(params))
        pulled = coordinates.mapped("pull_back", pulled.mT.contiguous()).double()
        finite = pulled.isfinite().all(-1).all(-1)  # else no data set's would be found
        matrices = torch.where(finite[:, None, None], pulled, 0.0) / self.stack.num_data
        return torch.where(finite, torch.linalg.eigvalsh(matrices)[:, -1], torch.nan)


def start_at_modes(
    stack: Stack, kernel: Kernel, starts: Tensor, kind: Kind, learns: bool
) -> StackedGroups:
    """Finds every posterior's mode, and starts a chain around it in coordinates that whiten the
    Gaussian there.

    Args:
        stack: the data sets.
        kernel: the sampler, with the longest step size.
        starts: starts of the searches, `[chains, D]`.
        kind: whether coordinates are scaled by a matrix or by elements.
        learns: whether windows update coordinates and step sizes.
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
    coordinates = Coordinates.of_each(whitenings, torch.ones(len(starts), dtype=starts.dtype))
    lowest = modes.value - GEOMETRY.depth(size)

    def is_deep(away: Tensor) -> Tensor:
        params = coordinates.mapped("to_params", away)
        return ~(stack.log_joints(params).double() > lowest)

    noise = torch.stack([standard_normal(seed, 0, size) for seed in stack.seeds]).to(starts)
    away = disperse(noise / stack.num_data**0.5, is_deep)
    lr = torch.full((len(starts),), float(kernel.lr) if learns else 1.0, dtype=torch.float64)
    return StackedGroups(stack, kernel, away, coordinates, lr, learns)
