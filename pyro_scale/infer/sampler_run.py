"""The stages of a sampler's run, from its checked arguments to its posterior."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from pyro_scale.core.warn import warn
from pyro_scale.diagnostics import crash_dump
from pyro_scale.diagnostics.divergence import all_stopped, explosion, message
from pyro_scale.diagnostics.post_run import measure
from pyro_scale.diagnostics.report import Report
from pyro_scale.diagnostics.verdict import Longer, report
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import (
    BiasWarning,
    FileError,
    NonFiniteError,
    PyroScaleWarning,
    VerdictWarning,
)
from pyro_scale.infer.method import Finished, NotRun
from pyro_scale.infer.sampler_setup import run_facts
from pyro_scale.kernels import Kernel
from pyro_scale.posterior.collect import collect, warn_of_short_warmup
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.posterior.sinks import ToDisk, sink_for
from pyro_scale.results.posterior import Posterior
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.budget import Budget, passes_of
from pyro_scale.run.by_rank import NO_DRAWS, gather_trajectory
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

#: Facts of a run by name, and its tables by name.
_Findings: TypeAlias = tuple[dict[str, Any], ...]


def run_stages(
    sampler: Sampler, problem: Problem, config: RunConfig, budget: Budget, journal: Journal
) -> None:
    """Runs a sampler from the analyzed model to its posterior, which it stores in the sampler:
    tunes, takes the steps, measures the draws, and raises or warns about what went wrong.

    Args:
        sampler: the sampler that is run.
        problem: the analyzed model on the data, with all chains at their starts.
        config: the checked arguments of `Sampler.run`.
        budget: limits on gradients of rows and on seconds.
        journal: writes checkpoints, and has the one that is resumed.

    Raises:
        NonFiniteError: a chain broke; and what the stages raise.
    """
    facts = run_facts(sampler, problem, config, journal)
    with sink_for(config.store, problem, config.num_samples, journal.last is not None) as sink:
        sampler._forget()
        plan, choice = plan_run(problem, config, sampler._settings, sampler._earlier, budget)
        if choice is not None:
            spent = sum(choice.passes.values())
            budget = budget.after(spent, problem.log_posterior.num_data)
        name, may_halve = type(sampler).__name__, "lr" in sampler._settings.chosen
        until = budget if choice is None else budget.until("draws")
        trajectory = execute(plan, name, may_halve, until, journal, facts, sink)
        trajectory = gather_trajectory(trajectory)
        result, error = _collect(sampler, trajectory, config, choice, budget, sink)
    if problem.draws_differ:
        findings = _findings_of(result) if problem.is_first else None
        findings = problem.broadcast(findings, "what all chains have come to")
        if not problem.is_first:  # the first process raises and warns
            sampler._last = _last_of_some_chains(name, result, findings)
            return
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
    budget: Budget,
    sink: ToDisk | ToMoments | None,
) -> tuple[PosteriorDraws | None, BaseException | None]:
    """Collects, measures and reports on a run's draws, and stores them in the sampler.

    Args:
        sampler: the sampler, which is given the posterior.
        trajectory: steps of the run, gathered from all processes.
        config: the checked arguments of the run.
        choice: step size, warm-up and thinning that tuning chose; None if the user set all of them.
        budget: limits on gradients of rows and on seconds, less what tuning has spent.
        sink: where draws were written during the run; None for memory.

    Returns:
        (The draws with their measurements and report, None if there are no draws; the exception
        that ended the run early or stopped the measurements, None if there was none).
    """
    draws, problem, values = trajectory.draws, trajectory.problem, _mean_values(trajectory)
    result = _draws_of(type(sampler).__name__, trajectory, config, choice, sink)
    if result is None:
        return None, draws.error
    plan = dataclasses.replace(trajectory.plan, finished=tuple(draws.finished))
    # stored before it is measured, as measuring can be interrupted
    sampler._last = Finished(Posterior(result), plan)
    if problem.draws_differ and not problem.is_first:
        return result, draws.error  # the first process, which has all draws, measures
    result, error = measure(trajectory, result, values)
    if problem.shares_rows and not problem.draws_differ:  # each on its rows
        measurements = problem.broadcast(result.measurements, "what was measured")
        result = dataclasses.replace(result, measurements=measurements)
    if not isinstance(sink, ToMoments):
        longer = None if choice is None else _argument_for(budget, trajectory)
        try:
            text = report(result, choice, config.num_samples, longer).to_json()
            attrs = result.attrs | {"report": text}
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


def _argument_for(budget: Budget, trajectory: Trajectory) -> Longer:
    """Function from a factor to the argument of `run`, as text, with which a run takes so many
    times as many steps after tuning as this one."""
    draws, problem = trajectory.draws, trajectory.problem

    def longer(factor: float) -> str:
        num_samples, steps = len(draws.kept_steps), draws.num_steps
        return budget.argument_for(problem, factor * num_samples, factor * steps)

    return longer


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
        **method_facts(name, plan.kernel),
        **facts,
        **plan.choice,
        # after the choice, as an extended run has a larger thinning than was chosen
        "num_samples": kept,
        "thinning": plan.steps.thinning,
        "whitened": int(plan.problem.engine.whitening is not None),
    }
    if plan.kernel.adjusted:
        attrs["acceptance_rate"] = acceptance_rate(draws)
    return collect(problem, draws, plan.columns, attrs, sink)


def _findings_of(result: PosteriorDraws | None) -> _Findings | None:
    """(Facts of the run with its report, tables `summary` and `diagnostics`) of all chains, for
    processes that have some of the chains; None without draws."""
    if result is None:
        return None
    posterior = Posterior(result)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = {"summary": posterior.summary(), "diagnostics": posterior.diagnostics()}
    return result.attrs, tables


def _last_of_some_chains(
    name: str, result: PosteriorDraws | None, findings: _Findings | None
) -> Finished | NotRun:
    """The state of a sampler in a process that has the draws of some chains, with tables and report
    about all chains.

    Args:
        name: name of the method.
        result: draws of this process's chains; None if it has none.
        findings: what `_findings_of` returned in the process that has all draws.
    """
    if result is None:
        return NotRun(name, NO_DRAWS)
    if findings is not None:
        attrs, tables = findings
        result = dataclasses.replace(result, attrs=attrs, tables=tables)
    return Finished(Posterior(result))


# ---------------------------------------------------------------------- errors and warnings


def _broken_chains(
    name: str, trajectory: Trajectory, result: PosteriorDraws | None, journal: Journal
) -> str:
    """The error message for chains whose state became NaN or infinite: chain, step, site, and the
    file that is written here for `ps.replay`, which finds the cause.

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
    """Raises the exception that ended a run early, with a note on how many draws were kept; only
    warns if the user pressed Control-C and there are draws.

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
    """The call with which the user reads the draws, as text for messages: "moments()" if a run kept
    only moments, else "get_samples()" (also if there is no result)."""
    return "moments()" if result is not None and result.online else "get_samples()"


# ---------------------------------------------------------------------- hyperparameters


def method_facts(name: str, kernel: Kernel) -> dict[str, Any]:
    """The method's name (`method`) and its hyperparameters by name, as floats, for the posterior's
    `attrs`; a schedule is the word "schedule", a tensor the word "tensor", and a hyperparameter by
    site a dict."""
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
    """The sampler's hyperparameters by name, tensors averaged over the steps after which draws were
    kept, for measurements of a run whose schedules change them."""
    kept = trajectory.draws.kept_steps
    return {name: column[kept].mean(0) for name, column in trajectory.plan.columns.items()}
