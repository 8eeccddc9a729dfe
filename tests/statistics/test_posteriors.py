"""Whole samplers on posteriors that are known: two wells, skewed ones, and logistic regressions.

Seeds are fixed; were they drawn anew, a chi-square test here would fail by chance once in
10,000 times, and a z beyond 4.4 would come once in 90,000 comparisons.
"""

import warnings

import pyro.distributions as dist
import pytest
import torch
from logistic import Logistic, logistic
from models import of_rows
from reference import double, normals
from repetitions import long_but
from scipy.stats import chi2

import pyro_scale as ps

pytestmark = pytest.mark.usefixtures("float64", "compiled_early")

QUIET = {"progress": False}
CHAINS, COPIES = 200, 25
FALSE_ALARMS = 1e-4


def chi_square(uniforms, bins=25):
    """Fails if they are not uniform on [0, 1]."""
    counts = torch.histc(uniforms.flatten(), bins, 0.0, 1.0)
    assert int(counts.sum()) == uniforms.numel()
    expected = uniforms.numel() / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(1 - FALSE_ALARMS, bins - 1), counts / expected


def cumulative(log_density, low=-8.0, high=8.0, points=40_001):
    """The distribution function of a density on a line, by the trapezoidal rule."""
    grid = torch.linspace(low, high, points)
    density = (log_density(grid) - log_density(grid).max()).exp()
    total = torch.cat([torch.zeros(1), torch.cumulative_trapezoid(density, grid)])

    def function(x):
        place = ((x - low) / (high - low) * (points - 1)).clamp(0, points - 1.001)
        left = place.floor().long()
        share = place - left
        return (total[left] * (1 - share) + total[left + 1] * share) / total[-1]

    return function


#: lr, friction and steps from one draw to the next, by which two wells are forgotten.
SAMPLERS = {
    "BAOA": (ps.BAOA, {"lr": 0.1}, 200),
    "SGHMC": (ps.SGHMC, {"lr": 0.02}, 900),
    "UBU": (ps.UBU, {"lr": 0.1}, 200),
    "SGNHT": (ps.SGNHT, {"lr": 0.05}, 400),
    "SGLD": (ps.SGLD, {"lr": 0.0025}, 4000),
}


def sampled(density, num_data, name, temperature=1.0, shape=(2,), num_samples=2):
    """Many copies in many chains, all at first in the shallower well."""
    method, hyperparameters, every = SAMPLERS[name]
    start = {"w": torch.full((COPIES, *shape), -1.0)}
    function = ps.LogPosterior.from_function(
        lambda params, batch: density(params["w"]).sum() / num_data, start, num_data
    )
    sampler = method(function, temperature=temperature, **scaled(hyperparameters, name, num_data))
    lengths = {"num_samples": num_samples, "warmup_steps": 0, "thinning": every}
    sampler.run(None, num_chains=CHAINS, seed=1, **lengths, **QUIET)
    return sampler.get_samples()["w"]


def scaled(hyperparameters, name, num_data):
    """Steps of the same length for a log joint that is divided by N."""
    lr = hyperparameters["lr"]
    if name == "SGLD":
        return {"lr": lr * num_data}
    return {"lr": lr * num_data**0.5, "friction": num_data**-0.5}


# ------------------------------------------------------------------ two wells


def wells(w):
    """The paper's Figure 2: two wells in two dimensions, here of different depth, and bent."""
    x, y = w[..., 0], w[..., 1]
    return -((x * x - 1) ** 2) + 0.3 * x - (y - 0.5 * x * x) ** 2 / 0.5


def of_x(x):
    """log p(x): y is normal given x, of variance 1/4 wherever."""
    return -((x * x - 1) ** 2) + 0.3 * x


class TestDoubleWell:
    @pytest.mark.parametrize(
        ("name", "num_data"),
        long_but(
            [(name, 1) for name in SAMPLERS] + [("BAOA", 9), ("SGNHT", 9)],
            *[("BAOA", 1), ("SGNHT", 9)],
        ),
    )
    def test_both_wells_have_their_weight_and_shape(self, name, num_data):
        draws = sampled(wells, num_data, name, num_samples=1 if name == "SGLD" else 2)
        x, y = draws[..., 0], draws[..., 1]
        chi_square(cumulative(of_x)(x))
        standard = (y - 0.5 * x * x) / 0.5
        chi_square(torch.special.ndtr(standard))
        share = 1 - float(cumulative(of_x)(double(0.0)))
        assert share > 0.6
        right = float((x > 0).double().mean())
        assert abs(right - share) < 4.4 * (share * (1 - share) / x.numel()) ** 0.5

    def test_half_the_temperature(self):
        draws = sampled(wells, 1, "BAOA", temperature=0.5, num_samples=3)
        x = draws[1:, ..., 0]
        chi_square(cumulative(lambda x: of_x(x) / 0.5)(x))

    def test_a_wrong_weight_would_be_seen(self):
        x = sampled(wells, 1, "BAOA")[..., 0]
        with pytest.raises(AssertionError):
            chi_square(cumulative(lambda x: of_x(x) - 0.2 * x)(x))
        with pytest.raises(AssertionError):
            chi_square(cumulative(lambda x: of_x(x) / 1.25)(x))

    @pytest.mark.slow
    def test_at_temperature_zero_chains_are_at_either_bottom(self):
        starts = torch.linspace(-1.5, 1.5, 21)[:, None].expand(21, 2).clone()
        function = ps.LogPosterior.from_function(
            lambda params, batch: wells(params["w"]), {"w": torch.zeros(2)}, 1
        )
        sampler = ps.BAOA(function, lr=0.15, temperature=0.0, init_strategy={"w": starts})
        sampler.run(
            None, num_samples=1, warmup_steps=0, thinning=600, num_chains=21, seed=0, **QUIET
        )
        ends = sampler.get_samples()["w"]
        x = ends[:, 0]
        assert float((4 * x * (1 - x * x) + 0.3).abs().max()) < 1e-9
        assert float((ends[:, 1] - 0.5 * x * x).abs().max()) < 1e-9
        assert sorted({round(float(v), 3) for v in x}) == [-0.96, 1.036]


# ------------------------------------------------------------------ one skewed well


#: Rates r ~ Gamma(1, 1), y ~ Exponential(r): r given n rows is Gamma(1 + n, 1 + sum y).
rates = of_rows(
    lambda r: dist.Exponential(r).to_event(1),
    r=lambda: dist.Gamma(torch.ones(COPIES), 1.0).to_event(1),
)


class TestSkewedWell:
    """Through Pyro, its transforms and their Jacobian: chains move in log r."""

    y = normals(2, COPIES, seed=4).abs()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "temperature"),
        long_but(
            [*((name, 1.0) for name in SAMPLERS), ("BAOA", 0.5), ("SGNHT", 0.5)],
            ("BAOA", 0.5),
            ("SGLD", 1.0),
        ),
    )
    def test_rates_are_gamma(self, name, temperature):
        """T tempers the density of log r: Gamma(shape / T, rate / T)."""
        y = self.y
        method, hyperparameters, every = SAMPLERS[name]
        sampler = method(rates, temperature=temperature, **hyperparameters)
        sampler.run(
            y, num_samples=2, warmup_steps=0, thinning=every, num_chains=CHAINS, seed=2, **QUIET
        )
        r = sampler.get_samples()["r"]
        shape = torch.full_like(r, 3.0) / temperature
        chi_square(torch.special.gammainc(shape, r * (1 + y.sum(0)) / temperature))
        with pytest.raises(AssertionError):  # without the Jacobian
            chi_square(torch.special.gammainc(shape - 1, r * (1 + y.sum(0)) / temperature))


@pytest.mark.parametrize("lr", long_but([0.05, 0.2], 0.2))
def test_sgld_has_the_law_of_its_own_chain(lr):
    """x' is N(x + lr g(x), 2 lr) given x: the stationary law by quadrature, at steps so large
    that it is another one than the target's."""

    def skewed(w):
        return 3 * w - w.exp()

    grid = torch.linspace(-12, 5, 2001)
    width = float(grid[1] - grid[0])
    center = grid + lr * (3 - grid.exp())
    kernel = (-((grid[:, None] - center) ** 2) / (4 * lr)).exp() / (4 * torch.pi * lr) ** 0.5
    law = skewed(grid).exp()
    for _ in range(round(15 / lr)):
        law = kernel @ law * width
    total = torch.cumulative_trapezoid(law, grid)
    total = torch.cat([torch.zeros(1), total]) / total[-1]

    function = ps.LogPosterior.from_function(
        lambda params, batch: skewed(params["w"]).sum(), {"w": torch.ones(COPIES)}, 1
    )
    sampler = ps.SGLD(function, lr=lr)
    every = round(12 / lr)
    sampler.run(
        None, num_samples=6, warmup_steps=0, thinning=every, num_chains=CHAINS, seed=3, **QUIET
    )
    draws = sampler.get_samples()["w"]
    place = ((draws - grid[0]) / width).clamp(0, len(grid) - 1.001)
    left = place.floor().long()
    chi_square(total[left] + (total[left + 1] - total[left]) * (place - left))
    if lr == 0.2:
        with pytest.raises(AssertionError):
            chi_square(cumulative(skewed)(draws))


# ------------------------------------------------------------------ logistic regression


def z_of_moments(draws, mean, sd):
    """The largest z of means and sds of independent draws, `[draws, D]`; sds of nearly normal
    draws, with 10% for tails."""
    count = len(draws)
    of_mean = (draws.mean(0) - mean) / (sd / count**0.5)
    of_sd = (draws.std(0) / sd - 1) / (1.1 * (2 * count) ** -0.5)
    return float(torch.cat([of_mean, of_sd]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BAOA", pytest.param("UBU", marks=pytest.mark.long)])
def test_logistic_regression_has_its_exact_moments(name):
    """Of 569 tumors, the whole data at every step; 100 chains of five draws, each of which has
    forgotten the one before."""
    problem = Logistic()
    starts = {"w": problem.mean + problem.sd * normals(100, 4, seed=1)}
    sampler = getattr(ps, name)(logistic, lr=0.8, friction=0.05, init_strategy=starts)
    steps = {"num_samples": 5, "warmup_steps": 300, "thinning": 240}
    sampler.run((problem.x, problem.y), num_chains=100, seed=1, **steps, **QUIET)
    assert z_of_moments(sampler.get_samples()["w"], problem.mean, problem.sd) < 4.4


@pytest.mark.long
class TestAMillionRows:
    """Laplace's approximation is exact to 10^-3 of an sd here."""

    num_data, dim = 10**6, 4

    @pytest.fixture(scope="class")
    def data(self):
        source = torch.Generator().manual_seed(1)
        x = torch.randn(self.num_data, self.dim, generator=source, dtype=torch.float64)
        x[:, 0] = 1
        x[:, 2] = (x[:, 1] + x[:, 2]) / 2  # correlated
        chance = torch.sigmoid(x @ double(-1.0, 0.5, -0.3, 0.8))
        y = (torch.rand(self.num_data, generator=source, dtype=torch.float64) < chance).double()
        return x, y

    @pytest.fixture(scope="class")
    def laplace(self, data):
        x, y = data
        w = torch.zeros(self.dim).double()
        for _ in range(10):
            chance = torch.sigmoid(x @ w)
            slope = x.T @ (y - chance) - w / 4
            curvature = (x.T * (chance * (1 - chance))) @ x + torch.eye(self.dim).to(w) / 4
            w = w + torch.linalg.solve(curvature, slope)
        return w, torch.linalg.inv(curvature).diagonal().sqrt()

    def run(self, data, **kwargs):
        sampler = ps.BAOA(logistic, lr=1.0, friction=0.5, **kwargs)
        steps = {"num_samples": 20, "warmup_steps": 300, "thinning": 30, "num_chains": 50}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*noise of minibatches.*")
            sampler.run(data, batch_size=64, sampling="replacement", seed=1, **steps, **QUIET)
            return sampler.get_samples()["w"], sampler.diagnostics()

    def test_control_variates_have_its_moments_from_batches_of_64(self, data, laplace):
        """From starts 1,000 sds away."""
        draws, table = self.run(data, control_variates=True)
        mean, sd = laplace
        assert z_of_moments(draws, mean, sd) < 4.4
        assert float(((draws.mean(0) - mean) / sd).abs().max()) < 0.1
        assert float((draws.std(0) / sd - 1).abs().max()) < 0.1
        assert float(table["minibatch_heating"].max()) < 1.05
        assert float(table["variance_reduction"].min()) > 10**4

    def test_without_them_the_same_steps_are_far_too_wide(self, data, laplace):
        draws, table = self.run(data)
        inflation = float(table["minibatch_heating"].max())
        widest = float((draws.var(0) / laplace[1].square()).max())
        assert inflation > 1000
        assert 0.5 < widest / inflation < 2
