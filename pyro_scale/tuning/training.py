"""Tuning for networks, and for any model at temperature 0: chains start where an optimizer ends.

an optimizer from each chain's start  ->  a trained network for each chain
the prior where it ended              ->  coordinates in which the prior is isotropic
the curvature there                   ->  a stable step size
the length of training                ->  as many steps of warm-up, and three times as many for the
                                          draws; more if steps are cheap

Training takes minibatches.  Chains take all rows if they are few, as minibatches heat most where
the likelihood is steepest, such as along the noise's scale of a regression.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.whitening import DiagonalWhitening
from pyro_scale.curvature.chunks import is_row_wise
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.prior_hessian import prior_precision
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import ArgumentError, ModelError, NonFiniteError
from pyro_scale.kernels import MAP
from pyro_scale.kernels.optimizer import as_optimizer
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.budget import Budget, passes_of, rows_a_step
from pyro_scale.run.config import RunConfig
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.choice import Choice, Settings, Simulation, lr_in_words
from pyro_scale.tuning.early_stopping import EarlyStopping
from pyro_scale.tuning.hidden_layers import has_hidden_layer
from pyro_scale.tuning.low_rank import steepest_by_products
from pyro_scale.tuning.one_group import OneGroup
from pyro_scale.tuning.policy import GEOMETRY, TRAINING
from pyro_scale.tuning.stable_lr import largest_stable_lr

#: Steps of the optimizer, at most, between two looks at the clock.
_STEPS_BY_CLOCK = 10


def is_network(problem: Problem) -> bool:
    """Whether the model has weights of an `nn.Module` and is too complex for a single mode and
    geometry: it has hidden layers, or many weights."""
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    if not log_posterior.model_info.weights:
        return False
    if layout.size > TRAINING.few_weights:
        return True
    params = layout.unflatten(problem.positions[0])
    return has_hidden_layer(log_posterior, params, problem.data.first())


def train(
    problem: Problem, settings: Settings, config: RunConfig, simulate: Simulation, budget: Budget
) -> Choice:
    """Trains every chain from its start with an optimizer, chooses a step size that is stable
    there, and warms chains up. Used for networks, and at temperature 0.

    At temperature 0 each chain has one draw, the end of training, unless thinning was set. If the
    step size was set, the method itself is the optimizer, for as many steps as warm-up was set to,
    and there are `num_samples` draws.

    At other temperatures, a warm-up follows that is as long as training, or longer if steps are
    cheap. The draws take three times as many steps, or fewer if the budget ends before. A start
    that the user passed counts as trained, unless the temperature is 0.

    Args:
        problem: chains at the user's or the library's starts.
        settings: settings of the sampler, which say what is to be chosen.
        config: arguments of the run.
        simulate: function that runs the chains.
        budget: gradients of rows and seconds that the run may take.

    Raises:
        NonFiniteError: the loss of a chain became NaN or infinite.
    """
    temperature = float(problem.engine.kernel.values(0)["temperature"])
    num_samples, chooses_lr = config.num_samples, settings.chooses_lr
    num_data, size = problem.log_posterior.num_data, problem.engine.layout.size
    in_batches = chooses_lr and problem.chooses_batches and is_network(problem)
    learner = _in_batches(problem) if in_batches else problem
    epoch = -(-num_data // (learner.data.batch_size or num_data))
    stopping = EarlyStopping(max(TRAINING.epochs * epoch, TRAINING.steps), size)
    trained, converged, warmup, passes = 4 * stopping.window, True, 0, dict[str, float]()
    # with a set step size, a set warm-up is part of the run
    optimizes = (settings.starts or temperature == 0) if chooses_lr else config.warmup_steps is None
    if optimizes:
        if chooses_lr:
            learner = learner.with_engine(kernel=MAP(optimizer=as_optimizer(None)))
        draws = _optimize(learner, chooses_lr, stopping, simulate, budget)
        trained, converged, warmup = draws.num_steps, stopping.reached(draws), draws.num_steps
        passes["training"] = passes_of(learner, trained)
        problem = dataclasses.replace(problem, positions=draws.state.position.detach())
    full_data = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    density = full_data.of_some_rows(TRAINING.rows, problem.seed)
    if temperature > 0 and problem.data.batch_size is None:
        problem = _whitened_by_prior(problem)
    if chooses_lr:
        problem = _with_stable_lr(problem, density, problem.positions)
    count = 1 if chooses_lr and config.thinning is None else num_samples
    steps = Steps(count, config.warmup_steps or 0, config.thinning or 1)
    if temperature > 0:
        spent = warmup * rows_a_step(learner) // rows_a_step(problem)
        length = max(trained, TRAINING.cheap // (rows_a_step(problem) * size))
        most = (budget.steps(problem) - spent) // (1 + TRAINING.length)
        length = max(1, min(length, most, simulate.affordable(budget, "pilots", problem)))
        warmup_steps = length if config.warmup_steps is None else config.warmup_steps
        limited = simulate.limited(budget, "pilots", problem)
        group = OneGroup(problem, limited, None, full_data)
        problem, moved = _warm_up(group, density, warmup_steps)
        warmup += moved
        passes["windows"] = passes_of(problem, moved)
        length = min(TRAINING.length * length, simulate.affordable(budget, "draws", problem))
        thinning = config.thinning or max(1, math.ceil(length / num_samples))
        steps = Steps(num_samples, 0, thinning)
    return Choice(
        problem=problem,
        steps=steps,
        passes=passes,
        reasons=_explain(problem, settings, trained if optimizes else None, converged),
        chooses_lr=chooses_lr,
        warmup_steps=warmup if config.warmup_steps is None else None,
        trained=trained if optimizes or chooses_lr else None,
    )


def _optimize(
    learner: Problem,
    chooses_lr: bool,
    stopping: EarlyStopping,
    simulate: Simulation,
    budget: Budget,
) -> Draws:
    """Runs the optimizer from every chain's start until no loss falls any more, or half of the
    budget is spent. Returns the run, whose state has the trained params.

    Args:
        learner: problem with the optimizer as its kernel.
        chooses_lr: whether tuning chooses the step size.
        stopping: rule that says when losses no longer fall.
        simulate: function that runs the chains.
        budget: gradients of rows and seconds that the run may take.

    Raises:
        NonFiniteError: the loss of a chain became NaN or infinite.
    """
    most = min(TRAINING.most_looks * stopping.window, max(1, budget.steps(learner) // 2))

    check_every = stopping.window
    if budget.max_seconds is not None:  # an interval may take longer than the run
        check_every = math.gcd(stopping.window, _STEPS_BY_CLOCK)

    def stop(draws: Draws) -> bool:
        if budget.until("windows", draws.compile_seconds).is_over_for(learner):
            return True
        if draws.num_steps % stopping.window:
            return False
        return learner.agree(stopping.reached(draws), "whether training is over")

    kernel, seed = learner.engine.kernel, derived_seed(learner.seed, 0, Purpose.SEARCH)
    draws = simulate(
        learner,
        Steps(most, positions=False),
        seed,
        kernel.columns(most),
        stop=stop,
        check_every=check_every,
    )
    if draws.error is not None:
        raise draws.error
    if draws.failures:
        if chooses_lr:
            advice = "or start from a trained network (init_strategy=ps.init_to_module, or a fit)"
        else:
            advice = f"or pass a smaller lr ({lr_in_words(kernel)})"
        first, sites = draws.failures[0], broken_sites(learner, draws)
        at_site = "".join(f" at site '{name}'" for name, *_ in list(sites.values())[:1])
        data = learner.log_posterior, learner.data, learner.engine.layout
        unclean = FullDataDensity(*data).to_clean()
        raise NonFiniteError(
            f"chain {first.chain}: the loss became NaN or infinite{at_site} at step "
            f"{first.step}, while it was trained: {unclean or f'scale the data, {advice}'}"
        )
    return draws


def _warm_up(group: OneGroup, density: FullDataDensity, num_steps: int) -> tuple[Problem, int]:
    """Warms trained chains up. Returns (the problem with the chains at their last states, and with
    a step size that is stable at the warm-up's draws; the number of steps taken).

    Args:
        group: the chains.
        density: log density of rows that represent all rows.
        num_steps: steps of the warm-up.
    """
    every = max(1, num_steps // TRAINING.looks)
    window = Steps(max(1, -(-num_steps // every)), 0, every)
    draws = group.run(window, Purpose.WINDOW, 0)
    problem = group.problem.moved_to(draws, draws.finished)
    places = draws.positions[draws.finished].flatten(0, 1).to(problem.positions)
    return _with_stable_lr(problem, density, places), draws.num_steps


def _explain(
    problem: Problem, settings: Settings, trained: int | None, converged: bool
) -> dict[str, str]:
    """The reasons of the choices for the report of a run that was trained first: a dict from
    "start", "step size" and "geometry" to a phrase for the user.

    Args:
        problem: the tuned problem.
        settings: settings of the sampler.
        trained: steps of the optimizer; None if there was none.
        converged: whether losses no longer fell.
    """
    lr, whitening = lr_in_words(problem.engine.kernel), problem.engine.whitening
    start = "each chain's own" if settings.starts else "as it was given"
    if trained is not None:
        how = "Adam" if settings.chooses_lr else "the method itself"
        end = "until the loss no longer fell" if converged else "while the loss still fell"
        start = f"{trained:,} steps of {how} from each chain's own start, {end}"
    step_size = f"{lr}, as it was set"
    if settings.chooses_lr:
        part = ", half" if whitening is None else " in whitened coordinates, a quarter"
        step_size = f"{lr}{part} of the stability limit at the largest curvature found"
    reasons = {"start": start, "step size": step_size}
    if whitening is not None:
        reasons["geometry"] = "whitened by the prior's sds"
    return reasons


def _in_batches(problem: Problem) -> Problem:
    """The problem with minibatches of `TRAINING.network_batch` rows, for training; unchanged if
    there are no more rows than that, the user set batches, or the model cannot be run on parts of
    the rows."""
    data, num_data = problem.data, problem.log_posterior.num_data
    if not isinstance(data, TensorData) or data.batch_size is not None:
        return problem
    has_all = rows.count(data.arguments) == num_data
    if num_data <= TRAINING.network_batch or not has_all or not is_row_wise(problem.log_posterior):
        return problem
    return problem.in_batches_of(TRAINING.network_batch)


def _whitened_by_prior(problem: Problem) -> Problem:
    """The problem in coordinates in which the log prior divided by N has curvature 1; unchanged if
    the model has point-estimated params.

    There, directions that the data do not determine relax fastest at a friction of about 1.  In
    params, that would be a small friction, and minibatches heat by its inverse.  The curvature is
    that at the first chain.  Elements without a positive curvature get the geometric mean of the
    other scales.
    """
    engine, num_data = problem.engine, problem.log_posterior.num_data
    if engine.has_points:  # they have no prior
        return problem
    params, arguments = engine.layout.unflatten(problem.positions[0]), problem.data.first()
    precision = prior_precision(problem.log_posterior, params, arguments, None, False)
    is_positive = torch.isfinite(precision) & (precision > 0)
    scale = torch.where(is_positive, precision, 1.0).rsqrt() * num_data**0.5
    usual = scale[is_positive].log().mean().exp() if bool(is_positive.any()) else num_data**0.5
    scale = torch.where(is_positive, scale, usual)
    return problem.with_engine(whitening=DiagonalWhitening(torch.zeros_like(scale), scale))


def _with_stable_lr(problem: Problem, density: FullDataDensity, places: Tensor) -> Problem:
    """The problem with a step size that is surely stable: a fraction of the largest one that is
    stable at the steepest of some points.

    Args:
        problem: model and chains.
        density: log density of all rows, or of rows that represent them.
        places: unconstrained params at which the curvature is computed, `[places, D]`.
    """
    whitening, kernel = problem.engine.whitening, problem.engine.kernel
    lengths = [steepest_by_products(density, whitening, place) for place in places]
    steepest = max([length for length in lengths if math.isfinite(length)], default=1.0)
    safety = TRAINING.safety if whitening is None else TRAINING.safety_whitened
    lr = safety * largest_stable_lr(kernel, max(steepest, 1e-12))
    return problem.with_lr(min(lr, getattr(kernel.theory, "largest_lr", math.inf)))


def prepare_in_batches(
    prepare: Callable[[Data], Problem],
    data: Data,
    in_batches_of: Callable[[int], Data],
    tunes: bool,
) -> Problem:
    """The problem (model, data and chains at their starts) with the default batch size: minibatches
    if there are many rows and the model can be run on parts of them, otherwise all rows.

    Args:
        prepare: function from data to the problem; it runs the model once, to check it.
        data: the data as the user passed them: all rows, or the batches of a loader.
        in_batches_of: (batch size) -> the data in batches.
        tunes: whether control variates and step size are chosen; if not, a step takes all rows of
            tensors.
    """
    if data.batch_size is not None:  # a loader
        return prepare(data)

    def try_batches(size: int) -> Problem | None:
        """The problem in batches of this size; None if the model needs all rows together."""
        with contextlib.suppress(ModelError, ArgumentError):
            return prepare(in_batches_of(size))
        return None

    problem = None
    if tunes and (data.num_data or 0) > TRAINING.few_rows:
        problem = try_batches(TRAINING.batch)
    problem = problem or prepare(data)
    num_data, size = problem.log_posterior.num_data, TRAINING.network_batch
    if tunes and num_data > size:
        # a unit takes all of its rows and nodes; local latents are summed out in batches
        if problem.anchor is not None:
            problem = problem.in_batches_of(in_batches_of(size).batch_size)
        elif problem.engine.layout.size > GEOMETRY.dense and _has_local_latents(problem):
            problem = try_batches(size) or problem
    is_small = num_data * problem.engine.layout.size <= TRAINING.few_numbers
    if tunes and not is_small and num_data > size and is_network(problem):
        problem = try_batches(size) or problem
    # a model that subsamples by itself has its own batches
    return dataclasses.replace(problem, chooses_batches=isinstance(problem.data, TensorData))


def _has_local_latents(problem: Problem) -> bool:
    """Whether a latent is in a plate of as many members as there are rows."""
    log_posterior = problem.log_posterior
    latents = [log_posterior.model_info.sites[name] for name in log_posterior.latents]
    frames = [frame for site in latents for frame in site.plates]
    return any(frame.size == log_posterior.num_data for frame in frames)
