"""The chains of a run as one group, for warm-up and pilots."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.whitening import (
    DenseWhitening,
    DiagonalWhitening,
    LowRankWhitening,
    whiten,
)
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.gauss_newton import AnchoredDensity, anchored
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.rng.streams import RefinedNoise
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.choice import Simulate
from pyro_scale.tuning.groups import WindowDraws, halve_step_size, have_left
from pyro_scale.tuning.low_rank import steepest_by_products, with_axes
from pyro_scale.tuning.modes import gaussian_at
from pyro_scale.tuning.policy import GEOMETRY, WARM_UP
from pyro_scale.tuning.windows import learn


@dataclass(frozen=True)
class OneGroup:
    """All chains of a run as a single group, for warm-up and for pilots (short runs that measure
    the step size's error); methods are those of `Groups`.

    Attributes:
        problem: problem with the chains' params, geometry and step size.
        simulate: function that runs the chains.
        density: log density of all rows, or of rows that represent them, whose curvature is
            evaluated after each window of warm-up; None if geometry and step size are set and
            windows only measure mixing.
        full_data: log density of all rows.
    """

    problem: Problem
    simulate: Simulate
    density: FullDataDensity | None
    full_data: FullDataDensity

    def with_problem(self, problem: Problem) -> OneGroup:
        """A copy of the group with another problem, such as one with other params, whitened
        coordinates or step size."""
        return dataclasses.replace(self, problem=problem)

    @property
    def learns(self) -> bool:
        return self.density is not None

    @property
    def num_latents(self) -> int:
        return self.problem.engine.num_latents

    @property
    def lr(self) -> Tensor:
        return torch.tensor([float(self.problem.engine.kernel.lr)], dtype=torch.float64)

    def with_lr(self, lr: Tensor) -> OneGroup:
        return self.with_problem(self.problem.with_lr(float(lr[0])))

    def run(self, steps: Steps, purpose: Purpose, number: int, halved: bool = False) -> Draws:
        problem, kernel = self.problem, self.problem.engine.kernel
        seed, noise = derived_seed(problem.seed, number, purpose), None
        columns = kernel.columns(steps.total)
        if halved:
            steps, columns = halve_step_size(kernel, steps)
            shape, like = (kernel.normals, self.num_latents), problem.positions
            noise = RefinedNoise(seed, problem.chains, shape, like.dtype, like.device)
        draws = self.simulate(problem, steps, seed, columns, noise=noise)
        if draws.error is not None:
            raise draws.error
        return draws

    def are_sound(self, draws: Draws) -> Tensor:
        sound = torch.zeros(1, len(draws.positions), dtype=torch.bool)
        sound[:, draws.finished] = True
        if self.density is None or not draws.finished:
            return sound
        problem = self.problem
        if problem.data.batch_size is None:
            left = have_left(draws.log_joint[draws.finished], self.num_latents)
        else:  # on batches, the log joint is noisy
            ends = draws.positions[draws.finished][:, [0, -1], : self.num_latents]
            values = self.density.values(ends.flatten(0, 1).to(problem.positions)).double()
            values = (values * problem.log_posterior.num_data).nan_to_num(-math.inf)
            first, last = values.unflatten(0, (-1, 2)).mT
            left = ~(first - last < WARM_UP.depth(self.num_latents))
        sound[0, draws.finished] = ~left.cpu()
        return sound

    def moved_to(self, draws: Draws, sound: Tensor) -> OneGroup:
        """The group with each chain that can go on (`sound`) at its last draw.  Any other chain
        restarts where one of these is, or halfway to the center if there are none; it stays if the
        user set geometry and step size."""
        chains, problem = torch.nonzero(sound[0])[:, 0].tolist(), self.problem
        positions, whitening = problem.positions.clone(), problem.engine.whitening
        for chain in torch.nonzero(~sound[0])[:, 0].tolist() if self.learns else ():
            if chains:
                positions[chain] = draws.positions[chains[chain % len(chains)], -1].to(positions)
            elif whitening is not None:
                center = whitening.tensors[0]
                positions[chain, : len(center)] = (positions[chain, : len(center)] + center) / 2
        moved = dataclasses.replace(problem, positions=positions).moved_to(draws, chains)
        return self.with_problem(moved)

    def sound_draws(self, draws: Draws, sound: Tensor) -> Tensor:
        return draws.positions[sound[0]][None]

    def to_values(self, latents: Tensor) -> Tensor:
        like, layout, values = self.problem.positions, self.problem.engine.layout, latents.clone()
        slices, params = layout.slices(), layout.unflatten(like[0])
        bijections = self.problem.log_posterior.elementwise_bijections(params)
        for name, bijection in bijections.items():
            draws = latents[..., slices[name]].to(like.device)
            of_site = torch.vmap(bijection)(draws.reshape(-1, *params[name].shape))
            values[..., slices[name]] = of_site.reshape(draws.shape).to(latents)
        return values

    def to_whitened(self, kept: Tensor) -> Tensor:
        params, whitening = kept[..., : self.num_latents].double(), self.problem.engine.whitening
        return params if whitening is None else whitening.double().to_whitened(params)

    def learn(self, draws: WindowDraws) -> tuple[OneGroup, Tensor, Tensor]:
        problem, old = self.problem, self.problem.engine.whitening
        assert old is not None
        change, new = learn(old, draws.z[0], problem.log_posterior.num_data, draws.counts[0])
        learned = self.with_problem(problem.with_engine(whitening=new))
        if float(draws.r_hat) >= WARM_UP.most_r_hat and change >= WARM_UP.largest_change:
            learned = learned._with_curvature_at_mean()
        steepest = learned._steepest(draws.places[0].to(problem.positions))
        return learned, change.view(1).cpu(), steepest[None]

    def _with_curvature_at_mean(self) -> OneGroup:
        """The group with whitened coordinates from the curvature at the draws' mean, the present
        center. When chains have moved away from the mode without mixing, the draws' covariance does
        not show stiff directions. The same group if the curvature is not finite, or coordinates are
        whitened neither by a matrix nor by low-rank directions.

        This happens in hierarchies of many groups, whose mode is far from the posterior.
        """
        problem, whitening, density = self.problem, self.problem.engine.whitening, self.density
        assert density is not None
        temperature = float(problem.engine.kernel.values(0)["temperature"])
        num_data, like = problem.log_posterior.num_data, problem.positions
        if isinstance(whitening, LowRankWhitening):
            # scales from all of the variance, as the new axes must not make elements longer
            elements = DiagonalWhitening(whitening.center, whitening.variance.sqrt())
            low_rank = with_axes(elements, density, temperature)
            return self.with_problem(problem.with_engine(whitening=low_rank))
        if not isinstance(whitening, DenseWhitening):
            return self
        many_rows = self.full_data.of_some_rows(GEOMETRY.most_rows, problem.seed)
        precision = -num_data * many_rows.hessian(whitening.center).double()
        if not bool(torch.isfinite(precision).all()):
            return self
        if isinstance(density, AnchoredDensity):
            density = anchored(density, whitening.center, precision)
        if self.num_latents > WARM_UP.matrix:
            gaussian = gaussian_at(whitening.center, precision, temperature)
            problem = problem.with_engine(whitening=whiten(gaussian, num_data, like))
        return dataclasses.replace(self, problem=problem, density=density)

    def _steepest(self, positions: Tensor) -> Tensor:
        """The largest curvature of the negative log density divided by N, in whitened coordinates,
        at each of the unconstrained params `positions` `[P, D]`: `[P]`; NaN where the Hessian is
        not finite. It limits the step size."""
        density, whitening = self.density, self.problem.engine.whitening
        assert density is not None
        if not isinstance(whitening, DenseWhitening):
            steepest = [steepest_by_products(density, whitening, place) for place in positions]
            return torch.tensor(steepest, dtype=torch.float64)
        curvatures = -density.hessians(positions)
        is_finite = torch.isfinite(curvatures).all(-1).all(-1)
        curvatures = torch.where(is_finite[:, None, None], curvatures, 0.0)
        whitened = whitening.pull_back(whitening.pull_back(curvatures).mT).double()
        largest = torch.linalg.eigvalsh(whitened)[:, -1]
        return torch.where(is_finite, largest, math.nan).cpu()
