"""Everything that `"auto"` stands for: starts, geometry, step size, lengths.

modes of the posterior  ->  a Gaussian, in whose coordinates it is about isotropic
windows of warm-up      ->  the geometry that draws have, a step size that is stable there
coupled pilots          ->  a step size whose bias is small
autocorrelation         ->  a thinning at which draws are nearly independent
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian
from pyro_scale.core.rng import Purpose, RefinedNoise, generator
from pyro_scale.core.validation import evenly
from pyro_scale.core.whitening import DenseWhitening, DiagonalWhitening, Whitening
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import ArgumentError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.kernels import Kernel
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.model.hierarchy import centered_latents, how_to_non_center
from pyro_scale.run.budget import Budget, rows_a_step
from pyro_scale.run.problem import Problem, position_of
from pyro_scale.tuning.adjust import adjust, without_adjustment
from pyro_scale.tuning.choice import Asked, Choice, Simulate
from pyro_scale.tuning.gradient_noise import most_noise
from pyro_scale.tuning.modes import Modes, find_diagonal_modes, find_modes, flat_direction
from pyro_scale.tuning.pilot import LEAST_PILOT, Pilot, pilot
from pyro_scale.tuning.step_size import check_target
from pyro_scale.tuning.tune import with_control_variates, with_known_noise
from pyro_scale.tuning.windows import FIRST_WINDOW, Window, warm_up

#: Dimensions up to which a matrix whitens, unless one is asked for.
_DENSE = 500
#: Searches for modes: the fewest and the most.
_FEWEST_SEARCHES, _MOST_SEARCHES = 4, 8
#: How far chains start from the mode, in its Gaussian's sds.
_DISPERSION = 2.0
#: Nats below the mode, for each dimension and in all, at which no chain starts.
_DEEP_EACH, _DEEP = 4.0, 10.0
#: Times that a start is moved to halfway from the mode, and the part of it that is then left.
_MOST_HALVINGS = 40
#: The step size in whitened coordinates: at most this, and none whose law of a standard normal has
#: an sd that is off by more.
_LONGEST_LR, _SD_BIAS = 0.5, 0.015
#: The friction in whitened coordinates: about that which lets all directions relax fastest.
FRICTION = 1.0
#: What minibatches may add to the temperature, in the direction where they add most.
_MOST_HEAT = 0.04
#: Rows that searches for modes and looks at the curvature take: at most and at least, and rows
#: times dimensions, each of which a Hessian goes back through them for.
_MOST_ROWS, _LEAST_ROWS, _MOST_WORK = 20_000, 2_000, 2**20
#: Draws at which the noise of minibatches is looked at.
_PLACES = 4


def choose(
    problem: Problem, asked: Asked, sampling: Sampling, simulate: Simulate, budget: Budget
) -> Choice:
    """Chooses what is to be chosen, and warms the chains up.

    Raises:
        ArgumentError: chains break at any step size; there is no step size to choose; the budget
            is too small for a warm-up.
    """
    modes, density, evaluations = None, None, 0
    if asked.precondition is not None:
        check_target(problem)
        whole = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
        affordable = max(_LEAST_ROWS, _MOST_WORK // whole.layout.size)
        density = whole.of_some_rows(min(_MOST_ROWS, affordable), problem.seed)
        problem, modes = _with_geometry(problem, asked, density, whole)
        evaluations += 0 if modes is None else modes.evaluations
        problem = _with_anchor(problem, asked, whole)
        problem = problem.with_engine(kernel=_kernel(problem.engine.kernel, asked))
        if asked.lr:
            problem = _cooled(problem, problem.positions, sampling)
        if asked.subtract_noise:
            problem = with_known_noise(problem, _center(problem), sampling)

    def run(problem: Problem, steps: Steps, seed: int) -> Draws:
        return simulate(problem, steps, seed, problem.engine.kernel.columns(steps.total))

    def coupled(problem: Problem, steps: Steps, seed: int, halved: bool) -> Draws:
        return (
            _at_half_step(problem, steps, seed, simulate) if halved else run(problem, steps, seed)
        )

    most_steps = budget.steps(problem)
    reserve = asked.num_samples + (3 * LEAST_PILOT if asked.lr else 0)
    least = FIRST_WINDOW + reserve
    if most_steps < least:
        needed = least * len(problem.positions) * rows_a_step(problem)
        raise ArgumentError(
            f"max_rows={budget.max_rows:,} is {most_steps:,} steps a chain, and warm-up and draws "
            f"take {least:,} at least: pass max_rows={needed:,} or more, or fewer num_samples"
        )
    for_windows = max(FIRST_WINDOW, (most_steps - reserve) // 2)
    kernel, adjusts = problem.engine.kernel, asked.lr and problem.engine.kernel.adjusted
    if adjusts:  # a chain that rejects all proposals would stay where it starts
        problem = problem.with_engine(kernel=_kernel(without_adjustment(kernel), asked))
    window = warm_up(problem, run, density if asked.lr else None, for_windows, budget)
    if window is None:
        raise _no_warm_up(problem, density)
    chains, problem, tried, time = len(problem.positions), window.problem, None, window.time
    evaluations += chains * window.steps + window.hessians * len(problem.positions[0])
    adjusted = None
    left = max(3 * LEAST_PILOT, (most_steps - asked.num_samples - window.steps) // 2)
    if adjusts:
        stable = float(problem.engine.kernel.lr)
        adjusted = adjust(problem.with_engine(kernel=kernel), run, stable, left, budget)
        problem, time = adjusted.problem, adjusted.time
        evaluations += chains * adjusted.steps
    elif asked.lr:
        if density is not None:
            if asked.anchor is True:
                problem = _with_anchor(problem, asked, whole)
            problem = _cooled(problem, _some(window.draws), sampling)
        theory = problem.engine.kernel.theory
        order = 1 if theory is None else theory.order
        tried = pilot(problem, coupled, time, order, left, budget)
        problem = tried.problem
        time = tried.time if math.isfinite(tried.time) else time
        evaluations += chains * tried.steps
    taken = window.steps + sum(each.steps for each in (tried, adjusted) if each is not None)
    most = max(1, (most_steps - taken) // asked.num_samples)
    needed = max(1, math.ceil(time)) if math.isfinite(time) else most
    thinning = asked.thinning or min(most, needed)
    steps = Steps(asked.num_samples, asked.warmup_steps or 0, thinning)
    reasons = _reasons(problem, modes, window, tried, thinning)
    if adjusted is not None:
        reasons["step size"] = adjusted.reason
    attrs: dict[str, Any] = {"lr_choice": reasons["step size"], "thinning": thinning}
    if asked.warmup_steps is None:
        attrs["warmup_steps"] = taken
    return Choice(problem, steps, modes, window, tried, evaluations, attrs, reasons)


def _no_warm_up(problem: Problem, density: FullDataDensity | None) -> ArgumentError:
    """What to say where no step size is stable."""
    position = problem.positions[0]
    flat = "" if density is None else flat_direction(density, position)
    advice = "give the sites proper priors, or start elsewhere (init_strategy=)"
    log_posterior, params = problem.log_posterior, problem.engine.layout.unflatten(position)
    centered = centered_latents(log_posterior, params, problem.data.first())
    for site, parents in list(centered.items())[:1]:
        advice = f"try {how_to_non_center(site, parents)}"
    return ArgumentError(
        "every chain becomes NaN or infinite in warm-up, at any step size that was tried"
        f"{flat}: {advice}"
    )


def _at_half_step(problem: Problem, steps: Steps, seed: int, simulate: Simulate) -> Draws:
    """As many draws at half the step size, on the same path of noise."""
    engine, positions = problem.engine, problem.positions
    steps = Steps(steps.num_samples, 0, 2 * steps.thinning)
    columns = dict(engine.kernel.columns(steps.total))
    columns["lr"] = columns["lr"] / 2
    shape = engine.kernel.normals, engine.num_latents
    noise = RefinedNoise(seed, len(positions), shape, positions.dtype, positions.device)
    return simulate(problem, steps, seed, columns, noise)


def _with_geometry(
    problem: Problem, asked: Asked, density: FullDataDensity, whole: FullDataDensity
) -> tuple[Problem, Modes | None]:
    """Chains at their starts, in whitened coordinates.

    Args:
        problem: chains where the user, or the library, would have them start.
        asked: for what.
        density: of some rows, where searches begin.
        whole: of all rows, where they end.
    """
    num_data, like = problem.log_posterior.num_data, problem.positions
    modes, gaussian = None, asked.precondition
    if isinstance(gaussian, str):
        starts = _search_starts(problem) if asked.starts else like[:_MOST_SEARCHES]
        temperature = float(problem.engine.kernel.values(0)["temperature"])
        if len(like[0]) <= _DENSE or asked.precondition == "dense":
            modes = find_modes(density, starts, temperature, problem.seed)
        else:
            modes = find_diagonal_modes(density, starts, temperature)
        gaussian = modes.best.gaussian
        if density is not whole:
            polished = [
                mode._replace(gaussian=_polished(mode.gaussian, whole, temperature, like))
                for mode in modes.modes
            ]
            modes = dataclasses.replace(modes, modes=tuple(polished))
            gaussian = modes.best.gaussian
    assert gaussian is not None
    is_dense = asked.precondition == "dense" or (
        asked.precondition != "diag" and len(gaussian.mean) <= _DENSE
    )
    problem = problem.with_engine(whitening=_whitening(gaussian, is_dense, num_data, like))
    if asked.starts:
        problem = dataclasses.replace(problem, positions=_starts(problem, density, modes, gaussian))
    return problem, modes


def _polished(
    gaussian: Gaussian, whole: FullDataDensity, temperature: float, like: Tensor
) -> Gaussian:
    """The Gaussian at the mode of all rows, which is near."""
    if isinstance(gaussian, Diagonal):
        return Diagonal(whole.lbfgs(gaussian.mean.to(like), "").position.double(), gaussian.sd)
    precision = gaussian.precision * temperature
    places = torch.arange(len(gaussian.mean))
    position, _ = whole.newton_refine(
        gaussian.mean.to(like), lambda _: precision.to(like) / whole.log_posterior.num_data, places
    )
    return Dense(position.double(), gaussian.scale_tril)


def _center(problem: Problem) -> Tensor:
    """The center of the geometry, as a position."""
    whitening = problem.engine.whitening
    assert whitening is not None
    return whitening.tensors[0]


def _some(draws: Tensor) -> Tensor:
    """Few of the draws `[chains, draws, D]`, from everywhere, `[few, D]`."""
    flat = draws.flatten(0, 1)
    return flat[evenly(len(flat), _PLACES)]


def _with_anchor(problem: Problem, asked: Asked, whole: FullDataDensity) -> Problem:
    """With control variates at the center of the geometry, or where they were asked for."""
    if problem.data.batch_size is None or asked.anchor is False:
        return problem
    if isinstance(asked.anchor, Mapping):
        return with_control_variates(
            problem, whole, position_of(problem, asked.anchor, "control_variates")
        )
    return with_control_variates(problem, whole, _center(problem))


def _cooled(problem: Problem, positions: Tensor, sampling: Sampling) -> Problem:
    """With a step size at which minibatches hardly heat."""
    kernel = problem.engine.kernel
    theory = kernel.theory
    if problem.data.batch_size is None or theory is None or not theory.heated:
        return problem
    noise = most_noise(problem, positions, sampling)
    if noise is None:
        return problem
    values = problem.engine.kernel_values(kernel.values(0))
    added = theory.added_temperature(values, torch.tensor(noise, dtype=torch.float64))
    heat = float((added / values["temperature"]).max())
    lr = float(kernel.lr) * min(1.0, _MOST_HEAT / max(heat, 1e-300))
    return problem.with_engine(kernel=dataclasses.replace(kernel, lr=lr))


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
        by = "a matrix" if isinstance(whitening, DenseWhitening) else "elements"
        found["geometry"] = f"whitened by {by}, from the draws of {window.steps} steps of warm-up"
    lr = float(kernel.lr)
    if tried is None:
        found["step size"] = f"lr={lr:.3g}, as it was set"
    elif tried.bias is None:
        found["step size"] = f"lr={lr:.3g}; its bias could not be measured"
    else:
        found["step size"] = (
            f"lr={lr:.3g}{' in whitened coordinates' if whitening is not None else ''}: by a "
            "coupled run at half of it, the bias is "
            f"{float(tried.bias.mean.abs().max()):.2g} sds in means and "
            f"{100 * float(tried.bias.log_sd.abs().max()):.2g}% in sds at most"
        )
    found["thinning"] = f"{thinning} steps from one draw to the next, about as many as they need"
    return found


def _search_starts(problem: Problem) -> Tensor:
    """Where searches for modes begin: chains' own starts, or opposite of the one before; and more
    where chains are few."""
    starts, log_posterior = list(problem.positions[:_MOST_SEARCHES]), problem.log_posterior
    first = problem.data.first()
    for chain in range(len(starts), _FEWEST_SEARCHES):
        init = log_posterior.default_init(chain)
        params = log_posterior.start(first, problem.seed, chain, init)
        starts.append(problem.engine.layout.flatten(params))
    # uniform starts are symmetric about 0: on the other side, they find other modes
    return torch.stack([-starts[i - 1] if i % 2 else start for i, start in enumerate(starts)])


def _whitening(gaussian: Gaussian, is_dense: bool, num_data: int, like: Tensor) -> Whitening:
    """The map to coordinates in which a Gaussian is isotropic, of variance 1/N."""
    center, scale = gaussian.mean.to(like), num_data**0.5
    if is_dense and isinstance(gaussian, Dense):
        return DenseWhitening(center, (gaussian.scale_tril * scale).to(like))
    return DiagonalWhitening(center, (gaussian.variance.sqrt() * scale).to(like))


def _starts(
    problem: Problem, density: FullDataDensity, modes: Modes | None, gaussian: Gaussian
) -> Tensor:
    """Draws at twice the sd of each chain's own mode, where the posterior is."""
    positions, num_data = problem.positions.clone(), problem.log_posterior.num_data
    found = modes.starting_points(len(positions)) if modes else [gaussian] * len(positions)
    for chain, own in enumerate(found):
        source = generator(problem.seed, chain, Purpose.INIT, 1)
        noise = torch.randn(len(own.mean), generator=source, dtype=torch.float64)
        center = own.mean.to(positions)
        away = _DISPERSION * (own.sample(noise) - own.mean).to(positions)
        lowest = float(density.values(center[None])) - (_DEEP_EACH * len(away) + _DEEP) / num_data
        for _ in range(_MOST_HALVINGS):
            with contextlib.suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                value, gradient = density.grad(center + away)
                if float(value) > lowest and bool(torch.isfinite(gradient).all()):
                    break
            away = away / 2
        positions[chain] = center + away
    return positions


def _kernel(kernel: Kernel, asked: Asked) -> Kernel:
    """With the friction of whitened coordinates, and the longest step size there."""
    if asked.friction and hasattr(kernel, "friction") and not kernel.adjusted:
        own: dict[str, Any] = {"friction": FRICTION}
        kernel = dataclasses.replace(kernel, **own)
    if asked.lr and not kernel.adjusted:
        kernel = dataclasses.replace(kernel, lr=longest_lr(kernel))
    return kernel


def longest_lr(kernel: Kernel) -> float:
    """The longest step size whose law on a standard normal has nearly its sd."""
    theory = kernel.theory
    assert theory is not None
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for lr in torch.linspace(0, -3, 61, dtype=torch.float64):
        length = min(_LONGEST_LR * 10 ** float(lr), theory.largest_lr)
        values: Values = dataclasses.replace(kernel, lr=length).values(0)
        values = {**values, "temperature": torch.ones((), dtype=torch.float64)}
        settled, values, _ = theory.linearize(kernel, values, none)
        chain = GaussianChain.of(settled, values, one)
        if bool(chain.stable.all()):
            sd = float(chain.covariance(none)[0, 0, 0]) ** 0.5
            if abs(math.log(sd)) <= _SD_BIAS:
                return float(f"{length:.3g}")
    raise ArgumentError("lr='auto': no step size samples a standard normal; pass a number for lr")
