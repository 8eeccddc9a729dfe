"""GHMC: its steps by hand, what makes them exact, and its law against closed forms.

Chains are independent and start in the law that they should keep, so that z-scores are normal.
A test fails by chance once in 10^4.
"""

import math
from functools import partial

import pytest
import reference
import torch
from gaussian import Field, bound, hills
from reference import double, normals

from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels import GHMC

HILLS = Field(torch.func.grad(hills), hills)
STILL = torch.zeros(1, 3, dtype=torch.float64)


class Rows(Field):
    """A log joint of N rows: N times the one over N."""

    def __init__(self, num_data, log_joint):
        super().__init__(torch.func.grad(log_joint), lambda x: num_data * log_joint(x))
        self.num_data = num_data


close = partial(reference.close, tolerance=1e-12)


def begun(kernel, target, position, momentum, u=0.3):
    """A state after the first step, which looks where the chain is, with this momentum and u."""
    state = kernel.init(position, torch.zeros_like(position))
    state, _ = kernel.update(state, target, torch.zeros(1, len(position), dtype=position.dtype))
    assert torch.equal(state.position, position)
    u = torch.as_tensor(u, dtype=position.dtype)
    return state._replace(momentum=momentum, slice=u)


# ------------------------------------------------------------------ single steps


def test_the_first_step_takes_the_gradient_where_the_chain_starts():
    kernel, start = bound(GHMC(lr=0.3)), normals(3, seed=0)
    state = kernel.init(start, normals(3, seed=1))
    assert float(state.log_joint) == -math.inf
    moved, evaluation = kernel.update(state, HILLS, normals(1, 3, seed=2))
    assert torch.equal(moved.position, start)
    assert torch.equal(moved.gradient, torch.func.grad(hills)(start))
    assert torch.equal(moved.log_joint, hills(start))
    assert torch.equal(evaluation.log_joint, hills(start))


def test_a_step_is_a_leapfrog_step():
    """By hand, at N = 7 and a temperature of 0.8."""
    num_data, lr, mass, temperature = 7, 0.1, 1.7, 0.8
    target = Rows(num_data, hills)
    kernel = bound(GHMC(lr=lr, friction=0.6, mass=mass, temperature=temperature), num_data)
    x, p, zeta = normals(3, seed=0), 0.3 * normals(3, seed=1), normals(1, 3, seed=2)
    state = begun(kernel, target, x, p, u=0.95)
    moved, evaluation = kernel.update(state, target, zeta)
    c = math.exp(-lr * 0.6)
    before = c * p + math.sqrt((1 - c * c) * mass * temperature / num_data) * zeta[0]
    slope = torch.func.grad(hills)
    half = before + lr / 2 * slope(x)
    there = x + lr / mass * half
    after = half + lr / 2 * slope(there)
    energies = [
        num_data * (q @ q / (2 * mass) - hills(y)) / temperature
        for y, q in ((x, before), (there, after))
    ]
    u = 0.95 + 0.1 - 2  # from 1 on to -1
    assert abs(u) < float((energies[0] - energies[1]).exp())  # it is accepted
    close(moved.position, there)
    close(moved.momentum, after)
    close(moved.gradient, slope(there))
    close(moved.log_joint, num_data * hills(there))
    close(moved.slice, u * (energies[1] - energies[0]).exp())
    assert float(moved.accepted - state.accepted) == 1
    assert torch.equal(evaluation.log_joint, moved.log_joint)


def test_a_rejection_turns_the_momentum_and_leaves_the_rest():
    kernel = bound(GHMC(lr=3.0, friction=0.6))  # far too long
    x, p, zeta = normals(3, seed=0), normals(3, seed=1), normals(1, 3, seed=2)
    state = begun(kernel, HILLS, x, p)
    moved, evaluation = kernel.update(state, HILLS, zeta)
    c = math.exp(-3.0 * 0.6)
    close(moved.momentum, -(c * p + math.sqrt(1 - c * c) * zeta[0]))
    close(moved.slice, double(0.4)[0])
    for name in ("position", "gradient", "log_joint", "accepted"):
        assert torch.equal(getattr(moved, name), getattr(state, name))
    assert torch.equal(evaluation.log_joint, hills(x))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("where", ["log joint", "gradient"])
def test_what_is_not_finite_is_rejected(bad, where):
    """But for a start, which the driver then refuses."""
    x = normals(3, seed=0)
    kernel = bound(GHMC(lr=0.1))
    state = begun(kernel, HILLS, x, normals(3, seed=1), u=0.0)
    slope = torch.func.grad(hills)
    log_joint = (lambda y: torch.full((), bad).double()) if where == "log joint" else hills
    gradient = (lambda y: torch.full((3,), bad).double()) if where == "gradient" else slope
    moved, evaluation = kernel.update(state, Field(gradient, log_joint), STILL)
    assert torch.equal(moved.position, x)
    assert all(bool(leaf.isfinite().all()) for leaf in (*moved, evaluation.log_joint))
    if where == "log joint":
        fresh = kernel.init(x, x)
        _, evaluation = kernel.update(fresh, Field(gradient, log_joint), STILL)
        assert not bool(evaluation.log_joint.isfinite())


def test_a_large_gain_is_accepted():
    """Whose ratio overflows, in single precision, too."""
    target = Rows(10**6, lambda x: -x.square().sum() / 2)
    kernel = bound(GHMC(lr=0.5), 10**6)
    for dtype in (torch.float32, torch.float64):
        start = torch.full((3,), 5.0, dtype=dtype)
        state = begun(kernel, target, start, torch.zeros(3, dtype=dtype), u=-0.9)
        moved, _ = kernel.update(state, target, STILL.to(dtype))
        assert bool((moved.position < start).all())
        assert float(moved.slice.abs()) <= 1e-30
        assert all(leaf.dtype == dtype for leaf in moved)


# ------------------------------------------------------------------ what makes it exact


def free(lr=0.4):
    """A kernel whose momentum is not refreshed."""
    return bound(GHMC(lr=lr, friction=1e-300))


def test_a_step_back_undoes_it():
    kernel, x, p = free(), normals(3, seed=0), normals(3, seed=1)
    state = begun(kernel, HILLS, x, p, u=-0.1)
    moved, _ = kernel.update(state, HILLS, STILL)
    assert float(moved.accepted) == 2
    back = moved._replace(momentum=-moved.momentum, slice=double(-0.1)[0])
    again, _ = kernel.update(back, HILLS, STILL)
    assert float(again.accepted) == 3
    close(again.position, x)
    close(again.momentum, -p)


def test_a_step_keeps_the_density_of_the_law():
    """The Jacobian of (x, p, u) -> (x', p', u') is the ratio of densities before and after."""
    kernel = free()

    def step(vector):
        state = begun(kernel, HILLS, vector[:3].detach(), vector[3:6], vector[6].detach())
        state = state._replace(
            position=vector[:3],
            slice=vector[6],
            gradient=torch.func.grad(hills)(vector[:3]),
            log_joint=hills(vector[:3]),
        )
        moved, _ = kernel.update(state, HILLS, STILL)
        return torch.cat([moved.position, moved.momentum, moved.slice[None]])

    def log_density(vector):
        return hills(vector[:3]) - vector[3:6].square().sum() / 2

    at = torch.cat([normals(3, seed=0), normals(3, seed=1), double(-0.12)])
    jacobian = torch.func.jacfwd(step)(at)
    moved = step(at)
    assert not torch.equal(moved[:3], at[:3])
    change = log_density(at) - log_density(moved)
    assert abs(float(change)) > 0.01
    close(torch.linalg.slogdet(jacobian).logabsdet, change, tolerance=1e-10)


def walk(kernel, target, positions, steps, seed=0):
    """States of many chains after so many steps; u stays where it belongs."""
    chains, size = positions.shape
    state = torch.vmap(kernel.init)(positions, normals(chains, size, seed=seed + 1))
    source = torch.Generator().manual_seed(seed)
    state = state._replace(slice=2 * torch.rand(chains, generator=source, dtype=torch.float64) - 1)
    move = torch.vmap(lambda s, z: kernel.update(s, target, z)[0])
    for _ in range(steps):
        noise = torch.randn(chains, 1, size, generator=source, dtype=torch.float64)
        state = move(state, noise)
        assert bool((state.slice.abs() <= 1).all())
    return state


def z_of_means(values, expected):
    """Of means of independent chains, by element."""
    return (values.mean(0) - expected) / values.std(0) * len(values) ** 0.5


LIMIT = 4.8  # of some 20 z-scores, one exceeds it once in 10^4 times


@pytest.mark.parametrize(("temperature", "num_data"), [(1.0, 1), (2.5, 300)])
@pytest.mark.parametrize("lr", [0.5, 1.1])
@pytest.mark.slow
def test_a_gaussian_is_exact_at_long_steps(lr, temperature, num_data):
    """Where leapfrog steps alone would have an sd that is off by 20%."""
    chains, sds, mass = 20_000, double(1.0, 0.7, 1.5, 1.0), double(1.0, 1.6, 1.0, 0.8)
    target = Rows(num_data, lambda x: -(x / sds).square().sum() / 2)
    kernel = bound(GHMC(lr=lr, friction=0.5, temperature=temperature), num_data)
    kernel = kernel.replace(mass=mass)
    unit = (temperature / num_data) ** 0.5
    state = walk(kernel, target, unit * sds * normals(chains, 4, seed=5), steps=60)
    accepted = float(state.accepted.mean()) / 60
    assert (0.9 if lr == 0.5 else 0.4) < accepted < (0.98 if lr == 0.5 else 0.75)
    x, p = state.position / (unit * sds), state.momentum / (unit * mass.sqrt())
    u = state.slice[:, None]
    for values, expected in (
        *((x, 0.0), (x.square(), 1.0), (p, 0.0), (p.square(), 1.0)),
        *((x * p, 0.0), (u, 0.0), (u.abs(), 0.5), (u.square(), 1 / 3)),
        *((x.square() * u.abs() - u.abs(), 0.0), (x[:, :1] * x[:, 1:], 0.0)),
    ):
        assert float(z_of_means(values, expected).abs().max()) < LIMIT


@pytest.mark.slow
def test_a_density_that_is_not_gaussian_is_exact():
    """One dimension, two unequal hills, from a law that is not its own; by quadrature."""

    def log_joint(x):
        return (-(x**4) / 4 + x**2 + 0.5 * x + 0.3 * torch.sin(4 * x)).sum()

    grid = torch.linspace(-6, 6, 40_001, dtype=torch.float64)
    weights = torch.vmap(log_joint)(grid[:, None]).exp()
    weights = weights / weights.sum()
    kernel = bound(GHMC(lr=0.7, friction=0.5))
    target = Field(torch.func.grad(log_joint), log_joint)
    x = walk(kernel, target, normals(20_000, 1, seed=5), steps=300).position[:, 0]
    edges = double(-2.0, -1.2, -0.5, 0.3, 1.0, 1.6, 2.2)
    functions = [lambda y: y, torch.square, lambda y: y**3]
    functions += [lambda y, e=edge: (y < e).double() for edge in edges]
    for function in functions:
        expected = (weights * function(grid)).sum()
        assert abs(float(z_of_means(function(x)[:, None], expected))) < LIMIT


@pytest.mark.slow
def test_rejections_come_together():
    """At nine in ten accepted, a momentum lasts longer than with a new uniform number a step."""
    target, kernel = Rows(1, lambda x: -x.square().sum() / 2), bound(GHMC(lr=0.52))

    def longest_runs(own):
        source, state = torch.Generator().manual_seed(0), None
        state = torch.vmap(kernel.init)(normals(500, 50, seed=1), normals(500, 50, seed=2))
        move = torch.vmap(lambda s, z: kernel.update(s, target, z)[0])
        counts = []
        for _ in range(300):
            if not own:
                fresh = 2 * torch.rand(500, generator=source, dtype=torch.float64) - 1
                state = state._replace(slice=fresh)
            noise = torch.randn(500, 1, 50, generator=source, dtype=torch.float64)
            state = move(state, noise)
            counts.append(state.accepted)
        accepted = torch.stack(counts).diff(dim=0)
        after = accepted[:-1] == 0  # of two in a row
        return float(accepted.mean()), float((accepted[1:] == 0)[after].double().mean())

    persistent, anew = longest_runs(True), longest_runs(False)
    assert abs(persistent[0] - anew[0]) < 0.02
    assert persistent[0] == pytest.approx(0.9, abs=0.03)
    assert persistent[1] > 2.5 * anew[1]


# ------------------------------------------------------------------ refusals


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ArgumentError, match=r"^temperature=0: pass a number > 0"):
        GHMC(lr=0.1, temperature=0)
    with pytest.raises(ArgumentError, match=r"^lr: Cyclical explores at temperature 0"):
        GHMC(lr=Cyclical(0.3, cycle_steps=20, exploration=0.5))
