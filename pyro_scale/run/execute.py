"""Executes the plan of a run: repeats it with half the step size if a chain diverges or draws are
thrown out of the posterior, and extends it if draws are too dependent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.stray import usual_fall
from pyro_scale.engine.checkpoint import Checkpoints
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError
from pyro_scale.run.budget import Budget, passes_of
from pyro_scale.run.by_rank import align, join_parts
from pyro_scale.run.extend import FEWEST_DRAWS, cut_short, extended, is_enough
from pyro_scale.run.parts import Part, Sinks
from pyro_scale.run.resume import Journal
from pyro_scale.run.run import RunPlan, Trajectory

#: How often a step size that was chosen is halved, while a chain diverges.
_MOST_HALVINGS = 8
#: How often it is halved, at most, where draws were thrown out of the posterior.
_MOST_THROWS = 2
#: How often draws are checked, each time after twice as many steps.
_MOST_CHECKS = 8


def execute(
    plan: RunPlan,
    name: str,
    may_halve: bool,
    budget: Budget,
    journal: Journal,
    facts: Mapping[str, Any],
    sinks: Sinks | None,
) -> Trajectory:
    """Takes the steps of a plan, and returns the trajectory of this process's chains.

    A step size that tuning chose is halved and the run repeated while a chain diverges, and up to
    twice if draws were thrown out of the posterior (`_throws`). A thinning that tuning is to choose
    is doubled while draws are too dependent, unless draws go into sinks.

    Args:
        plan: all decisions about the run.
        name: name of the sampler, for the progress bar.
        may_halve: True if tuning chose the step size, which may then be halved; False if the user
            set it.
        budget: rows and seconds that the run may take.
        journal: the run's checkpoints: where they are written, and where the run resumes.
        facts: settings that must be the same when the run is resumed, by name, for its checkpoints.
        sinks: storage for the draws instead of memory; None to keep them in memory.

    Raises:
        ArgumentError: the time was over before the first draw.
    """
    problem, parts = plan.problem, journal.parts(plan.problem)
    for halvings in range(journal.halvings):
        plan = plan.halved(halvings + 1)
    halvings, throws, steps = journal.halvings, 0, plan.steps
    least = min(FEWEST_DRAWS, steps.num_samples) if may_halve else 0
    while True:
        retries = may_halve and halvings < _MOST_HALVINGS
        chosen = f", lr={plan.kernel.lr:.2g}" if may_halve else ""
        num_chains = len(plan.problem.positions)
        title = f"{name}{chosen}, {num_chains} chain{'s' * (num_chains > 1)}"

        def is_over(draws: Draws, retries: bool = retries, budget: Budget = budget) -> bool:
            kept = steps.kept_before(draws.num_steps)
            return (budget.is_over and kept >= least) or (retries and bool(draws.failures))

        parts = [part._replace(last=journal.goes_on_from(part, halvings)) for part in parts]
        move = functools.partial(plan.execute, title, stop=is_over)
        writer = functools.partial(journal.writer, facts=facts, halvings=halvings)
        trajectories = _move_parts(move, parts, sinks, writer)
        trajectory = align(join_parts(trajectories, parts))
        diverged = not problem.agree(not trajectory.diverged, "whether chains diverged")
        if plan.extends and sinks is None and not (retries and diverged):
            trajectory = _extend_while_dependent(cut_short(trajectory), title, budget)
        if not retries or trajectory.draws.error is not None:
            break
        taken, why = passes_of(problem, trajectory.draws.num_steps), "a chain diverged"
        budget = budget.after(taken, problem.log_posterior.num_data)
        if not diverged:
            why, throws = "steps threw draws out of the posterior", throws + 1
            is_affordable = budget.steps(problem) >= steps.total and not budget.is_over_for(problem)
            if throws > _MOST_THROWS or not is_affordable or not _throws(trajectory):
                break
        halvings += 1
        plan = plan.halved(halvings, why)
    journal.tidy(problem, parts)
    if sinks is not None:
        error = sinks.end([of_part.draws.finished for of_part in trajectories])
        trajectory.draws.error = trajectory.draws.error or error
    return _without_stopped_steps(trajectory, budget)


def _without_stopped_steps(trajectory: Trajectory, budget: Budget) -> Trajectory:
    """A trajectory without room for draws of the steps that were not taken.

    Args:
        trajectory: the steps of a run.
        budget: rows and seconds of the run.

    Raises:
        ArgumentError: the time was over before the first draw.
    """
    trajectory = cut_short(trajectory)
    draws, is_over = trajectory.draws, budget.is_over_for(trajectory.problem)
    if is_over and draws.error is None and not draws.log_joint.shape[1]:
        raise ArgumentError(
            f"max_seconds={budget.max_seconds:g} were over before the first draw was kept: pass "
            "more"
        )
    return trajectory


def _throws(trajectory: Trajectory) -> bool:
    """Whether steps threw draws out of the posterior, though no number became NaN: the log joint of
    some is too low for the posterior (`core/stray.py`), and their chains had been higher. False
    with fewer than 100 draws a chain, on batches, whose log joint is noisy, and for kernels that
    accept or reject."""
    plan, problem, _, draws = trajectory
    is_exact = problem.data.batch_size is None and not plan.kernel.adjusted
    if not is_exact or draws.log_joint.shape[1] < FEWEST_DRAWS:
        return False
    log_joint = draws.log_joint[draws.finished].double().cpu()
    return problem.reduce(_has_stray, log_joint, "draws to check")


def _has_stray(of_processes: list[Tensor]) -> bool:
    """Whether the log joint of some draw is too low for the posterior, after a draw of its chain
    that was not: a chain on its way in comes from below.

    Args:
        of_processes: log joints `[chains, draws]` of each process, in nats.
    """
    falls = -torch.cat(of_processes)
    if not falls.numel():
        return False
    base, most = usual_fall(falls.flatten().sort(descending=True).values)
    is_low = falls - base > most
    has_arrived = (~is_low).cummax(1).values
    return bool((is_low & has_arrived).any())


def _move_parts(
    move: Callable[..., Trajectory],
    parts: Sequence[Part],
    sinks: Sinks | None,
    writer: Callable[[Part], AbstractContextManager[Checkpoints | None]],
) -> list[Trajectory]:
    """Takes the steps of each group of chains, one group after another, and returns the groups'
    trajectories.

    Args:
        move: takes the steps of some chains, as `RunPlan.execute`.
        parts: the groups of chains, each with the checkpoint that it continues from.
        sinks: storage for the draws instead of memory; None to keep them in memory.
        writer: context of a group in which its checkpoints are written, as `Journal.writer`.
    """
    sink_of_part = [None] * len(parts) if sinks is None else sinks.begin(parts)
    trajectories = []
    for part, sink in zip(parts, sink_of_part, strict=True):
        with writer(part) as checkpoints:
            trajectory = move(
                chains=part.chains, last=part.last, checkpoints=checkpoints, sink=sink
            )
            trajectories.append(trajectory)
    return trajectories


def _extend_while_dependent(trajectory: Trajectory, title: str, budget: Budget) -> Trajectory:
    """The trajectory of a run that is continued, with twice the thinning each time, until its draws
    are independent enough (`is_enough`), the budget is spent, or an error ends it; the number of
    draws stays. Unchanged if the draws are independent enough already.

    Args:
        trajectory: the finished run.
        title: name of what runs, for the progress bar.
        budget: rows and seconds that the run may take.
    """
    problem = trajectory.problem
    most_steps = budget.steps(problem)
    for _ in range(1, _MOST_CHECKS):
        longer, error = 2 * trajectory.plan.steps.total, trajectory.draws.error
        if error is not None or longer > most_steps or budget.is_over_for(problem):
            break
        if is_enough(trajectory):
            break
        trajectory = cut_short(align(extended(trajectory, title, lambda _: budget.is_over)))
    return trajectory
