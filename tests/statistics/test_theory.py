"""Kernels against what is known of them, without sampling error: linear maps and noise are read
out on Gaussian targets, and temperature 0 is compared with torch's optimizers."""

import itertools
import math

import numpy as np
import pytest
import torch
from gaussian import Field, bound, hills, read_out, stationary
from methods import STOCHASTIC, by_name
from reference import close_to_largest, double, normals

from pyro_scale.core.schedules import polynomial_decay
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels import BAOA, SGHMC, SGLD, SGNHT, UBU, pSGLD
from pyro_scale.kernels.ubu import move_freely

CORRELATED = double([2.0, 0.6, 0.0], [0.6, 0.9, -0.2], [0.0, -0.2, 0.4])
ONE = torch.ones(1, 1, dtype=torch.float64)
#: Underdamped methods whose steps are linear in gradients and noise.
UNADJUSTED = [row for row in STOCHASTIC if row.has_momentum]
MASSES = {"1": 1.0, "2.5": 2.5, "apart": double(0.5, 1.0, 3.0)}


def of_eigenvalues(function, matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(function(values)) @ vectors.T


def with_values(kernel, **values):
    """A bound kernel with these tensors, as for sites of their own."""
    given = {name: torch.as_tensor(value).double() for name, value in values.items()}
    return kernel.replace(**given)


# ------------------------------------------------------------------ temperature 1 and others


def sgld_position(e, t):
    return lambda p: t / (p * (1 - e * p / 2))


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


@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize(("lr", "friction", "temperature", "num_data"), SETTINGS)
class TestStationaryVariance:
    """Against the closed forms, T over N and the precision over N.

    With masses M the position x M^1/2 has mass 1 and the precision M^-1/2 P M^-1/2.
    """

    def law(self, method, lr, friction, temperature, num_data, mass):
        kernel = bound(method(lr=lr, friction=friction, temperature=temperature), num_data)
        covariance = stationary(with_values(kernel, mass=MASSES[mass]), CORRELATED / num_data)
        root = torch.as_tensor(MASSES[mass]).double().expand(3).sqrt()
        precision = CORRELATED / num_data / torch.outer(root, root)
        return covariance[:3, :3], covariance[3:, 3:], root, precision

    def test_sghmc(self, lr, friction, temperature, num_data, mass):
        values = lr, friction, temperature, num_data
        position, momentum, root, precision = self.law(SGHMC, *values, mass)
        scale, tempered = torch.outer(root, root), temperature / num_data
        expected = of_eigenvalues(sghmc_position(lr, friction, tempered), precision)
        close_to_largest(position, expected / scale)
        expected = of_eigenvalues(sghmc_momentum(lr, friction, tempered), precision)
        close_to_largest(momentum, expected * scale)
        if mass == "2.5":  # as it is documented
            m, eigenvalues = 2.5, torch.linalg.eigvalsh(CORRELATED / num_data)
            d = 4 * m - 2 * lr * friction * m - lr**2 * eigenvalues
            variance = tempered * (4 * m - 2 * lr * friction * m) / (eigenvalues * d)
            close_to_largest(torch.linalg.eigvalsh(position), variance.flip(0))
            close_to_largest(torch.linalg.eigvalsh(momentum), 4 * tempered * m**2 / d)

    def test_baoa_is_exact(self, lr, friction, temperature, num_data, mass):
        values = lr, friction, temperature, num_data
        position, momentum, root, _ = self.law(BAOA, *values, mass)
        close_to_largest(position, temperature * torch.linalg.inv(CORRELATED))
        close_to_largest(momentum, temperature / num_data * torch.diag(root**2))


@pytest.mark.parametrize("factors", [double(1.0, 1.0, 1.0), double(0.3, 1.0, 1.7)])
@pytest.mark.parametrize(("lr", "temperature", "num_data"), [(0.1, 1.0, 1), (0.5, 0.3, 40)])
def test_stationary_variance_of_sgld(lr, temperature, num_data, factors):
    """With step sizes H the position H^-1/2 x has the step size 1 and precision H^1/2 P H^1/2."""
    kernel = bound(SGLD(lr=lr, temperature=temperature), num_data)
    covariance = stationary(with_values(kernel, lr=lr * factors), CORRELATED / num_data)
    scale = torch.outer(factors.sqrt(), factors.sqrt())
    precision = CORRELATED / num_data * scale
    expected = of_eigenvalues(sgld_position(lr, temperature / num_data), precision)
    close_to_largest(covariance, scale * expected)


@pytest.mark.parametrize("method", [BAOA, SGHMC, UBU])
def test_elements_of_their_own_step_size_friction_and_mass(method):
    """Independent elements go as they would alone."""
    names = "lr", "friction", "mass"
    each = dict(zip(names, double([0.2, 0.7, 0.1], [0.5, 2.0, 3.0], [0.4, 1.0, 6.0]), strict=True))
    precision = double(1.5, 0.4, 2.0)
    temperature = double(0.3, 0.3, 0.3)
    kernel = with_values(bound(method(lr=1)), temperature=temperature, **each)
    together = stationary(kernel, torch.diag(precision))
    for i in range(3):
        own = {name: value[i] for name, value in each.items()}
        alone = with_values(bound(method(lr=1, temperature=0.3)), **own)
        expected = stationary(alone, precision[i : i + 1, None])
        close_to_largest(together[i::3, i::3], expected)
        if method is BAOA:
            close_to_largest(together[i, i], 0.3 / precision[i])


def test_sghmc_known_figure():
    variance = float(stationary(bound(SGHMC(lr=0.1)), ONE)[0, 0])
    assert variance == pytest.approx(1.002639, abs=5e-7)


@pytest.mark.parametrize(
    ("kernel", "limit"),
    [
        (SGLD(lr=0.5), 2 / 0.5),
        (SGHMC(lr=0.5, friction=0.4), (4 - 2 * 0.5 * 0.4) / 0.5**2),
        (BAOA(lr=0.5, friction=0.4), 4 / 0.5**2),
        (SGHMC(lr=0.5, friction=0.4, mass=3.0), 3 * (4 - 2 * 0.5 * 0.4) / 0.5**2),
        (BAOA(lr=0.5, friction=0.4, mass=3.0), 3 * 4 / 0.5**2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_stable_up_to_the_limit_and_not_beyond(kernel, limit):
    def radius(precision):
        return torch.linalg.eigvals(read_out(bound(kernel), precision * ONE)[0]).abs().max()

    assert radius(0.999 * limit) < 1 < radius(1.001 * limit)


# ------------------------------------------------------------------ coordinates and units


def path_of(kernel, gradient, start, momentum, noise):
    """(The last state, all positions)."""
    state = kernel.init(start, momentum)
    positions = []
    for each in noise:
        state, _ = kernel.update(state, Field(gradient), each)
        positions.append(state.position)
    return state, torch.stack(positions)


@pytest.mark.parametrize("row", UNADJUSTED, ids=by_name)
def test_masses_are_a_change_of_coordinates(row):
    """With masses m, sqrt(m) x goes as it would with mass 1: path by path, on any target."""
    mass = double(0.5, 1.0, 3.0)
    unit = bound(row.of(lr=0.15, mass=1.0, temperature=0.4))
    start, noise = normals(3, seed=1), normals(40, unit.normals, 3, seed=2)
    momentum = normals(3, seed=3)
    slope = torch.func.grad(hills)
    state, path = path_of(with_values(unit, mass=mass), slope, start, momentum, noise)
    expected, scaled = path_of(
        unit,
        lambda x: slope(x / mass.sqrt()) / mass.sqrt(),
        start * mass.sqrt(),
        momentum,
        noise,
    )
    close_to_largest(path, scaled / mass.sqrt(), rtol=1e-11)
    close_to_largest(state.momentum, expected.momentum * mass.sqrt(), rtol=1e-11)
    assert path.std(0).min() > 0.05


@pytest.mark.parametrize("row", [row for row in UNADJUSTED if row.name != "SGNHT"], ids=by_name)
def test_step_sizes_by_element_are_a_change_of_coordinates(row):
    """With steps h lr and friction f / h, x / h goes as it would with lr and f."""
    factor = double(0.3, 1.0, 1.6)
    plain = bound(row.of(temperature=0.4))
    start, noise = normals(3, seed=1), normals(40, plain.normals, 3, seed=2)
    slope = torch.func.grad(hills)
    apart = with_values(plain, lr=plain.lr * factor, friction=plain.friction / factor)
    _, path = path_of(apart, slope, start, start, noise)
    _, scaled = path_of(plain, lambda x: factor * slope(factor * x), start / factor, start, noise)
    close_to_largest(path, scaled * factor, rtol=1e-11)


@pytest.mark.parametrize("row", UNADJUSTED, ids=by_name)
def test_a_target_of_more_rows_is_a_narrower_one(row):
    """Temperature 1/N: x sqrt(N) goes as it would at temperature 1, so that no law depends on N
    (a thermostat without the factor N would)."""
    size = 10_000
    start, noise = normals(3, seed=1), normals(60, row.kernel.normals, 3, seed=2)
    slope = torch.func.grad(hills)
    one, _ = path_of(bound(row.of()), slope, start, start, noise)
    root = size**0.5
    many, _ = path_of(
        bound(row.of(), size), lambda x: slope(root * x) / root, start / root, start, noise
    )
    close_to_largest(many.position * root, one.position, rtol=1e-11)
    close_to_largest(many.momentum * root, one.momentum, rtol=1e-11)
    if row.name == "SGNHT":
        close_to_largest(many.xi, one.xi, rtol=1e-11)
        assert abs(one.xi - 0.7) > 0.01


# ------------------------------------------------------------------ UBU


def free_motion(friction, mass, temperature, time):
    """(Matrix, covariance) of free motion: a kick of 1 at a time s before the end leaves the
    momentum exp(-f s) and the position (1 - exp(-f s)) / (f m); Gauss-Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    s, weights = time * (nodes + 1) / 2, weights * time / 2
    decay, response = np.exp(-friction * s), -np.expm1(-friction * s) / (friction * mass)
    rate = 2 * friction * mass * temperature
    mixed = rate * weights @ (response * decay)
    covariance = double([rate * weights @ response**2, mixed], [mixed, rate * weights @ decay**2])
    away = -math.expm1(-friction * time)
    matrix = double([1.0, away / (friction * mass)], [0.0, 1 - away])
    return matrix, covariance


PRODUCTS = [
    1e-6,
    1e-4,
    1e-2,
    0.1,
    0.3,
    1.0,
    3.0,
    10.0,
]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("friction", "mass", "temperature"), [(1, 1, 1), (0.3, 2.5, 0.01)])
class TestUBU:
    def kernel(self, product, friction, mass, temperature):
        lr = product / friction
        kernel = UBU(lr=lr, friction=friction, mass=mass, temperature=temperature)
        return bound(kernel), (friction, mass, temperature, lr / 2)

    def half(self, kernel):
        """(Matrix, noise) of the motion before the kick."""
        zero, one = double(0.0), double(1.0)
        pairs = [(one, zero, zero, zero), (zero, one, zero, zero)]
        pairs += [(zero, zero, one, zero), (zero, zero, zero, one)]
        start = kernel.init(zero, zero)
        images = [
            torch.cat(move_freely(start._replace(position=x, momentum=p), kernel.values, (a, b)))
            for x, p, a, b in pairs
        ]
        columns = torch.stack(images, 1)
        return columns[:, :2], columns[:, 2:]

    def test_free_motion_is_exact(self, product, friction, mass, temperature):
        kernel, values = self.kernel(product, friction, mass, temperature)
        matrix, noise = self.half(kernel)
        exact, covariance = free_motion(*values)
        torch.testing.assert_close(matrix, exact, rtol=1e-12, atol=0)
        torch.testing.assert_close(noise @ noise.T, covariance, rtol=1e-12, atol=0)
        # what a Cholesky factor with the momentum first would be, element by element
        beside = (covariance[0, 0] - covariance[0, 1] ** 2 / covariance[1, 1]).sqrt()
        factor = double(
            [covariance[0, 1] / covariance[1, 1].sqrt(), beside], [covariance[1, 1].sqrt(), 0.0]
        )
        loss = 1e-12 * covariance[0, 0] / beside**2  # the subtraction's
        torch.testing.assert_close(noise, factor, rtol=float(loss), atol=0)


@pytest.mark.parametrize("product", [1e-6, 1e-4, 1e-2, 0.3, 10.0])
def test_ubu_is_free_motion_kick_free_motion(product):
    """Without a force two halves are free motion over lr, but for what cancels at small steps:
    the position's variance gets a quarter from the second coefficient."""
    friction, mass, temperature = 0.7, 2.0, 0.3
    kernel = bound(
        UBU(lr=product / friction, friction=friction, mass=mass, temperature=temperature)
    )
    transition, noise, pushed = read_out(kernel, torch.zeros(1, 1).double())
    matrix, covariance = free_motion(friction, mass, temperature, product / friction)
    rtol = max(1e-12, 1e-14 / product**2)
    torch.testing.assert_close(transition, matrix, rtol=1e-12, atol=0)
    torch.testing.assert_close(noise @ noise.T, covariance, rtol=rtol, atol=0)
    half, _ = free_motion(friction, mass, temperature, product / friction / 2)
    kick = double(0.0, product / friction)
    torch.testing.assert_close(pushed[:, 0], half @ kick, rtol=1e-12, atol=0)
    # the momentum alone is stationary at m T, whatever the step
    left = 1 - transition[1, 1] ** 2
    assert float((noise @ noise.T)[1, 1] / left) == pytest.approx(mass * temperature, rel=1e-9)


@pytest.mark.parametrize("mass", [1.0, 2.5])
@pytest.mark.parametrize("friction", [0.3, 1.0, 5.0])
def test_ubus_bias_is_of_second_order(friction, mass):
    def errors(lr):
        kernel = UBU(lr=lr, friction=friction, mass=mass, temperature=0.6)
        covariance = stationary(bound(kernel, num_data=3), 0.8 * ONE)
        return covariance[0, 0] / (0.2 / 0.8) - 1, covariance[1, 1] / (0.2 * mass) - 1

    for big, small in zip(errors(0.02), errors(0.01), strict=True):
        assert float(big / small) == pytest.approx(4, rel=3e-3)
        assert 1e-6 < abs(float(big)) < 1e-3


@pytest.mark.parametrize(("method", "factor"), [(SGLD, 2), (SGHMC, 4), (UBU, 4)])
def test_orders_of_the_steps_own_bias(method, factor):
    errors = [float(stationary(bound(method(lr=lr)), ONE)[0, 0] - 1) for lr in (0.02, 0.01)]
    assert errors[0] / errors[1] == pytest.approx(factor, rel=0.02)


# ------------------------------------------------------------------ temperature 0


def optimized(start, make, steps=30):
    """The positions of a torch optimizer on minus `hills`."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer, schedule = make(parameter)
    path = []
    for step in range(steps):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.zero_grad()
        (-hills(parameter)).backward()
        optimizer.step()
        path.append(parameter.detach().clone())
    return torch.stack(path)


def walked(kernel, start, steps=30):
    """The positions of a kernel at temperature 0, whose schedules see the step's number."""
    state, path = None, []
    for step in range(steps):
        now = bound(kernel, num_data=3, step=step)
        state = now.init(start, normals(3, seed=step)) if state is None else state
        state, _ = now.update(state, Field(torch.func.grad(hills)), normals(now.normals, 3))
        path.append(state.position)
    path = torch.stack(path)
    assert (path - start).abs().max() > 0.1  # it did move
    return path


def sgd(**settings):
    return lambda parameter: (torch.optim.SGD([parameter], **settings), None)


START = double(0.5, -1.0, 0.2)


@pytest.mark.parametrize("mass", [1.0, 2.5])
@pytest.mark.parametrize(("lr", "friction"), [(0.1, 1.0), (0.3, 0.2), (0.05, 4.0)])
@pytest.mark.parametrize("method", [BAOA, SGHMC, SGNHT])
def test_temperature_zero_is_sgd_with_momentum(method, lr, friction, mass):
    """Step for step; torch's first step sets its buffer to the gradient, as rest does."""
    decay = 1 - lr * friction if method is SGHMC else math.exp(-lr * friction)
    rate = lr**2 / mass if method is SGHMC else lr**2 * (1 + decay) / (2 * mass)
    kernel = method(lr=lr, friction=friction, mass=mass, temperature=0)
    expected = optimized(START, sgd(lr=rate, momentum=decay))
    close_to_largest(walked(kernel, START), expected, rtol=1e-13)


@pytest.mark.parametrize("lr", [0.01, 0.09])
def test_temperature_zero_of_sgld_is_sgd(lr):
    kernel = SGLD(lr=lr, temperature=0)
    close_to_largest(walked(kernel, START), optimized(START, sgd(lr=lr)), rtol=1e-13)


@pytest.mark.parametrize(("forgetting", "damping"), [(0.01, 1e-5), (0.3, 0.1), (1.0, 1e-5)])
def test_temperature_zero_of_psgld_is_rmsprop(forgetting, damping):
    """Whose mean square starts at 0, too."""
    kernel = pSGLD(lr=0.02, temperature=0, forgetting=forgetting, damping=damping)
    settings = {"lr": 0.02, "alpha": 1 - forgetting, "eps": damping}
    expected = optimized(START, lambda p: (torch.optim.RMSprop([p], **settings), None))
    close_to_largest(walked(kernel, START), expected, rtol=1e-12)


FALLING = polynomial_decay(0.03, power=1.0, delay=10.0)
MOMENTA = [(BAOA, 0.2), (BAOA, 0.95), (SGHMC, 0.0), (SGHMC, 0.5), (SGHMC, 0.95)]


def checked_against_sgd(method, lr, momentum):
    def make(parameter):
        optimizer = torch.optim.SGD([parameter], lr=0.02, momentum=momentum)
        return optimizer, (lr if callable(lr) else None)

    kernel = method(**method.from_sgd(lr, momentum), temperature=0)
    close_to_largest(walked(kernel, START), optimized(START, make), rtol=1e-12)


@pytest.mark.parametrize(("method", "momentum"), MOMENTA)
def test_from_sgd_is_torchs_sgd(method, momentum):
    checked_against_sgd(method, 0.02, momentum)


@pytest.mark.parametrize(("method", "momentum"), MOMENTA)
def test_from_sgd_with_a_schedule_is_torchs_sgd(method, momentum):
    checked_against_sgd(method, FALLING, momentum)


@pytest.mark.parametrize("method", [SGLD, UBU, SGNHT, pSGLD])
def test_from_sgd_of_what_is_not_sgd(method):
    with pytest.raises(ArgumentError, match=rf"^{method.__name__} at temperature 0 is not SGD"):
        method.from_sgd(0.1, 0.9)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5, math.nan])
@pytest.mark.parametrize("method", [BAOA, SGHMC])
def test_from_sgd_needs_a_momentum_below_one(method, momentum):
    with pytest.raises(ArgumentError, match=rf"^momentum={momentum!r}: {method.__name__} needs"):
        method.from_sgd(0.1, momentum)
    with pytest.raises(ArgumentError, match=r"^momentum=0: BAOA needs one inside \(0, 1\)"):
        BAOA.from_sgd(0.1, 0)


@pytest.mark.parametrize(
    "lr",
    [0.0, -0.1, "0.1", None, math.nan, math.inf],
)
@pytest.mark.parametrize("method", [BAOA, SGHMC])
def test_from_sgd_needs_a_positive_lr(method, lr):
    with pytest.raises(ArgumentError, match=r"lr"):
        method(**method.from_sgd(lr, 0.9))


# ------------------------------------------------------------------ what diagnostics rely on


@pytest.mark.parametrize("mass", [1.0, 2.5])
@pytest.mark.parametrize("gradient_noise", [0.3, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("method", [BAOA, SGHMC, SGLD, UBU])
def test_added_temperature_is_the_inflation(method, temperature, gradient_noise, mass):
    """The position's variance with gradient noise over that without, minus 1, is the added
    temperature over T: exactly where gradient noise enters as the kernel's own noise does,
    else to second order in lr (the error falls to a quarter when lr is halved)."""

    def error(lr):
        others = {} if method is SGLD else {"friction": 1.7, "mass": mass}
        kernel = bound(method(lr=lr, temperature=temperature, **others))
        clean = stationary(kernel, CORRELATED)[:3, :3]
        noisy = stationary(kernel, CORRELATED, gradient_noise)[:3, :3]
        inflation = torch.trace(noisy) / torch.trace(clean) - 1
        noise = torch.tensor(gradient_noise, dtype=torch.float64)
        return float(inflation / (kernel.added_temperature(noise) / temperature) - 1)

    if method in (SGHMC, SGLD):
        assert abs(error(0.2)) < 1e-10
    else:
        assert 0 < abs(error(0.2)) < 0.02
        assert error(0.1) / error(0.2) == pytest.approx(0.25, rel=0.05)


def test_added_temperature_of_psgld_whose_preconditioner_is_the_noises():
    """v = V: SGLD with the step size lr / (damping + sqrt(V))."""
    noise = 0.7
    kernel = bound(pSGLD(lr=0.1, damping=0.2, forgetting=0, temperature=0.4))
    step = 0.1 / (0.2 + noise**0.5)
    plain = bound(SGLD(lr=step, temperature=0.4))
    added = [float(k.added_temperature(double(noise))) for k in (kernel, plain)]
    assert added[0] == pytest.approx(added[1], rel=1e-12)
    metric = kernel.metric(double(noise))
    assert float(kernel.lr * metric) == pytest.approx(step, rel=1e-12)
    settled, left = kernel.linearize(double(noise))
    assert (type(settled.kernel), float(settled.lr), float(left)) == (SGLD, 0.1, noise)


def relaxation_ratio(kernel, precision):
    """The relaxation steps that a kernel predicts, over those of its transition matrix."""
    kernel = bound(kernel)
    modes = torch.linalg.eigvals(read_out(kernel, precision * ONE)[0]).abs()
    exact = -1 / math.log(float(modes.max()))
    return float(kernel.relaxation_steps(torch.tensor(precision).double())) / exact


@pytest.mark.parametrize(
    ("kernel", "precision", "tolerance"),
    [
        (SGLD(lr=0.001), 0.7, 0.001),
        *((k(lr=0.001, friction=20.0), 1.0, 0.02) for k in (BAOA, SGHMC, UBU)),  # overdamped
        *((k(lr=0.001, friction=0.3), 1.0, 0.001) for k in (BAOA, SGHMC, UBU)),  # underdamped
        *((k(lr=0.001, friction=8.0, mass=5.0), 0.8, 0.01) for k in (BAOA, SGHMC, UBU)),
        *((k(lr=0.001, friction=0.3, mass=5.0), 1.0, 0.001) for k in (BAOA, SGHMC, UBU)),
    ],
    ids=lambda value: f"{value:g}" if isinstance(value, float) else type(value).__name__,
)
def test_relaxation_steps_are_those_of_the_transition(kernel, precision, tolerance):
    """The slowest mode falls by e in as many steps, in either regime."""
    assert relaxation_ratio(kernel, precision) == pytest.approx(1.0, rel=tolerance)


@pytest.mark.parametrize(
    ("friction", "method"), itertools.product([0.5, 1.0, 1.5, 2.0, 3.0], [BAOA, SGHMC, UBU])
)
def test_relaxation_steps_are_within_a_factor_of_two_between_the_regimes(friction, method):
    assert 0.99 < relaxation_ratio(method(lr=0.001, friction=friction), 1.0) < 2.01
