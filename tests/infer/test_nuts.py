"""NUTS against exact posteriors, and as users call it."""

import math
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from dtypes import default_dtype
from linear import linear_data, linear_posterior, regression
from models import normal, of_rows
from pyro.contrib import gp
from pyro.nn import PyroModule, PyroSample
from reference import double, normals
from repetitions import long_but
from runs import EVERY_STEP
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ConvergenceWarning, PyroScaleWarning

pytest.importorskip("nutpie")
pytestmark = pytest.mark.usefixtures("float64")

QUIET = {"seed": 1, "progress": False}
linear = regression(variance=2.0)
X, Y = linear_data(60)
N = len(X)
MEAN, PRECISION = linear_posterior(2.0, X, Y)
COVARIANCE = torch.linalg.inv(PRECISION)


def z_of_mean(draws, exact):
    """Of the mean of chains' draws `[chains, draws]`, with the standard error by chains' ESS."""
    import arviz

    ess = float(arviz.ess(draws.numpy()))
    return float((draws.mean() - exact) / (draws.std() / math.sqrt(ess)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "mass", "temperature"),
    long_but(
        product([True, False], ["diag", "low_rank"], [1.0, 0.3]),
        *[(True, "diag", 0.3), (True, "low_rank", 1.0)],
    ),
)
def test_a_conjugate_posterior(temperature, mass, compiled):
    """Means within 4.4 errors, and so squares about the exact mean."""
    few = {} if compiled else {"num_samples": 300, "warmup_steps": 300}
    nuts = ps.NUTS(linear, mass=mass, temperature=temperature, compile=compiled)
    draws = nuts.run((X, Y), **few, **QUIET).get_samples(group_by_chain=True)["w"]
    for i in range(3):
        assert abs(z_of_mean(draws[..., i], MEAN[i])) < 4.4
        square = (draws[..., i] - MEAN[i]).square()
        assert abs(z_of_mean(square, temperature * COVARIANCE[i, i])) < 4.4
    assert float(nuts.diagnostics().r_hat.max()) < 1.02
    program = nuts.posterior.draws.attrs["program"]
    assert program.startswith("compiled" if compiled else "eager")


#: A constrained site, whose posterior is an inverse gamma.
scale_of = of_rows(
    lambda variance: dist.Normal(0.0, variance.sqrt()), variance=lambda: dist.InverseGamma(3.0, 2.0)
)


@pytest.mark.slow
def test_jacobians_are_in_it():
    y = 0.8 * normals(25, seed=3)
    shape, rate = 3 + 25 / 2, 2 + float(y.square().sum()) / 2
    draws = ps.NUTS(scale_of).run(y, **QUIET).get_samples(group_by_chain=True)["variance"]
    assert abs(z_of_mean(draws, rate / (shape - 1))) < 4.4
    assert abs(z_of_mean(1 / draws, shape / rate)) < 4.4
    assert abs(z_of_mean(draws.log(), math.log(rate) - float(torch.digamma(double(shape))))) < 4.4


def schools():
    y = double(28, 8, -3, 7, -1, 1, 18, 12)
    error = double(15, 10, 16, 11, 9, 11, 10, 18)
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfNormal(5.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * theta, error), obs=y)


@pytest.mark.slow
def test_local_latents_against_quadrature():
    """mu and tau with the schools' effects integrated out by hand, on a grid."""
    y, error = double(28, 8, -3, 7, -1, 1, 18, 12), double(15, 10, 16, 11, 9, 11, 10, 18)
    mu, tau = torch.linspace(-25, 30, 600).double(), torch.linspace(0, 30, 600).double()
    m, t = torch.meshgrid(mu, tau, indexing="ij")
    log = dist.Normal(0.0, 5.0).log_prob(m) + dist.HalfNormal(5.0).log_prob(t)
    for value, sd in zip(y, error, strict=True):
        log = log + dist.Normal(m, (sd**2 + t**2).sqrt()).log_prob(value)
    weight = (log - log.max()).exp()
    weight = weight / weight.sum()
    draws = ps.NUTS(schools).run(None, **QUIET).get_samples(group_by_chain=True)
    for name, grid in (("mu", m), ("tau", t)):
        for power in (1, 2):
            assert abs(z_of_mean(draws[name] ** power, (weight * grid**power).sum())) < 4.4


def two_components(y):
    """An enumerated site."""
    loc = pyro.sample("loc", dist.Normal(double(-1.0, 1.0), 0.5).to_event(1))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(loc[k.long()], 0.6), obs=y)


@pytest.mark.slow
def test_enumerated_sites_against_quadrature():
    y = torch.cat([normals(20, seed=4) * 0.6 - 1, normals(14, seed=5) * 0.6 + 1])
    grid = torch.linspace(-2.5, 2.5, 400).double()
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    log = dist.Normal(-1.0, 0.5).log_prob(a) + dist.Normal(1.0, 0.5).log_prob(b)
    for value in y:
        parts = [math.log(p) + dist.Normal(x, 0.6).log_prob(value) for p, x in ((0.6, a), (0.4, b))]
        log = log + torch.logaddexp(*parts)
    weight = (log - log.max()).exp()
    weight = weight / weight.sum()
    draws = ps.NUTS(two_components).run(y, **QUIET).get_samples(group_by_chain=True)["loc"]
    assert abs(z_of_mean(draws[..., 0], (weight * a).sum())) < 4.4
    assert abs(z_of_mean(draws[..., 1], (weight * b).sum())) < 4.4


def gaussian_process(x, y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    squares = (x[:, None] - x[None]).square() / scale.square()
    covariance = (-squares / 2).exp() + noise.square() * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", long_but([True, False], True))
def test_a_gaussian_process_against_quadrature(compiled):
    """By ATen's Cholesky factors."""
    x = torch.linspace(-2, 2, 12).double()
    y = x.sin() + 0.3 * normals(12, seed=6)
    log_scale, log_noise = torch.linspace(-5, 5, 160).double(), torch.linspace(-4, 2, 160).double()
    s, n = torch.meshgrid(log_scale.exp(), log_noise.exp(), indexing="ij")
    squares = (x[:, None] - x[None]).square() / s.square()[..., None, None]
    covariance = (-squares / 2).exp() + n.square()[..., None, None] * torch.eye(12)
    log = dist.MultivariateNormal(torch.zeros(12), covariance).log_prob(y)
    log = log + dist.Normal(0.0, 1.0).log_prob(s.log())
    log = log + dist.Normal(-1.0, 0.5).log_prob(n.log())
    weight = (log - log.max()).exp()
    weight = weight / weight.sum()
    nuts = ps.NUTS(gaussian_process, num_data=12, compile=compiled)
    few = {} if compiled else {"num_samples": 250, "warmup_steps": 250, "num_chains": 2}
    draws = nuts.run((x, y), **few, **QUIET).get_samples(group_by_chain=True)
    assert nuts.posterior.draws.attrs["program"].startswith("compiled" if compiled else "eager")
    for name, grid in (("scale", s.log()), ("noise", n.log())):
        for power in (1, 2):
            assert abs(z_of_mean(draws[name].log() ** power, (weight * grid**power).sum())) < 4.4


# ------------------------------------------------------------------ as users call it


@pytest.fixture
def _float32():
    with default_dtype(torch.float32):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_float32")
def test_float32_is_sampled_in_float64_and_given_back_as_it_is():
    """Data, a network's weights and literals."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    bayesian = ps.bayesianize(net)

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.net = bayesian

        def forward(self, x, y=None):
            f = self.net(x).squeeze(-1)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(f, torch.tensor(0.5)), obs=y)

    model = Model()
    before = [w.clone() for w in model.parameters()]
    few = {"num_samples": 50, "warmup_steps": 50, "num_chains": 2}
    data = X.float(), Y.float()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*float64.*")
        nuts = ps.NUTS(model).run(data, **few, **QUIET)
    assert all(value.dtype == torch.float32 for value in nuts.get_samples().values())
    assert torch.get_default_dtype() == torch.float32
    assert all(map(torch.equal, before, model.parameters()))
    assert nuts.predict(data[0])["y"].shape == (100, N)
    frozen = torch.nn.Linear(3, 3)
    with pytest.warns(PyroScaleWarning, match=r"does not run in float64.*net\.double\(\)"):
        within = ps.NUTS(lambda x, y: model(frozen(x), y)).run(data, **few, **QUIET)
    assert within.posterior.draws.attrs["program"] == "compiled log density"


@pytest.mark.slow
@pytest.mark.usefixtures("_float32")
def test_what_a_model_holds_in_float32_may_stay_so():
    """Pyro's Gaussian processes: a method of a module, which holds its data as plain tensors."""
    x = torch.linspace(0, 5, 20)
    kernel = gp.kernels.RBF(1, variance=torch.tensor(1.0), lengthscale=torch.tensor(1.0))
    process = gp.models.GPRegression(x, x.sin(), kernel, noise=torch.tensor(0.1))
    process.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0))
    nuts = ps.NUTS(process.model, num_data=20)
    with pytest.warns(PyroScaleWarning, match="computes in torch.float32 in places"):
        nuts.run(None, num_samples=20, warmup_steps=50, num_chains=1, **QUIET)
    assert nuts.posterior.draws.attrs["program"] == "compiled log density"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_draws_whatever_the_number_of_chains():
    runs = [
        ps.NUTS(linear)
        .run((X, Y), num_samples=50, num_chains=chains, **QUIET)
        .posterior.draws.positions
        for chains in (3, 3, 1)
    ]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0][:1], runs[2])
    other = ps.NUTS(linear).run((X, Y), num_samples=50, num_chains=1, seed=2, progress=False)
    assert not torch.equal(other.posterior.draws.positions, runs[2])


@pytest.mark.slow
def test_a_second_run_sees_what_has_changed():
    """Data in place, by torch or behind its back, and what the model reads besides."""
    array = Y.numpy().copy()
    y, scale = torch.from_numpy(array), double(1.0)

    model = of_rows(lambda w: dist.Normal(w, 1.0), w=normal(sd=scale))

    def change_array():
        array[0] += 30.0

    few = {"num_samples": 20, "warmup_steps": 50, "num_chains": 1, **QUIET}
    nuts, changes = ps.NUTS(model), (lambda: y.add_(1.0), change_array, lambda: scale.mul_(0.1))
    for change in (lambda: None, *changes):
        change()
        again = nuts.run(y, **few).posterior.draws.positions
        assert torch.equal(again, ps.NUTS(model).run(y, **few).posterior.draws.positions)


@pytest.mark.slow
def test_runs_in_two_threads_are_those_of_one():
    def positions(seed):
        nuts = ps.NUTS(linear).run((X, Y), num_samples=100, seed=seed, progress=False)
        return nuts.posterior.draws.positions

    with ThreadPoolExecutor(2) as threads:
        side_by_side = list(threads.map(positions, (1, 2, 3, 4)))
    assert all(map(torch.equal, side_by_side, map(positions, (1, 2, 3, 4))))


def test_a_loader_is_read_once_and_in_order():
    loader = DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)
    runs = [
        ps.NUTS(linear).run(data, num_samples=50, num_chains=1, **QUIET).posterior.draws.positions
        for data in (loader, (X, Y))
    ]
    assert torch.equal(*runs)


def test_everything_that_a_sampler_offers(tmp_path):
    nuts = ps.NUTS(linear).run((X, Y), num_samples=200, num_chains=2, **QUIET)
    stats = nuts.to_arviz().sample_stats
    names = {"diverging", "energy", "tree_depth", "n_steps", "acceptance_rate", "step_size", "lp"}
    assert names <= set(stats.data_vars)
    assert nuts.summary().shape[0] == 3
    assert math.isfinite(nuts.loo().elpd)
    assert nuts.ksd() < 0.2
    nuts.save(tmp_path / "nuts")
    loaded = ps.NUTS.load(tmp_path / "nuts", linear)
    assert torch.equal(loaded.get_samples()["w"], nuts.get_samples()["w"])
    other = ps.BAOA(linear, lr=0.05, init_strategy=nuts)
    other.run((X, Y), num_samples=10, num_chains=2, **EVERY_STEP, **QUIET)
    table = ps.compare({"NUTS": nuts, "BAOA": other})
    assert set(table.table.index) == {"NUTS", "BAOA"}


@pytest.mark.slow
def test_progress_is_told_of_each_chain(capsys):
    ps.NUTS(linear, compile=False).run(
        (X, Y), num_samples=40, warmup_steps=40, num_chains=2, seed=1, progress=True
    )
    told = capsys.readouterr().err
    assert "NUTS, 2 chains, eager log density" in told
    assert re.search(r"chain 0: \d+ draws, 0 divergent, step size [\d.]+; chain 1: \d+", told)
    assert "160/160" in told


def funnel():
    pyro.factor("no data", torch.zeros(()))
    scale = pyro.sample("scale", dist.Normal(0.0, 3.0))
    pyro.sample("x", dist.Normal(torch.zeros(9), (scale / 2).exp()).to_event(1))


@pytest.mark.slow
def test_divergences_are_reported():
    with pytest.warns(ConvergenceWarning, match=r"trajectories diverged: raise target_accept"):
        nuts = ps.NUTS(funnel).run(None, **QUIET)
    assert bool(nuts.posterior.draws.sample_stats["diverging"].any())


def test_arviz_plots_energies_and_divergences():
    import arviz
    import matplotlib

    matplotlib.use("Agg")
    with pytest.warns(ConvergenceWarning):
        nuts = ps.NUTS(funnel).run(None, num_samples=200, warmup_steps=200, **QUIET)
    draws = nuts.to_arviz()
    arviz.plot_energy(draws)
    if arviz.__version__ < "1":
        arviz.plot_pair(draws, divergences=True, coords={"x_dim_0": [0]})
    else:
        arviz.plot_pair(draws, visuals={"divergence": True}, coords={"x_dim_0": [0, 1]})


def with_divergence(nuts):
    nuts.posterior.draws.sample_stats["diverging"][0, 0] = True


def apart(nuts):
    nuts.posterior.draws.positions[0] += 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "temperature", "expected"),
    long_but(
        [
            (None, 1.0, "NUTS"),
            (None, 0.9, "SGLD"),
            (with_divergence, 1.0, "SGLD"),
            (apart, 1.0, "SGLD"),
        ],
        *[(None, 1.0, "NUTS"), (with_divergence, 1.0, "SGLD")],
    ),
)
def test_it_is_the_reference_if_nothing_speaks_against_it(change, temperature, expected):
    """Before a sampler with a larger ESS; and not if the alternative is itself untrusted."""
    nuts = ps.NUTS(linear, temperature=temperature).run((X, Y), num_samples=1000, **QUIET)
    other = ps.SGLD(linear, lr=0.003).run(
        (X, Y), num_samples=4000, thinning=10, warmup_steps=0, num_chains=1, **QUIET
    )
    if change is not None:
        change(nuts)
    assert ps.compare({"SGLD": other, "NUTS": nuts}).reference == expected
