"""From a finished simulation to a result: statistics of the draws, and the facts of the run."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.drive.batches import Batches
from pyro_scale.drive.simulate import Draws
from pyro_scale.infer.diagnostics import gradient_noise
from pyro_scale.infer.result import Result
from pyro_scale.infer.setup import Setup

#: Batches from which the noise of minibatches is estimated, rows at one draw, and draws.
_NOISE_BATCHES, _NOISE_ROWS, _FEWEST_PLACES = 128, 64, 4
#: Draws below which their variance says nothing of the posterior's.
_FEWEST_DRAWS = 20


def collected(
    setup: Setup,
    draws: Draws,
    tape: Mapping[str, Tensor],
    attrs: Mapping[str, Any],
    inflation: Tensor | None = None,
) -> Result:
    """The finished chains of a simulation."""
    finished = torch.tensor(draws.finished)
    log_joint = draws.log_joint[finished]
    stats = {"lp": log_joint, "step": draws.kept_steps.expand(log_joint.shape)}
    for name, column in tape.items():
        stats[name] = column[draws.kept_steps].expand(log_joint.shape)
    known = setup.log_posterior
    facts = {
        "num_data": known.num_data,
        "batch_size": known.understanding.batch_size,
        "seed": setup.seed,
        "sampling_time": draws.seconds,
        "compile_time": draws.compile_seconds,
        "program": draws.program,
        "inference_library": "pyro_scale",
        "inference_library_version": version("pyro_scale"),
        "pyro_version": version("pyro-ppl"),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
    }
    return Result(
        log_posterior=known,
        data=setup.data,
        layout=setup.engine.layout,
        positions=draws.positions[finished],
        sample_stats=stats,
        attrs={**attrs, **facts},
        temperature_inflation=inflation,
    )


def temperature_inflation(
    setup: Setup,
    draws: Draws,
    batches: Batches,
    step: int,
    values: Mapping[str, Tensor],
    replacement: bool,
) -> Tensor | None:
    """By what minibatches multiply the temperature, from a batch at each of some draws.

    None at temperature 0, and where the rows' gradients cannot be had at once.
    """
    known, engine = setup.log_posterior, setup.engine
    if values["temperature"] == 0 or not engine.vectorised:
        return None
    if setup.data.batch_size is None:  # the whole data at every step
        return torch.ones(engine.num_latents)
    each = -(-_NOISE_ROWS // known.understanding.batch_size)  # batches at one draw
    places = max(_FEWEST_PLACES, _NOISE_BATCHES // each)
    chains = torch.tensor(draws.finished[:places])
    total = draws.positions.shape[1]
    chosen = torch.linspace(0, total - 1, min(total, places // len(chains))).round().long()
    positions = draws.positions[chains][:, chosen].to(setup.positions.device)
    taken = [batches.take(step + i, step + i + 1) for i in range(each * len(chosen))]
    drawn = [pytree.tree_map(lambda leaf: leaf[:, 0], changing) for changing in taken]
    found = [batches.batch(batches.fixed, changing).of(chains) for changing in drawn]
    some = [found[i : i + each] for i in range(0, len(found), each)]
    noise = gradient_noise(known, engine.layout, positions, some, replacement)
    if noise is None:
        return None
    added = engine.kernel.bind(values).added_temperature(noise)
    return (1 + added / values["temperature"]).cpu()


def warn_of_short_warmup(
    setup: Setup, result: Result, values: Mapping[str, Tensor], warmup_steps: int
) -> None:
    """Warns when warm-up is under five relaxation times, judged by the draws' own variance."""
    latents = result.positions[..., : setup.engine.num_latents].flatten(0, 1).double()
    if len(latents) < _FEWEST_DRAWS or values["temperature"] == 0:
        return
    precision = values["temperature"] / (setup.log_posterior.num_data * latents.var(0))
    steps = float(setup.engine.kernel.bind(values).relaxation_steps(precision).max())
    if warmup_steps < 5 * steps:
        warnings.warn(
            f"warm-up of {warmup_steps} steps is under five relaxation times (one is about "
            f"{steps:.0f} steps here), so the draws may remember where the chains started: pass "
            f"warmup_steps={round(5 * steps)}",
            UserWarning,
            stacklevel=3,
        )
