"""The stages of a sampler's run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pyro_scale.diagnostics.divergence import all_stopped
from pyro_scale.distributed.ranks import Ranks
from pyro_scale.errors import NonFiniteError
from pyro_scale.infer.method import Finished, NotRun
from pyro_scale.infer.sampler_outcome import (
    broken_chains,
    draws_of_run,
    end_early,
    measured,
    shared,
    warn_of_run,
)
from pyro_scale.infer.sampler_setup import run_facts, run_problem
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.posterior.sinks import ToDisk, sink_for
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.budget import Budget
from pyro_scale.run.by_rank import gather_trajectory
from pyro_scale.run.config import RunConfig
from pyro_scale.run.execute import execute
from pyro_scale.run.resume import Journal
from pyro_scale.run.run import Trajectory
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.plan import plan_run

if TYPE_CHECKING:
    from pyro_scale.infer.sampler import Sampler


def run_stages(
    sampler: Sampler,
    data: Any,
    config: RunConfig,
    budget: Budget,
    journal: Journal,
    seed: int | None,
    ranks: Ranks,
    rows_by_rank: bool,
) -> None:
    """Runs a sampler from its checked arguments to its posterior, which it stores in the sampler.

    Args:
        sampler: whose run it is, and which is given the posterior.
        data: as for `Sampler.run`.
        config: its arguments, checked.
        budget: of rows and seconds.
        journal: of checkpoints.
        seed: of the run; None draws one.
        ranks: the processes that share the run out.
        rows_by_rank: whether each rank's data are rows of its own.

    Raises:
        NonFiniteError: a chain broke; and what the stages raise.
    """
    seed = journal.seed(seed)
    chosen = choose_seed(seed)
    seed = ranks.of_first(chosen, "the choice of a seed") if seed is None else chosen
    problem = run_problem(sampler, data, config, seed, ranks, rows_by_rank)
    facts = run_facts(sampler, problem, config, journal)
    with sink_for(config.store, problem, config.num_samples, journal.last is not None) as sink:
        sampler._forget()
        plan, choice = plan_run(problem, config, sampler._settings, sampler._earlier, budget)
        if choice is not None:
            spent = sum(choice.passes.values())
            budget = budget.after(spent, problem.log_posterior.num_data)
        name, may_halve = type(sampler).__name__, "lr" in sampler._settings.chosen
        trajectory = execute(plan, name, may_halve, budget, journal, facts, sink)
        trajectory = gather_trajectory(trajectory)
        result, error = _collect(sampler, trajectory, config, choice, sink)
    is_split = trajectory.problem.is_split
    if is_split and not ranks.keeps_all:
        result = shared(result, ranks)
        if result is not None and not ranks.is_first:
            sampler._last = Finished(Posterior(result))
        elif result is None and not ranks.has_all:
            sampler._last = NotRun(
                name, "has no draws on this rank, as all of its chains have stopped"
            )
    if not ranks.has_all and is_split:
        return  # rank 0 says what there is to be said
    if error is not None:
        end_early(name, trajectory.draws, result, error, journal.hint)
    if trajectory.draws.failures:
        told = broken_chains(name, trajectory, result, journal)
        if result is None:
            path = sink.store.path if isinstance(sink, ToDisk) else None
            sampler._last = NotRun(name, all_stopped(path, told))
        raise NonFiniteError(told)
    assert result is not None
    warn_of_run(trajectory, result, choice)


def _collect(
    sampler: Sampler,
    trajectory: Trajectory,
    config: RunConfig,
    choice: Choice | None,
    sink: ToDisk | ToMoments | None,
) -> tuple[PosteriorDraws | None, BaseException | None]:
    """(The run's draws with what is measured of them, if there are any; what ended the run, or
    was in the way of its measurements)."""
    draws, name = trajectory.draws, type(sampler).__name__
    result = draws_of_run(name, trajectory, config, choice, sink)
    if result is None:
        return None, draws.error
    plan = dataclasses.replace(trajectory.plan, finished=tuple(draws.finished))
    # at once, as measuring can be interrupted
    sampler._last = Finished(Posterior(result), plan)
    if trajectory.problem.is_split and not trajectory.problem.ranks.has_all:
        return result, draws.error  # rank 0, which has all draws, measures
    result, error = measured(trajectory, result, config, choice, sink)
    sampler._last = Finished(Posterior(result), plan)
    return result, error
