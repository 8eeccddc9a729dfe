"""From a finished run to a result: statistics of the draws, and the facts of the run."""

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
from pyro_scale.storage.lazy_draws import Positions, spread

#: Draws below which their variance says nothing of the posterior's.
_FEWEST_DRAWS = 20
#: Numbers in all draws that it is judged by.
_MOST_NUMBERS = 2**21


def collect(
    problem: Problem,
    draws: Draws,
    columns: Mapping[str, Tensor],
    attrs: Mapping[str, Any],
    sink: ToDisk | ToMoments | None = None,
) -> PosteriorDraws:
    """The finished chains of a simulation, whose draws may have gone into a sink."""
    finished, numbers = torch.tensor(draws.finished), problem.numbers(len(draws.log_joint))
    if isinstance(sink, ToDisk):
        positions: Positions = sink.kept(draws)
        draws = draws.first(positions.shape[1])
    elif isinstance(sink, ToMoments):
        positions = sink.positions(draws)
    else:
        all_finished = len(finished) == len(draws.positions)  # then the draws are not copied
        positions = draws.positions if all_finished else draws.positions[finished]
    log_joint = draws.log_joint[finished]
    stats = {"lp": log_joint, "step": draws.kept_steps.expand(log_joint.shape)}
    for name, hyper in problem.engine.kernel.hyperparameters().items():
        column = columns[name][draws.kept_steps]
        of_sites = (
            {f"{name}_{site}": column[:, i] for i, site in enumerate(hyper)}
            if isinstance(hyper, Mapping)
            else {name: column}
        )
        stats |= {label: each.expand(log_joint.shape) for label, each in of_sites.items()}
    weight, kernel = _weights(columns["lr"][draws.kept_steps]), problem.engine.kernel
    if weight is not None and not (isinstance(kernel.lr, Cyclical) or kernel.adjusted):
        stats["weight"] = weight.expand(log_joint.shape)
    times = {
        "sampling_time": draws.seconds,
        "compile_time": draws.compile_seconds,
        "program": draws.program,
    }
    return PosteriorDraws(
        log_posterior=problem.log_posterior,
        data=problem.data,
        layout=problem.engine.layout,
        positions=positions,
        sample_stats=stats,
        attrs={
            **attrs,
            **facts_of(problem.log_posterior, problem.seed),
            **times,
            "batch_size": problem.batch_size,
            "frozen_base": problem.base,
        },
        online=sink.totals if isinstance(sink, ToMoments) else None,
        chains=[numbers[chain] for chain in draws.finished],
    )


def facts_of(log_posterior: LogPosterior, seed: int) -> dict[str, Any]:
    """The facts of any run."""
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


#: Of an installed package; looking it up takes half a millisecond.
_version = functools.cache(version)


def _weights(lr: Tensor) -> Tensor | None:
    """How much each draw counts, 1 on average: as much as its step is long (Welling and Teh
    2011), `[draws]`; None where all are alike.  Sites of their own lr count alike."""
    if not len(lr):
        return None
    relative = lr / lr.mean(0)
    weights = relative.mean(1) if relative.dim() == 2 else relative
    return None if bool((lr == lr[0]).all()) else weights


def warn_of_short_warmup(
    problem: Problem, result: PosteriorDraws, values: Mapping[str, Tensor], warmup_steps: int
) -> None:
    """Warns when warm-up is under five relaxation times, judged by the draws' own variance."""
    chains, _, size = result.positions.shape
    chosen = spread(result.positions, max(_FEWEST_DRAWS, _MOST_NUMBERS // (chains * size)))
    draws = result.positions[torch.arange(chains)[:, None], chosen].flatten(0, 1)
    latents = draws[..., : problem.engine.num_latents]
    cyclical = isinstance(problem.engine.kernel.lr, Cyclical)
    if len(latents) < _FEWEST_DRAWS or values["temperature"] == 0 or cyclical:
        return
    engine, theory = problem.engine, problem.engine.kernel.theory
    if theory is None:
        return
    values = engine.kernel_values(values)
    # torch's own var is many times slower here
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
