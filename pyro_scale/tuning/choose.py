"""Chooses starts, geometry (coordinates of chains), step size and lengths of a run in a warm-up.

modes of the posterior  ->  a Gaussian, in whose coordinates the posterior is about isotropic
windows of warm-up      ->  the geometry of the draws, and a stable step size
coupled pilots          ->  a step size with a small bias
autocorrelation         ->  a thinning at which draws are nearly independent
"""

from __future__ import annotations

import math

from torch import Tensor

from pyro_scale.core.whitening import (
    DenseWhitening,
    DiagonalWhitening,
    KroneckerWhitening,
    LowRankWhitening,
)
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import ArgumentError
from pyro_scale.model.diagnose import centered_latents, how_to_non_center
from pyro_scale.run.blame import WITHIN, broken_sites
from pyro_scale.run.budget import Budget, passes_of, rows_a_step
from pyro_scale.run.config import RunConfig
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.adjust import adjust, without_adjustment
from pyro_scale.tuning.choice import Choice, Settings, Simulate, lr_in_words
from pyro_scale.tuning.control_variates import center_of, with_anchor
from pyro_scale.tuning.geometry import with_geometry
from pyro_scale.tuning.gradient_noise import with_known_noise
from pyro_scale.tuning.groups import Limit
from pyro_scale.tuning.heat import Cooled, cool, stays_cool, with_fewest_rows
from pyro_scale.tuning.modes import Modes
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.one_group import OneGroup
from pyro_scale.tuning.pilot import Pilot, pilot
from pyro_scale.tuning.policy import ACCEPTANCE, NOISE, PILOTS, SEARCH, WARM_UP
from pyro_scale.tuning.stable_lr import kernel_for_whitened, longest_whitened_lr
from pyro_scale.tuning.windows import NoStableStep, Window, warm_up

#: Coordinates of each form, in words.
_WORDS: dict[type, str] = {
    DenseWhitening: "a matrix",
    DiagonalWhitening: "elements",
    KroneckerWhitening: "Kronecker factors",
    LowRankWhitening: "elements and a few directions",
}


def choose(
    problem: Problem,
    settings: Settings,
    anchor: bool | Tensor,
    config: RunConfig,
    simulate: Simulate,
    budget: Budget,
) -> Choice:
    """Chooses the settings that the user has left open (starts, geometry, step size, batches,
    thinning), and warms the chains up.

    Args:
        problem: model, data, sampler's kernel, and chains at the user's or the library's starts.
        settings: settings of the sampler, which say what is to be chosen.
        anchor: params `[D]`, unconstrained, at which control variates have the gradient of all
            rows; True for the center of the geometry; False for no control variates.
        config: arguments of the run.
        simulate: function that runs the chains.
        budget: gradients of rows and seconds that the whole run may take.

    Raises:
        ArgumentError: chains break at any step size; there is no step size to choose; the budget is
            too small for a warm-up.
    """
    chooses_lr, sampling, num_samples = settings.chooses_lr, config.sampling, config.num_samples
    _check_budget(budget, with_fewest_rows(problem), num_samples, chooses_lr)
    num_data, most_rows = problem.log_posterior.num_data, problem.data.batch_size
    full_data = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    modes, density, cooled, tried, passes = None, None, None, None, dict[str, float]()
    if settings.precondition is not None:
        problem, modes, density = with_geometry(problem, settings, full_data, budget.of_tuning)
        passes["modes"] = 0 if modes is None else modes.evaluations
        problem = with_anchor(problem, anchor, full_data)
        problem = _for_whitened(problem, settings)
        if chooses_lr:
            cooled = cool(problem, sampling, full_data, NOISE.far_at_first)
            problem, passes["noise"] = cooled.problem, cooled.passes
        if settings.subtract_noise:
            problem = with_known_noise(problem, center_of(problem), sampling)

    def steps_left(budget: Budget) -> int:
        return budget.after(sum(passes.values()), num_data).steps(problem)

    def limit(least: int, reserve: int = 0) -> Limit:
        """The limit of a stage of warm-up: half of the tuning steps that are left, but at least
        `least`.

        Args:
            least: steps that the stage gets in any case.
            reserve: steps to leave for later stages.
        """
        steps = (steps_left(budget.of_tuning) - budget.of_tuning.num_samples - reserve) // 2
        return Limit(max(least, steps), lambda: budget.is_over_for(problem))

    left = budget.after(sum(passes.values()), num_data)
    _check_budget(left, problem, num_samples, chooses_lr)
    kernel, adjusts = problem.engine.kernel, chooses_lr and problem.engine.kernel.adjusted
    if adjusts:  # a chain that rejects all proposals would stay where it starts
        problem = _for_whitened(problem.with_engine(kernel=without_adjustment(kernel)), settings)
    group = OneGroup(problem, simulate, density if chooses_lr else None, full_data)
    try:
        limits = limit(WARM_UP.first_window, reserve=_steps_of_pilots(chooses_lr))
        group, window = warm_up(group, limits, WARM_UP)
    except NoStableStep as broken:
        last, draws = broken.args
        raise _no_warm_up(last.problem, density, chooses_lr, draws) from None
    problem, time = group.problem, window.time
    passes["windows"] = passes_of(problem, window.steps)
    if density is not None:
        share = (density.num_rows or num_data) / num_data
        passes["curvature"] = window.looks * len(problem.positions[0]) * share
    if adjusts:
        stable, group = group.lr, group.with_problem(problem.with_engine(kernel=kernel))
        group, tried = adjust(group, stable, limit(3 * PILOTS.least), ACCEPTANCE)
    elif chooses_lr:
        if cooled is not None and problem.data.batch_size is not None:
            longest = longest_whitened_lr(problem.engine.kernel)
            problem = problem.with_lr(min(longest, float(window.stable_lr)))
            cooled = _cool_again(cooled, problem, anchor, most_rows, sampling, full_data)
            problem = cooled.problem
            passes["noise"] += cooled.passes
        theory = problem.engine.kernel.theory
        order, limits = 1 if theory is None else theory.order, limit(3 * PILOTS.least)
        group, tried = pilot(group.with_problem(problem), time, order, limits, PILOTS)
    warmup_steps = window.steps
    if tried is not None:
        problem, warmup_steps = group.problem, window.steps + tried.steps
        time = tried.time if math.isfinite(tried.time) else time
        passes["pilots"] = passes_of(problem, tried.steps)
    most = max(1, steps_left(budget) // num_samples)
    needed = max(1, math.ceil(time)) if math.isfinite(time) else most
    thinning = config.thinning or min(most, needed)
    return Choice(
        problem=problem,
        steps=Steps(num_samples, config.warmup_steps or 0, thinning),
        passes=passes,
        reasons=_explain(problem, modes, window, tried, thinning),
        chooses_lr=chooses_lr,
        warmup_steps=warmup_steps if config.warmup_steps is None else None,
        modes=modes,
        window=window,
        pilot=tried,
        heat=None if cooled is None or cooled.heat is None else cooled.heat.added,
    )


def _cool_again(
    cooled: Cooled,
    problem: Problem,
    anchor: bool | Tensor,
    most_rows: int | None,
    sampling: Sampling,
    full_data: FullDataDensity,
) -> Cooled:
    """Limits the heating by minibatches a second time, after warm-up, as minibatch noise differs in
    the new whitened coordinates. If a bound shows that the heating is still small, the result is
    the first one with the new problem.

    Args:
        cooled: result of the first time, before warm-up.
        problem: chains after warm-up, with the longest stable step size.
        anchor: anchor of control variates `[D]`; True to move it to the new center; False for no
            control variates.
        most_rows: the largest batch size that the library may choose; None for all rows.
        sampling: how the rows of batches are drawn.
        full_data: log density of all rows.
    """
    if stays_cool(cooled, problem):
        return cooled._replace(problem=problem, passes=0.0)
    if problem.chooses_batches:
        problem = problem.in_batches_of(most_rows)
    if anchor is True:
        problem = with_anchor(problem, True, full_data)
    return cool(problem, sampling, full_data, NOISE.far)


def _for_whitened(problem: Problem, settings: Settings) -> Problem:
    """The problem (model, data, chains, kernel) with the sampler's kernel for the first steps in
    whitened coordinates: the longest step size and the best friction there, unless the user set
    them."""
    chosen = settings.chooses_lr, settings.chooses_friction
    return problem.with_engine(kernel=kernel_for_whitened(problem.engine.kernel, *chosen))


def _steps_of_pilots(chooses_lr: bool) -> int:
    """The least number of steps of each chain that must be left for pilots (short runs that measure
    the bias of a step size); 0 if the user set the step size, so that there are no pilots."""
    return 3 * PILOTS.least if chooses_lr else 0


def _check_budget(budget: Budget, problem: Problem, num_samples: int, chooses_lr: bool) -> None:
    """Raises unless a budget allows the shortest warm-up and the draws.

    Args:
        budget: gradients of rows that are left.
        problem: model and chains, which determine the cost of a step.
        num_samples: draws of each chain.
        chooses_lr: whether pilots of the step size are needed, too.

    Raises:
        ArgumentError: the budget does not allow them.
    """
    most_steps = budget.steps(problem)
    least = WARM_UP.first_window + num_samples + _steps_of_pilots(chooses_lr)
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
    problem: Problem, density: FullDataDensity | None, chooses_lr: bool, draws: Draws
) -> ArgumentError:
    """The error to raise if all chains break at every step size that warm-up tried. It names the
    site that breaks, or says what to try.

    Args:
        problem: model and chains, with their params at the start of the last window (stretch of
            warm-up).
        density: log density whose curvature warm-up evaluates; None if the user set lr.
        chooses_lr: whether the step size is chosen.
        draws: draws of the last window of warm-up.
    """
    for chain, broken in broken_sites(problem, draws).items():
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
    params = problem.engine.layout.unflatten(position)
    centered = centered_latents(problem.log_posterior, params, problem.data.first())
    for site, parents in list(centered.items())[:1]:
        advice = f": try {how_to_non_center(site, parents)}"
    return ArgumentError(
        "in warm-up every chain becomes NaN or infinite, or falls to where the posterior is not, "
        f"at any step size that was tried{advice}",
        code="not-finite",
    )


def _explain(
    problem: Problem, modes: Modes | None, window: Window, tried: Pilot | None, thinning: int
) -> dict[str, str]:
    """The reasons of the choices for the report, a dict from the setting ("start", "geometry",
    "step size", "thinning", ...) to a sentence for the user.

    Args:
        problem: the tuned problem.
        modes: modes of the posterior; None if they were not searched for.
        window: measurements of the last window of warm-up.
        tried: measurements of the pilots; None if the step size was set.
        thinning: steps from one draw to the next.
    """
    engine, reasons = problem.engine, dict[str, str]()
    whitening, lr = engine.whitening, lr_in_words(engine.kernel)
    if modes is not None:
        stand_in = "a Gaussian fitted along the search path, as no mode has one that fits"
        reasons["start"] = (
            f"around {'the mode' if modes.are_modes else stand_in} ({modes.searches} searches), "
            "overdispersed by 2"
        )
    if whitening is not None:
        form = _WORDS[type(whitening)]
        reasons["geometry"] = (
            f"whitened by {form}, from the draws of {window.steps} steps of warm-up"
        )
    size, density = problem.data.batch_size, engine.density
    if size is not None:
        how = "without control variates"
        if isinstance(density, ControlVariates):
            order = ("first", "second")[density.order - 1]
            how = f"with control variates of {order} order"
        reasons["minibatches"] = f"{size:,} of {density.num_data:,} rows a step, {how}"
    if tried is None:
        reasons["step size"] = f"{lr}, as it was set"
    elif tried.acceptance is not None:
        reasons["step size"] = (
            f"{lr} in whitened coordinates: {float(tried.acceptance):.0%} of proposals were "
            f"accepted (target: about {ACCEPTANCE.target:.0%})"
        )
    elif tried.bias is None:
        reasons["step size"] = f"{lr}; its bias could not be measured"
    else:
        reasons["step size"] = (
            f"{lr}{' in whitened coordinates' if whitening is not None else ''}; bias, "
            "estimated by halving the step size: at most "
            f"{float(tried.bias.mean.abs().max()):.2g} sds in means and "
            f"{100 * float(tried.bias.log_sd.abs().max()):.2g}% in sds"
        )
    reasons["thinning"] = f"{thinning} steps from one draw to the next: nearly independent draws"
    return reasons
