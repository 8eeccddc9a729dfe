"""Stein variational gradient descent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from pyro_scale import kernels
from pyro_scale.core.rows import Arguments
from pyro_scale.core.schedules import Schedule
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn, without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data
from pyro_scale.engine.compile_step import check_compile
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError, ConvergenceWarning
from pyro_scale.infer.method import Finished, asks
from pyro_scale.infer.stepwise import SteppedChain, Stepwise
from pyro_scale.infer.stochastic import check_failures, check_length, count_steps, times_of
from pyro_scale.kernels.optimizer import as_optimizer, is_pure
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.results.particles import ParticlePosterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.frozen_features import with_frozen_features
from pyro_scale.run.problem import Problem, as_log_posterior, module_device
from pyro_scale.run.single_step import Stepping, batch_as_data
from pyro_scale.tuning.early_stopping import still_rises


class SVGD(Stepwise):
    """Stein variational gradient descent (Liu and Wang 2016): particles that climb to the posterior
    and repel each other (the equations are at `kernels.SVGD`), in unconstrained space.

    Use this where a few points have to stand for a posterior of few dimensions.  In many, the
    repulsion vanishes against the gradients and the particles' variance is far too small (Ba et
    al. 2022): for networks, an ensemble, `MAP` with `num_chains`, predicts as well, and costs less.

    `get_samples` gives the particles, as draws of one chain.  `pyro.param` sites are moved by the
    particles' mean gradient.  There are no checkpoints: `save` keeps the particles, and another run
    starts from them by `init_strategy=SVGD.load(...)`, with its optimizer afresh.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        num_particles: how many; one alone climbs to the mode, in unconstrained space.
        optimizer: one of TorchOpt's functional ones, `torchopt.adam(1e-2)` by default, or a
            factory of one of torch.optim's, as for `MAP`.
        temperature: 1 is the posterior; below, a cold one; a float or a schedule.
        init_strategy: where particles start, as for `MAP`, dicts `[num_particles, ...]`, or another
            `SVGD`; each in a place of its own, as two in one place never part.
        num_data: N, which overrides what the data say.
        compile: as for samplers.

    Raises:
        ArgumentError: an argument that is unknown or out of range.

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

    elsewhere: ClassVar[Mapping[str, str]] = {
        "num_chains": "num_particles=, of the constructor",
        "num_samples": "num_particles=, of the constructor: particles are the draws",
        "mesh": "nothing: one process moves all particles; MAP's num_chains share batches by mesh=",
        "bandwidth": "nothing: the kernel's width follows the median distance of particles",
        "kernel": "nothing: it is Gaussian, as wide as the median distance of particles",
    }

    def __init__(
        self,
        model: Any,
        *,
        num_particles: int = 50,
        optimizer: Any = None,
        temperature: float | Schedule = 1.0,
        init_strategy: Any = None,
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
    ):
        super().__init__(model, init_strategy=init_strategy, num_data=num_data)
        check_compile(compile)
        self.num_particles = as_count("num_particles", num_particles)
        self.kernel = kernels.SVGD(optimizer=as_optimizer(optimizer), temperature=temperature)
        self._compile, self._earlier = compile, Earlier()

    @without_vmap_warnings()
    def run(
        self,
        data: Any,
        *,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Takes `num_steps` steps with all particles, or as many as `num_epochs` epochs have; one
        batch a step, for all of them.

        Args:
            data: as for samplers: a `DataLoader`, or the model's own arguments.
            num_steps: steps; one of this and `num_epochs` is needed.
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
        opened = open_data(data, batch_size, self._num_data, module_device(self.model))
        problem = with_frozen_features(self._prepare(opened, choose_seed(seed)))
        steps = Steps(count_steps(problem, num_steps, num_epochs), positions=False)
        with Progress(steps.total, f"SVGD, {self.num_particles} particles", progress) as bar:
            plan = StepPlan(
                problem.engine,
                problem.positions,
                problem.batches(1, "shuffle"),
                self.kernel.columns(steps.total),
                steps,
                problem.seed,
                self._compile if is_pure(self.kernel.optimizer) else False,
                self._earlier,
            )
            draws = simulate(plan, bar)
        if draws.error is not None:
            raise draws.error
        check_failures(problem, draws, "particle")
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
        """Particles at their starts, for loops of your own; see `Stepwise.begin`."""
        data = batch_as_data(self.model, self._num_data, args, kwargs)
        stepping = Stepping(self._prepare(data, choose_seed(None)), self.kernel)
        return SteppedChain(
            stepping,
            lambda problem, draws, _, batch: check_failures(problem, draws, "particle", batch),
            self._posterior_of_step,
        )

    @property
    def trace(self) -> Tensor:
        """The mean of the particles' log joints at every step, estimated from its batch, in nats,
        a total: `[steps]`; of `step`, of the latest one."""
        return self.posterior.trace

    @property
    def converged(self) -> bool:
        """Whether the particles' mean log joint is known neither to rise nor to fall from the third
        quarter of the steps to the last, by 0.1 nats times the root of the dimensions."""
        return self.posterior.converged

    starts = asks(ParticlePosterior.starts)
    summary = asks(ParticlePosterior.summary)
    moments = asks(ParticlePosterior.moments)
    diagnostics = asks(ParticlePosterior.diagnostics)

    # ------------------------------------------------------------------ inside

    posterior: ParticlePosterior

    def _prepare(self, data: Data, seed: int) -> Problem:
        log_posterior = as_log_posterior(self.model, data.num_data)
        starts = self._starts(self.num_particles, seed)
        how = self.kernel, starts, self.num_particles, seed
        problem = self._understand(log_posterior, data, *how)
        latents = problem.positions[:, : problem.engine.num_latents]
        if len(torch.unique(latents, dim=0)) < self.num_particles:
            raise ArgumentError(
                "init_strategy: two particles start in the same place, and would never part: pass "
                "one that draws, such as pyro.infer.autoguide.init_to_sample, or other values"
            )
        return problem if is_pure(self.kernel.optimizer) else problem.with_engine(vectorized=False)

    def _collect(self, problem: Problem, draws: Draws) -> PosteriorDraws:
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
        """The particles after a single step."""
        result = dataclasses.replace(self._collect(problem, draws), data=None)
        return ParticlePosterior(result, draws.log_joint.mean(0), batch)
