"""Measurements after the last step of a run, on batches that the run has not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.diagnostics.temperature import kinetic, virial
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.measurements import Measurements, VirialTemperature
from pyro_scale.run.run import Trajectory
from pyro_scale.tuning.gradient_noise import gradient_noise, warn_of_a_bad_anchor
from pyro_scale.tuning.policy import NOISE


def measure(
    trajectory: Trajectory, result: PosteriorDraws, values: Mapping[str, Tensor]
) -> tuple[PosteriorDraws, BaseException | None]:
    """Measures minibatch noise and the temperatures of draws and momenta after a run. Returns (the
    draws with these measurements; the error that ended the measurements early, None if there was
    none).

    Args:
        trajectory: plan, batches and draws of the run.
        result: draws of the run, to which the measurements are added.
        values: hyperparameters of the sampler's kernel by name, averaged over the draws.
    """
    plan, problem, batches, draws = trajectory
    noise = heat = temperature = error = None
    if draws.error is None and problem.has_all_rows:
        step = plan.steps.total  # the first batch that the run did not use
        run = problem, result.positions, draws.finished, batches
        try:
            noise = gradient_noise(*run, step, values, plan.sampling)
            warn_of_a_bad_anchor(noise)
            if values["temperature"] > 0:
                variance = None if noise is None else noise.variance
                requested = float(values["temperature"])
                heat = virial(*run, step + NOISE.draws, variance, temperature=requested)
                elements = torch.stack([heat.of_elements, heat.errors])
                temperature = VirialTemperature(heat.parts, heat.num_draws, elements)
        except (Exception, KeyboardInterrupt) as raised:  # the data may no longer be available
            error = raised
    momenta = kinetic(problem, draws, values, noise, heat)
    measurements = Measurements(noise, temperature, momenta)
    return dataclasses.replace(result, measurements=measurements), error
