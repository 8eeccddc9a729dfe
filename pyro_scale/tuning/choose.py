"""Everything that `"auto"` stands for: starts, geometry, step size, lengths.

modes of the posterior  ->  a Gaussian, in whose coordinates it is about isotropic
windows of warm-up      ->  the geometry that draws have, a step size that is stable there
coupled pilots          ->  a step size whose bias is small
autocorrelation         ->  a thinning at which draws are nearly independent
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Gaussian
from pyro_scale.core.rng import Purpose, RefinedNoise, generator
from pyro_scale.core.whitening import DenseWhitening, DiagonalWhitening, Whitening
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import ArgumentError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.kernels import Kernel
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.modes import Modes, find_modes
from pyro_scale.tuning.pilot import Pilot, pilot
from pyro_scale.tuning.windows import Window, warm_up

#: What chains move in: coordinates whitened by a matrix or by elements, or latents themselves.
Precondition: TypeAlias = Literal["auto", "dense", "diag"] | Gaussian | None

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
#: Steps from one draw to the next, at most.
_MOST_THINNING = 4096

#: Runs chains: (problem, values, steps, seed, noise) -> draws.
Simulate = Callable[..., Draws]


@dataclass(frozen=True)
class Asked:
    """What is to be chosen.

    Attributes:
        lr: whether the step size is.
        friction: whether the friction is.
        precondition: the geometry.
        starts: whether chains' starts are.
        num_samples: draws of each chain.
        warmup_steps: steps before the first; None where they are to be chosen.
        thinning: steps from one draw to the next; None likewise.
    """

    lr: bool
    friction: bool
    precondition: Precondition
    starts: bool
    num_samples: int
    warmup_steps: int | None
    thinning: int | None


@dataclass(frozen=True)
class Choice:
    """What was chosen, and how.

    Attributes:
        problem: chains in their stationary law, with kernel and geometry.
        steps: which draws are kept, numbered from the end of warm-up.
        modes: of the posterior, where they were looked for.
        window: the last of warm-up.
        pilot: of the step size.
        evaluations: gradients that it took, of all chains together.
        reasons: of each choice, in words.
    """

    problem: Problem
    steps: Steps
    modes: Modes | None
    window: Window | None
    pilot: Pilot | None
    evaluations: int
    reasons: Mapping[str, str]


def choose(problem: Problem, asked: Asked, density: FullDataDensity, simulate: Simulate) -> Choice:
    """Chooses what is to be chosen, and warms the chains up.

    Raises:
        ArgumentError: chains break at any step size; there is no step size to choose.
    """
    modes, evaluations = None, 0
    whitens = asked.precondition is not None
    if whitens:
        problem, modes = _with_geometry(problem, asked, density)
        evaluations += 0 if modes is None else modes.evaluations
        problem = problem.with_engine(kernel=_kernel(problem.engine.kernel, asked))
    chains, reasons = len(problem.positions), {}

    def run(problem: Problem, steps: Steps, seed: int) -> Draws:
        return simulate(problem, steps, seed, problem.engine.kernel.columns(steps.total))

    def coupled(problem: Problem, steps: Steps, seed: int, halved: bool) -> Draws:
        if not halved:
            return run(problem, steps, seed)
        steps = Steps(steps.num_samples, 0, 2 * steps.thinning)
        columns = dict(problem.engine.kernel.columns(steps.total))
        columns["lr"] = columns["lr"] / 2
        positions, shape = (
            problem.positions,
            (problem.engine.kernel.normals, problem.engine.num_latents),
        )
        noise = RefinedNoise(seed, chains, shape, positions.dtype, positions.device)
        return simulate(problem, steps, seed, columns, noise)

    adapts = whitens and asked.lr
    window = warm_up(problem, run, density if whitens else None)
    if window is None:
        raise ArgumentError(
            "every chain becomes NaN or infinite in warm-up, at any step size that was tried: start "
            "elsewhere (init_strategy=), or bring the sites to one scale"
        )
    problem, tried, time = window.problem, None, window.time
    evaluations += chains * window.steps + window.hessians * len(problem.positions[0])
    if adapts:
        theory = problem.engine.kernel.theory
        tried = pilot(
            problem, coupled, window.time, asked.lr, 1 if theory is None else theory.order
        )
        problem, time = tried.problem, tried.time
        evaluations += chains * tried.steps
    thinning = asked.thinning or min(_MOST_THINNING, max(1, round(time)))
    steps = Steps(asked.num_samples, 0, thinning)
    return Choice(problem, steps, modes, window, tried, evaluations, reasons)


def _with_geometry(
    problem: Problem, asked: Asked, density: FullDataDensity
) -> tuple[Problem, Modes | None]:
    """Chains at their starts, in whitened coordinates."""
    num_data, like = problem.log_posterior.num_data, problem.positions
    temperature = float(problem.engine.kernel.values(0)["temperature"])
    if not isinstance(asked.precondition, str):
        gaussian = asked.precondition
        assert gaussian is not None
        modes = None
    else:
        modes = find_modes(density, _search_starts(problem), temperature, problem.seed)
        gaussian = modes.best.gaussian
    is_dense = asked.precondition == "dense" or (
        asked.precondition == "auto" and len(gaussian.mean) <= _DENSE
    )
    is_dense = is_dense or (isinstance(asked.precondition, Dense))
    problem = problem.with_engine(whitening=_whitening(gaussian, is_dense, num_data, like))
    if asked.starts:
        problem = dataclasses.replace(problem, positions=_starts(problem, density, modes, gaussian))
    return problem, modes


def _search_starts(problem: Problem) -> Tensor:
    """Where searches for modes begin: chains' own starts."""
    count = max(_FEWEST_SEARCHES, min(len(problem.positions), _MOST_SEARCHES))
    return problem.positions[: min(count, len(problem.positions))]


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
            value, gradient = density.grad(center + away)
            if float(value) > lowest and bool(torch.isfinite(gradient).all()):
                break
            away = away / 2
        positions[chain] = center + away
    return positions


def _kernel(kernel: Kernel, asked: Asked) -> Kernel:
    """With the friction of whitened coordinates, and the longest step size there."""
    if asked.friction and hasattr(kernel, "friction"):
        kernel = dataclasses.replace(kernel, friction=FRICTION)
    if asked.lr:
        kernel = dataclasses.replace(kernel, lr=longest_lr(kernel))
    return kernel


def longest_lr(kernel: Kernel) -> float:
    """The longest step size whose law on a standard normal has nearly its sd."""
    theory = kernel.theory
    assert theory is not None
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for lr in torch.linspace(0, -3, 61, dtype=torch.float64):
        length = min(_LONGEST_LR * 10 ** float(lr), theory.largest_lr)
        values = kernel.per_datum(dataclasses.replace(kernel, lr=length).values(0), 1)
        values = {**values, "temperature": torch.ones((), dtype=torch.float64)}
        settled, values, _ = theory.linearize(kernel, values, none)
        chain = GaussianChain.of(settled, values, one)
        if bool(chain.stable.all()):
            sd = float(chain.covariance(none)[0, 0, 0]) ** 0.5
            if abs(math.log(sd)) <= _SD_BIAS:
                return float(f"{length:.3g}")
    raise ArgumentError("lr='auto': no step size samples a standard normal; pass a number for lr")
