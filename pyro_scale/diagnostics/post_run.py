"""What is measured after the last step, on batches that the run has not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.diagnostics.kinetic_temperature import kinetic
from pyro_scale.diagnostics.temperature import virial
from pyro_scale.distributed.ranks import Ranks
from pyro_scale.posterior.draws import Result
from pyro_scale.run.run import Trajectory
from pyro_scale.tuning.gradient_noise import gradient_noise, warn_of_a_bad_anchor
from pyro_scale.tuning.policy import NOISE


def measure(
    trajectory: Trajectory, result: Result, values: Mapping[str, Tensor]
) -> tuple[Result, BaseException | None]:
    """(The result with what minibatches did and the temperatures of draws and momenta, an error in
    reading the batches).

    Args:
        trajectory: of the run.
        result: of the run.
        values: the hyperparameters', on average over the draws.
    """
    plan, problem, batches, draws = trajectory
    noise = heat = error = None
    if draws.error is None and problem.has_all_rows:
        step = plan.steps.total  # the first that the run did not take
        try:
            known = problem, result.positions, draws.finished, batches
            noise = gradient_noise(*known, step, values, plan.sampling)
            warn_of_a_bad_anchor(noise)
            if values["temperature"] > 0:
                variance = None if noise is None else noise.variance
                heat = virial(*known, step + NOISE.draws, variance)
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
    measured = dataclasses.replace(
        result,
        gradient_noise=noise,
        virial=None if heat is None else heat.parts,
        element_temperatures=None if heat is None else torch.stack([heat.of_elements, heat.errors]),
        kinetic=kinetic(problem, draws, values, noise, heat),
    )
    return measured, error


def as_measured_by_first(result: Result, ranks: Ranks) -> Result:
    """The result with what rank 0 has measured, of the same draws."""
    names = "gradient_noise", "virial", "element_temperatures", "kinetic"
    measured = {name: getattr(result, name) for name in names}
    return dataclasses.replace(result, **ranks.of_first(measured, "what was measured"))
