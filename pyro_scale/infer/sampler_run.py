"""The stages of a sampler's run, from its checked arguments to its posterior."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyro_scale.core.rows import Arguments, DataLike
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics import crash_dump
from pyro_scale.diagnostics.divergence import all_stopped, explosion, message
from pyro_scale.diagnostics.post_run import measure
from pyro_scale.diagnostics.report import Report
from pyro_scale.diagnostics.verdict import report
from pyro_scale.distributed.workers import Workers
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import (
    BiasWarning,
    FileError,
    NonFiniteError,
    PyroScaleWarning,
    VerdictWarning,
)
from pyro_scale.infer.method import Finished, NotRun
from pyro_scale.infer.sampler_setup import run_facts, run_problem
from pyro_scale.kernels import Kernel
from pyro_scale.posterior.collect import collect, warn_of_short_warmup
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.posterior.sinks import ToDisk, sink_for
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.budget import Budget, passes_of
from pyro_scale.run.by_rank import gather_trajectory
from pyro_scale.run.config import RunConfig
from pyro_scale.run.execute import execute
from pyro_scale.run.problem import Problem
from pyro_scale.run.resume import Journal
from pyro_scale.run.run import Trajectory
from pyro_scale.tuning.adjust import acceptance_rate
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.plan import plan_run

if TYPE_CHECKING:
    from pyro_scale.infer.sampler import Sampler


def run_stages(
    sampler: Sampler,
    data: DataLike,
    config: RunConfig,
    budget: Budget,
    journal: Journal,
    seed: int | None,
    workers: Workers,
    rows_by_rank: bool,
) -> None:
    """Runs a sampler from its checked arguments to its posterior, which it stores in the sampler:
    tunes, takes the steps, measures the draws, and raises or warns about what went wrong.

    Args:
        sampler: the sampler that is run.
        data: data as for `Sampler.run`.
        config: the checked arguments of `Sampler.run`.
        budget: limits on gradients of rows and on seconds.
        journal: writes checkpoints, and has the one that is resumed.
        seed: seed of the run; None draws one.
        workers: processes of the run.
        rows_by_rank: whether every process's data are rows of its own.

    Raises:
        NonFiniteError: a chain broke; and what the stages raise.
    """
    seed = workers.broadcast(choose_seed(journal.seed(seed)), "the choice of a seed")
    problem = run_problem(sampler, data, config, seed, workers, rows_by_rank)
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
    if is_split and not workers.keeps_all:
        result = _share_findings(result, workers)
        if result is not None and not workers.is_first:
            sampler._last = Finished(Posterior(result))
        elif result is None and not workers.has_all:
            sampler._last = NotRun(
                name, "has no draws on this rank, as all of its chains have stopped"
            )
    if not workers.has_all and is_split:
        return  # rank 0 raises and warns
    if error is not None:
        _end_early(name, trajectory.draws, result, error, journal.hint)
    if trajectory.draws.failures:
        why = _broken_chains(name, trajectory, result, journal)
        if result is None:
            path = sink.store.path if isinstance(sink, ToDisk) else None
            sampler._last = NotRun(name, all_stopped(path, why))
        raise NonFiniteError(why)
    assert result is not None
    _warn_of_run(trajectory, result, choice)


def _collect(
    sampler: Sampler,
    trajectory: Trajectory,
    config: RunConfig,
    choice: Choice | None,
    sink: ToDisk | ToMoments | None,
) -> tuple[PosteriorDraws | None, BaseException | None]:
    """Collects, measures and reports on a run's draws, and stores them in the sampler.

    Args:
        sampler: the sampler, which is given the posterior.
        trajectory: steps of the run, gathered from all processes.
        config: the checked arguments of the run.
        choice: step size, warm-up and thinning that tuning chose; None if the user set all of them.
        sink: where draws were written during the run; None for memory.

    Returns:
        (The draws with their measurements and report, None if there are no draws; the exception
        that ended the run early or stopped the measurements, None if there was none).
    """
    draws, workers, values = trajectory.draws, trajectory.problem.workers, _mean_values(trajectory)
    result = _draws_of(type(sampler).__name__, trajectory, config, choice, sink)
    if result is None:
        return None, draws.error
    plan = dataclasses.replace(trajectory.plan, finished=tuple(draws.finished))
    # stored before it is measured, as measuring can be interrupted
    sampler._last = Finished(Posterior(result), plan)
    is_split = trajectory.problem.is_split
    if is_split and not workers.has_all:
        return result, draws.error  # rank 0, which has all draws, measures
    result, error = measure(trajectory, result, values)
    if workers.rows is not None and (workers.keeps_all or not is_split):  # each on its rows
        measurements = workers.broadcast(result.measurements, "what was measured")
        result = dataclasses.replace(result, measurements=measurements)
    if not isinstance(sink, ToMoments):
        try:
            attrs = result.attrs | {"report": report(result, choice, config.num_samples).to_json()}
            result = dataclasses.replace(result, attrs=attrs)
        except (Exception, KeyboardInterrupt) as raised:  # such as data that cannot be read again
            error = error or raised
    error = draws.error or error
    if isinstance(sink, ToDisk):
        try:
            sink.describe(result)
        except FileError as raised:
            error = error or raised
    sampler._last = Finished(Posterior(result), plan)
    return result, error


def _draws_of(
    name: str,
    trajectory: Trajectory,
    config: RunConfig,
    choice: Choice | None,
    sink: ToDisk | ToMoments | None,
) -> PosteriorDraws | None:
    """The draws of a run, with the run's facts but before anything is measured; None if there are
    no draws.

    Args:
        name: name of the method.
        trajectory: steps of the run, gathered from all processes.
        config: the checked arguments of the run.
        choice: step size, warm-up and thinning that tuning chose; None if the user set all of them.
        sink: where draws were written during the run; None for memory.
    """
    plan, problem, _, draws = trajectory
    kept = len(draws.kept_steps)
    if isinstance(sink, ToDisk):
        stored = sink.store.count if sink.store.path.exists() else 0
        kept = min(kept, stored)  # the disk may be full
    if not draws.finished or not kept:
        return None
    facts = config.facts
    if choice is not None:
        facts["passes_draws"] = round(passes_of(problem, draws.num_steps), 2)
    attrs = {
        **_method_facts(name, plan.kernel),
        **facts,
        **plan.choice,
        # after the choice, as an extended run has a larger thinning than was chosen
        "num_samples": kept,
        "thinning": plan.steps.thinning,
        "whitened": int(plan.problem.engine.whitening is not None),
    }
    if plan.kernel.adjusted:
        attrs["acceptance_rate"] = acceptance_rate(draws)
    result = collect(problem, draws, plan.columns, attrs, sink)
    return dataclasses.replace(result, read_together=problem.workers.read_together)


def _share_findings(result: PosteriorDraws | None, workers: Workers) -> PosteriorDraws | None:
    """This process's draws, with the tables (summary, diagnostics) and report about the chains of
    all processes, which rank 0 computed. Has to be called on every rank.

    Args:
        result: draws of this process; None if it has none.
        workers: processes of the run.
    """
    findings = None
    if workers.is_first and result is not None:
        posterior = Posterior(result)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tables = {"summary": posterior.summary(), "diagnostics": posterior.diagnostics()}
        findings = result.attrs, tables
    findings = workers.broadcast(findings, "what all chains have come to")
    if workers.is_first or result is None or findings is None:
        return result
    attrs, tables = findings
    return dataclasses.replace(result, attrs=attrs, tables=tables)


# ---------------------------------------------------------------------- errors and warnings


def _broken_chains(
    name: str, trajectory: Trajectory, result: PosteriorDraws | None, journal: Journal
) -> str:
    """The error message for chains whose state became NaN or infinite. Also writes a file for
    `ps.replay`, which the message names.

    Args:
        name: name of the method.
        trajectory: steps of the run.
        result: draws of the chains that finished; None if there are none.
        journal: has the directory of checkpoints, for the file.
    """
    plan, problem, _, draws = trajectory
    replay = crash_dump.write(problem, name, draws, journal.path)
    sites = broken_sites(problem, draws)
    return message(draws, plan.columns["lr"], sites, replay, _held_by(result))


def _warn_of_run(trajectory: Trajectory, result: PosteriorDraws, choice: Choice | None) -> None:
    """Warns if chains exploded, if the report's verdict is not "yes" (of a run that tuned itself),
    or if warm-up was short (of a run whose arguments the user set).

    Args:
        trajectory: steps of the run.
        result: draws of the run.
        choice: step size, warm-up and thinning that tuning chose; None if the user set all of them.
    """
    if explosion_message := explosion(result):
        warn(BiasWarning, explosion_message, code="exploded")
    elif choice is None:
        values, warmup_steps = _mean_values(trajectory), trajectory.plan.steps.warmup_steps
        warn_of_short_warmup(trajectory.problem, result, values, warmup_steps)
    elif "report" in result.attrs and result.attrs.get("temperature") != 0:  # not an optimizer
        verdict = Report.from_json(result.attrs["report"])
        if verdict.verdict != "yes":
            warn(
                VerdictWarning,
                f"{verdict.headline}; report() says more",
                code="ensemble" if verdict.verdict == "ensemble" else "verdict",
            )


def _end_early(
    name: str, draws: Draws, result: PosteriorDraws | None, error: BaseException, hint: str
) -> None:
    """Raises the error that ended a run early, with a note on the draws until then; only warns if
    that was the user's Control-C and there are draws.

    Args:
        name: name of the method.
        draws: steps of the run.
        result: draws that were kept; None if there are none.
        error: exception that ended the run.
        hint: end of the message: how to resume.
    """
    kept = 0 if result is None else len(result.sample_stats["step"][0])
    held = f"{_held_by(result)} holds the {kept} draws a chain until then" if kept else "no draws"
    lost = len(draws.kept_steps) - kept if draws.finished else 0  # the disk may be full
    more = f", {lost} more could not be written" if lost else ""
    when = f"after {draws.num_steps} steps; {held}{more}{hint}"
    if result is None or not isinstance(error, KeyboardInterrupt):
        error.add_note(f"{name}: {when}")
        raise error
    warn(PyroScaleWarning, f"interrupted {when}")


def _held_by(result: PosteriorDraws | None) -> str:
    """The method that the user can call on the draws, as text for messages: "get_samples()", or
    "moments()" if only moments were kept."""
    return "moments()" if result is not None and result.online else "get_samples()"


# ---------------------------------------------------------------------- single steps


def raise_broken_step(
    problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
) -> None:
    """Raises the error for a single step (of `step`) that made the chain's state NaN or infinite.

    Args:
        problem: the analyzed model.
        draws: states after the step.
        values: hyperparameters of the step, by name.
        batch: batch of the step, as the model's arguments.

    Raises:
        NonFiniteError: always; the message names the site.
    """
    sites = broken_sites(problem, draws, batch)
    raise NonFiniteError(message(draws, values["lr"], sites))


def posterior_of_step(
    name: str, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
) -> Posterior:
    """A posterior of one draw: the chain's state after a single step (of `step`).

    Args:
        name: name of the method.
        problem: the analyzed model.
        draws: states after the step.
        values: hyperparameters of the step, by name.
        batch: first batch, which the posterior keeps in place of the data.
    """
    result = collect(problem, draws, values, _method_facts(name, problem.engine.kernel))
    return Posterior(dataclasses.replace(result, data=None), batch)


# ---------------------------------------------------------------------- hyperparameters


def _method_facts(name: str, kernel: Kernel) -> dict[str, Any]:
    """The method's name and hyperparameters as plain numbers and words, by name, for the
    posterior's `attrs`."""
    hyperparameters = {
        label: {site: _as_fact(value) for site, value in hyper.items()}
        if isinstance(hyper, Mapping)
        else _as_fact(hyper)
        for label, hyper in kernel.hyperparameters().items()
    }
    return {"method": name, **hyperparameters}


def _as_fact(hyper: Any) -> float | str:
    if callable(hyper):
        return "schedule"
    return "tensor" if isinstance(hyper, Tensor) else float(hyper)


def _mean_values(trajectory: Trajectory) -> dict[str, Tensor]:
    """Hyperparameters of the run by name, as tensors, averaged over the steps that were kept as
    draws."""
    kept = trajectory.draws.kept_steps
    return {name: column[kept].mean(0) for name, column in trajectory.plan.columns.items()}
