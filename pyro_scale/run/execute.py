"""Executes a plan, and does so again where a chain diverges or draws are too dependent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError
from pyro_scale.run.budget import Budget
from pyro_scale.run.by_rank import in_step, together
from pyro_scale.run.extend import cut_short, extended, is_enough
from pyro_scale.run.parts import Sinks
from pyro_scale.run.resume import Journal
from pyro_scale.run.run import RunPlan, Trajectory

#: How often a step size that was chosen is halved, where a chain diverges.
_MOST_HALVINGS = 8
#: How often draws are looked at, each time at twice as many steps.
_MOST_LOOKS = 8


def execute(
    plan: RunPlan,
    name: str,
    may_halve: bool,
    budget: Budget,
    journal: Journal,
    facts: Mapping[str, Any],
    sinks: Sinks | None,
) -> Trajectory:
    """What comes of a plan.

    A step size that was chosen is halved as long as a chain diverges.  A thinning that is to be
    chosen is doubled as long as draws are too dependent, unless they go into sinks.

    Args:
        plan: of the run.
        name: of the method.
        may_halve: whether the step size was chosen.
        budget: of the run.
        journal: where it is written, and what it goes on from.
        facts: of the run, for its checkpoints.
        sinks: where draws go instead of memory.

    Raises:
        ArgumentError: the time was over before the first draw.
    """
    ranks, parts = plan.problem.ranks, journal.parts(plan.problem)
    for halvings in range(journal.halvings):
        plan = plan.halved(halvings + 1)
    halvings = journal.halvings
    while True:
        retries = may_halve and halvings < _MOST_HALVINGS
        chosen = f", lr={plan.kernel.lr:.2g}" if may_halve else ""
        chains = len(plan.problem.positions)
        title = f"{name}{chosen}, {chains} chain{'s' * (chains > 1)}"

        def is_over(draws: Draws, retries: bool = retries) -> bool:
            return budget.is_over or (retries and bool(draws.failures))

        parts = [part._replace(last=journal.goes_on_from(part, halvings)) for part in parts]
        own = [None] * len(parts) if sinks is None else sinks.begin(parts)
        moved = []
        for part, sink in zip(parts, own, strict=True):
            with journal.writer(part, facts, halvings) as checkpoints:
                moved.append(
                    plan.execute(
                        title,
                        chains=part.chains,
                        stop=is_over,
                        last=part.last,
                        checkpoints=checkpoints,
                        sink=sink,
                    )
                )
        trajectory = in_step(together(moved, parts))
        diverged = any(ranks.of_all(trajectory.diverged, "whether chains diverged"))
        if not retries or not diverged or trajectory.draws.error is not None:
            break
        halvings += 1
        plan = plan.halved(halvings)
    journal.tidy(parts)
    trajectory = cut_short(trajectory)
    draws = trajectory.draws
    if sinks is not None:
        error = sinks.end([each.draws.finished for each in moved])
        draws.error = draws.error or error
    if budget.is_over_for_all and draws.error is None and not draws.log_joint.shape[1]:
        raise ArgumentError(
            f"max_seconds={budget.max_seconds:g} were over before the first draw was kept: pass "
            "more"
        )
    if plan.extends and sinks is None:
        trajectory = _extended_while_dependent(trajectory, title, budget)
    return trajectory


def _extended_while_dependent(trajectory: Trajectory, title: str, budget: Budget) -> Trajectory:
    """The trajectory at twice the thinning, as often as that is needed and can be had."""
    most_steps = budget.steps(trajectory.problem)
    for _ in range(1, _MOST_LOOKS):
        longer = 2 * trajectory.plan.steps.total
        if trajectory.draws.error is not None or longer > most_steps or budget.is_over_for_all:
            break
        if is_enough(trajectory):
            break
        trajectory = cut_short(in_step(extended(trajectory, title, lambda _: budget.is_over)))
    return trajectory
