"""The settings of a run that tuning may choose, and the settings that it chose."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.kernels import Kernel
from pyro_scale.run.budget import Budget, Stage
from pyro_scale.run.by_rank import gather
from pyro_scale.run.config import RunConfig
from pyro_scale.run.problem import Problem
from pyro_scale.run.run import RunPlan
from pyro_scale.tuning.modes import Modes
from pyro_scale.tuning.pilot import Pilot
from pyro_scale.tuning.windows import Window

#: Coordinates of chains: whitened by a matrix, by Kronecker factors, by elements and a few
#: directions, by elements, or by a given Gaussian; None for params themselves.
Precondition: TypeAlias = Literal["auto", "dense", "kron", "low_rank", "diag"] | Gaussian | None
#: Whether there are control variates, or constrained values of their anchor.
Anchor: TypeAlias = bool | Mapping[str, Tensor] | Literal["auto"]
#: Runs chains: (problem, steps, seed, hyperparameter columns, further arguments of the engine's
#: `simulate`) -> draws.
Simulate: TypeAlias = Callable[..., Draws]
#: Least steps of a stage of tuning whose time is over before it begins.
FEWEST_STEPS = 64


@dataclass
class Simulation:
    """Runs chains for tuning, on every process.

    Attributes:
        bar: progress bar, which the steps advance.
        config: arguments of the run.
        compile: whether steps are compiled.
        earlier: compiled steps of earlier runs, for reuse.
        has_clock: whether the run's time is limited; only then do stages end by the clock.
        compile_seconds: time that compilation has taken so far.
        pace: seconds of a step in the latest run of chains; 0 if the run's time is not limited.
    """

    bar: Progress
    config: RunConfig
    compile: bool
    earlier: Earlier
    has_clock: bool
    compile_seconds: float = 0.0
    pace: float = 0.0

    def __call__(
        self,
        problem: Problem,
        steps: Steps,
        seed: int,
        columns: Mapping[str, Tensor],
        is_over: Callable[[], bool] | None = None,
        **how: Any,
    ) -> Draws:
        """The draws of all chains, fewer than planned if the time is over before.

        Args:
            problem: chains at their starts.
            steps: numbers of draws and steps.
            seed: seed of all random numbers.
            columns: hyperparameters at every step.
            is_over: whether the time is over; not asked before a few steps have been taken.
            how: further options of the engine's `simulate`.
        """
        problem = dataclasses.replace(problem, seed=seed)
        options = self.config.sampling, self.config.share_batches, self.compile, False
        plan = RunPlan(problem, columns, steps, *options, self.earlier)
        before = self.compile_seconds
        if self.has_clock and is_over is not None:
            least = max(FEWEST_STEPS, min(4, steps.num_samples // 4) * steps.thinning)

            def stop(draws: Draws) -> bool:
                self.compile_seconds = before + draws.compile_seconds
                return draws.num_steps >= least and is_over()

            how["stop"] = stop
            how["check_every"] = max(1, steps.total // FEWEST_STEPS)
        draws = gather(plan.execute("", bar=self.bar, **how).draws, problem)
        if self.has_clock and draws.error is None:
            self.compile_seconds = before + draws.compile_seconds
            self.pace = draws.seconds / max(1, draws.num_steps)
        if is_over is not None and draws.num_steps < steps.total and draws.finished:
            draws = draws.first(steps.kept_before(draws.num_steps))
        return draws

    def until(self, budget: Budget, stage: Stage) -> Budget:
        """The budget at whose end a stage ends; compilation is no part of the stages."""
        return budget.until(stage, self.compile_seconds)

    def limited(self, budget: Budget, stage: Stage, problem: Problem) -> Simulate:
        """The function that runs chains until a stage's time is over."""
        return functools.partial(
            self, is_over=lambda: self.until(budget, stage).is_over_for(problem)
        )

    def affordable(self, budget: Budget, stage: Stage, problem: Problem) -> int:
        """The steps for which there is time until the end of a stage, at the pace of the latest
        steps and by the first process's clock; `sys.maxsize` without a limit, or before the first
        step."""
        if budget.max_seconds is None or not self.pace:
            return sys.maxsize
        steps = int(self.until(budget, stage).seconds_left / self.pace)
        return problem.broadcast(steps, "the clock")


@dataclass(frozen=True)
class Settings:
    """The settings of a sampler that say which of a run's settings tuning chooses.

    Attributes:
        name: name of the sampler, such as BAOA.
        chosen: names of the hyperparameters that tuning chooses, among them "lr" and "friction".
        precondition: coordinates in which the chains move.
        control_variates: whether there are control variates, or constrained values of their anchor
            by site; `"auto"` if that is to be chosen.
        subtract_noise: whether the variance of gradient noise is subtracted from the injected
            noise.
        starts: whether tuning chooses where chains start; False if the user passed starts.
        compile: whether steps are compiled; `"auto"` if that is to be chosen.
    """

    name: str
    chosen: frozenset[str]
    precondition: Precondition
    control_variates: Anchor
    subtract_noise: bool
    starts: bool
    compile: bool | Literal["auto"]

    @property
    def chooses_lr(self) -> bool:
        """Whether tuning chooses the step size, as the user has not set lr."""
        return "lr" in self.chosen

    @property
    def chooses_friction(self) -> bool:
        """Whether tuning chooses the friction, as the user has not set one."""
        return "friction" in self.chosen


@dataclass(frozen=True)
class Choice:
    """The settings that tuning chose for a run, with the reasons and the measurements behind them.

    Attributes:
        problem: model, data and chains after warm-up, with the sampler's kernel and the geometry
            (the whitened coordinates in which chains move).
        steps: number of draws, warm-up and thinning of the run that follows; without warm-up if
            tuning chose its length, as it is over.
        passes: passes through the data that tuning took, by stage.
        reasons: a dict from setting ("start", "step size", ...) to the reason of the choice, in
            words for the user.
        chooses_lr: whether tuning chose the step size.
        warmup_steps: steps of each chain in the warm-up that tuning ran; None if the user set their
            number.
        modes: modes of the posterior; None if they were not searched for.
        window: measurements of the last window (stretch of warm-up, after which the geometry is
            updated); None if chains were trained.
        pilot: measurements of the pilots (short runs that measure a step size's bias or acceptance
            rate); None if the user set the step size.
        trained: steps of the optimizer; None if chains were not trained.
        heat: relative rise of the temperature by minibatches, in the direction where it is largest;
            None if it is not known.
    """

    problem: Problem
    steps: Steps
    passes: Mapping[str, float]
    reasons: Mapping[str, str]
    chooses_lr: bool
    warmup_steps: int | None
    modes: Modes | None = None
    window: Window | None = None
    pilot: Pilot | None = None
    trained: int | None = None
    heat: float | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts about tuning by name, for the `attrs` of the run's results: thinning, the reason of
        the step size, lengths of warm-up and training in steps, and passes through the data of each
        stage (`passes_<stage>`)."""
        attrs: dict[str, Any] = {"thinning": self.steps.thinning}
        if self.chooses_lr:
            attrs["lr_choice"] = self.reasons["step size"]
        if self.trained is not None:
            attrs["trained_steps"] = self.trained
        if self.warmup_steps is not None:
            attrs["warmup_steps"] = self.warmup_steps
        return attrs | {f"passes_{stage}": round(n, 2) for stage, n in self.passes.items()}

    def reasons_at(self, thinning: int, step_size: str | None) -> dict[str, str]:
        """The reasons of the choices, in words by setting, for the report of a run: they say so if
        it had to double the thinning that tuning chose, or to halve the step size.

        Args:
            thinning: thinning with which the run ended.
            step_size: reason of the step size with which the run ended; None if the user set it.
        """
        reasons = dict(self.reasons)
        if step_size is not None:
            reasons["step size"] = step_size
        if thinning != self.steps.thinning:
            reasons["thinning"] = (
                f"{thinning} steps from one draw to the next, as too few draws "
                f"{self.steps.thinning} step{'s' * (self.steps.thinning > 1)} apart were effective"
            )
        return reasons


def lr_in_words(kernel: Kernel) -> str:
    """The step size of a sampler's kernel as a phrase for messages: the number, or that it is a
    schedule or a dict by site."""
    lr = kernel.hyperparameters()["lr"]
    if callable(lr):
        return "lr, a schedule"
    return "lr by site" if isinstance(lr, Mapping) else f"lr={float(lr):.3g}"
