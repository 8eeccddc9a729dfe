"""The noise of minibatches, each way of drawing them against its own theory, without sampling
error: on Gaussian models steps are affine, so that second moments go through an epoch linearly,
and averages over all orders of a few batches are exact."""

import itertools
import math

import gaussian
import pytest
import torch
from gaussian import Field, bound
from reference import double, normals

import pyro_scale as ps
from pyro_scale.data.row_sampler import RowIndices
from pyro_scale.kernels import BAOA, SGHMC, SGLD, UBU

LINEAR = [BAOA, SGHMC, SGLD, UBU]
UNDERDAMPED = [BAOA, SGHMC, UBU]
#: Each batch's gradient over N is push - slope x: of means, and of a regression.
PUSHES = double(1.0, -2.0, 0.3, 0.7)
SLOPES = {"alike": torch.ones(4).double(), "apart": double(0.2, 1.6, 0.7, 1.5)}


def made(kernel, lr, **others):
    """The kernel at friction 1 and temperature 1 over N, bound."""
    return bound(kernel(lr=lr, **others))


def step_of(kernel, slope, push):
    """(A, b b', o) of one step on a batch, z' = A z + b zeta + o, z = position[, momentum]."""
    target = Field(lambda x: push - slope * x)
    zero = torch.zeros(1).double()
    rest = kernel.init(zero, zero)

    def moved(vector, noise):
        state = type(rest)(*vector.split(1))
        return torch.cat(list(kernel.update(state, target, noise[:, None])[0]))

    still, origin = torch.zeros(kernel.normals).double(), torch.zeros(len(rest)).double()
    offset = moved(origin, still)
    units = torch.eye(len(rest)).double(), torch.eye(kernel.normals).double()
    transition = torch.stack([moved(unit, still) - offset for unit in units[0]], 1)
    noise = torch.stack([moved(origin, unit) - offset for unit in units[1]], 1)
    return transition, noise @ noise.T, offset


def orders(count, sampling):
    """All orders of so many batches that are equally likely, in one cycle of steps."""
    if sampling == "replacement":
        return [(batch,) for batch in range(count)]
    sweeps = itertools.permutations(range(count))
    return [s + s[::-1] if sampling == "symmetric" else s for s in sweeps]


def laws(kernel, sampling, slopes, pushes=PUSHES):
    """The stationary (mean, covariance) after 0, 1, ... steps of a cycle, averaged over all orders.

    The second moments of (z, 1) after a step are (M x M) theirs + q, M = [[A, o], [0, 1]].
    """
    steps = []
    for slope, push in zip(slopes, pushes, strict=True):
        transition, added, offset = step_of(kernel, slope, push)
        size = len(offset) + 1
        affine, noise = torch.eye(size).double(), torch.zeros(size, size).double()
        affine[:-1, :-1], affine[:-1, -1], noise[:-1, :-1] = transition, offset, added
        steps.append((torch.kron(affine, affine), noise.flatten()))
    each = orders(len(steps), sampling)
    cycle = [[] for _ in range(len(each[0]) + 1)]
    for order in each:
        product, added = torch.eye(size * size).double(), torch.zeros(size * size).double()
        cycle[0].append((product, added))
        for place, batch in enumerate(order, start=1):
            matrix, noise = steps[batch]
            product, added = matrix @ product, matrix @ added + noise
            cycle[place].append((product, added))
    mean = [[torch.stack(part).mean(0) for part in zip(*phase, strict=True)] for phase in cycle]
    product, added = mean.pop()
    system = torch.eye(size * size).double() - product
    system[-1], added[-1] = 0.0, 1.0  # the moment of 1 is 1
    system[-1, -1] = 1.0
    start = torch.linalg.solve(system, added)
    found = []
    for product, added in mean:
        moments = (product @ start + added).reshape(size, size)
        average = moments[:-1, -1]
        found.append((average, moments[:-1, :-1] - torch.outer(average, average)))
    return found


def on_average(kernel, sampling, slopes, pushes=PUSHES):
    """(The position's mean, its variance) on average over the phases of a cycle."""
    found = laws(kernel, sampling, slopes, pushes)
    return torch.stack([torch.stack([mean[0], cov[0, 0]]) for mean, cov in found]).mean(0)


def ratios(error, start, count=4):
    """By what the error falls each time that the step size is halved."""
    errors = [float(error(start / 2**i)) for i in range(count)]
    return [a / b for a, b in itertools.pairwise(errors)]


# ------------------------------------------------------------------ against closed forms


@pytest.mark.parametrize("kernel", LINEAR)
def test_enumeration_without_noise_is_the_stationary_law(kernel):
    """Batches that are all alike: what tests/gaussian.py says."""
    bound_kernel = made(kernel, 0.3)
    exact = gaussian.stationary(bound_kernel, double(0.8)[:, None])
    for sampling in ("replacement", "shuffle", "symmetric"):
        same = double(0.8, 0.8, 0.8), double(0.4, 0.4, 0.4)
        for mean, covariance in laws(bound_kernel, sampling, *same):
            torch.testing.assert_close(covariance, exact, rtol=1e-11, atol=1e-12)
            assert float(mean[0]) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("kernel", LINEAR)
def test_replacement_is_white_gradient_noise(kernel):
    """Batches of one curvature: the enumeration is the Lyapunov equation with V added."""
    bound_kernel = made(kernel, 0.3)
    ((_, covariance),) = laws(bound_kernel, "replacement", SLOPES["alike"])
    variance = float(PUSHES.square().mean())
    exact = gaussian.stationary(bound_kernel, torch.ones(1, 1).double(), variance)
    torch.testing.assert_close(covariance, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("kernel", LINEAR)
def test_replacement_adds_its_temperature_to_first_order(kernel, slopes):
    """Where the batches' curvatures differ too, V is that at the mode and at draws around it:
    E (push - slope x)^2 about its mean, E x^2 = T / L."""
    slopes, temperature = SLOPES[slopes], 1.0
    precision = float(slopes.mean())
    noise = PUSHES.square().mean() + slopes.var(correction=0) * temperature / precision

    def error(lr):
        kernel_now = made(kernel, lr)
        _, variance = on_average(kernel_now, "replacement", slopes)
        clean = gaussian.stationary(kernel_now, double(precision)[:, None])[0, 0]
        added = kernel_now.added_temperature(noise) / precision
        return ((variance - clean) / added - 1).abs()

    assert error(0.001) < 0.02
    assert error(0.0005) / error(0.001) < 0.55


# ------------------------------------------------------------------ orders in lr


@pytest.mark.parametrize(
    ("sampling", "factor"), [("replacement", 2), ("shuffle", 8), ("symmetric", 16)]
)
def test_orders_of_baoas_bias_by_minibatches(sampling, factor):
    """BAOA has no bias of its own, so that all of it is the batches'."""

    def error(lr):
        return on_average(made(BAOA, lr), sampling, SLOPES["alike"])[1] - 1

    assert ratios(error, 0.05)[-1] == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("sampling", ["replacement", "shuffle", "symmetric"])
@pytest.mark.parametrize("kernel", UNDERDAMPED)
def test_orders_of_the_bias(kernel, sampling, slopes):
    """SMS-UBU's claim, and that of the others: where an epoch cancels the noise, the bias is of
    second order, the step's own included."""
    slopes = SLOPES[slopes]
    exact = 1 / float(slopes.mean())

    def error(lr):
        return on_average(made(kernel, lr), sampling, slopes)[1] - exact

    if sampling == "replacement":
        assert ratios(error, 0.05)[-1] == pytest.approx(2, rel=0.02)
    else:
        assert all(abs(float(error(lr))) < 0.6 * lr**2 for lr in (0.05, 0.02, 0.01))


@pytest.mark.parametrize("kernel", LINEAR)
def test_orders_of_the_means_bias(kernel):
    """Where batches' curvatures differ, orders matter to the mean as well; batches drawn anew
    have none of it."""
    slopes, pushes = SLOPES["apart"], PUSHES + 0.5

    def error(lr, sampling):
        mean, _ = on_average(made(kernel, lr), sampling, slopes, pushes)
        return mean - pushes.mean() / slopes.mean()

    assert abs(error(0.2, "replacement")) < 1e-12
    for sampling in ("shuffle", "symmetric"):
        last = ratios(lambda lr, s=sampling: error(lr, s), 0.05)[-1]
        assert last == pytest.approx(2 if kernel is SGLD else 4, rel=0.05)


@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize(("sampling", "factor"), [("shuffle", 2), ("symmetric", 4)])
def test_paths_are_of_second_order_in_symmetric_sweeps_alone(sampling, factor, slopes):
    """UBU over the time 6 without noise, in one order of the batches again and again: how far
    the end is off the whole data's, root mean square over all orders."""
    slopes = SLOPES[slopes]

    def power(steps, times):
        size = len(steps[0][2])
        whole = torch.eye(size + 1).double()
        for transition, _, offset in steps:
            affine = torch.eye(size + 1).double()
            affine[:size, :size], affine[:size, size] = transition, offset
            whole = affine @ whole
        return torch.linalg.matrix_power(whole, times) @ double(1.0, -0.5, 1.0)

    def error(lr):
        kernel = made(UBU, lr, temperature=0)
        each = [step_of(kernel, *batch) for batch in zip(slopes, PUSHES, strict=True)]
        every = orders(4, sampling)
        times = round(6 / (lr * len(every[0])))
        mean = step_of(kernel, slopes.mean(), PUSHES.mean())
        exact = power([mean], times * len(every[0]))
        ends = torch.stack([power([each[batch] for batch in order], times) for order in every])
        return (ends - exact)[:, 0].square().mean().sqrt()

    assert ratios(error, 0.05, 3)[-1] == pytest.approx(factor, rel=0.05)


# ------------------------------------------------------------------ the samplers themselves


@pytest.mark.parametrize("sampling", ["replacement", "shuffle", "symmetric"])
@pytest.mark.parametrize("method", [BAOA, SGLD, UBU])
def test_chains_on_row_indices_have_the_law_of_their_sampling(method, sampling):
    """Four rows one by one: at every phase of a cycle, over 4,000 chains; the largest of 78 z
    beyond 4.4 would come once in 1,200 seeds."""
    chains, kernel = 4000, made(method, 0.3, temperature=0.5)
    cycle = len(orders(4, sampling)[0])
    steps = cycle * math.ceil(60 / cycle)
    rows = RowIndices(7, range(chains), 4, 1, sampling).span(0, steps + cycle)
    noise = normals(steps + cycle, chains, kernel.normals, 1, seed=8)
    state = torch.vmap(kernel.init)(normals(chains, 1, seed=9), normals(chains, 1, seed=10))
    expected = laws(kernel, sampling, SLOPES["apart"])
    clean = gaussian.stationary(kernel, SLOPES["apart"].mean()[None, None])[0, 0]
    assert expected[0][1][0, 0] > (1.4 if sampling == "replacement" else 1.01) * clean

    def update(state, row, noise):
        target = Field(lambda x: PUSHES[row] - SLOPES["apart"][row] * x)
        return kernel.update(state, target, noise)[0]

    for step in range(steps + cycle):
        if step >= steps:
            mean, covariance = expected[step - steps if cycle > 1 else 0]
            spread = covariance[0, 0] / chains
            centered = state.position[:, 0] - mean[0]
            assert abs(centered.mean()) < 4.4 * spread**0.5
            # not quite normal, as there are few orders
            squares = centered.square()
            assert abs(squares.mean() - covariance[0, 0]) < 4.4 * squares.std() / chains**0.5
        state = torch.vmap(update)(state, rows[:, step], noise[step])


# ------------------------------------------------------------------ kernels/gaussian.py

PRECISIONS = double(0.05, 0.4, 1.0, 2.5)
CHAINS = [
    (BAOA, {"friction": 0.5}),
    (SGHMC, {"friction": 2.0, "mass": 1.5}),
    (SGLD, {}),
    (UBU, {"friction": 1.0, "mass": 0.7}),
]


@pytest.fixture(params=CHAINS, ids=lambda case: case[0].__name__)
def kernel(request):
    method, others = request.param
    return bound(method(lr=0.4, temperature=0.8, **others))


class TestGaussianChain:
    def test_is_what_is_read_out_of_the_kernel(self, kernel):
        chain = kernel.modes(PRECISIONS)
        for mode, precision in enumerate(PRECISIONS):
            transition, noise, pushed = gaussian.read_out(kernel, precision[None, None])
            torch.testing.assert_close(chain.transition[mode], transition, rtol=0, atol=1e-15)
            torch.testing.assert_close(chain.injected[mode], noise @ noise.T, rtol=0, atol=1e-15)
            torch.testing.assert_close(chain.pushed[mode], pushed[:, 0], rtol=0, atol=1e-15)
        assert chain.stable.all()

    def test_covariance_of_batches_drawn_anew(self, kernel):
        noise = double(0.0, 0.3, 2.0, 9.0)
        covariance = kernel.modes(PRECISIONS).covariance(noise)
        for mode, precision in enumerate(PRECISIONS):
            expected = gaussian.stationary(kernel, precision[None, None], noise[mode])
            torch.testing.assert_close(covariance[mode], expected, rtol=1e-11, atol=1e-12)

    @pytest.mark.parametrize("pushes", [double(2.0, -2.0), PUSHES[:3], PUSHES])
    def test_covariance_of_shuffled_batches(self, kernel, pushes):
        """On average over the phases of an epoch."""
        pushes = pushes - pushes.mean()
        noise = pushes.square().mean().expand(len(PRECISIONS))
        covariance = kernel.modes(PRECISIONS).covariance(noise, epoch=len(pushes))
        for mode, precision in enumerate(PRECISIONS):
            slopes = precision.expand(len(pushes))
            each = [covariance for _, covariance in laws(kernel, "shuffle", slopes, pushes)]
            expected = torch.stack(each).mean(0)
            torch.testing.assert_close(covariance[mode], expected, rtol=1e-10, atol=1e-12)

    def test_covariance_of_long_epochs(self, kernel):
        """To 1%, by sums over the steps of m = 48 batches, whose errors n_t have the covariance
        V m/(m-1) (1[s=t] - 1/m), on average over all phases."""
        size, noise = 48, double(0.1, 0.5, 1.0, 2.0)
        chain = kernel.modes(PRECISIONS)
        covariance = chain.covariance(noise, epoch=size)
        errors = (torch.eye(size).double() - 1 / size) * size / (size - 1)
        for mode in range(len(PRECISIONS)):
            transition, pushed = chain.transition[mode], chain.pushed[mode]
            power, loads, phases = torch.eye(len(pushed)).double(), torch.zeros(0), []
            for phase in range(size + 1):
                added = loads @ errors[:phase, :phase] @ loads.T if phase else 0.0
                phases.append((power, noise[mode] * added))
                fresh = pushed[:, None]
                loads = torch.cat([transition @ loads, fresh], 1) if phase else fresh
                power = transition @ power
            start = gaussian.lyapunov(*phases.pop())
            clean = gaussian.lyapunov(transition, chain.injected[mode])
            exact = torch.stack([p @ start @ p.T + added for p, added in phases]).mean(0)
            torch.testing.assert_close(
                covariance[mode] - clean, exact, rtol=0.01, atol=0.01 * float(exact.abs().max())
            )

    def test_one_batch_an_epoch_has_no_noise(self, kernel):
        chain = kernel.modes(PRECISIONS)
        quiet = chain.covariance(torch.zeros(4).double())
        assert torch.equal(chain.covariance(torch.ones(4).double(), epoch=1), quiet)

    def test_mixing_times_by_brute_force(self, kernel):
        chain = kernel.modes(PRECISIONS)
        covariance = chain.covariance(double(0.1, 0.2, 0.3, 0.4))
        of_mean, of_square = chain.autocorrelation_times(covariance)
        for mode in range(len(PRECISIONS)):
            lagged, correlations = covariance[mode], []
            for _ in range(4000):
                lagged = chain.transition[mode] @ lagged
                correlations.append(float(lagged[0, 0] / covariance[mode, 0, 0]))
            rho = double(*correlations)
            assert float(of_mean[mode]) == pytest.approx(1 + 2 * float(rho.sum()), rel=1e-9)
            squares = float(rho.square().sum())
            assert float(of_square[mode]) == pytest.approx(1 + 2 * squares, rel=1e-9)

    @pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 30), (7, 50), (100, 400)])
    def test_forgetting_by_brute_force(self, kernel, warmup, steps):
        chain = kernel.modes(PRECISIONS)
        path, square = chain.forgetting(warmup, steps)
        remains = normals(4, 0)
        for _ in range(steps):
            power = torch.linalg.matrix_power(chain.transition, warmup + remains.shape[1])
            remains = torch.cat([remains, power[:, :1, 0]], dim=1)
        torch.testing.assert_close(path, remains.mean(1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(square, remains.square().mean(1), rtol=1e-9, atol=1e-12)

    def test_what_is_unstable_is_said_to_be(self):
        chain = bound(SGLD(lr=0.5)).modes(double(3.999, 4.001, -0.01))
        assert chain.stable.tolist() == [True, False, False]

    @pytest.mark.parametrize("unknown", [math.nan, math.inf, 1e200])
    def test_of_what_is_no_number_nothing_is_stable(self, unknown):
        chain = bound(UBU(lr=0.5)).modes(double(1.0, unknown))
        assert chain.stable.tolist() == [True, False]


def test_the_largest_modes_noise_is_what_a_thermostat_leaves():
    """SGNHT settles to BAOA with the friction that takes the mean noise, and what is left."""
    kernel = bound(ps.kernels.SGNHT(lr=0.2, friction=0.9, mass=2.5, temperature=0.6), num_data=3)
    noise = double(0.1, 0.5, 0.9)
    settled, left = kernel.linearize(noise)
    torch.testing.assert_close(left, double(-0.4, 0.0, 0.4), rtol=0, atol=1e-15)
    assert type(settled.kernel) is BAOA
    assert float(settled.friction) == pytest.approx(0.9 + 0.2 * 0.5 / (2 * 0.2), rel=1e-14)
    assert float(settled.mass) == 1
    assert float(settled.temperature) == pytest.approx(0.2, rel=1e-14)
    assert float(settled.lr) == pytest.approx(0.2, rel=1e-14)
