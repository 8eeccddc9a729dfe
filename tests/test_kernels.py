"""Kernels without sampling error: their linear map and noise are read out on Gaussian targets."""

import dataclasses
import math

import pytest
import torch
from gaussian import Field, bound, read_out, stationary

from pyro_scale.errors import ArgumentError
from pyro_scale.kernels import BAOA, SGHMC, SGLD

KERNELS = [BAOA, SGHMC, SGLD]
CORRELATED = torch.tensor([[2.0, 0.6, 0.0], [0.6, 0.9, -0.2], [0.0, -0.2, 0.4]]).double()
ONE = torch.ones(1, 1, dtype=torch.float64)


def of_eigenvalues(function, matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(function(values)) @ vectors.T


def close(actual, expected, rtol=1e-10):
    expected = torch.as_tensor(expected, dtype=torch.float64).expand_as(actual)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


# ------------------------------------------------------------------ temperature 1 and others


def sghmc_position(e, f, t):
    return lambda p: t * (4 - 2 * e * f) / (p * (4 - 2 * e * f - e * e * p))


def sghmc_momentum(e, f, t):
    return lambda p: 4 * t / (4 - 2 * e * f - e * e * p)


SETTINGS = [  # lr, friction, temperature, N
    (0.1, 1.0, 1.0, 1),
    (0.5, 1.0, 1.0, 1),
    (0.8, 0.2, 0.3, 1),
    (0.3, 3.0, 2.0, 50),
    (1.0, 0.7, 1.0, 1000),
]


@pytest.mark.parametrize("precision", [ONE, CORRELATED], ids=["unit", "correlated"])
@pytest.mark.parametrize(("lr", "friction", "temperature", "num_data"), SETTINGS)
class TestStationaryVariance:
    """Against the closed forms, T over N and the precision over N."""

    def test_sgld(self, lr, friction, temperature, num_data, precision):
        kernel = bound(SGLD(lr=lr, temperature=temperature), num_data)
        covariance = stationary(kernel, precision / num_data)
        expected = of_eigenvalues(
            lambda p: temperature / (p * (1 - lr * p / num_data / 2)), precision
        )
        close(covariance, expected)

    def test_sghmc(self, lr, friction, temperature, num_data, precision):
        kernel = bound(SGHMC(lr=lr, friction=friction, temperature=temperature), num_data)
        dim, over_n = len(precision), precision / num_data
        covariance = stationary(kernel, over_n)
        tempered = temperature / num_data
        close(
            covariance[:dim, :dim], of_eigenvalues(sghmc_position(lr, friction, tempered), over_n)
        )
        close(
            covariance[dim:, dim:], of_eigenvalues(sghmc_momentum(lr, friction, tempered), over_n)
        )

    def test_baoa_is_exact(self, lr, friction, temperature, num_data, precision):
        kernel = bound(BAOA(lr=lr, friction=friction, temperature=temperature), num_data)
        dim = len(precision)
        covariance = stationary(kernel, precision / num_data)
        close(covariance[:dim, :dim], temperature * torch.linalg.inv(precision))
        close(covariance[dim:, dim:], temperature / num_data * torch.eye(dim).double())


def test_sghmc_known_figure():
    variance = float(stationary(bound(SGHMC(lr=0.1)), ONE)[0, 0])
    assert variance == pytest.approx(1.002639, abs=5e-7)


@pytest.mark.parametrize(
    ("kernel", "limit"),
    [
        (SGLD(lr=0.5), 2 / 0.5),
        (SGHMC(lr=0.5, friction=0.4), (4 - 2 * 0.5 * 0.4) / 0.5**2),
        (BAOA(lr=0.5, friction=0.4), 4 / 0.5**2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_stable_up_to_the_limit_and_not_beyond(kernel, limit):
    def radius(precision):
        return torch.linalg.eigvals(read_out(bound(kernel), precision * ONE)[0]).abs().max()

    assert radius(0.999 * limit) < 1 < radius(1.001 * limit)


@pytest.mark.parametrize(("temperature", "num_data"), [(1.0, 1), (0.3, 40), (0.0, 7)])
@pytest.mark.parametrize("kernel", [BAOA, SGHMC])
def test_momenta_start_at_their_stationary_spread(kernel, temperature, num_data):
    noise = torch.randn(5, dtype=torch.float64, generator=torch.manual_seed(0))
    state = bound(kernel(lr=0.1, temperature=temperature), num_data).init(torch.ones(5), noise)
    close(state.momentum, math.sqrt(temperature / num_data) * noise, rtol=1e-15)
    assert torch.equal(state.position, torch.ones(5))


# ------------------------------------------------------------------ temperature 0


def hills(x):
    """A log joint over N that is not quadratic, so that signs and scales all show."""
    return -(x**4).sum() / 4 - 0.7 * (x[0] * x[1:]).sum() + torch.sin(3 * x).sum()


@pytest.mark.parametrize(("lr", "friction"), [(0.1, 1.0), (0.3, 0.2), (0.05, 4.0)])
@pytest.mark.parametrize("name", ["SGHMC", "BAOA", "SGLD"])
def test_temperature_zero_is_sgd(name, lr, friction):
    """Step for step; torch's first step sets its buffer to the gradient, as rest does."""
    decay = math.exp(-lr * friction)
    kernel, sgd = {
        "SGHMC": (
            SGHMC(lr=lr, friction=friction, temperature=0),
            {"lr": lr**2, "momentum": 1 - lr * friction},
        ),
        "BAOA": (
            BAOA(lr=lr, friction=friction, temperature=0),
            {"lr": lr**2 * (1 + decay) / 2, "momentum": decay},
        ),
        "SGLD": (SGLD(lr=lr**2, temperature=0), {"lr": lr**2}),
    }[name]
    start = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    optimiser = torch.optim.SGD([parameter], **sgd)
    kernel = bound(kernel, num_data=3)
    state = kernel.init(start, torch.randn(3).double())
    target = Field(torch.func.grad(hills))
    for _ in range(30):
        optimiser.zero_grad()
        (-hills(parameter)).backward()
        optimiser.step()
        state, _ = kernel.update(state, target, torch.randn(1, 3).double())
        close(state.position, parameter.detach(), rtol=1e-13)
    assert (state.position - start).abs().max() > 0.1  # they did move


# ------------------------------------------------------------------ what diagnostics rely on


@pytest.mark.parametrize("gradient_noise", [0.3, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("name", ["BAOA", "SGHMC", "SGLD"])
def test_added_temperature_is_the_inflation(name, temperature, gradient_noise):
    """The position's variance with gradient noise over that without, minus 1, is the added
    temperature over T: exactly where gradient noise enters as the kernel's own noise does,
    else to second order in lr (the error falls to a quarter when lr is halved)."""

    def error(lr):
        friction = {} if name == "SGLD" else {"friction": 1.7}
        kernel = bound(globals()[name](lr=lr, temperature=temperature, **friction))
        clean = stationary(kernel, CORRELATED)[:3, :3]
        noisy = stationary(kernel, CORRELATED, gradient_noise)[:3, :3]
        inflation = torch.trace(noisy) / torch.trace(clean) - 1
        noise = torch.tensor(gradient_noise, dtype=torch.float64)
        return float(inflation / (kernel.added_temperature(noise) / temperature) - 1)

    if name == "BAOA":
        assert 0 < error(0.2) < 0.02
        assert error(0.1) / error(0.2) == pytest.approx(0.25, rel=0.05)
    else:
        assert abs(error(0.2)) < 1e-10


@pytest.mark.parametrize(
    ("kernel", "precision", "tolerance"),
    [
        (SGLD(lr=0.001), 0.7, 0.001),
        *((k(lr=0.001, friction=20.0), 1.0, 0.02) for k in (BAOA, SGHMC)),  # overdamped
        *((k(lr=0.001, friction=0.3), 1.0, 0.001) for k in (BAOA, SGHMC)),  # underdamped
    ],
    ids=lambda value: f"{value:g}" if isinstance(value, float) else type(value).__name__,
)
def test_relaxation_steps_are_those_of_the_transition(kernel, precision, tolerance):
    """The slowest mode falls by e in as many steps, in either regime."""
    kernel = bound(kernel)
    modes = torch.linalg.eigvals(read_out(kernel, precision * ONE)[0]).abs()
    exact = -1 / math.log(float(modes.max()))
    steps = float(kernel.relaxation_steps(torch.tensor(precision).double()))
    assert steps == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("friction", [0.5, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("kernel", [BAOA, SGHMC])
def test_relaxation_steps_are_within_a_factor_of_two_between_the_regimes(kernel, friction):
    kernel = bound(kernel(lr=0.001, friction=friction))
    modes = torch.linalg.eigvals(read_out(kernel, ONE)[0]).abs()
    exact = -1 / math.log(float(modes.max()))
    steps = float(kernel.relaxation_steps(torch.tensor(1.0).double()))
    assert 0.99 < steps / exact < 2.01


# ------------------------------------------------------------------ pure functions


def random_chains(kernel, num_chains=4, dim=3):
    source = torch.Generator().manual_seed(3)
    numbers = [torch.randn(num_chains, dim, generator=source).double() for _ in range(3)]
    state = torch.vmap(kernel.init)(numbers[0], numbers[1])
    return state, numbers[2][:, None]


@pytest.mark.parametrize("kernel", KERNELS)
def test_update_leaves_its_inputs_alone(kernel):
    kernel = bound(kernel(lr=0.2))
    state, noise = random_chains(kernel, num_chains=1)
    state, noise = type(state)(*(leaf[0] for leaf in state)), noise[0]
    before = [leaf.clone() for leaf in (*state, noise, *kernel.hyperparameters().values())]
    target = Field(torch.func.grad(hills))
    once, _ = kernel.update(state, target, noise)
    twice, _ = kernel.update(state, target, noise)
    after = (*state, noise, *kernel.hyperparameters().values())
    assert all(map(torch.equal, before, after))
    assert all(map(torch.equal, once, twice))
    assert not torch.equal(once.position, state.position)


@pytest.mark.parametrize("kernel", KERNELS)
def test_vmapped_is_looped(kernel):
    kernel = bound(kernel(lr=0.2))
    state, noise = random_chains(kernel)
    target = Field(torch.func.grad(hills))
    together, _ = torch.vmap(lambda s, z: kernel.update(s, target, z))(state, noise)
    for chain in range(4):
        alone, _ = kernel.update(type(state)(*(s[chain] for s in state)), target, noise[chain])
        for a, b in zip(together, alone, strict=True):
            close(a[chain], b, rtol=1e-15)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_evaluation_is_passed_on(kernel):
    kernel = bound(kernel(lr=0.2))
    state, noise = random_chains(kernel, num_chains=1)
    target = Field(None)
    target.grad = lambda position: (position, "evaluation")
    state = type(state)(*(leaf[0] for leaf in state))
    assert kernel.update(state, target, noise[0])[1] == "evaluation"


# ------------------------------------------------------------------ hyperparameters


@pytest.mark.parametrize("value", [0, 0.0, -0.1, math.nan, math.inf, "0.1", None, True, [0.1]])
@pytest.mark.parametrize("name", ["lr", "friction"])
@pytest.mark.parametrize("kernel", [BAOA, SGHMC])
def test_rates_must_be_positive_numbers(kernel, name, value):
    with pytest.raises(ArgumentError, match=rf"^{name}=.*pass a number > 0, or a schedule"):
        kernel(**{"lr": 0.1, name: value})


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("kernel", KERNELS)
def test_temperature_must_not_be_negative(kernel, value):
    with pytest.raises(ArgumentError, match=r"^temperature=.*pass a number >= 0"):
        kernel(lr=0.1, temperature=value)
    assert kernel(lr=0.1, temperature=0).values(0)["temperature"] == 0


def test_schedules_are_functions_of_the_step():
    kernel = SGHMC(lr=lambda step: 1 / (1 + step), friction=lambda step: 2.0 + step)
    tape = kernel.tape(3)
    close(tape["lr"], [1, 1 / 2, 1 / 3], rtol=1e-15)
    close(tape["friction"], [2.0, 3.0, 4.0], rtol=1e-15)
    close(tape["temperature"], [1.0, 1.0, 1.0], rtol=1e-15)
    assert tape["lr"].dtype == torch.float64


@pytest.mark.parametrize("name", ["lr", "friction", "temperature"])
def test_a_schedule_out_of_range_names_the_step(name):
    kernel = BAOA(**{"lr": 0.1, name: lambda step: 2.5 - step})
    with pytest.raises(ArgumentError, match=rf"^{name}=-0\.5 at step 3"):
        kernel.tape(10)


def test_kernels_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BAOA(lr=0.1).lr = 0.2
