"""From a problem to the plan of its run: what is to be chosen is chosen here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.run.budget import Budget
from pyro_scale.run.by_rank import gather
from pyro_scale.run.config import RunConfig
from pyro_scale.run.problem import Problem
from pyro_scale.run.run import RunPlan
from pyro_scale.tuning.choice import Asked, Choice, Precondition, Simulate
from pyro_scale.tuning.choose import choose
from pyro_scale.tuning.policy import STEP_SIZE
from pyro_scale.tuning.step_size import tune
from pyro_scale.tuning.training import is_network, train


@dataclass(frozen=True)
class Settings:
    """What a method says of what is to be chosen.

    Attributes:
        name: of the method.
        chosen: hyperparameters that are.
        precondition: the coordinates that chains move in.
        control_variates: whether there are any, or where their anchor is, or `"auto"`.
        subtract_noise: whether gradient noise is taken off the injected noise.
        starts: whether chains' starts are.
        compile: whether steps become one program.
    """

    name: str
    chosen: frozenset[str]
    precondition: Precondition
    control_variates: bool | Mapping[str, Tensor] | Literal["auto"]
    subtract_noise: bool
    starts: bool
    compile: bool | Literal["auto"]


def plan_run(
    problem: Problem, config: RunConfig, settings: Settings, earlier: Earlier, budget: Budget
) -> tuple[RunPlan, Choice | None]:
    """(The plan of a run, what was chosen for it in warm-up, if anything was)."""
    begun, lr, steps = time.perf_counter(), "lr" in settings.chosen, config.steps
    anchor = settings.control_variates
    if isinstance(anchor, str):
        anchor = problem.data.batch_size is not None
    asked = Asked(
        lr=lr,
        friction="friction" in settings.chosen,
        precondition=settings.precondition,
        starts=settings.starts,
        anchor=anchor,
        subtract_noise=settings.subtract_noise,
        num_samples=config.num_samples,
        warmup_steps=config.warmup_steps,
        thinning=config.thinning,
    )
    noted, choice = dict[str, Any](), None
    trains = is_trained(problem, settings, steps is None)
    whitens = settings.precondition is not None and not trains
    if not whitens and not (trains and lr):
        nominal = steps or Steps(config.num_samples, config.num_samples, STEP_SIZE.thinning)
        problem, reasons = tune(problem, asked, nominal, config.sampling)
        noted |= reasons
    # with lengths to choose, a run repays compilation
    compiles = settings.compile if isinstance(settings.compile, bool) else True
    if steps is None or whitens or trains:
        title = f"{settings.name}, warm-up"
        with Progress(None, title, config.progress) as bar:
            simulate = _simulation(bar, config, compiles, earlier)
            try:
                if trains:
                    choice = train(problem, asked, simulate, budget)
                else:
                    choice = choose(problem, asked, config.sampling, simulate, budget)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"{title}: no draws have been kept")
                raise
        problem, steps = choice.problem, choice.steps
        noted |= choice.attrs
    noted["tuning_time"] = time.perf_counter() - begun
    compile = compiles if config.steps is None else settings.compile
    plan = RunPlan.from_config(problem, config, steps, compile, earlier, noted)
    return dataclasses.replace(plan, extends=config.thinning is None and not trains), choice


def is_trained(problem: Problem, settings: Settings, chooses_length: bool) -> bool:
    """Whether chains start from what an optimizer ends with, as there is no mode to start from.

    Args:
        problem: with the kernel.
        settings: of the method.
        chooses_length: whether the run's warm-up or thinning is to be chosen.
    """
    coordinates, lr = settings.precondition, "lr" in settings.chosen
    if bool(problem.engine.kernel.values(0)["temperature"] == 0):
        return coordinates in ("auto", None) and (lr or chooses_length)
    auto = coordinates == "auto" and not problem.engine.kernel.adjusted
    return lr and auto and is_network(problem)


def _simulation(bar: Progress, config: RunConfig, compile: bool, earlier: Earlier) -> Simulate:
    """What takes the steps of training and of warm-up."""

    def simulate(
        problem: Problem,
        steps: Steps,
        seed: int,
        columns: Mapping[str, Tensor],
        **how: Any,
    ) -> Draws:
        own = config.sampling, config.share_batches, compile, False
        plan = RunPlan(dataclasses.replace(problem, seed=seed), columns, steps, *own, earlier)
        return gather(plan.execute("", bar=bar, **how).draws, problem)

    return simulate
