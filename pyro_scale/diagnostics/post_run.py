"""What is measured after the last step, on batches that the run has not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.diagnostics.kinetic_temperature import kinetic
from pyro_scale.diagnostics.temperature import virial
from pyro_scale.distributed.ranks import Ranks
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.measurements import Measurements, VirialTemperature
from pyro_scale.run.run import Trajectory
from pyro_scale.tuning.gradient_noise import gradient_noise, warn_of_a_bad_anchor
from pyro_scale.tuning.policy import NOISE


def measure(
    trajectory: Trajectory, result: PosteriorDraws, values: Mapping[str, Tensor]
) -> tuple[PosteriorDraws, BaseException | None]:
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
    temperature = None
    if heat is not None:
        temperature = VirialTemperature(heat.parts, torch.stack([heat.of_elements, heat.errors]))
    momenta = kinetic(problem, draws, values, noise, heat)
    return dataclasses.replace(
        result, measurements=Measurements(noise, temperature, momenta)
    ), error


def as_measured_by_first(result: PosteriorDraws, ranks: Ranks) -> PosteriorDraws:
    """The draws with what rank 0 has measured of them."""
    measured = ranks.of_first(result.measurements, "what was measured")
    return dataclasses.replace(result, measurements=measured)
