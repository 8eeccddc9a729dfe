"""Everything that `"auto"` stands for: starts, geometry, step size, lengths.

modes of the posterior  ->  a Gaussian, in whose coordinates it is about isotropic
windows of warm-up      ->  the geometry that draws have, a step size that is stable there
coupled pilots          ->  a step size whose bias is small
autocorrelation         ->  a thinning at which draws are nearly independent
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pyro_scale.core.whitening import (
    DenseWhitening,
    DiagonalWhitening,
    KroneckerWhitening,
    LowRankWhitening,
)
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import ArgumentError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.model.control_variates import ControlVariates
from pyro_scale.model.hierarchy import centered_latents, how_to_non_center
from pyro_scale.run.blame import WITHIN, Broken, broken_sites
from pyro_scale.run.budget import Budget, passes_of, rows_a_step
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.adjust import adjust, without_adjustment
from pyro_scale.tuning.choice import Asked, Choice, Simulate, lr_in_words
from pyro_scale.tuning.geometry import with_geometry
from pyro_scale.tuning.groups import Limit
from pyro_scale.tuning.heat import (
    center_of,
    cool,
    stays_cool,
    with_anchor,
    with_fewest_rows,
    with_known_noise,
)
from pyro_scale.tuning.modes import Modes
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.one_group import OneGroup
from pyro_scale.tuning.pilot import Pilot, pilot
from pyro_scale.tuning.policy import ACCEPTANCE, NOISE, PILOTS, SEARCH, WARM_UP
from pyro_scale.tuning.stable_lr import kernel_for_whitened, longest_whitened_lr
from pyro_scale.tuning.step_size import check_target
from pyro_scale.tuning.windows import NoStableStep, Window, warm_up

#: What chains are whitened by, in words.
_WORDS: dict[type, str] = {
    DenseWhitening: "a matrix",
    DiagonalWhitening: "elements",
    KroneckerWhitening: "Kronecker factors",
    LowRankWhitening: "elements and a few directions",
}


def choose(
    problem: Problem, asked: Asked, sampling: Sampling, simulate: Simulate, budget: Budget
) -> Choice:
    """Chooses what is to be chosen, and warms the chains up.

    Raises:
        ArgumentError: chains break at any step size; there is no step size to choose; the budget
            is too small for a warm-up.
    """
    _check(budget, with_fewest_rows(problem), asked)
    modes, density, cooled, passes = None, None, None, dict[str, float]()
    most_rows = problem.data.batch_size
    whole = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    if asked.precondition is not None:
        check_target(problem)
        problem, modes, density = with_geometry(problem, asked, whole, budget.of_tuning)
        passes["modes"] = 0 if modes is None else modes.evaluations
        problem = with_anchor(problem, asked, whole)
        problem = problem.with_engine(
            kernel=kernel_for_whitened(problem.engine.kernel, asked.lr, asked.friction)
        )
        if asked.lr:
            cooled = cool(problem, sampling, whole, NOISE.far_at_first)
            problem, passes["noise"] = cooled.problem, cooled.passes
        if asked.subtract_noise:
            problem = with_known_noise(problem, center_of(problem), sampling)

    def left_over(budget: Budget) -> Budget:
        return budget.after(sum(passes.values()), problem.log_posterior.num_data)

    def for_tuning(reserve: int) -> int:
        steps = left_over(budget.of_tuning).steps(problem)
        return (steps - budget.of_tuning.num_samples - reserve) // 2

    def for_pilots() -> int:
        return max(3 * PILOTS.least, for_tuning(0))

    def limit(steps: int) -> Limit:
        return Limit(steps, lambda: budget.is_over_for_all)

    _check(left_over(budget), problem, asked)
    for_windows = max(WARM_UP.first_window, for_tuning(_for_pilots(asked)))
    kernel, adjusts = problem.engine.kernel, asked.lr and problem.engine.kernel.adjusted
    if adjusts:  # a chain that rejects all proposals would stay where it starts
        problem = problem.with_engine(
            kernel=kernel_for_whitened(without_adjustment(kernel), asked.lr, asked.friction)
        )
    group = OneGroup(problem, simulate, density if asked.lr else None, whole)
    try:
        group, window = warm_up(group, limit(for_windows), WARM_UP)
    except NoStableStep as broken:
        last, draws = broken.args
        sites = broken_sites(last.problem, draws)
        raise _no_warm_up(problem, density, asked.lr, sites) from None
    problem, tried, time = group.problem, None, window.time
    passes["windows"] = passes_of(problem, window.steps)
    if density is not None:
        in_all = problem.log_posterior.num_data
        share = (density.num_rows or in_all) / in_all
        passes["curvature"] = window.looks * len(problem.positions[0]) * share
    if adjusts:
        stable, tuned = group.lr, group.of(problem.with_engine(kernel=kernel))
        group, tried = adjust(tuned, stable, limit(for_pilots()), ACCEPTANCE)
    elif asked.lr:
        if cooled is not None and problem.data.batch_size is not None:
            # what is noisy at first may not be so here, and the other way round
            stable_lr = float(window.stable_lr)
            problem = problem.with_lr(min(longest_whitened_lr(problem.engine.kernel), stable_lr))
            if not stays_cool(cooled, problem):
                if problem.chooses_batches:
                    problem = problem.in_batches_of(most_rows)
                if asked.anchor is True:
                    problem = with_anchor(problem, asked, whole)
                cooled = cool(problem, sampling, whole, NOISE.far)
                problem = cooled.problem
                passes["noise"] += cooled.passes
        theory = problem.engine.kernel.theory
        order = 1 if theory is None else theory.order
        group, tried = pilot(group.of(problem), time, order, limit(for_pilots()), PILOTS)
    if tried is not None:
        problem = group.problem
        time = tried.time if math.isfinite(tried.time) else time
        passes["pilots"] = passes_of(problem, tried.steps)
    heat = None if cooled is None or cooled.heat is None else cooled.heat.added
    taken = window.steps + (0 if tried is None else tried.steps)
    most = max(1, left_over(budget).steps(problem) // asked.num_samples)
    needed = max(1, math.ceil(time)) if math.isfinite(time) else most
    thinning = asked.thinning or min(most, needed)
    steps = Steps(asked.num_samples, asked.warmup_steps or 0, thinning)
    reasons = _reasons(problem, modes, window, tried, thinning)
    attrs: dict[str, Any] = {"lr_choice": reasons["step size"]} if asked.lr else {}
    attrs["thinning"] = thinning
    attrs |= {f"passes_{stage}": round(count, 2) for stage, count in passes.items()}
    if asked.warmup_steps is None:
        attrs["warmup_steps"] = taken
    return Choice(problem, steps, modes, window, tried, passes, attrs, reasons, heat=heat)


def _for_pilots(asked: Asked) -> int:
    """Steps of each chain that pilots take at least."""
    return 3 * PILOTS.least if asked.lr else 0


def _check(budget: Budget, problem: Problem, asked: Asked) -> None:
    """Refuses a budget that is too small for anything.

    Raises:
        ArgumentError: it says how much would do.
    """
    most_steps = budget.steps(problem)
    least = WARM_UP.first_window + asked.num_samples + _for_pilots(asked)
    if most_steps < least:
        rows = least * len(problem.positions) * rows_a_step(problem)
        needed = math.ceil(rows / (1 - SEARCH.fraction)) + budget.spent
        spent = f" after {budget.spent:,} for the search for modes" if budget.spent else ""
        raise ArgumentError(
            f"max_rows={budget.most_rows(problem):,} is {most_steps:,} steps a chain{spent}, and "
            f"warm-up and draws take {least:,} at least: pass max_rows={needed:,} or more, or "
            "fewer num_samples"
        )


def _no_warm_up(
    problem: Problem,
    density: FullDataDensity | None,
    chooses_lr: bool,
    sites: Mapping[int, Broken],
) -> ArgumentError:
    """What to say where no step size is stable, and where the log densities of sites broke."""
    for chain, broken in sites.items():
        if broken.is_far:
            continue
        tried = "any step size that was tried" if chooses_lr else "the step size that was set"
        return ArgumentError(
            f"in warm-up every chain breaks at {tried}: chain {chain} where "
            f"the log density of site '{broken.site}' is {broken.finding}. {WITHIN.capitalize()}",
            code="not-finite",
        )
    if not chooses_lr:
        return ArgumentError(
            "in warm-up every chain becomes NaN or infinite at the step size that was set "
            f"({lr_in_words(problem.engine.kernel)}): pass a smaller lr, or leave it to 'auto'",
            code="not-finite",
        )
    position, advice = problem.positions[0], ": start elsewhere (init_strategy=)"
    if density is not None:
        advice = what_to_try(density, position)
    log_posterior, params = problem.log_posterior, problem.engine.layout.unflatten(position)
    centered = centered_latents(log_posterior, params, problem.data.first())
    for site, parents in list(centered.items())[:1]:
        advice = f": try {how_to_non_center(site, parents)}"
    return ArgumentError(
        "in warm-up every chain becomes NaN or infinite, or falls to where the posterior is not, "
        f"at any step size that was tried{advice}",
        code="not-finite",
    )


def _reasons(
    problem: Problem, modes: Modes | None, window: Window, tried: Pilot | None, thinning: int
) -> dict[str, str]:
    """What was chosen, and why."""
    engine = problem.engine
    kernel, whitening, found = engine.kernel, engine.whitening, {}
    if modes is not None:
        one = "a Gaussian on the way up, as there is no mode or its Gaussian does not fit"
        found["start"] = (
            f"draws at twice the sd around {'the mode' if modes.found else one}, which "
            f"{modes.searches} searches found"
        )
    if whitening is not None:
        by = _WORDS[type(whitening)]
        found["geometry"] = f"whitened by {by}, from the draws of {window.steps} steps of warm-up"
    size, density = problem.data.batch_size, engine.density
    if size is not None:
        how = "without control variates"
        if isinstance(density, ControlVariates):
            order = ("first", "second")[density.order - 1]
            how = f"with control variates of {order} order"
        found["minibatches"] = f"{size:,} of {density.num_data:,} rows a step, {how}"
    lr = lr_in_words(kernel)
    if tried is None:
        found["step size"] = f"{lr}, as it was set"
    elif tried.acceptance is not None:
        found["step size"] = (
            f"{lr} in whitened coordinates: {float(tried.acceptance):.0%} of proposals were "
            f"accepted (about {ACCEPTANCE.target:.0%} are to be)"
        )
    elif tried.bias is None:
        found["step size"] = f"{lr}; its bias could not be measured"
    else:
        found["step size"] = (
            f"{lr}{' in whitened coordinates' if whitening is not None else ''}: by a "
            "coupled run at half of it, the bias is "
            f"{float(tried.bias.mean.abs().max()):.2g} sds in means and "
            f"{100 * float(tried.bias.log_sd.abs().max()):.2g}% in sds at most"
        )
    found["thinning"] = f"{thinning} steps from one draw to the next, about as many as they need"
    return found
