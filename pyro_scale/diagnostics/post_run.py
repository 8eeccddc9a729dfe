"""What is found out about a run once its steps are taken, from the batches after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from pyro_scale.data.batches import Batches
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.diagnostics.kinetic_temperature import kinetic
from pyro_scale.diagnostics.temperature import virial
from pyro_scale.engine.draws import Draws
from pyro_scale.posterior.draws import Result
from pyro_scale.run.problem import Setup
from pyro_scale.tuning.gradient_noise import NOISE_BATCHES, gradient_noise, warn_of_a_bad_anchor


def examined(
    setup: Setup,
    result: Result,
    draws: Draws,
    batches: Batches,
    step: int,
    values: Mapping[str, Tensor],
    sampling: Sampling,
) -> Result:
    """The result with what minibatches did, and the temperatures of draws and momenta.

    An error in reading the batches is the run's, and goes into the draws.

    Args:
        setup: of the run.
        result: of the run.
        draws: of the run.
        batches: of the run.
        step: the first that the run did not take.
        values: the hyperparameters', on average over the draws.
        sampling: how rows were drawn.
    """
    noise = heat = None
    if draws.error is None:
        try:
            known = setup, result.positions, draws.finished, batches
            noise = gradient_noise(*known, step, values, sampling)
            warn_of_a_bad_anchor(noise)
            if values["temperature"] > 0:
                variance = None if noise is None else noise.variance
                heat = virial(*known, step + NOISE_BATCHES, variance)
        except (Exception, KeyboardInterrupt) as error:
            draws.error = error
    return dataclasses.replace(
        result,
        gradient_noise=noise,
        virial=None if heat is None else heat.parts,
        kinetic=kinetic(setup, draws, values, noise, heat),
    )
