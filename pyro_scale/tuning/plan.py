"""The plan of a run: step size, coordinates, starts and lengths, chosen if they are not set."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_scale.core.thread_count import Arithmetic
from pyro_scale.engine.compile_step import share_of_calls
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError
from pyro_scale.run.budget import Budget, rounded_up
from pyro_scale.run.by_rank import gather
from pyro_scale.run.config import RunConfig
from pyro_scale.run.extend import FEWEST_DRAWS
from pyro_scale.run.problem import Problem, position_of
from pyro_scale.run.run import RunPlan
from pyro_scale.tuning.choice import FEWEST_STEPS, Anchor, Choice, Settings, Simulation
from pyro_scale.tuning.choose import choose
from pyro_scale.tuning.policy import STEP_SIZE
from pyro_scale.tuning.step_size import tune
from pyro_scale.tuning.training import is_network, train

#: Seconds that a new model takes to compile: shorter runs that tune themselves are not compiled.
_COMPILING = 10.0


def plan_run(
    problem: Problem, config: RunConfig, settings: Settings, earlier: Earlier, budget: Budget
) -> tuple[RunPlan, Choice | None]:
    """Plans a run: chooses the settings that the user has left open (starts, coordinates, step
    size, warm-up, thinning), by a warm-up if that is needed.

    Args:
        problem: chains at the user's or the library's starts.
        config: arguments of the run.
        settings: settings of the sampler, which say what is to be chosen.
        earlier: compiled steps of earlier runs of the same sampler, for reuse.
        budget: gradients of rows and seconds that the run may take.

    Returns:
        The plan of the run; the choices of the warm-up, None without a warm-up.

    Raises:
        ArgumentError: a setting cannot be chosen for this model, or within the budget.
    """
    begun, steps = time.perf_counter(), config.steps
    if budget.max_seconds is not None and (settings.chooses_lr or steps is None):
        _check_seconds(problem, config, earlier, budget)
    anchor = resolve_anchor(problem, settings.control_variates)
    facts, choice = dict[str, Any](), None
    trains = is_trained(problem, settings, steps is None)
    whitens = settings.precondition is not None and not trains
    if whitens or (settings.chooses_lr and not trains):
        _check_latents(problem)
    if not whitens and not (trains and settings.chooses_lr):
        nominal = steps or Steps(config.num_samples, config.num_samples, STEP_SIZE.thinning)
        problem, facts = tune(problem, settings, anchor, nominal, config.sampling)
    # a run with a warm-up is long enough to repay compilation, if it has the time
    has_time = budget.max_seconds is None or budget.max_seconds >= _COMPILING
    compiles = settings.compile if isinstance(settings.compile, bool) else has_time
    if steps is None or whitens or trains:
        title = f"{settings.name}, warm-up"
        with Progress(None, title, config.progress) as bar:
            has_clock = budget.max_seconds is not None
            simulate = Simulation(bar, config, compiles, earlier, has_clock)
            try:
                if trains:
                    choice = train(problem, settings, config, simulate, budget)
                else:
                    choice = choose(problem, settings, anchor, config, simulate, budget)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"{title}: no draws have been kept")
                raise
        problem, steps = choice.problem, choice.steps
        facts = {**facts, **choice.attrs}
    facts["tuning_time"] = time.perf_counter() - begun
    compile = compiles if config.steps is None else settings.compile
    plan = RunPlan.from_config(problem, config, steps, compile, earlier, facts)
    return dataclasses.replace(plan, extends=config.thinning is None and not trains), choice


def _check_seconds(problem: Problem, config: RunConfig, earlier: Earlier, budget: Budget) -> None:
    """Raises if the seconds of a run are too few for the shortest warm-up and 100 draws a chain, by
    one eager step without the time of its calls, which compilation saves.

    Raises:
        ArgumentError: the seconds are too few.
    """
    steps, columns = Steps(1), problem.engine.kernel.columns(1)
    options = config.sampling, config.share_batches, False, False
    plan = RunPlan(problem, columns, steps, *options, earlier)
    with Arithmetic() as counted:  # not timed: counting, and a model's first calls, are slow
        plan.execute("", bar=Progress(None, "", False))
    draws = gather(plan.execute("", bar=Progress(None, "", False)).draws, problem)
    seconds = draws.seconds * (1 - share_of_calls(counted))
    needed = problem.broadcast((4 * FEWEST_STEPS + FEWEST_DRAWS) * seconds, "the clock")
    if draws.error is None and needed > (budget.max_seconds or math.inf):
        raise ArgumentError(
            f"max_seconds={budget.max_seconds:g}: a warm-up and {FEWEST_DRAWS} draws a chain take "
            f"about {rounded_up(needed)} s at least: pass max_seconds={rounded_up(2 * needed)}, or "
            "fewer num_chains"
        )


def is_trained(problem: Problem, settings: Settings, chooses_length: bool) -> bool:
    """Whether a run begins with training by an optimizer, at whose end chains start, instead of a
    search for modes: for networks, and at temperature 0.

    Args:
        problem: the model and the chains, with the sampler's kernel.
        settings: settings of the sampler.
        chooses_length: whether tuning chooses the run's warm-up or thinning.
    """
    kernel, coordinates = problem.engine.kernel, settings.precondition
    if bool(kernel.values(0)["temperature"] == 0):
        return coordinates in ("auto", None) and (settings.chooses_lr or chooses_length)
    is_auto = coordinates == "auto" and not kernel.adjusted
    return settings.chooses_lr and is_auto and is_network(problem)


def resolve_anchor(problem: Problem, anchor: Anchor) -> bool | Tensor:
    """Where control variates have their anchor: unconstrained params `[D]` if the user passed
    values; otherwise True (at a mode that is to be found) or False (no control variates). "auto"
    means True if steps take minibatches.

    Raises:
        ArgumentError: the anchor's values do not fit the model's sites.
    """
    if isinstance(anchor, Mapping):
        return position_of(problem, anchor, "control_variates")
    return problem.data.batch_size is not None if anchor == "auto" else bool(anchor)


def _check_latents(problem: Problem) -> None:
    """Raises unless a step size or whitened coordinates can be chosen for the problem.

    Raises:
        ArgumentError: the temperature is 0, or the model has point-estimated sites.
    """
    if problem.engine.kernel.values(0)["temperature"] == 0:
        raise ArgumentError(
            "temperature=0 is an optimizer, whose draws have no spread to whiten by: leave "
            "precondition out, or pass a temperature above 0"
        )
    if problem.engine.has_points:
        raise ArgumentError(
            "lr='auto' and precondition are for models whose parameters are all latents: this one "
            f"has {list(problem.log_posterior.points)}; pass a number for lr, and precondition=None"
        )
