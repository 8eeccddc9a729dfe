"""Stein variational gradient descent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from pyro_scale import kernels
from pyro_scale.core.rows import Arguments, DataLike, Model
from pyro_scale.core.schedules import Schedule
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn, without_vmap_warnings
from pyro_scale.data.sources import Data
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import ArgumentError, ConvergenceWarning
from pyro_scale.infer.method import Finished, InitStrategy, SteppedChain, asks
from pyro_scale.infer.stochastic import Stochastic, check_length, count_steps, times_of
from pyro_scale.kernels.optimizer import as_optimizer
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.results.particles import ParticlePosterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.frozen_features import with_frozen_features
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.early_stopping import still_rises


class SVGD(Stochastic):
    """Stein variational gradient descent (Liu and Wang 2016): particles in unconstrained space that
    climb the posterior density and repel each other.  `kernels.SVGD` has the equations.

    Use this if a few points have to represent a posterior of few dimensions.  In many dimensions
    the repulsion is small beside the gradients, and the particles' variance is far too small (Ba et
    al. 2022).  For networks, an ensemble, `MAP` with `num_chains`, predicts as well and costs less.

    `get_samples` returns the particles as draws of one chain.  `pyro.param` sites are moved by the
    particles' mean gradient.  There are no checkpoints: `save` keeps the particles, and
    `init_strategy=SVGD.load(...)` starts another run from them, with a new optimizer.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        num_particles: number of particles; a single one climbs to the mode, in unconstrained space.
        optimizer: one of TorchOpt's functional ones, `torchopt.adam(1e-2)` by default, or a
            factory of one of torch.optim's, as for `MAP`.
        temperature: 1 is the posterior, below 1 a cold one; a float or a schedule.
        init_strategy: where particles start, as for `MAP`: dicts are `[num_particles, ...]`; or
            another `SVGD`.  All starts must differ, as two particles in one place never part.
        num_data: number of rows in all, N; None takes it from the data.
        compile: whether steps are compiled, as for samplers.

    Raises:
        ArgumentError: an argument is unknown or out of range.

    Examples:
        >>> import torch, torchopt, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model(y=None):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> svgd = ps.SVGD(model, num_particles=20, optimizer=torchopt.adam(0.05))
        >>> svgd = svgd.run((torch.tensor([1.0, 2.0, 3.0]),), num_steps=500, seed=0, progress=False)
        >>> mu = svgd.get_samples()["mu"]
        >>> len(mu), round(float(mu.mean()), 2)  # 6 / 3.01
        (20, 1.99)
    """

    mover = "particle"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "num_chains": "num_particles=, of the constructor",
        "num_samples": "num_particles=, of the constructor: particles are the draws",
        "mesh": "nothing: one process moves all particles; MAP's num_chains share batches by mesh=",
        "bandwidth": "nothing: the kernel's width follows the median distance of particles",
        "kernel": "nothing: it is Gaussian, as wide as the median distance of particles",
    }

    def __init__(
        self,
        model: Model,
        *,
        num_particles: int = 50,
        optimizer: Any = None,
        temperature: float | Schedule = 1.0,
        init_strategy: InitStrategy = None,
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
    ):
        super().__init__(model, init_strategy=init_strategy, num_data=num_data)
        self.num_particles = as_count("num_particles", num_particles)
        kernel = kernels.SVGD(optimizer=as_optimizer(optimizer), temperature=temperature)
        self._set_kernel(kernel, compile)

    @without_vmap_warnings()
    def run(
        self,
        data: DataLike,
        *,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Takes `num_steps` steps with all particles, or as many as `num_epochs` epochs have.  All
        particles have the same batch.

        Args:
            data: a `DataLoader`, or the model's own arguments, as for samplers.
            num_steps: number of steps; pass this or `num_epochs`.
            num_epochs: passes through the data.
            batch_size: rows a step, for tensors; all of them by default.
            seed: the same seed gives the same particles; drawn from torch's generator by default.
            progress: whether to show a progress bar.

        Returns:
            The method itself.

        Raises:
            ArgumentError, DataError: before the model is run; two particles start in one place.
            ModelError, SiteError, PlateError: before any step.
            NonFiniteError: the state became NaN or infinite.

        Warns:
            ConvergenceWarning: the particles' log joint was still changing at the end.
        """
        check_length(num_steps, num_epochs)
        self._forget()
        opened = self._open(data, batch_size)
        problem = with_frozen_features(self._prepare(opened, choose_seed(seed)))
        steps = Steps(count_steps(problem, num_steps, num_epochs), positions=False)
        draws = self._simulate(problem, problem.batches(1, "shuffle"), steps, progress)
        trace, size = draws.log_joint.mean(0), problem.engine.layout.size
        self._last = Finished(ParticlePosterior(self._collect(problem, draws), trace))
        if bool(still_rises(trace, size) | still_rises(-trace, size)):
            warn(
                ConvergenceWarning,
                "the particles' log joint still changed over the last quarter of the "
                f"{draws.num_steps} steps: take more steps, or a larger learning rate at first",
            )
        return self

    def begin(self, *args: Any, **kwargs: Any) -> SteppedChain:
        """Particles at their starts, for your own loops: `step(*batch)` moves them all; see
        `Stepwise.begin`."""
        data = self._open_batch(args, kwargs)
        return self._begin(self._prepare(data, choose_seed(None)))

    @property
    def trace(self) -> Tensor:
        """Mean of the particles' log joints at every step, estimated from the step's batch, in
        nats, as a total over all rows: `[steps]`; after `step`, that of the latest step."""
        return self.posterior.trace

    @property
    def converged(self) -> bool:
        """Whether the particles have converged: their mean log joint changes, from the third
        quarter of the steps to the last, by significantly less than 0.1 nats times the square root
        of the number of dimensions."""
        return self.posterior.converged

    starts = asks(ParticlePosterior.starts)
    summary = asks(ParticlePosterior.summary)
    moments = asks(ParticlePosterior.moments)
    diagnostics = asks(ParticlePosterior.diagnostics)

    # ------------------------------------------------------------------ inside

    posterior: ParticlePosterior

    def _prepare(self, data: Data, seed: int) -> Problem:
        """The analyzed model on the data, with particles at their starts.

        Raises:
            ArgumentError: two particles start in the same place.
        """
        problem = self._analyze(data, data.num_data, self.kernel, self.num_particles, seed)
        latents = problem.positions[:, : problem.engine.num_latents]
        if len(torch.unique(latents, dim=0)) < self.num_particles:
            raise ArgumentError(
                "init_strategy: two particles start in the same place, and would never part: pass "
                "one that draws, such as pyro.infer.autoguide.init_to_sample, or other values"
            )
        return problem if self._is_pure else problem.with_engine(vectorized=False)

    def _collect(self, problem: Problem, draws: Draws) -> PosteriorDraws:
        """The particles' last states as the draws of a single chain, unconstrained, `[1, particles,
        D]`, with each particle's log joint and the facts of the run."""
        last = draws.log_joint[:, -1]
        return PosteriorDraws(
            log_posterior=problem.log_posterior,
            data=problem.data,
            layout=problem.engine.layout,
            positions=draws.state.position.detach()[None],
            sample_stats={"lp": last[None]},
            attrs={
                "method": type(self).__name__,
                "num_particles": self.num_particles,
                "temperature": float(self.kernel.values(draws.num_steps - 1)["temperature"]),
                **facts_of(problem.log_posterior, problem.seed),
                **times_of(draws),
                "batch_size": problem.batch_size,
            },
        )

    def _posterior_of_step(
        self, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
    ) -> ParticlePosterior:
        result = dataclasses.replace(self._collect(problem, draws), data=None)
        return ParticlePosterior(result, draws.log_joint.mean(0), batch)
