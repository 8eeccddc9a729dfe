"""A kernel whose author left the theory out samples, and what needs the theory says so."""

import dataclasses
import math
from typing import NamedTuple

import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from reference import normals
from runs import QUIET

from pyro_scale.errors import ArgumentError
from pyro_scale.infer.sampler import Sampler
from pyro_scale.kernels import Kernel

ROWS = 0.4 + normals(64, seed=1)
pytestmark = pytest.mark.usefixtures("float64")


class State(NamedTuple):
    position: torch.Tensor
    momentum: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(Kernel):
    """SGHMC whose momentum is halved at every step."""

    mass: float = 1.0

    def init(self, position, values, noise):
        return State(position, torch.sqrt(values["mass"] * values["temperature"]) * noise)

    def update(self, state, target, values, noise):
        spread = torch.sqrt(values["mass"] * values["temperature"])
        gradient, evaluation = target.grad(state.position)
        momentum = 0.5 * state.momentum + spread * noise[0] + values["lr"] * gradient
        return State(
            state.position + values["lr"] / values["mass"] * momentum, momentum
        ), evaluation


class Own(Sampler):
    kernel_class = Halving


class Remembering(NamedTuple):
    position: torch.Tensor
    noise: torch.Tensor
    before: torch.Tensor


class Colored(Kernel):
    """Noise of two steps and inertia, whose state holds inputs of the last step as they came."""

    def init(self, position, values, noise):
        return Remembering(position, noise, position)

    def update(self, state, target, values, noise):
        gradient, evaluation = target.grad(state.position)
        spread = torch.sqrt(values["lr"] * values["temperature"] / 2)
        position = (
            state.position
            + values["lr"] * gradient
            + spread * (noise[0] + state.noise)
            + 0.1 * (state.position - state.before)
        )
        return Remembering(position, noise[0], state.position), evaluation


class OwnColored(Sampler):
    kernel_class = Colored


model = of_rows(lambda mean: dist.Normal(mean, 1.0), mean=normal(sd=10.0))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 16])
def test_it_samples_and_is_diagnosed(batch_size):
    """With all rows the draws are the posterior's, up to .7% in the sd: within 4.4 errors."""
    lengths = {"num_samples": 1000, "num_chains": 4, "warmup_steps": 0, "thinning": 21}
    sampler = Own(model, lr=0.2).run(ROWS, batch_size=batch_size, **lengths, **QUIET)
    draws = sampler.get_samples()["mean"]
    exact_mean, exact_sd = float(ROWS.sum() / (64 + 0.01)), 1 / math.sqrt(64 + 0.01)
    table = sampler.diagnostics()
    ess = float(table.loc["mean", "ess_bulk"])
    if batch_size is None:
        assert abs(float(draws.mean()) - exact_mean) < 4.4 * exact_sd / ess**0.5
        assert float(draws.std()) == pytest.approx(1.007 * exact_sd, rel=4.4 / (2 * ess) ** 0.5)
    assert ("minibatch_heating" in table) == (batch_size is None)  # where it is 1
    assert "gradient_variance" in table
    assert table["kinetic_temperature_expected"].isna().all()
    assert (sampler.step_size_bias().attrs["order"]["mean"]) == 1  # nobody knows of a higher one


def test_a_state_that_is_an_input_as_it_came_is_carried_by_a_compiled_loop():
    runs = [
        OwnColored(model, lr=0.05, compile=compile).run(
            ROWS, batch_size=16, num_samples=30, num_chains=2, thinning=3, warmup_steps=7, **QUIET
        )
        for compile in (True, False)
    ]
    programs = [run.diagnostics().attrs["program"] for run in runs]
    assert programs == ["compiled loop", "eager"]
    compiled, eager = (run.get_samples()["mean"] for run in runs)
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-10)


def test_what_needs_the_theory_says_so():
    with pytest.raises(ArgumentError, match=r"lr='auto': Halving has no theory.*number"):
        Own(model, lr="auto")
    with pytest.raises(ArgumentError, match="Halving has no theory to choose by"):
        Own(model)
    with pytest.raises(ArgumentError, match=r"subtract_noise: Halving has no theory"):
        Own(model, lr=0.1, subtract_noise=True)
