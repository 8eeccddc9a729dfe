"""Tuning for chains that move in params: control variates and subtracted noise at the mode, and the
step size with the least predicted error.

This is for `precondition=None`, which hyperparameters by site imply, and for kernels that have a
preconditioner (pSGLD).  The posterior is approximated by a Gaussian at its mode (Laplace), on which
a kernel's behavior is known exactly (`kernels/gaussian.py`): the bias by the step and by
minibatches, the slow decay of the start's influence, and the Monte Carlo error of averages over the
run.  With short steps, the start has a long influence and Monte Carlo errors are large; long steps
are biased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.warn import warn
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.modes import find_mode
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import ArgumentError, BiasWarning
from pyro_scale.kernels.gaussian import GaussianChain
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Linearized
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.choice import Settings
from pyro_scale.tuning.control_variates import with_control_variates
from pyro_scale.tuning.gradient_noise import (
    first_batches,
    row_gradients,
    variance_factor,
    with_known_noise,
)
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.policy import STEP_SIZE

#: Candidates for the step size: so many to a decade, for so many decades below the largest.
_PER_DECADE, _DECADES = 12, 5
#: Advice if there is no mode.
_WITHOUT_MODE = "pass a number for lr, and control_variates as a dict of values"


class StepSize(NamedTuple):
    """A step size that was chosen by its predicted error.

    Attributes:
        lr: the step size.
        error: predicted error of posterior means and log sds, in posterior sds, root mean square
            over elements.
        reason: the reason of the choice, a phrase for the report.
    """

    lr: float
    error: float
    reason: str


@dataclass(frozen=True)
class Modes:
    """Normal modes of the posterior at its mode: independent directions of a Gaussian, in
    coordinates in which the kernel's metric is 1.

    Attributes:
        precision: precision along each normal mode, divided by N, `[modes]`.
        steepest: the largest precision divided by N, at the mode and at draws around it, 0-d.
        noise: variance of (minibatch gradient / N) along each normal mode, `[modes]`.
        starts: starts of the chains relative to the mode, along each normal mode,
            `[chains, modes]`.
        loadings: squared change of each element with each normal mode, `[D, modes]`.
        scale: root mean square change of an element with a normal mode, 0-d.
    """

    precision: Tensor
    steepest: Tensor
    noise: Tensor
    starts: Tensor
    loadings: Tensor
    scale: Tensor


def tune(
    problem: Problem,
    settings: Settings,
    anchor: bool | Tensor,
    steps: Steps,
    sampling: Sampling,
) -> tuple[Problem, dict[str, str]]:
    """Chooses the settings that the user has left open (step size, control variates, subtracted
    noise) from the curvature at the mode, for chains that are neither whitened nor warmed up by
    tuning.

    Args:
        problem: chains at their starts.
        settings: settings of the sampler, which say what is to be chosen.
        anchor: whether there are control variates; or their anchor as unconstrained params `[D]`,
            which replaces the mode.
        steps: number of steps and draws of the run.
        sampling: how the rows of batches are drawn.

    Returns:
        The problem with step size, control variates and known noise; a dict with the reason of the
        step size, for the run's `attrs`, empty if the step size was not chosen.

    Raises:
        ArgumentError: no mode was found, or the model is too large.
        DataError: the data do not hold all N rows.
    """
    has_anchor, reason = anchor is not False, dict[str, str]()
    if not (settings.chooses_lr or has_anchor or settings.subtract_noise):
        return problem, reason
    size, most = problem.engine.layout.size, STEP_SIZE.most_dimensions
    if settings.chooses_lr and size > most:
        raise ArgumentError(
            f"lr='auto' needs the Hessian at the mode, and has room for {most} dimensions; the "
            f"model has {size}: pass a number for lr"
        )
    density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    mode = anchor
    if not isinstance(mode, Tensor):
        mode = find_mode(density, problem.positions[0], _WITHOUT_MODE)
    if has_anchor:
        problem = with_control_variates(problem, density, mode)
    if settings.subtract_noise:
        problem = with_known_noise(problem, mode, sampling)
    if settings.chooses_lr:
        choice = choose_step_size(problem, density, mode, steps, sampling)
        _warn_of_large_error(choice, has_anchor)
        problem, reason = problem.with_lr(choice.lr), {"lr_choice": choice.reason}
    if settings.subtract_noise:
        _warn_of_excess_noise(problem)
    return problem, reason


def choose_step_size(
    problem: Problem, density: FullDataDensity, mode: Tensor, steps: Steps, sampling: Sampling
) -> StepSize:
    """The step size with the least predicted error of posterior means and sds, among step sizes at
    which the sampler's kernel is stable, with that error in posterior sds and the reason in words.

    Args:
        problem: the model, the chains' starts, and the kernel, whose lr is not used.
        density: log density of all rows.
        mode: mode of the posterior, as unconstrained params `[D]`.
        steps: number of steps and draws of the run.
        sampling: how the rows of batches are drawn.

    Raises:
        ArgumentError: there is no curvature at the mode, or no gradients of single rows.
    """
    modes, epoch = _modes(problem, density, mode, sampling), problem.epoch(sampling)
    largest = problem.engine.kernel.theory.largest_lr
    highest = min(_largest_stable(problem, modes.steepest), largest)
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


def _modes(problem: Problem, density: FullDataDensity, mode: Tensor, sampling: Sampling) -> Modes:
    """The normal modes of the posterior: independent directions of the Gaussian approximation at
    its mode, with the minibatch noise and the chains' starts along them. From these the error of a
    step size is predicted.

    Args:
        problem: model, kernel and chains at their starts.
        density: log density of all rows.
        mode: mode of the posterior, as unconstrained params `[D]`.
        sampling: how the rows of batches are drawn.

    Raises:
        ArgumentError: there is no curvature at the mode, or no gradients of single rows.
    """
    values = _values_at(problem, torch.ones((), dtype=torch.float64))
    precision = -density.hessian(mode).double()
    draws = _laplace_draws(mode, precision, values["temperature"], problem.seed)
    gradients = _scaled_gradients(problem, draws, sampling)
    noise = gradients.square().mean(0)
    mean_square = values["temperature"] * precision.diagonal().clamp(min=0) + noise
    metric = problem.engine.kernel.theory.metric(values, mean_square)
    scale = metric.double().sqrt()

    def decompose(precision: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(scale[:, None] * precision * scale)

    lengths, vectors = decompose(precision)
    if not float(lengths.max()) > 0:
        raise ArgumentError(
            "lr='auto': the posterior has no curvature at the mode that was found"
            f"{what_to_try(density, mode)}; or pass a number for lr"
        )
    lengths = _positive(lengths)
    nearby = [-density.hessian(draw).double() for draw in draws]
    steepest = [decompose(one)[0].max() for one in nearby if bool(torch.isfinite(one).all())]
    return Modes(
        precision=lengths,
        steepest=torch.stack([lengths.max(), *steepest]).max(),
        noise=(gradients * scale @ vectors).square().mean(0),
        starts=(problem.positions - mode).double() / scale @ vectors,
        loadings=(scale[:, None] * vectors).square(),
        scale=scale.square().mean().sqrt(),
    )


def _positive(lengths: Tensor) -> Tensor:
    """Precisions that a Gaussian can have, from curvatures along directions, `[directions]` each:
    absolute values, but at least a small fraction of the largest, as flat directions have a
    curvature of 0."""
    return lengths.abs().clamp(min=STEP_SIZE.flattest * float(lengths.abs().max()))


def _laplace_draws(mode: Tensor, precision: Tensor, temperature: Tensor, seed: int) -> Tensor:
    """A few draws of the Laplace approximation at a mode, unconstrained, `[draws, D]`, at which
    gradients and curvatures are evaluated.

    Args:
        mode: unconstrained params `[D]`.
        precision: negative Hessian of the log joint at the mode divided by N, `[D, D]`.
        temperature: temperature of the posterior divided by N, 0-d.
        seed: seed of the draws.
    """
    lengths, vectors = torch.linalg.eigh(precision)
    source = generator(seed, 0, Purpose.STEP_SIZE)
    normals = torch.randn(STEP_SIZE.draws, len(mode), generator=source, dtype=torch.float64)
    return mode + (normals * (temperature / _positive(lengths)).sqrt() @ vectors.T).to(mode)


def _scaled_gradients(problem: Problem, draws: Tensor, sampling: Sampling) -> Tensor:
    """Gradients of single rows minus their mean at each draw, `[rows of all draws, D]`, scaled so
    that their mean square is the variance of (minibatch gradient / N); zero without
    minibatches.

    Args:
        problem: model and engine.
        draws: unconstrained params at which gradients are taken, `[draws, D]`.
        sampling: how the rows of batches are drawn.
    """
    size = problem.data.batch_size
    if size is None:
        return torch.zeros(1, problem.engine.num_latents, dtype=torch.float64)
    batches = first_batches(problem, -(-STEP_SIZE.rows // len(draws)), sampling)
    density = problem.engine.density
    gradients = row_gradients(problem, density, draws, [batches] * len(draws))
    if gradients is None:
        raise ArgumentError(
            "lr='auto' needs the gradient of single rows, which this model does not give: pass a "
            "number for lr"
        )
    gradients = gradients.double()
    factor = variance_factor(size, problem.log_posterior.num_data, sampling)
    return ((gradients - gradients.mean(1, keepdim=True)) * factor**0.5).flatten(0, 1)


def _largest_stable(problem: Problem, precision: Tensor) -> float:
    """The largest step size, to within 1%, at which the problem's kernel is stable on a Gaussian.

    Args:
        problem: model and kernel.
        precision: precision of the Gaussian divided by N, 0-d.
    """
    low, high = -8.0, 4.0  # powers of ten
    while high - low > 0.004:
        middle = (low + high) / 2
        lr = torch.tensor(10**middle, dtype=torch.float64)
        kernel, values, _ = _linearize(problem, lr, torch.zeros_like(precision[None]))
        stable = bool(GaussianChain.from_kernel(kernel, values, precision[None]).stable.all())
        low, high = (middle, high) if stable else (low, middle)
    return float(10**low)


def _values_at(problem: Problem, lr: Tensor) -> Values:
    """The hyperparameters of the problem's kernel by name, tensors as steps read them, with `lr` in
    place of the kernel's own step size."""
    return problem.engine.kernel_values({**problem.engine.kernel.values(0), "lr": lr})


def _linearize(problem: Problem, lr: Tensor, noise: Tensor) -> Linearized:
    """What the sampler does on a Gaussian posterior at a step size, in units in which its
    stationary preconditioner is 1: (a sampler's kernel that does not adapt; that kernel's
    hyperparameters by name; the variance of the gradient noise in these units, `[modes]`).

    Args:
        problem: model and sampler's kernel.
        lr: step size, 0-d.
        noise: variance of (minibatch gradient / N) along each normal mode, `[modes]`.
    """
    kernel = problem.engine.kernel
    linearized: Linearized = kernel.theory.linearize(kernel, _values_at(problem, lr), noise)
    return linearized


def _error(problem: Problem, modes: Modes, lr: Tensor, steps: Steps, epoch: int | None) -> Tensor:
    """The predicted mean square error of posterior means and log sds, in squared posterior sds,
    `[2]`: by the bias of the step size, and by Monte Carlo. Both are infinite if the step size is
    not stable.

    Args:
        problem: the kernel and the model.
        modes: normal modes of the posterior.
        lr: step size, 0-d.
        steps: number of steps and draws of the run.
        epoch: number of batches of an epoch; None if batches are drawn with replacement, or are all
            rows.
    """
    theory = problem.engine.kernel.theory
    kernel, values, noise = _linearize(problem, lr, modes.noise)
    chain = GaussianChain.from_kernel(kernel, values, modes.precision)
    num_steps, num_chains = steps.total - steps.warmup_steps, len(modes.starts)
    if problem.engine.known_noise is not None:  # noise that cannot be subtracted heats the chains
        added = theory.added_temperature(values, noise)
        noise = noise * ((added - values["temperature"]) / added).clamp(min=0).nan_to_num()
    exact = values["temperature"] / modes.precision
    covariance = chain.covariance(noise, epoch)
    time, time_of_square = chain.autocorrelation_times(covariance)
    distances = modes.starts, modes.starts * modes.precision
    far, steep = (distance.square().mean().sqrt() for distance in distances)
    traveling = theory.traveling_steps(_values_at(problem, lr), far, steep, modes.scale)
    arrived = int(steps.warmup_steps - traveling.clamp(max=steps.total))
    path, square = chain.forgetting(max(0, arrived), num_steps)

    def over_elements(variances: Tensor) -> Tensor:
        """Variances of elements relative to their exact variances, `[D]`, from variances of normal
        modes, `[modes]`."""
        return modes.loadings @ variances / (modes.loadings @ exact)

    offset = over_elements((modes.starts.mean(0) * path).square())
    variance = covariance[:, 0, 0].clamp(min=STEP_SIZE.least_variance * exact)
    remembered = modes.starts.square().mean(0) * square
    log_sd = over_elements(variance + remembered).log() / 2
    share = (time / num_steps).clamp(max=1) / num_chains
    scatter = over_elements(variance * share)
    share_of_square = (time_of_square / num_steps).clamp(max=1)
    spread = over_elements(variance * share_of_square / num_chains) / 2
    bias = offset.mean() + log_sd.square().mean()
    error = torch.stack([bias, scatter.mean() + spread.mean()])
    sound = bool(chain.stable.all()) and bool(torch.isfinite(error).all())
    return error if sound else torch.full_like(error, torch.inf)


def _warn_of_large_error(choice: StepSize, control_variates: bool) -> None:
    if choice.error > STEP_SIZE.large_error:
        others = "" if control_variates else ", control_variates=True,"
        warn(
            BiasWarning,
            f"lr='auto': with these steps, even the best step size is predicted to leave an error "
            f"of {choice.error:.2g} posterior sds ({choice.reason}): take more steps or larger "
            f"batches{others} or bring the sites to one scale (standardized data, mass by site)",
            code="step-size",
        )


def _warn_of_excess_noise(problem: Problem) -> None:
    """Warns if, in some element, minibatches add more noise than the sampler injects. No more than
    the injected noise can be subtracted, so chains stay too hot there."""
    engine, kernel = problem.engine, problem.engine.kernel
    values = engine.kernel_values(kernel.values(0))
    added = kernel.theory.added_temperature(values, engine.known_noise)[: engine.num_latents]
    injected = values["temperature"].expand(engine.layout.size)[: engine.num_latents]
    is_over = added > injected
    if bool(is_over.any()):
        first = int(torch.nonzero(is_over)[0])
        warn(
            BiasWarning,
            f"subtract_noise: minibatch noise exceeds the injected noise at {int(is_over.sum())} "
            f"of {len(is_over)} elements (site '{engine.layout.site_at(first)}'), so their "
            f"temperature stays up to {float((added / injected).max()):.3g} times too high: "
            f"multiply lr by less than {float((injected / added).min()):.2g}, or raise batch_size",
        )
