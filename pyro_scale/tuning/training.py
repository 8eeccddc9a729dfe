"""What `"auto"` stands for in networks, and in any model at temperature 0: training.

an optimizer from each chain's own start  ->  a network a chain, whose loss no longer falls
the prior where it ended                  ->  coordinates in which the prior is isotropic
the curvature there                       ->  a step size that is stable
as many steps as training took            ->  warm-up, and three times as many for the draws;
                                              more where steps of so few weights cost nothing

Training takes minibatches, the chains take all rows where these are few: minibatch noise heats most
where the likelihood is steepest, as along the noise's scale of a regression.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.whitening import DiagonalWhitening
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import ArgumentError, ModelError, NonFiniteError
from pyro_scale.fullbatch.chunks import is_row_wise
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.kernels import MAP
from pyro_scale.kernels.optimizer import as_optimizer
from pyro_scale.model.curvature.prior_hessian import prior_precision
from pyro_scale.model.nn.hidden_layers import has_hidden_layer
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.budget import Budget, passes_of, rows_a_step
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.choice import Asked, Choice, Simulate, lr_in_words
from pyro_scale.tuning.early_stopping import EarlyStopping
from pyro_scale.tuning.low_rank import steepest_by_products
from pyro_scale.tuning.one_group import OneGroup
from pyro_scale.tuning.policy import TRAINING
from pyro_scale.tuning.stable_lr import largest_stable_lr


def is_network(problem: Problem) -> bool:
    """Whether weights of an `nn.Module` have no one mode with a geometry: they are of hidden
    layers, or too many."""
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    if not log_posterior.model_info.weights:
        return False
    if layout.size > TRAINING.few_weights:
        return True
    params = layout.unflatten(problem.positions[0])
    return has_hidden_layer(log_posterior, params, problem.data.first())


def is_small(problem: Problem) -> bool:
    """Whether a network's chains can take all rows at every step."""
    return problem.log_posterior.num_data * problem.engine.layout.size <= TRAINING.few_numbers


def train(problem: Problem, asked: Asked, simulate: Simulate, budget: Budget) -> Choice:
    """Chains at trained networks, with a step size that is stable there.

    At temperature 0 what training ends with is the one draw of each chain, unless thinning was set.
    Where the step size was set, the method itself is the optimizer, for as many steps as warm-up
    was set to, and there are as many draws as were asked for.

    Else chains go on from there: for as many steps as training took until the first draw, or for
    more where these are cheap, and for three times as many to the last, or fewer where the budget
    ends before.  A start that was given is taken as trained, unless the temperature is 0.

    Raises:
        NonFiniteError: a chain's loss became NaN or infinite.
    """
    kernel, seed = problem.engine.kernel, problem.seed
    temperature = float(kernel.values(0)["temperature"])
    num_data, size = problem.log_posterior.num_data, problem.engine.layout.size
    is_learned = asked.lr and problem.chooses_batches and is_network(problem)
    learner = _in_batches(problem) if is_learned else problem
    epoch = -(-num_data // (learner.data.batch_size or num_data))
    stopping = EarlyStopping(max(TRAINING.epochs * epoch, TRAINING.steps), size)
    trained, ended, taken, passes = 4 * stopping.window, True, 0, dict[str, float]()
    # with a step size that was set, a warm-up that was set is the run's own
    optimizes = asked.starts or temperature == 0 if asked.lr else asked.warmup_steps is None
    if optimizes:
        most = min(TRAINING.most_looks * stopping.window, max(1, budget.steps(learner) // 2))

        def stop(draws: Draws) -> bool:
            if budget.is_over_for_all:
                return True
            return all(problem.ranks.of_all(stopping.reached(draws), "whether training is over"))

        adam = MAP(optimizer=as_optimizer(None))
        optimizer = learner.with_engine(kernel=adam) if asked.lr else learner
        draws = simulate(
            optimizer,
            Steps(most, positions=False),
            derived_seed(seed, 0, Purpose.SEARCH),
            optimizer.engine.kernel.columns(most),
            stop=stop,
            check_every=stopping.window,
        )
        if draws.error is not None:
            raise draws.error
        if draws.failures:
            advice = "or start from a trained network (init_strategy=ps.init_to_module, or a fit)"
            advice = advice if asked.lr else f"or pass a smaller lr ({lr_in_words(kernel)})"
            first, sites = draws.failures[0], broken_sites(learner, draws)
            of_site = "".join(f" at site '{name}'" for name, *_ in list(sites.values())[:1])
            data = problem.log_posterior, problem.data, problem.engine.layout
            unclean = FullDataDensity(*data).to_clean()
            raise NonFiniteError(
                f"chain {first.chain}: the loss became NaN or infinite{of_site} at step "
                f"{first.step}, while it was trained: {unclean or f'scale the data, {advice}'}"
            )
        trained, ended, taken = draws.num_steps, stopping.reached(draws), draws.num_steps
        passes["training"] = passes_of(learner, taken)
        problem = dataclasses.replace(problem, positions=draws.state.position.detach())
    whole = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    density = whole.of_some_rows(TRAINING.rows, seed)
    if temperature > 0 and problem.data.batch_size is None:
        problem = _in_units_of_the_prior(problem)
    if asked.lr:
        problem = _with_stable_lr(problem, density, problem.positions)
    count = 1 if asked.lr and asked.thinning is None else asked.num_samples
    steps = Steps(count, asked.warmup_steps or 0, asked.thinning or 1)
    if temperature > 0:
        spent = taken * rows_a_step(learner) // rows_a_step(problem)
        length = max(trained, TRAINING.cheap // (rows_a_step(problem) * size))
        length = max(1, min(length, (budget.steps(problem) - spent) // (1 + TRAINING.length)))
        warmup_steps = length if asked.warmup_steps is None else asked.warmup_steps
        every = max(1, warmup_steps // TRAINING.looks)
        warmup = Steps(max(1, -(-warmup_steps // every)), 0, every)
        draws = OneGroup(problem, simulate, None, whole).run(warmup, Purpose.WINDOW, 0)
        problem = problem.moved_to(draws, draws.finished)
        seen = draws.positions[draws.finished].flatten(0, 1).to(problem.positions)
        problem = _with_stable_lr(problem, density, seen)
        taken += draws.num_steps
        passes["windows"] = passes_of(problem, draws.num_steps)
        thinning = asked.thinning or -(-TRAINING.length * length // asked.num_samples)
        steps = Steps(asked.num_samples, 0, thinning)
    told = "until the loss no longer fell" if ended else "while the loss still fell"
    lr, whitening = lr_in_words(problem.engine.kernel), problem.engine.whitening
    part = ", half" if whitening is None else " in whitened coordinates, a quarter"
    how = "Adam" if asked.lr else "the method itself"
    reasons = {
        "start": f"{trained:,} steps of {how} from each chain's own start, {told}"
        if optimizes
        else ("each chain's own" if asked.starts else "as it was given"),
        "step size": f"{lr}{part} of what is stable at the largest curvature that was seen"
        if asked.lr
        else f"{lr}, as it was set",
    }
    if whitening is not None:
        reasons["geometry"] = "whitened by the prior's sds"
    attrs: dict[str, Any] = {"lr_choice": reasons["step size"]} if asked.lr else {}
    attrs["thinning"] = steps.thinning
    if optimizes or asked.lr:
        attrs["trained_steps"] = trained
    if asked.warmup_steps is None:
        attrs["warmup_steps"] = taken
    attrs |= {f"passes_{stage}": round(count, 2) for stage, count in passes.items()}
    return Choice(
        problem, steps, None, None, None, passes, attrs, reasons, attrs.get("trained_steps")
    )


def _in_batches(problem: Problem) -> Problem:
    """The problem with minibatches, where the data have rows enough and the model takes parts."""
    data, num_data = problem.data, problem.log_posterior.num_data
    if not isinstance(data, TensorData) or data.batch_size is not None:
        return problem
    is_all = rows.count(data.arguments) == num_data
    if num_data <= TRAINING.network_batch or not is_all or not is_row_wise(problem.log_posterior):
        return problem
    return problem.in_batches_of(TRAINING.network_batch)


def _in_units_of_the_prior(problem: Problem) -> Problem:
    """In coordinates where the prior over N has curvature 1.

    Directions that the data leave alone relax fastest there at about a friction of 1.  In the
    parameters' own units that is a small friction, which minibatches would heat by its inverse.
    The prior's curvature is that at the first chain; an element where it has none, or a negative
    one, has the mean scale of the others.
    """
    engine, num_data = problem.engine, problem.log_posterior.num_data
    if engine.has_points:  # which have no prior
        return problem
    params, arguments = engine.layout.unflatten(problem.positions[0]), problem.data.first()
    precision = prior_precision(problem.log_posterior, params, arguments, None, False)
    is_known = torch.isfinite(precision) & (precision > 0)
    scale = torch.where(is_known, precision, 1.0).rsqrt() * num_data**0.5
    usual = scale[is_known].log().mean().exp() if bool(is_known.any()) else num_data**0.5
    scale = torch.where(is_known, scale, usual)
    return problem.with_engine(whitening=DiagonalWhitening(torch.zeros_like(scale), scale))


def _with_stable_lr(problem: Problem, density: FullDataDensity, places: Tensor) -> Problem:
    """With a part of the step size that is stable at the steepest of some places,
    `[places, D]`."""
    whitening = problem.engine.whitening
    lengths = [steepest_by_products(density, whitening, place) for place in places]
    steepest = max([length for length in lengths if math.isfinite(length)], default=1.0)
    kernel = problem.engine.kernel
    safety = TRAINING.safety if whitening is None else TRAINING.safety_whitened
    lr = safety * largest_stable_lr(kernel, max(steepest, 1e-12))
    longest = getattr(kernel.theory, "largest_lr", math.inf)
    return problem.with_lr(min(lr, longest))


def prepare_in_batches(
    prepare: Callable[[Data], Problem],
    data: Data,
    in_batches_of: Callable[[int], Data],
    tunes: bool,
) -> Problem:
    """The model on its data, in batches of a size that fits many rows, or a network.

    Args:
        prepare: understands the model on some data.
        data: as the user passed them: all rows, or in a loader's batches.
        in_batches_of: the data in batches of a size.
        tunes: whether control variates and step size are chosen, too; if not, a step takes all rows
            of tensors.
    """
    if data.batch_size is not None:  # a loader's
        return prepare(data)
    problem = None
    if tunes and (data.num_data or 0) > TRAINING.few_rows:
        problem = _prepared(prepare, in_batches_of, TRAINING.batch)
    problem = problem or prepare(data)
    num_data = problem.log_posterior.num_data
    size = TRAINING.network_batch
    if tunes and is_network(problem) and not is_small(problem) and num_data > size:
        problem = _prepared(prepare, in_batches_of, size) or problem
    # a model that subsamples by itself has batches of its own
    is_plain = isinstance(problem.data, TensorData)
    return dataclasses.replace(problem, chooses_batches=is_plain)


def _prepared(
    prepare: Callable[[Data], Problem], in_batches_of: Callable[[int], Data], size: int
) -> Problem | None:
    """The problem in batches of a size; None for a model of all rows together."""
    with contextlib.suppress(ModelError, ArgumentError):
        return prepare(in_batches_of(size))
    return None
