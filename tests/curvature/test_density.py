"""The log joint of all rows, its derivatives and its mode, against dense autograd of log joints
that are written out by hand."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import density_of_all_rows, linear_regression, prepare_run
from reference import close, double, normals
from row_datasets import RowByRow, Stream
from runs import ONE_CHAIN, QUIET
from scipy import optimize
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
)

import pyro_scale as ps
from pyro_scale.curvature.modes import find_mode
from pyro_scale.errors import ArgumentError, DataError

pytestmark = pytest.mark.usefixtures("float64")

N, B = 23, 5
X = normals(N, 2, seed=1)
Y = X @ double(0.7, -1.2) + 0.5 * normals(N, seed=2)
#: Positions [w_0, w_1, log s], none of them special.
PLACES = [double(0.3, -0.4, 0.2), double(-1.1, 0.8, -0.7)]


def density_and_start(model, data, **kwargs):
    """(The density of all rows, a chain's start), as a run finds them."""
    problem = prepare_run(model, data, seed=3, **kwargs)
    return density_of_all_rows(problem), problem.positions[0]


# ------------------------------------------------------------------ a hierarchical model


def two_sites_of(x, y, plate):
    """w ~ N(0, 4), s ~ LogNormal(0.3, 0.36), a factor between the w, y ~ N(x w, s^2)."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.3, 0.6))
    pyro.factor("tie", -0.5 * (w[0] + w[1]) ** 2)
    with plate(len(x)) as index:
        own = slice(None) if len(index) == len(x) else index
        pyro.sample("y", dist.Normal(x[own] @ w, s), obs=y[own])


def of_rows(x, y):
    two_sites_of(x, y, functools.partial(pyro.plate, "data"))


def scaled_by_pyro(x, y):
    two_sites_of(x, y, lambda size: pyro.plate("data", N, subsample_size=size))


def by_itself(x, y):
    two_sites_of(x, y, lambda size: pyro.plate("data", N, subsample_size=B))


def with_its_data():
    two_sites_of(X, Y, functools.partial(pyro.plate, "data"))


def normal_log_prob(value, mean, sd):
    return -0.5 * ((value - mean) / sd) ** 2 - sd.log() - 0.5 * math.log(2 * math.pi)


def written_out(position):
    """The log joint of [w_0, w_1, u], u = log s: a LogNormal's density times its Jacobian s is
    that of the normal u."""
    w, u = position[:2], position[2]
    prior = normal_log_prob(w, 0.0, double(2.0)).sum() + normal_log_prob(u, 0.3, double(0.6)).sum()
    return prior - 0.5 * (w[0] + w[1]) ** 2 + normal_log_prob(Y, X @ w, u.exp()).sum()


class Backwards:
    """A sampler of the user's own."""

    def __iter__(self):
        return iter(range(N - 1, -1, -1))

    def __len__(self):
        return N


class Batches:
    """Batches without a DataLoader."""

    dataset = RowByRow(X, Y)

    def __iter__(self):
        return zip(X.split(B), Y.split(B), strict=True)


WAYS = {
    "whole": (of_rows, (X, Y), {}),
    "minibatches": (of_rows, (X, Y), {"batch_size": B}),
    "minibatches by name": (of_rows, {"y": Y, "x": X}, {"batch_size": B}),
    "batches of one row": (of_rows, (X, Y), {"batch_size": 1}),
    "all but one row": (of_rows, (X, Y), {"batch_size": N - 1}),
    "scaled by Pyro": (scaled_by_pyro, (X, Y), {"batch_size": B}),
    "TensorDataset": (of_rows, DataLoader(TensorDataset(X, Y), B, shuffle=True), {}),
    "dropping the last": (of_rows, DataLoader(TensorDataset(X, Y), B, drop_last=True), {}),
    "read by index": (of_rows, DataLoader(RowByRow(X, Y), B, shuffle=True), {}),
    "a sampler of one's own": (of_rows, DataLoader(RowByRow(X, Y), B, sampler=Backwards()), {}),
    "stream": (of_rows, DataLoader(Stream(X, Y), B), {}),
    "batches": (of_rows, Batches(), {}),
    "subsampling by itself": (by_itself, (X, Y), {}),
    "with its data": (with_its_data, None, {}),
}


@pytest.mark.parametrize("numbers", [2**22, 4 * 3], ids=["one piece", "pieces of four rows"])
@pytest.mark.parametrize("way", WAYS)
def test_value_gradient_and_hessian_are_those_of_all_rows(way, numbers):
    model, data, kwargs = WAYS[way]
    density = density_of_all_rows(prepare_run(model, data, seed=3, **kwargs), chunk_numbers=numbers)
    assert density.layout.names == ("w", "s")
    for place in PLACES:
        value, gradient = density.grad(place)
        slope, curvature = (
            derivative(written_out, place)
            for derivative in (
                torch.autograd.functional.jacobian,
                torch.autograd.functional.hessian,
            )
        )
        close(value, written_out(place) / N, 1e-10)
        close(gradient, slope / N, 1e-10)
        close(density.hessian(place), curvature / N, 1e-10)


def test_a_subset_is_all_there_is():
    chosen = [2, 3, 5, 7, 11, 13, 17]
    loader = DataLoader(RowByRow(X, Y), 3, sampler=SubsetRandomSampler(chosen))
    theirs, _ = density_and_start(of_rows, loader)
    ours, _ = density_and_start(of_rows, (X[chosen], Y[chosen]))
    for place in PLACES:
        close(theirs.grad(place)[1], ours.grad(place)[1], 1e-12)
        close(theirs.hessian(place), ours.hessian(place), 1e-12)


@pytest.mark.parametrize("numbers", [2**22, 4 * 3])
def test_the_prior_counts_once_however_the_data_are_cut(numbers):
    """Where s = e^40 the rows' curvature in w is gone: the prior's and the factor's are left."""
    for way in ("minibatches", "subsampling by itself", "stream"):
        model, data, kwargs = WAYS[way]
        problem = prepare_run(model, data, seed=3, **kwargs)
        density = density_of_all_rows(problem, chunk_numbers=numbers)
        curvature = density.hessian(double(0.0, 0.0, 40.0))
        close(curvature[:2, :2] * N, -double([1 / 4 + 1, 1], [1, 1 / 4 + 1]), 1e-10)


def test_a_function_is_taken_as_it_is():
    """Per datum f(w, v) = -(w - 2)^2 v^2 - v^4 + v, and N = 50: f itself over N."""

    def function(params, batch):
        w, v = params["w"], params["v"]
        return (-((w - 2) ** 2) * v**2 - v**4 + v).sum()

    start = {"w": double(0.5), "v": double(1.5)}
    density, position = density_and_start(
        ps.LogPosterior.from_function(function, start, num_data=50), None
    )
    close(position, double(0.5, 1.5))
    value, gradient = density.grad(position)
    close(value, -(1.5**2) * 1.5**2 - 1.5**4 + 1.5, 1e-12)
    close(gradient, double(3 * 1.5**2, -2 * 1.5**2 * 1.5 - 4 * 1.5**3 + 1), 1e-12)
    close(
        density.hessian(position),
        double([-2 * 1.5**2, 4 * 1.5 * 1.5], [4 * 1.5 * 1.5, -2 * 1.5**2 - 12 * 1.5**2]),
        1e-12,
    )
    close(find_mode(density, position), double(2.0, 4 ** (-1 / 3)), 1e-6)


def test_points_count_as_positions_without_a_prior():
    """w ~ N(0, 1), y ~ N(w + b, 1) with b a parameter: d/db has no prior's share."""

    def model(y):
        b = pyro.param("b", double(0.5))
        w = pyro.sample("w", dist.Normal(double(0.0), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w + b, 1.0), obs=y)

    with pyro.get_param_store().scope():
        density, _ = density_and_start(model, Y, batch_size=B)
        assert density.layout.names == ("w", "b")
        w, b = 0.4, -0.3
        _, gradient = density.grad(double(w, b))
        slope = float((Y - w - b).sum())
        close(gradient * N, double(slope - w, slope), 1e-10)
        close(density.hessian(double(w, b)) * N, -double([N + 1, N], [N, N]), 1e-10)


# ------------------------------------------------------------------ the mode


def posterior_of(x, y):
    """The exact mean and precision of `regression`."""
    dim = x.shape[1]
    precision = (x.T @ x + torch.eye(dim)) / 0.25
    return torch.linalg.solve(precision, (x.T @ y + torch.ones(dim)) / 0.25), precision


@pytest.mark.parametrize("kwargs", [{}, {"batch_size": 7}])
def test_the_mode_of_a_linear_regression_is_its_mean(kwargs):
    """The prior matters: least squares lie 0.01 off and more."""
    x, y = normals(40, 4, seed=4), normals(40, seed=5)
    density, start = density_and_start(linear_regression(0.5, mean=1.0, sd=0.5), (x, y), **kwargs)
    mean, precision = posterior_of(x, y)
    found = find_mode(density, start)
    assert float((start - mean).abs().max()) > 0.3
    assert float((torch.linalg.lstsq(x, y).solution - mean).abs().max()) > 1e-2
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)
    close(-density.hessian(found) * len(x), precision, 1e-10)


@pytest.mark.parametrize("condition", [1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mode_is_found_where_scales_differ(dtype, condition):
    """Within a thousandth of a posterior sd in float64, a tenth in float32."""
    scales = torch.logspace(0, -math.log10(condition) / 2, 6)
    x = normals(300, 6, seed=6) * scales
    y = x @ torch.ones(6) + 0.5 * normals(300, seed=7)
    mean, precision = posterior_of(x, y)
    density, start = density_and_start(
        linear_regression(0.5, mean=1.0, sd=0.5), (x.to(dtype), y.to(dtype)), batch_size=32
    )
    off = find_mode(density, start.to(dtype)).double() - mean
    assert float((off @ precision @ off).sqrt()) < (1e-3 if dtype is torch.float64 else 0.1)


def test_the_mode_is_that_of_unconstrained_space():
    """y ~ Exponential(r), r ~ Gamma(2, 3): with the Jacobian log r has its mode at
    (2 + n) / (3 + sum y), without it r's would be at (1 + n) / (3 + sum y)."""
    y = double(0.4, 1.7, 0.2)

    def model(y):
        r = pyro.sample("r", dist.Gamma(2.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Exponential(r), obs=y)

    density, start = density_and_start(model, y, batch_size=2)
    close(find_mode(density, start), [math.log(5 / (3 + float(y.sum())))], 1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_a_search_turns_back_where_the_log_joint_overflows(seed):
    """Data of thousandths: long steps to a small s overflow.  At the mode, w is the ridge estimate
    for s, and s^2 (s^2 + N - 1) = |y - x w|^2."""
    source, single = torch.Generator().manual_seed(1), torch.float32
    x, noise = (torch.randn(103, n, generator=source, dtype=single) for n in (3, 1))
    y = 1e-3 * (x @ torch.tensor([1.0, -0.5, 0.2], dtype=single) + 0.5 * noise[:, 0])

    def model(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        s = pyro.sample("s", dist.HalfNormal(x.new_ones(())))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ w, s), obs=y)

    exact_x, exact_y = x.double(), y.double()

    def ridge(s):
        gram = exact_x.T @ exact_x + s**2 * torch.eye(3, dtype=torch.float64)
        return torch.linalg.solve(gram, exact_x.T @ exact_y)

    def slope(s):
        rest = exact_y - exact_x @ ridge(s)
        return s**2 * (s**2 + len(x) - 1) - float(rest @ rest)

    s = optimize.brentq(slope, 1e-6, 1.0)
    center = ps.Laplace(model).run((x, y), seed=seed, progress=False).fit.centers[0]
    close(center[:3], ridge(s), 1e-6)
    close(center[3], math.log(s), 1e-3)  # float32's log joint is flat so close to the mode


def test_a_start_at_the_mode_stays_there():
    x, y = normals(6, 4, seed=4), normals(6, seed=5)
    density, _ = density_and_start(linear_regression(0.5, mean=1.0, sd=0.5), (x, y))
    mean, _ = posterior_of(x, y)
    torch.testing.assert_close(find_mode(density, mean), mean, rtol=0, atol=1e-8)
    assert not find_mode(density, mean).requires_grad


def function_of(density):
    start = {"w": torch.ones(2)}
    return ps.LogPosterior.from_function(lambda p, batch: density(p["w"]), start, num_data=10)


@pytest.mark.parametrize(
    "density",
    [
        pytest.param(lambda w: w.square().sum(), id="convex"),
        pytest.param(lambda w: w.sum(), id="linear"),
        pytest.param(lambda w: w.pow(4).sum() - w[0], id="quartic"),
        pytest.param(lambda w: w.exp().sum(), id="exponential"),
    ],
)
@pytest.mark.parametrize(
    "asked", [{"lr": "auto", "precondition": None}, {"lr": 0.1, "control_variates": True}]
)
def test_no_mode_is_said_so(density, asked):
    sampler = ps.BAOA(function_of(density), **asked)
    with pytest.raises(ArgumentError, match="no mode of the posterior could be found"):
        sampler.run(
            None, num_samples=2, warmup_steps=0, thinning=1, num_chains=1, seed=0, progress=False
        )


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"lr": "auto", "precondition": None},
        {"lr": 0.01, "control_variates": True},
    ],
    ids=["all", "lr", "control_variates"],
)
@pytest.mark.parametrize(
    ("data", "kwargs"),
    [
        ((X, Y), {"batch_size": B}),
        ((X, Y), {}),
        (DataLoader(Stream(X, Y, num_rows=N - 4), B), {}),
        (DataLoader(RowByRow(X, Y), B), {}),
    ],
    ids=["minibatches", "whole", "stream", "loader"],
)
def test_a_part_of_the_data_is_refused(data, kwargs, asked):
    """The data hold 23 rows (the stream 19), whereas N is 200."""
    sampler = ps.BAOA(of_rows, num_data=200, **asked)
    with pytest.raises(DataError, match=r"the data hold (19|23) rows, not N = 200"):
        sampler.run(data, num_samples=2, **ONE_CHAIN, **QUIET, **kwargs)


def test_a_stream_that_says_more_than_it_holds_is_refused():
    density, start = density_and_start(of_rows, DataLoader(Stream(X, Y, num_rows=N - 4), B))
    with pytest.raises(DataError, match=r"the data hold 19 rows, not N = 23"):
        density.grad(start)
    with pytest.raises(DataError, match=r"the data hold 19 rows, not N = 23"):
        density.hessian(start)
