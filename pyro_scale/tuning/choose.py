"""Chooses starts, geometry (coordinates of chains), step size and lengths of a run in a warm-up.

modes of the posterior  ->  a Gaussian, in whose coordinates the posterior is about isotropic
windows of warm-up      ->  the geometry of the draws, and a stable step size
coupled pilots          ->  a step size with a small bias
autocorrelation         ->  a thinning at which a quarter of the draws is effective
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

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
from pyro_scale.kernels import Kernel
from pyro_scale.model.diagnose import centered_latents, how_to_non_center
from pyro_scale.run.blame import WITHIN, broken_sites
from pyro_scale.run.budget import Budget, Stage, passes_of, rows_a_step
from pyro_scale.run.config import RunConfig
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.adjust import adjust, without_adjustment
from pyro_scale.tuning.choice import Choice, Settings, Simulate, Simulation, lr_in_words
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
    simulate: Simulation,
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
    num_samples, chooses_lr = config.num_samples, settings.chooses_lr
    _check_budget(budget, with_fewest_rows(problem), num_samples, chooses_lr)
    full_data = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    tuning = _Tuning(settings, anchor, config.sampling, simulate, budget, full_data)
    most_rows, modes, cooled = problem.data.batch_size, None, None
    if settings.precondition is not None:
        problem, modes, cooled = tuning.choose_coordinates(problem)
    _check_budget(tuning.left, problem, num_samples, chooses_lr)
    group, window = tuning.warm_up(problem)
    tried = None
    if chooses_lr and problem.engine.kernel.adjusted:
        group, tried = tuning.adjust(group, problem.engine.kernel)
    elif chooses_lr:
        if cooled is not None and problem.data.batch_size is not None:
            group, cooled = tuning.cool_again(group, cooled, window, most_rows)
        group, tried = tuning.pilot(group, window)
    problem, time, warmup_steps = group.problem, window.time, window.steps
    if tried is not None:
        warmup_steps += tried.steps
        time = tried.time if math.isfinite(tried.time) else time
        tuning.passes["pilots"] = passes_of(problem, tried.steps)
    most = tuning.most_steps_a_draw(problem)
    needed = max(1, math.ceil(PILOTS.effective * time)) if math.isfinite(time) else most
    thinning = config.thinning or min(most, needed)
    return Choice(
        problem=problem,
        steps=Steps(num_samples, config.warmup_steps or 0, thinning),
        passes=tuning.passes,
        reasons=_explain(problem, modes, window, tried, thinning),
        chooses_lr=chooses_lr,
        warmup_steps=warmup_steps if config.warmup_steps is None else None,
        modes=modes,
        window=window,
        pilot=tried,
        heat=None if cooled is None or cooled.heat is None else cooled.heat.added,
    )


@dataclass
class _Tuning:
    """The stages of tuning, and the passes through the data that they have taken.

    Attributes:
        settings: settings of the sampler, which say what is to be chosen.
        anchor: params `[D]` of control variates; True for the center of the geometry; False for no
            control variates.
        sampling: how the rows of batches are drawn.
        simulate: function that runs the chains.
        budget: gradients of rows and seconds that the whole run may take.
        full_data: log density of all rows.
        density: log density of all rows, or of rows that represent them, whose curvature warm-up
            evaluates; None if the coordinates are not chosen.
        passes: passes through the data so far, by stage.
    """

    settings: Settings
    anchor: bool | Tensor
    sampling: Sampling
    simulate: Simulation
    budget: Budget
    full_data: FullDataDensity
    density: FullDataDensity | None = None
    passes: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> Budget:
        """The budget of the run without the passes so far."""
        return self._after_passes(self.budget)

    def choose_coordinates(self, problem: Problem) -> tuple[Problem, Modes | None, Cooled | None]:
        """(The problem in coordinates in which the posterior is about isotropic, with control
        variates, and with batches whose noise hardly heats chains; the modes that were found, None
        without a search; the effect of batches, None if the step size is set). Sets `density`."""
        settings, budget, cooled = self.settings, self.budget.of_tuning, None
        problem, modes, self.density = with_geometry(problem, settings, self.full_data, budget)
        self.passes["modes"] = 0 if modes is None else modes.evaluations
        problem = with_anchor(problem, self.anchor, self.full_data)
        problem = _for_whitened(problem, settings)
        if settings.chooses_lr:
            cooled = cool(problem, self.sampling, self.full_data, NOISE.far_at_first)
            problem, self.passes["noise"] = cooled.problem, cooled.passes
        if settings.subtract_noise:
            problem = with_known_noise(problem, center_of(problem), self.sampling)
        return problem, modes, cooled

    def warm_up(self, problem: Problem) -> tuple[OneGroup, Window]:
        """(The chains in the geometry of their draws; the measurements of the last window).

        Raises:
            ArgumentError: all chains break at every step size that is tried.
        """
        settings, chooses_lr = self.settings, self.settings.chooses_lr
        kernel, density = problem.engine.kernel, self.density
        if chooses_lr and kernel.adjusted:  # chains that reject all proposals would not move
            free = problem.with_engine(kernel=without_adjustment(kernel))
            problem = _for_whitened(free, settings)
        least, reserve = WARM_UP.first_window, _steps_of_pilots(chooses_lr)
        limit, simulate = self._stage("windows", problem, least, reserve)
        group = OneGroup(problem, simulate, density if chooses_lr else None, self.full_data)
        try:
            group, window = warm_up(group, limit, WARM_UP)
        except NoStableStep as broken:
            last, draws = broken.args
            is_over = limit.is_over()
            raise _no_warm_up(last.problem, density, chooses_lr, draws, is_over) from None
        self.passes["windows"] = passes_of(group.problem, window.steps)
        if density is not None:
            num_data = problem.log_posterior.num_data
            share = (density.num_rows or num_data) / num_data
            self.passes["curvature"] = window.looks * len(problem.positions[0]) * share
        return group, window

    def adjust(self, group: OneGroup, kernel: Kernel) -> tuple[OneGroup, Pilot]:
        """(The chains with `kernel`, which accepts or rejects proposals, and a step size of about
        the target acceptance rate; the measurements of the pilots)."""
        limit, simulate = self._stage("pilots", group.problem, 3 * PILOTS.least)
        stable, problem = group.lr, group.problem.with_engine(kernel=kernel)
        adjusted = dataclasses.replace(group, problem=problem, simulate=simulate)
        return adjust(adjusted, stable, limit, ACCEPTANCE)

    def cool_again(
        self, group: OneGroup, cooled: Cooled, window: Window, most_rows: int | None
    ) -> tuple[OneGroup, Cooled]:
        """(The chains with batches that hardly heat them in the geometry of warm-up, and with a
        step size that is at most the longest stable one; the effect of the batches).

        If a bound shows that the effect of batches is still small, they stay as they are.

        Args:
            group: the chains after warm-up.
            cooled: the effect of batches in the geometry before warm-up.
            window: measurements of warm-up.
            most_rows: the largest batch size that the library may choose; None for all rows.
        """
        longest = longest_whitened_lr(group.problem.engine.kernel)
        problem = group.problem.with_lr(min(longest, float(window.stable_lr)))
        if stays_cool(cooled, problem):
            cooled = cooled._replace(problem=problem, passes=0.0)
        else:
            if problem.chooses_batches:
                problem = problem.in_batches_of(most_rows)
            if self.anchor is True:
                problem = with_anchor(problem, True, self.full_data)
            cooled = cool(problem, self.sampling, self.full_data, NOISE.far)
        self.passes["noise"] += cooled.passes
        return group.with_problem(cooled.problem), cooled

    def pilot(self, group: OneGroup, window: Window) -> tuple[OneGroup, Pilot]:
        """(The chains with a step size of a small bias; the measurements of the pilots)."""
        theory = group.problem.engine.kernel.theory
        order = 1 if theory is None else theory.order
        limit, simulate = self._stage("pilots", group.problem, 3 * PILOTS.least)
        group = dataclasses.replace(group, simulate=simulate)
        return pilot(group, window.time, order, limit, PILOTS)

    def _after_passes(self, budget: Budget) -> Budget:
        num_data = self.full_data.log_posterior.num_data
        return budget.after(sum(self.passes.values()), num_data)

    def most_steps_a_draw(self, problem: Problem) -> int:
        """The largest thinning, at least 1: the steps of each chain that rows are left for, by
        draw (the same for any number of draws, unless the user set the rows), and that seconds are
        left for, at the pace of the latest steps."""
        left, num_samples = self._after_passes(self.budget.of_tuning), self.budget.num_samples
        seconds = self.simulate.affordable(self.left, "draws", problem)
        return int(max(1, min(left.steps(problem) // left.num_samples, seconds // num_samples)))

    def _stage(
        self, stage: Stage, problem: Problem, least: int, reserve: int = 0
    ) -> tuple[Limit, Simulate]:
        """(The limit of a stage of warm-up: half of the tuning steps that are left, or fewer if
        there is no time for them, but at least `least`; the function that runs chains until the
        stage's time is over).

        Args:
            stage: the stage.
            problem: the chains, which determine the cost of a step.
            least: steps that the stage gets in any case.
            reserve: steps to leave for later stages.
        """
        left = self._after_passes(self.budget.of_tuning)
        most = (left.steps(problem) - left.num_samples - reserve) // 2
        steps = max(least, min(most, self.simulate.affordable(left, stage, problem)))
        limit = Limit(steps, lambda: self.simulate.until(left, stage).is_over_for(problem))
        return limit, self.simulate.limited(left, stage, problem)


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
    problem: Problem,
    density: FullDataDensity | None,
    chooses_lr: bool,
    draws: Draws,
    is_over: bool,
) -> ArgumentError:
    """The error to raise if all chains break at every step size that warm-up tried. It names the
    site that breaks, or says what to try.

    Args:
        problem: model and chains, with their params at the start of the last window (stretch of
            warm-up).
        density: log density whose curvature warm-up evaluates; None if the user set lr.
        chooses_lr: whether the step size is chosen.
        draws: draws of the last window of warm-up.
        is_over: whether the time for warm-up is over.
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
    if is_over:
        advice += "; or more max_seconds=, as the time for warm-up is over"
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
        rows = "rows" if problem.anchor is None else f"{problem.anchor.model.local.unit}s"
        reasons["minibatches"] = f"{size:,} of {density.num_data:,} {rows} a step, {how}"
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
    reasons["thinning"] = (
        f"{thinning} step{'s' * (thinning > 1)} from one draw to the next, for about "
        f"{PILOTS.effective:.0%} effective draws"
    )
    return reasons
