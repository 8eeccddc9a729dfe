"""Checks and results of a chain that the user moves by `step`, in a loop of their own: the error if
a step breaks it, the warning if minibatches heat it, and the posterior of its latest state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.divergence import message
from pyro_scale.diagnostics.policy import TEMPERATURE
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import BiasWarning, NonFiniteError
from pyro_scale.infer.sampler_run import method_facts
from pyro_scale.posterior.collect import collect
from pyro_scale.results.posterior import Posterior
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.measurements import GradientNoise, Measurements
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.gradient_noise import noise_of_step

#: Numbers of steps after which the noise of minibatches is measured: 64, and twice as many each
#: time.  The first measurements that are believed are those after 512 and 1,024 steps, as rows'
#: gradients vary most where a chain starts.
_FIRST, _BELIEVED = 64, 512


class OwnLoop:
    """Checks every step of one chain in a loop of the user's own, and makes a posterior of its
    latest state.

    Args:
        name: name of the method, such as "BAOA".
    """

    def __init__(self, name: str):
        self._name, self._latest, self._has_warned = name, list[GradientNoise](), False

    def check(
        self, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
    ) -> None:
        """Looks at a step after it was taken. At some steps, measures from the rows of its batch
        how much minibatches heat the chain.

        Args:
            problem: the analyzed model.
            draws: states after the step.
            values: hyperparameters by name, `[steps so far, ...]`.
            batch: batch of the step, as the model's arguments.

        Raises:
            NonFiniteError: the step made the chain's state NaN or infinite; the message names the
                site.

        Warns:
            BiasWarning: minibatches raise the temperature by more than a tenth; once.
        """
        if draws.failures:
            sites = broken_sites(problem, draws, batch)
            raise NonFiniteError(message(draws, values["lr"], sites))
        count, subsamples = draws.num_steps, problem.log_posterior.model_info.own_plate is not None
        if count < _FIRST or count & (count - 1) or subsamples:
            return
        last = {name: value[-1] for name, value in values.items()}
        noise = noise_of_step(problem, draws.positions[0, -1], (batch, None), last)
        if noise is not None:
            self._latest = [*self._latest[-1:], noise]
        heat = self._heat
        if count > _BELIEVED and heat is not None and heat.inflation is not None:
            self._warn_if_hot(problem, heat.inflation, float(last["lr"].max()))

    @property
    def _heat(self) -> GradientNoise | None:
        """The mean of the latest two measurements; None if there are none."""
        if not self._latest:
            return None
        variance = torch.stack([noise.variance for noise in self._latest]).mean(0)
        inflations = [noise.inflation for noise in self._latest if noise.inflation is not None]
        return GradientNoise(torch.stack(inflations).mean(0) if inflations else None, variance)

    def _warn_if_hot(self, problem: Problem, inflation: Tensor, lr: float) -> None:
        """Warns, at most once, if minibatches raise the temperature of some element above 1.1 times
        the posterior's; names the site of the hottest element, and a smaller step size. Returns
        nothing.

        Args:
            problem: the analyzed model.
            inflation: factor on the temperature of each latent element, `[latents]`.
            lr: step size.
        """
        factor = float(inflation.max())
        if factor <= TEMPERATURE.hot or self._has_warned:
            return
        self._has_warned = True
        site = problem.engine.layout.site_at(int(inflation.argmax()))
        cooler = lr * (TEMPERATURE.hot - 1) / 2 / (factor - 1)
        warn(
            BiasWarning,
            f"{self._name}: minibatches raise the temperature of site '{site}' to {factor:.2g} "
            f"times the posterior's, so sds are about {factor**0.5:.2g} times too large: pass "
            f"lr={cooler:.1g} instead of {lr:.3g}, larger batches, or the data to run(), which "
            "chooses both",
        )

    def posterior(
        self, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
    ) -> Posterior:
        """A posterior of one draw: the chain's state after its latest step, with the measured heat.

        Args:
            problem: the analyzed model.
            draws: states after the step.
            values: hyperparameters by name, `[steps so far, ...]`.
            batch: first batch, which the posterior keeps in place of the data.
        """
        result = collect(problem, draws, values, method_facts(self._name, problem.engine.kernel))
        measured = Measurements(self._heat)
        return Posterior(dataclasses.replace(result, data=None, measurements=measured), batch)
