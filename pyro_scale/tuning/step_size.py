"""What is chosen without a geometry, at the mode: control variates, known noise, and the step size
of least predicted error, by the Laplace approximation.

On that Gaussian a kernel's behavior is known exactly (`kernels/gaussian.py`): the bias of the step
and of minibatches, how long the start is remembered, and how far averages over the run scatter.
Short steps scatter and remember; long steps are biased.  The step size in between with the least
error is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.warn import warn
from pyro_scale.data.batches import batches_from
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import ArgumentError, BiasWarning
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.kernels import Kernel
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Linearized, Theory
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.run.problem import Problem, position_of
from pyro_scale.tuning.choice import Asked
from pyro_scale.tuning.gradient_noise import row_gradients
from pyro_scale.tuning.heat import with_control_variates, with_known_noise
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.policy import STEP_SIZE

#: Step sizes that are compared: down from the largest that is used, so many to a decade.
_PER_DECADE, _DECADES = 12, 5
#: What to do where there is no mode.
_WITHOUT_MODE = "pass a number for lr, and control_variates as a dict of values"


class StepSize(NamedTuple):
    """A step size, its predicted error in posterior sds, and how it was chosen in words."""

    lr: float
    error: float
    reason: str


@dataclass(frozen=True)
class Modes:
    """A Gaussian posterior in coordinates in which the kernel's metric is 1 and its elements are
    independent.

    Attributes:
        precision: of each mode, over N, `[modes]`.
        steepest: the largest precision over N at the mode and at draws around it, 0-d.
        noise: the variance of the minibatch gradient over N along each mode, `[modes]`.
        starts: where chains start, from the mode, `[chains, modes]`.
        loadings: the square of what each mode adds to each element, `[D, modes]`.
        scale: the root mean square of an element where a mode is 1, 0-d.
    """

    precision: Tensor
    steepest: Tensor
    noise: Tensor
    starts: Tensor
    loadings: Tensor
    scale: Tensor


def tune(
    problem: Problem, asked: Asked, steps: Steps, sampling: Sampling
) -> tuple[Problem, dict[str, str]]:
    """(The problem with step size, control variates and known noise, the reason of the step size).

    Raises:
        ArgumentError: the model has no mode that can be found, or is too large.
        DataError: the data do not hold all N rows.
    """
    if not (asked.lr or asked.anchor or asked.subtract_noise):
        return problem, {}
    if asked.lr:
        check(problem)
    density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    mode, choice = _mode(problem, density, asked.anchor), {}
    if asked.anchor:
        problem = with_control_variates(problem, density, mode)
    if asked.subtract_noise:
        problem = with_known_noise(problem, mode, sampling)
    if asked.lr:
        chosen = choose_step_size(problem, density, mode, steps, sampling)
        _warn_of_a_large_error(chosen, bool(asked.anchor))
        problem = problem.with_lr(chosen.lr)
        choice = {"lr_choice": chosen.reason}
    if asked.subtract_noise:
        _warn_of_what_is_left(problem)
    return problem, choice


def _mode(
    problem: Problem, density: FullDataDensity, anchor: bool | Mapping[str, Tensor]
) -> Tensor:
    if isinstance(anchor, Mapping):
        return position_of(problem, anchor, "control_variates")
    return density.mode(problem.positions[0], _WITHOUT_MODE)


def check_target(problem: Problem) -> None:
    """Refuses what there is neither a geometry nor a step size to choose for.

    Raises:
        ArgumentError: temperature 0; points.
    """
    engine = problem.engine
    if engine.kernel.values(0)["temperature"] == 0:
        raise ArgumentError(
            "temperature=0 is an optimizer, whose draws have no spread to whiten by: leave "
            "precondition out, or pass a temperature above 0"
        )
    if engine.has_points:
        raise ArgumentError(
            "lr='auto' and precondition are for models whose parameters are all latents: this one "
            f"has {list(problem.log_posterior.points)}; pass a number for lr, and precondition=None"
        )


def check(problem: Problem) -> None:
    """Refuses what no step size can be chosen for, before the mode is looked for.

    Raises:
        ArgumentError: temperature 0; points; too many dimensions.
    """
    check_target(problem)
    size, most = problem.engine.layout.size, STEP_SIZE.most_dimensions
    if size > most:
        raise ArgumentError(
            f"lr='auto' needs the Hessian at the mode, and has room for {most} dimensions; the "
            f"model has {size}: pass a number for lr"
        )


def choose_step_size(
    problem: Problem, density: FullDataDensity, mode: Tensor, steps: Steps, sampling: Sampling
) -> StepSize:
    """The step size of least predicted error.

    Args:
        problem: the model, the chains' starts and the kernel, whose lr is not used.
        density: of all rows.
        mode: the posterior's, [D].
        steps: of the run.
        sampling: how rows are drawn.

    Raises:
        ArgumentError: no curvature at the mode, or no gradients of single rows.
    """
    modes = _modes(problem, density, mode, sampling)
    epoch = problem.epoch(sampling)
    highest = min(_largest_stable(problem, modes.steepest), _theory(problem).largest_lr)
    decades = -torch.arange(_PER_DECADE * _DECADES + 1, dtype=torch.float64) / _PER_DECADE
    candidates = STEP_SIZE.safety * highest * 10**decades
    errors = torch.stack([_error(problem, modes, lr, steps, epoch) for lr in candidates])
    best = int(errors.sum(1).argmin())
    lr = float(f"{float(candidates[best]):.2g}")
    bias, scatter = errors[best].sqrt().tolist()
    return StepSize(
        lr,
        (bias**2 + scatter**2) ** 0.5,
        f"lr={lr:g}, the least error of means and log sds predicted at the mode: {bias:.2g} by "
        f"bias and {scatter:.2g} by Monte Carlo (posterior sds, root mean square over elements); "
        f"stable below about {highest:.2g}; curvature over N "
        f"{float(modes.precision.min()):.2g} to {float(modes.steepest):.2g}",
    )


def chain_at(kernel: Kernel, lr: float, precision: float = 1.0) -> GaussianChain:
    """The kernel's chain at a step size, on a Gaussian of one dimension, at temperature 1."""
    theory = kernel.theory
    assert theory is not None
    one = torch.ones(1, dtype=torch.float64)
    values: Values = {**dataclasses.replace(kernel, lr=lr).values(0), "temperature": one[0]}
    settled, values, _ = theory.linearize(kernel, values, torch.zeros_like(one))
    return GaussianChain.from_kernel(settled, values, one * precision)


def _values(problem: Problem, lr: Tensor) -> Values:
    """The kernel's values at a step size."""
    return problem.engine.kernel_values({**problem.engine.kernel.values(0), "lr": lr})


def _theory(problem: Problem) -> Theory:
    """The kernel's."""
    theory: Theory = problem.engine.kernel.theory
    return theory


def _modes(problem: Problem, density: FullDataDensity, mode: Tensor, sampling: Sampling) -> Modes:
    values = _values(problem, torch.ones((), dtype=torch.float64))
    precision = -density.hessian(mode).double()
    draws = _draws(mode, precision, values["temperature"], problem.seed)
    rows = _rows(problem, draws, sampling)
    noise = rows.square().mean(0)
    mean_square = values["temperature"] * precision.diagonal().clamp(min=0) + noise
    scale = _theory(problem).metric(values, mean_square).double().sqrt()

    def curvature(precision: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(scale[:, None] * precision * scale)

    lengths, vectors = curvature(precision)
    if not float(lengths.max()) > 0:
        raise ArgumentError(
            "lr='auto': the posterior has no curvature at the mode that was found"
            f"{what_to_try(density, mode)}; or pass a number for lr"
        )
    lengths = _positive(lengths)
    nearby = [-density.hessian(draw).double() for draw in draws]
    around = [curvature(each)[0].max() for each in nearby if bool(torch.isfinite(each).all())]
    return Modes(
        precision=lengths,
        steepest=torch.stack([lengths.max(), *around]).max(),
        noise=(rows * scale @ vectors).square().mean(0),
        starts=(problem.positions - mode).double() / scale @ vectors,
        loadings=(scale[:, None] * vectors).square(),
        scale=scale.square().mean().sqrt(),
    )


def _positive(lengths: Tensor) -> Tensor:
    """Precisions of a Gaussian: where the posterior is flat, or a saddle, nearly none."""
    return lengths.abs().clamp(min=STEP_SIZE.flattest * float(lengths.abs().max()))


def _draws(mode: Tensor, precision: Tensor, temperature: Tensor, seed: int) -> Tensor:
    """Draws from the Gaussian around the mode, `[draws, D]`."""
    lengths, vectors = torch.linalg.eigh(precision)
    source = generator(seed, 0, Purpose.STEP_SIZE)
    normals = torch.randn(STEP_SIZE.draws, len(mode), generator=source, dtype=torch.float64)
    return mode + (normals * (temperature / _positive(lengths)).sqrt() @ vectors.T).to(mode)


def _rows(problem: Problem, draws: Tensor, sampling: Sampling) -> Tensor:
    """Rows' gradients about their mean at each draw, scaled to a minibatch's, `[rows, D]`."""
    size = problem.data.batch_size
    if size is None:
        return torch.zeros(1, problem.engine.num_latents, dtype=torch.float64)
    batches = problem.batches(1, sampling)
    run_batches = batches_from(batches, 0, -(-STEP_SIZE.rows // (size * len(draws))))
    own = [[batch.of_chain(0) for batch in run_batches]] * len(draws)
    rows = row_gradients(problem, problem.engine.density, draws, own)
    if rows is None:
        raise ArgumentError(
            "lr='auto' needs the gradient of single rows, which this model does not give: pass a "
            "number for lr"
        )
    rows = rows.double()
    others = 1 - size / problem.log_posterior.num_data  # of a batch whose rows are all different
    share = 1 / size if sampling == "replacement" else others / size
    return ((rows - rows.mean(1, keepdim=True)) * share**0.5).flatten(0, 1)


def _largest_stable(problem: Problem, precision: Tensor) -> float:
    """The largest stable step size at a precision, within 1%."""
    low, high = -8.0, 4.0  # powers of ten
    while high - low > 0.004:
        middle = (low + high) / 2
        lr = torch.tensor(10**middle, dtype=torch.float64)
        kernel, values, _ = _linearize(problem, lr, torch.zeros_like(precision[None]))
        stable = bool(GaussianChain.from_kernel(kernel, values, precision[None]).stable.all())
        low, high = (middle, high) if stable else (low, middle)
    return float(10**low)


def _linearize(problem: Problem, lr: Tensor, noise: Tensor) -> Linearized:
    """What the kernel settles to at a step size, on a Gaussian."""
    return _theory(problem).linearize(problem.engine.kernel, _values(problem, lr), noise)


def _error(problem: Problem, modes: Modes, lr: Tensor, steps: Steps, epoch: int | None) -> Tensor:
    """The predicted mean square error of means and log sds, in posterior sds: [by bias, by Monte
    Carlo]."""
    kernel, values, noise = _linearize(problem, lr, modes.noise)
    chain = GaussianChain.from_kernel(kernel, values, modes.precision)
    taken = steps.total - steps.warmup_steps
    if problem.engine.known_noise is not None:  # heats by what is left above the injected noise
        added = _theory(problem).added_temperature(values, noise)
        noise = noise * ((added - values["temperature"]) / added).clamp(min=0).nan_to_num()
    exact = values["temperature"] / modes.precision
    covariance = chain.covariance(noise, epoch)
    of_mean, of_square = chain.autocorrelation_times(covariance)
    far = (modes.starts, modes.starts * modes.precision)
    far_off, steep = (each.square().mean().sqrt() for each in far)
    way = _theory(problem).traveling_steps(_values(problem, lr), far_off, steep, modes.scale)
    late = int(steps.warmup_steps - way.clamp(max=steps.total))
    path, square = chain.forgetting(max(0, late), taken)
    num_chains = len(modes.starts)

    def over_elements(of_modes: Tensor) -> Tensor:
        """Variances of elements over their exact variance, from those of modes."""
        return modes.loadings @ of_modes / (modes.loadings @ exact)

    offset = over_elements((modes.starts.mean(0) * path).square())
    variance = covariance[:, 0, 0].clamp(min=STEP_SIZE.least_variance * exact)
    remembered = modes.starts.square().mean(0) * square
    log_sd = over_elements(variance + remembered).log() / 2
    share = (of_mean / taken).clamp(max=1) / num_chains
    scatter = over_elements(variance * share)
    spread = over_elements(variance * (of_square / taken).clamp(max=1) / num_chains) / 2
    bias = offset.mean() + log_sd.square().mean()
    error = torch.stack([bias, scatter.mean() + spread.mean()])
    sound = bool(chain.stable.all()) and bool(torch.isfinite(error).all())
    return error if sound else torch.full_like(error, torch.inf)


def _warn_of_a_large_error(chosen: StepSize, control_variates: bool) -> None:
    if chosen.error > STEP_SIZE.large_error:
        others = "" if control_variates else ", control_variates=True,"
        warn(
            BiasWarning,
            f"lr='auto': with these steps, even the best step size is predicted to leave an error "
            f"of {chosen.error:.2g} posterior sds ({chosen.reason}): take more steps or larger "
            f"batches{others} or bring the sites to one scale (standardized data, mass by site)",
            code="step-size",
        )


def _warn_of_what_is_left(problem: Problem) -> None:
    """Warns where minibatches bring more noise than the step injects: subtracting stops at none."""
    engine, kernel = problem.engine, problem.engine.kernel
    values = engine.kernel_values(kernel.values(0))
    added = kernel.theory.added_temperature(values, engine.known_noise)[: engine.num_latents]
    injected = values["temperature"].expand(engine.layout.size)[: engine.num_latents]
    over = added > injected
    if bool(over.any()):
        first = int(torch.nonzero(over)[0])
        warn(
            BiasWarning,
            f"subtract_noise: minibatch noise exceeds the injected noise at {int(over.sum())} of "
            f"{len(over)} elements (site '{engine.layout.site_at(first)}'), so their temperature "
            f"stays up to {float((added / injected).max()):.3g} times too high: multiply lr by "
            f"less than {float((injected / added).min()):.2g}, or raise batch_size",
        )
