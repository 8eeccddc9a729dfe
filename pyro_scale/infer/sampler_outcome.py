"""From the steps of a sampler's run to its posterior, and what is said of it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics import crash_dump
from pyro_scale.diagnostics.divergence import explosion, message
from pyro_scale.diagnostics.post_run import as_measured_by_first, measure
from pyro_scale.diagnostics.report import Report
from pyro_scale.diagnostics.verdict import report
from pyro_scale.distributed.ranks import Ranks
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import (
    BiasWarning,
    FileError,
    NonFiniteError,
    PyroScaleWarning,
    VerdictWarning,
)
from pyro_scale.kernels import Kernel
from pyro_scale.posterior.collect import collect, warn_of_short_warmup
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.posterior.sinks import ToDisk
from pyro_scale.results.posterior import Posterior
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.budget import passes_of
from pyro_scale.run.config import RunConfig
from pyro_scale.run.problem import Problem
from pyro_scale.run.resume import Journal
from pyro_scale.run.run import RunPlan, Trajectory
from pyro_scale.tuning.adjust import acceptance_rate
from pyro_scale.tuning.choice import Choice


def draws_of_run(
    name: str,
    trajectory: Trajectory,
    config: RunConfig,
    choice: Choice | None,
    sink: ToDisk | ToMoments | None,
) -> PosteriorDraws | None:
    """The draws of a run, before anything is measured of them; None if there are none.

    Args:
        name: of the method.
        trajectory: of the run, gathered from all processes.
        config: what was asked for.
        choice: what warm-up chose; None where everything was set.
        sink: where draws went, if not into memory.
    """
    plan, problem, _, draws = trajectory
    kept = len(draws.kept_steps)
    if isinstance(sink, ToDisk):
        there = sink.store.count if sink.store.path.exists() else 0
        kept = min(kept, there)  # the disk may be full
    if not draws.finished or not kept:
        return None
    facts = config.facts
    if choice is not None:
        facts["passes_draws"] = round(passes_of(problem, draws.num_steps), 2)
    # last, as a run that went on has more steps between draws than were chosen
    lengths = {"num_samples": kept, "thinning": plan.steps.thinning}
    whitened = {"whitened": int(plan.problem.engine.whitening is not None)}
    attrs = {**method_facts(name, plan.kernel), **facts, **plan.choice, **lengths, **whitened}
    if plan.kernel.adjusted:
        attrs["acceptance_rate"] = acceptance_rate(draws)
    result = collect(problem, draws, plan.columns, attrs, sink)
    if problem.ranks.keeps_all and problem.has_all_rows:
        result = dataclasses.replace(result, ranks=problem.ranks)
    return result


def measured(
    trajectory: Trajectory,
    result: PosteriorDraws,
    config: RunConfig,
    choice: Choice | None,
    sink: ToDisk | ToMoments | None,
) -> tuple[PosteriorDraws, BaseException | None]:
    """(The draws with what is measured of them, and the report; the error that was in the way).

    Args:
        trajectory: of the run.
        result: its draws.
        config: what was asked for.
        choice: what warm-up chose; None where everything was set.
        sink: where draws went, if not into memory.
    """
    plan, problem, _, draws = trajectory
    result, error = measure(trajectory, result, mean_values(plan, draws))
    all_measure = problem.ranks.keeps_all or not problem.is_split
    if problem.ranks.rows is not None and all_measure:  # each on rows of its own
        result = as_measured_by_first(result, problem.ranks)
    if not isinstance(sink, ToMoments):
        try:
            verdict = report(result, choice, config.num_samples)
            attrs = result.attrs | {"report": verdict.to_json()}
            result = dataclasses.replace(result, attrs=attrs)
        except (Exception, KeyboardInterrupt) as raised:  # the data may be gone
            error = error or raised
    error = draws.error or error
    if isinstance(sink, ToDisk):
        try:
            sink.describe(result)
        except FileError as raised:
            error = error or raised
    return result, error


def shared(result: PosteriorDraws | None, ranks: Ranks) -> PosteriorDraws | None:
    """This rank's draws, with what rank 0 has found out about all chains."""
    told = None
    if ranks.is_first and result is not None:
        posterior = Posterior(result)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tables = {"summary": posterior.summary(), "diagnostics": posterior.diagnostics()}
        told = result.attrs, tables
    told = ranks.of_first(told, "what all chains have come to")
    if ranks.is_first or result is None or told is None:
        return result
    attrs, tables = told
    return dataclasses.replace(result, attrs=attrs, tables=tables)


def broken_chains(
    name: str, trajectory: Trajectory, result: PosteriorDraws | None, journal: Journal
) -> str:
    """What is said of chains that broke.  Writes a file for `ps.replay`."""
    plan, problem, _, draws = trajectory
    replay = crash_dump.write(problem, name, draws, journal.path)
    sites = broken_sites(problem, draws)
    return message(draws, plan.columns["lr"], sites, replay, _held_by(result))


def warn_of_run(trajectory: Trajectory, result: PosteriorDraws, choice: Choice | None) -> None:
    """Warns of chains that exploded, of a verdict that is not yes, or of a short warm-up."""
    plan, problem, _, draws = trajectory
    if explosion_message := explosion(result):
        warn(BiasWarning, explosion_message, code="exploded")
    elif choice is None:
        values, warmup_steps = mean_values(plan, draws), plan.steps.warmup_steps
        warn_of_short_warmup(problem, result, values, warmup_steps)
    elif "report" in result.attrs and result.attrs.get("temperature") != 0:  # known to be cold
        verdict = Report.from_json(result.attrs["report"])
        if verdict.verdict != "yes":
            warn(
                VerdictWarning,
                f"{verdict.headline}; report() says more",
                code="ensemble" if verdict.verdict == "ensemble" else "verdict",
            )


def end_early(
    name: str, draws: Draws, result: PosteriorDraws | None, error: BaseException, hint: str
) -> None:
    """Raises what ended a run before its time, or warns of it where that was the user."""
    kept = 0 if result is None else len(result.sample_stats["step"][0])
    held = f"{_held_by(result)} holds the {kept} draws a chain until then" if kept else "no draws"
    lost = len(draws.kept_steps) - kept if draws.finished else 0  # the disk may be full
    more = f", {lost} more could not be written" if lost else ""
    when = f"after {draws.num_steps} steps; {held}{more}{hint}"
    if result is None or not isinstance(error, KeyboardInterrupt):
        error.add_note(f"{name}: {when}")
        raise error
    warn(PyroScaleWarning, f"interrupted {when}")


def check_step(
    problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
) -> None:
    """Raises for a single step that broke the chain.

    Raises:
        NonFiniteError: it says where.
    """
    sites = broken_sites(problem, draws, batch)
    raise NonFiniteError(message(draws, values["lr"], sites))


def posterior_of_step(
    name: str, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
) -> Posterior:
    """A method's chain after a single step."""
    result = collect(problem, draws, values, method_facts(name, problem.engine.kernel))
    return Posterior(dataclasses.replace(result, data=None), batch)


def _held_by(result: PosteriorDraws | None) -> str:
    """Which method gives the results."""
    return "moments()" if result is not None and result.online else "get_samples()"


def method_facts(name: str, kernel: Kernel) -> dict[str, Any]:
    """The method and its hyperparameters, as results keep them."""
    hyperparameters = {
        label: {site: _in_words(value) for site, value in hyper.items()}
        if isinstance(hyper, Mapping)
        else _in_words(hyper)
        for label, hyper in kernel.hyperparameters().items()
    }
    return {"method": name, **hyperparameters}


def mean_values(plan: RunPlan, draws: Draws) -> dict[str, Tensor]:
    """The hyperparameters' values, on average over the draws."""
    return {name: column[draws.kept_steps].mean(0) for name, column in plan.columns.items()}


def _in_words(hyper: Any) -> float | str:
    if callable(hyper):
        return "schedule"
    return "tensor" if isinstance(hyper, Tensor) else float(hyper)
