"""What `"auto"` stands for in networks, and in any model at temperature 0: training.

an optimizer from each chain's own start  ->  a network a chain, whose loss no longer falls
the curvature where it ended              ->  a step size that is stable there
as many steps as training took            ->  warm-up, and three times as many for the draws
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.rng import Purpose, derived_seed
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import NonFiniteError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.kernels import MAP, Kernel
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.optimizer import as_optimizer
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.choice import Asked, Choice, Simulate
from pyro_scale.tuning.curvature import steepest_by_products
from pyro_scale.tuning.early_stopping import EarlyStopping

#: Weights up to which a network is sampled as any other posterior.
FEW_WEIGHTS = 500
#: Epochs between two looks at the loss, and steps at least; training takes four of these or more.
_EPOCHS, _STEPS = 5, 50
#: Looks after which training ends, whether the loss still falls or not.
_MOST_LOOKS = 60
#: Rows that the curvature is taken from.
_ROWS = 2_000
#: The part of the stable step sizes that is taken, and steps of 10% that the search for it takes.
_SAFETY, _MOST_STEPS = 0.5, 400
#: Steps from the first draw to the last, for each of training.
_LENGTH = 3
#: Draws of the last window at which the curvature is looked at, of each chain.
_LOOKS = 4

#: Takes steps with an optimizer: (problem, steps, seed, stop, steps between asking it) -> draws.
Optimize = Callable[[Problem, Steps, int, Callable[[Draws], bool], int], Draws]


def is_network(problem: Problem) -> bool:
    """Whether weights of an `nn.Module` are too many to have one mode with a geometry."""
    sites = problem.log_posterior.model_info.sites.values()
    has_weights = any(WEIGHT in site.infer for site in sites if site.kind == "latent")
    return has_weights and problem.engine.layout.size > FEW_WEIGHTS


def train(
    problem: Problem, asked: Asked, optimize: Optimize, simulate: Simulate, budget: Budget
) -> Choice:
    """Chains at trained networks, with a step size that is stable there.

    At temperature 0 what training ends with is the one draw of each chain.  Else chains go on from
    there: for as many steps as training took until the first draw, and for three times as many to
    the last.  A start that was given is taken as trained, unless the temperature is 0.

    Raises:
        NonFiniteError: a chain's loss became NaN or infinite.
    """
    kernel, seed = problem.engine.kernel, problem.seed
    temperature = float(kernel.values(0)["temperature"])
    num_data, size = problem.log_posterior.num_data, problem.engine.layout.size
    epoch = -(-num_data // (problem.data.batch_size or num_data))
    stopping = EarlyStopping(max(_EPOCHS * epoch, _STEPS), size)
    trained, ended = 4 * stopping.window, True
    if asked.starts or temperature == 0:
        most = min(_MOST_LOOKS * stopping.window, max(1, budget.steps(problem) // 2))

        def stop(draws: Draws) -> bool:
            return budget.is_over or stopping.reached(draws)

        optimizer = problem.with_engine(kernel=MAP(optimizer=as_optimizer(None)))
        draws = optimize(
            optimizer,
            Steps(most, positions=False),
            derived_seed(seed, 0, Purpose.SEARCH),
            stop,
            stopping.window,
        )
        if draws.error is not None:
            raise draws.error
        if draws.failures:
            raise NonFiniteError(
                f"chain {draws.failures[0].chain}: the loss became NaN or infinite while it was "
                "trained: scale the data, or start from a trained network "
                "(init_strategy=ps.init_to_module, or a fit)"
            )
        trained, ended = draws.num_steps, stopping.reached(draws)
        problem = dataclasses.replace(problem, positions=draws.state.position.detach())
    whole = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    density = whole.of_some_rows(_ROWS, seed)
    problem = _with_stable_lr(problem, density, problem.positions)
    taken, steps = trained, Steps(1, 0, 1)
    if temperature > 0:
        every = max(1, trained // _LOOKS)
        warmup = Steps(-(-(asked.warmup_steps or trained) // every), 0, every)
        columns = problem.engine.kernel.columns(warmup.total)
        draws = simulate(problem, warmup, derived_seed(seed, 0, Purpose.WINDOW), columns)
        if draws.error is not None:
            raise draws.error
        positions = problem.positions.clone()
        positions[draws.finished] = draws.positions[draws.finished, -1].to(positions)
        problem = dataclasses.replace(problem, positions=positions)
        seen = draws.positions[draws.finished].flatten(0, 1).to(problem.positions)
        problem = _with_stable_lr(problem, density, seen)
        taken += draws.num_steps
        thinning = asked.thinning or -(-_LENGTH * trained // asked.num_samples)
        steps = Steps(asked.num_samples, 0, thinning)
    told = "until the loss no longer fell" if ended else "while the loss still fell"
    lr = f"lr={float(problem.engine.kernel.lr):.3g}"
    reasons = {
        "start": f"{trained:,} steps of Adam from each chain's own start, {told}"
        if asked.starts or temperature == 0
        else "as it was given",
        "step size": f"{lr}, half of what is stable at the largest curvature that was seen",
    }
    attrs: dict[str, Any] = {"lr_choice": reasons["step size"], "thinning": steps.thinning}
    attrs |= {"warmup_steps": taken, "trained_steps": trained}
    evaluations = taken * len(problem.positions)
    return Choice(problem, steps, None, None, None, evaluations, attrs, reasons, trained=trained)


def _with_stable_lr(problem: Problem, density: FullDataDensity, places: Tensor) -> Problem:
    """With half of the step size that is stable at the steepest of some places, `[places, D]`."""
    lengths = [steepest_by_products(density, None, place) for place in places]
    steepest = max([length for length in lengths if math.isfinite(length)], default=1.0)
    kernel = problem.engine.kernel
    lr = _SAFETY * _largest_stable(kernel, max(steepest, 1e-12))
    longest = getattr(kernel.theory, "largest_lr", math.inf)
    return problem.with_engine(kernel=dataclasses.replace(kernel, lr=min(lr, longest)))


def _largest_stable(kernel: Kernel, precision: float) -> float:
    """About the largest step size at which the kernel is stable on a Gaussian."""
    theory = kernel.theory
    assert theory is not None
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    lr = 10.0
    for _ in range(_MOST_STEPS):
        values: Values = dataclasses.replace(kernel, lr=lr).values(0)
        values = {**values, "temperature": torch.ones((), dtype=torch.float64)}
        settled, values, _ = theory.linearize(kernel, values, none)
        if bool(GaussianChain.of(settled, values, one * precision).stable.all()):
            break
        lr /= 1.1
    return lr
