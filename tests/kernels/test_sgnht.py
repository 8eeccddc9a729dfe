"""The Nosé-Hoover thermostat: a step by hand, and its laws over long runs of many chains.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.  A chain's averages over time are one number of many alike.
"""

import math

import numpy as np
import pytest
import torch
from gaussian import Field, bound, hills
from reference import double, normals
from repetitions import long_but

from pyro_scale.kernels import BAOA, SGHMC, SGNHT, UBU

SLOPE = torch.func.grad(hills)


def with_values(kernel, **values):
    given = {name: torch.as_tensor(value).double() for name, value in values.items()}
    return kernel.replace(**given)


# ------------------------------------------------------------------ steps by hand


def mean_of_decay(xi, time):
    """The mean of exp(-2 xi s) over s in [0, time], by Gauss-Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    return float(weights @ np.exp(-2 * xi * time * (nodes + 1) / 2)) / 2


def step_by_hand(state, gradient, zeta, lr, mass, temperature, friction):
    """BADODAB with its half kicks made one, element by element."""
    x, p, xi = (leaf.tolist() for leaf in state)
    lr, mass, temperature = (
        torch.as_tensor(value).expand(len(x)).tolist() for value in (lr, mass, temperature)
    )
    warm = [i for i in range(len(x)) if temperature[i] > 0]

    def heated(xi, p):
        total = 0.0
        for i in warm:
            total += lr[i] * (p[i] ** 2 / (mass[i] * temperature[i]) - 1)
        return xi + total / (2 * max(1, len(warm)))

    every = range(len(x))
    p = [p[i] + lr[i] * gradient[i] for i in every]
    x = [x[i] + lr[i] / 2 * p[i] / mass[i] for i in every]
    xi = heated(xi, p)
    for i in every:
        rate = xi if i in warm else friction  # a thermostat is of no use to what is cold
        variance = 2 * friction * mass[i] * temperature[i] * lr[i] * mean_of_decay(rate, lr[i])
        p[i] = math.exp(-lr[i] * rate) * p[i] + math.sqrt(variance) * zeta[i]
    xi = heated(xi, p)
    x = [x[i] + lr[i] / 2 * p[i] / mass[i] for i in every]
    return double(*x), double(*p), double(xi)[0]


VALUES = {
    "floats": (0.3, 2.5, 0.04),
    "vectors": (double(0.1, 0.3, 0.2), double(0.5, 1.0, 3.0), 0.04),
    "points": (0.3, double(0.5, 1.0, 3.0), double(0.04, 0.04, 0.0)),
    "cold": (0.3, 2.5, 0.0),
}


@pytest.mark.parametrize("xi", [0.7, 0.0, 1e-9, -1e-9, -0.8, 6.0])
@pytest.mark.parametrize("kind", ["floats", "vectors", "points", "cold"])
def test_a_step_by_hand(kind, xi):
    lr, mass, temperature = VALUES[kind]
    kernel = bound(SGNHT(lr=0.1, friction=1.3))
    kernel = with_values(kernel, lr=lr, mass=mass, temperature=temperature)
    start = kernel.init(normals(3, seed=1), normals(3, seed=2))
    state = start._replace(momentum=0.5 * normals(3, seed=4), xi=double(xi)[0])
    slope, zeta = normals(3, seed=5), normals(1, 3, seed=6)
    moved, _ = kernel.update(state, Field(lambda x: slope), zeta)
    expected = step_by_hand(
        state, slope.tolist(), zeta[0].tolist(), lr, mass, temperature, friction=1.3
    )
    for a, b in zip(moved, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_thermostat_starts_and_stays_at_the_friction_at_temperature_zero():
    kernel = bound(SGNHT(lr=0.2, friction=1.7, temperature=0))
    state = kernel.init(double(0.5, -1.0), double(1.0, 1.0))
    for _ in range(20):
        state, _ = kernel.update(state, Field(SLOPE), normals(1, 2))
        assert float(state.xi) == 1.7
    assert torch.isfinite(state.position).all()


@pytest.mark.parametrize("lr", [0.2, double(0.2, 0.1, 0.3, 0.2, 0.1)], ids=["one", "apart"])
def test_points_have_no_part_in_the_temperature(lr):
    """Elements of temperature 0 go their own way, and the others as if they were not there."""
    kernel = bound(SGNHT(lr=0.1))
    warm, lr = torch.tensor([0, 1, 3]), torch.as_tensor(lr).double().expand(5)
    temperature = torch.zeros(5).double().index_fill(0, warm, 0.5)
    every = with_values(kernel, lr=lr, temperature=temperature)
    alone = with_values(kernel, lr=lr[warm], temperature=0.5)
    target = Field(lambda x: torch.cos(x) - x**3)
    start, first = normals(5, seed=1), normals(5, seed=2)
    state, latents = every.init(start, first), alone.init(start[warm], first[warm])
    for noise in normals(30, 1, 5, seed=3):
        state, _ = every.update(state, target, noise)
        latents, _ = alone.update(latents, target, noise[:, warm])
        torch.testing.assert_close(state.position[warm], latents.position, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(state.xi, latents.xi, rtol=1e-12, atol=0)
    assert abs(state.xi - 1) > 0.01


# ------------------------------------------------------------------ laws


def averages(kernel, precision, noise=0.0, chains=1000, warmup=300, steps=1200, seed=0):
    """Each chain's averages over time, by name `[chains, ...]`, on a Gaussian whose gradient has
    white noise."""
    size = len(precision)
    source = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    kernel = with_values(kernel, precision=precision)

    def update(state, push, zeta):
        return kernel.update(state, Field(lambda x: push - precision * x), zeta)[0]

    spread = (kernel.temperature / precision).sqrt()
    state = torch.vmap(kernel.init)(spread * drawn(chains, size), drawn(chains, size))
    sums = {}
    for step in range(warmup + steps):
        push, zeta = noise**0.5 * drawn(chains, size), drawn(chains, kernel.normals, size)
        state = torch.vmap(update)(state, push, zeta)
        if step < warmup:
            continue
        found = {
            "position": state.position.square() * precision / kernel.temperature,
            "energy": state.momentum.square() / (kernel.mass * kernel.temperature),
        }
        if isinstance(kernel.kernel, SGNHT):
            found |= {"xi": state.xi, "xi squared": state.xi.square()}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value / steps
    return sums


def worst_z(values, expected):
    """How many standard errors the mean over chains is off, the worst of all elements."""
    error = values.std(0) / len(values) ** 0.5
    return float(((values.mean(0) - expected) / error).abs().max())


@pytest.mark.parametrize("num_data", long_but([1, 10_000], 10_000))
@pytest.mark.slow
def test_the_law_of_the_thermostat(num_data):
    """Five elements of their own precision, mass and step size: variances T / L, kinetic
    temperatures T, and xi of mean friction and variance 1/5, whatever N and T."""
    temperature, friction = 0.3, 1.5
    kernel = bound(SGNHT(lr=0.1, friction=friction, temperature=temperature), num_data)
    kernel = with_values(
        kernel, lr=double(0.06, 0.08, 0.1, 0.12, 0.1), mass=double(0.5, 1.0, 2.0, 1.0, 3.0)
    )
    found = averages(kernel, double(0.5, 1.0, 1.0, 2.0, 3.0), seed=num_data)
    assert worst_z(found["position"], 1.0) < 4.4
    assert worst_z(found["energy"], 1.0) < 4.4
    assert worst_z(found["xi"], friction) < 4.4
    about = found["xi squared"] - 2 * friction * found["xi"] + friction**2
    assert worst_z(about, 1 / 5) < 4.4
    sizes = {name: float((v.std(0) / len(v) ** 0.5).max()) for name, v in found.items()}
    assert sizes["position"] < 0.01
    assert sizes["xi"] < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("method", long_but([SGNHT, BAOA, SGHMC, UBU], SGNHT, BAOA))
def test_gradient_noise_that_nobody_knows(method):
    """It heats every element by lr V / (2 f m T) = 0.4 of the temperature, whatever the mass.
    The thermostat takes it: xi rises by as much of the friction, and the variance stays right;
    the others' variances are too large by it."""
    lr, friction, mass, temperature, size = 0.1, 0.8, 2.0, 0.5, 6
    noise = 0.4 * 2 * friction * mass * temperature / lr
    kernel = bound(method(lr=lr, friction=friction, mass=mass, temperature=temperature))
    quick = {} if method is SGNHT else {"steps": 500, "chains": 500}
    found = averages(kernel, torch.ones(size).double(), noise, **quick)
    position = found["position"].mean(1)
    if method is SGNHT:
        assert worst_z(position, 1.0) < 4.4
        assert position.std() / len(position) ** 0.5 < 0.003
        assert worst_z(found["xi"], 1.4 * friction) < 4.4
        mean = found["xi"].mean()
        about = found["xi squared"] - 2 * mean * found["xi"] + mean**2
        assert worst_z(about, 1 / size) < 4.4
    else:
        assert float(position.mean()) == pytest.approx(1.4, abs=0.03)
