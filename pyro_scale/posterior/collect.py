"""Collects the draws of a finished run, with statistics of each draw and the facts of the run."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.core.warn import warn
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ConvergenceWarning
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.posterior.sinks import ToDisk
from pyro_scale.run.problem import Problem
from pyro_scale.storage.lazy_draws import Positions, some_draws

#: Draws of a chain that are needed to estimate the posterior's variance.
_MIN_DRAWS = 20
#: Most numbers (draws times parameters) from which the variance is estimated.
_MAX_NUMBERS = 2**21


def collect(
    problem: Problem,
    draws: Draws,
    columns: Mapping[str, Tensor],
    attrs: Mapping[str, Any],
    sink: ToDisk | ToMoments | None = None,
) -> PosteriorDraws:
    """The draws of a run's finished chains, with statistics of each draw and the facts of the run.

    Args:
        problem: model, data and chains of the run.
        draws: draws and final state that the engine returned.
        columns: values of the sampler's hyperparameters at every step, by name, `[steps]` or
            `[steps, sites]`.
        attrs: method and settings, to which further facts are added.
        sink: object to which the draws were written (a store, or moments); None if they are in
            memory.
    """
    finished, numbers = torch.tensor(draws.finished), problem.numbers(len(draws.log_joint))
    online = None if sink is None else sink.totals
    if sink is not None:
        positions: Positions = sink.positions(draws)
        if online is None:  # in a store, some draws may be missing at the end
            draws = draws.first(positions.shape[1])
    elif len(finished) == len(draws.positions):
        positions = draws.positions  # without a copy
    else:
        positions = draws.positions[finished]
    log_joint = draws.log_joint[finished]
    kernel = problem.engine.kernel
    stats = {"lp": log_joint, "step": draws.kept_steps.expand(log_joint.shape)}
    for name, hyper in kernel.hyperparameters().items():
        column = columns[name][draws.kept_steps]
        by_site = (
            {f"{name}_{site}": column[:, i] for i, site in enumerate(hyper)}
            if isinstance(hyper, Mapping)
            else {name: column}
        )
        stats |= {label: values.expand(log_joint.shape) for label, values in by_site.items()}
    weight = _weights(columns["lr"][draws.kept_steps])
    if weight is not None and not (isinstance(kernel.lr, Cyclical) or kernel.adjusted):
        stats["weight"] = weight.expand(log_joint.shape)
    return PosteriorDraws(
        log_posterior=problem.log_posterior,
        data=problem.data,
        layout=problem.engine.layout,
        positions=positions,
        sample_stats=stats,
        attrs={
            **attrs,
            **facts_of(problem.log_posterior, problem.seed),
            "sampling_time": draws.seconds,
            "compile_time": draws.compile_seconds,
            "program": draws.program,
            "batch_size": problem.batch_size,
            "frozen_base": problem.base,
        },
        online=online,
        chains=[numbers[chain] for chain in draws.finished],
        read_together=problem.read_together,
    )


def facts_of(log_posterior: LogPosterior, seed: int) -> dict[str, Any]:
    """Facts that every run has, by name, for the posterior's `attrs`: N (`num_data`), B
    (`batch_size`), the seed, and the versions of this library, Pyro, torch and Python."""
    return {
        "num_data": log_posterior.num_data,
        "batch_size": log_posterior.model_info.batch_size,
        "seed": seed,
        "inference_library": "pyro_scale",
        "inference_library_version": _version("pyro_scale"),
        "pyro_version": _version("pyro-ppl"),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
    }


#: The version of an installed package; cached, because a lookup takes half a millisecond.
_version = functools.cache(version)


def _weights(lr: Tensor) -> Tensor | None:
    """Weights of the draws, `[draws]`, proportional to the step size at each (Welling and Teh
    2011), 1 on average; None if all are equal. With one lr for each site, the mean over sites is
    used.

    Args:
        lr: step size at each draw, `[draws]` or `[draws, sites]`.
    """
    if not len(lr):
        return None
    relative = lr / lr.mean(0)
    weights = relative.mean(1) if relative.dim() == 2 else relative
    return None if bool((lr == lr[0]).all()) else weights


def warn_of_short_warmup(
    problem: Problem, result: PosteriorDraws, values: Mapping[str, Tensor], warmup_steps: int
) -> None:
    """Warns if the warm-up took less than five relaxation times of the slowest parameter, which are
    estimated from the variance of the draws. Does nothing with fewer than 20 draws, at temperature
    0, with a cyclical step size, or for a sampler without a theory of its relaxation.

    Args:
        problem: model, data and chains of the run.
        result: draws of the run.
        values: hyperparameters of the sampler by name, averaged over the draws.
        warmup_steps: number of steps of the run's warm-up.
    """
    engine, theory = problem.engine, problem.engine.kernel.theory
    chains, _, size = result.positions.shape
    most = max(_MIN_DRAWS, _MAX_NUMBERS // (chains * size))
    draws = some_draws(result.positions, most).flatten(0, 1)
    latents = draws[..., : engine.num_latents]
    is_cyclical = isinstance(engine.kernel.lr, Cyclical)
    if len(latents) < _MIN_DRAWS or values["temperature"] == 0 or is_cyclical or theory is None:
        return
    values = engine.kernel_values(values)
    # torch.var is many times slower for these shapes
    squares = (latents - latents.mean(0)).square_().sum(0, dtype=torch.float64)
    precision = values["temperature"] / engine.pad(squares / (len(latents) - 1))
    steps = float(theory.relaxation_steps(values, precision)[: engine.num_latents].max())
    if warmup_steps < 5 * steps:
        warn(
            ConvergenceWarning,
            f"warm-up of {warmup_steps} steps is under five relaxation times (one is about "
            f"{steps:.0f} steps here), so the draws may remember where the chains started: pass "
            f"warmup_steps={math.ceil(5 * steps)}",
        )
