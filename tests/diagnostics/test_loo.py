"""Leave-one-out densities against closed forms, ArviZ, and the estimate from all rows.

Seeds are fixed; were they drawn anew, a z beyond 4.4 would come once in 90,000 comparisons.
"""

import warnings

import arviz
import pyro
import pyro.distributions as dist
import pytest
import torch
from both_arviz import IS_1, elpd_of, elpd_of_rows
from densities import linear_regression
from reference import double
from repetitions import long_but
from runs import QUIET
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("float64")

N = 300


SOURCE = torch.Generator().manual_seed(1)
X = torch.randn(N, 2, generator=SOURCE, dtype=torch.float64)
Y = X @ double(1.0, -0.5) + 0.7 * torch.randn(N, generator=SOURCE, dtype=torch.float64)
linear = linear_regression(0.7)


def two_observations(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.7), obs=y)
        pyro.sample("z", dist.Normal(x[:, 0], 1.0 + w[0] ** 2), obs=x[:, 1])


def plate_of_some(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", N, subsample_size=64) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, 0.7), obs=y[i])


def exact_by_row():
    """log p(y_i | all others) of `linear`, `[N]`."""
    found = []
    for i in range(N):
        others = torch.arange(N) != i
        precision = torch.eye(2) + X[others].T @ X[others] / 0.7**2
        mean = torch.linalg.solve(precision, X[others].T @ Y[others] / 0.7**2)
        variance = 0.7**2 + X[i] @ torch.linalg.solve(precision, X[i])
        found.append(dist.Normal(X[i] @ mean, variance.sqrt()).log_prob(Y[i]))
    return torch.stack(found)


@pytest.fixture(scope="module")
def fit_of_all(float64):
    """1,000 draws of the exact posterior, which is Gaussian."""
    return ps.Laplace(linear, structure="dense").run((X, Y), **QUIET)


def test_all_rows_are_those_of_the_closed_form(fit_of_all):
    found, truth = fit_of_all.loo(), exact_by_row()
    assert found.num_data == N
    assert torch.equal(found.rows, torch.arange(N))
    assert found.subsampling_se == 0
    assert (found.pointwise - truth).abs().max() < 0.02
    assert abs(found.elpd - float(truth.sum())) < 0.1  # the effect of two params is 2 nats
    assert found.se == pytest.approx(float((N * truth.var(correction=0)).sqrt()), rel=0.01)
    assert str(found).startswith(f"elpd {found.elpd:.1f} ± {found.se:.1f} (PSIS-LOO, 300 of 300")


@pytest.mark.slow
@pytest.mark.parametrize("model", [linear, plate_of_some])
def test_all_rows_are_those_of_arviz(model):
    sampler = ps.BAOA(model, lr=0.3, friction=1.0)
    sampler.run((X, Y), num_samples=300, thinning=1, num_chains=3, warmup_steps=100, **QUIET)
    found, theirs = sampler.loo(), arviz.loo(sampler.to_arviz(), pointwise=True)
    assert found.elpd == pytest.approx(elpd_of(theirs), rel=1e-10)
    # ArviZ 1 divides the sum of squares by one less than the number of rows
    times = (len(found.pointwise) / (len(found.pointwise) - IS_1)) ** 0.5
    assert found.se * times == pytest.approx(theirs.se, rel=1e-10)
    assert found.pareto_k.numpy() == pytest.approx(theirs.pareto_k.values, rel=1e-6)
    assert found.pointwise.numpy() == pytest.approx(elpd_of_rows(theirs), rel=1e-10)


@pytest.mark.slow
def test_a_row_is_left_out_with_all_its_sites():
    sampler = ps.BAOA(two_observations, lr=0.1, friction=1.0)
    sampler.run((X, Y), num_samples=300, thinning=1, num_chains=1, warmup_steps=100, **QUIET)
    both = sum(sampler.log_likelihood().values())
    log_ratios = -both
    weights = (log_ratios - torch.logsumexp(log_ratios, 0)).exp()
    by_hand = torch.log((weights * both.exp()).sum(0))  # without smoothing
    assert (sampler.loo().pointwise - by_hand).abs().max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", long_but([2, 40, 150], 2))
def test_some_rows_estimate_all_of_them(num_rows, fit_of_all):
    """Unbiased, with the standard error that they say."""
    whole, runs = fit_of_all.loo(), 200
    some = [fit_of_all.loo(num_rows, seed=seed) for seed in range(runs)]
    elpd = torch.tensor([each.elpd for each in some])
    errors = torch.tensor([each.subsampling_se for each in some])
    assert abs(elpd.mean() - whole.elpd) < 4.4 * elpd.std() / runs**0.5
    # the variance of 200 estimates is known to 10%, for two rows' heavy tails to 40%
    tolerance = 0.9 if num_rows == 2 else 0.4
    assert errors.square().mean() / elpd.var() == pytest.approx(1, abs=tolerance)
    if num_rows > 2:
        assert torch.tensor([each.se for each in some]).mean() == pytest.approx(whole.se, rel=0.05)
        assert elpd.std() < 0.2 * whole.se  # far better than the rows' own scatter
    one = some[0]
    assert len(one.rows) == len(one.pointwise) == len(one.pareto_k) == num_rows
    assert torch.allclose(one.pointwise, whole.pointwise[one.rows], atol=1e-12)


def test_as_many_rows_as_there_are_are_all(fit_of_all):
    whole, some = fit_of_all.loo(), fit_of_all.loo(N + 5)
    assert some.elpd == pytest.approx(whole.elpd, rel=1e-12)
    assert some.se == pytest.approx(whole.se, rel=1e-9)
    assert some.subsampling_se == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [None, 30])
def test_loaders_and_own_subsamples_give_the_same(num_rows):
    how = {"num_samples": 50, "thinning": 1, "num_chains": 1, "warmup_steps": 20, **QUIET}
    starts = {"lr": 0.1, "compile": False}
    tensors = ps.BAOA(linear, **starts).run((X, Y), batch_size=64, **how)
    loader = DataLoader(TensorDataset(X, Y), batch_size=64)
    read = ps.BAOA(linear, **starts).run(loader, **how)
    own = ps.BAOA(plate_of_some, **starts).run((X, Y), **how)
    expected = tensors.loo(num_rows)
    for other in (read.loo(num_rows), own.loo(num_rows), tensors.loo(num_rows, data=loader)):
        assert torch.equal(other.rows, expected.rows)
        assert other.elpd == pytest.approx(expected.elpd, rel=1e-10)


def test_rows_that_weigh_too_much_are_said():
    y = Y.clone()
    y[3] = 40.0
    fit = ps.Laplace(linear, structure="dense").run((X, y), **QUIET)
    with pytest.warns(UserWarning, match=r"unreliable for 1 of 300 rows with Pareto k > 0.67"):
        found = fit.loo()
    assert int(found.pareto_k.argmax()) == 3


def test_masked_rows_weigh_nothing():
    def masked(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)), pyro.poutine.mask(mask=x[:, 0] > 0):
            pyro.sample("y", dist.Normal(x @ w, 0.7), obs=y)

    fit = ps.Laplace(masked, structure="dense").run((X, Y), **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit.loo()
    assert (found.pointwise[X[:, 0] <= 0] == 0).all()


def test_what_cannot_be_left_out_is_refused(fit_of_all):
    def nothing():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(0.0, 1.0))

    sampler = ps.BAOA(nothing, lr=0.1).run(
        None, num_samples=50, warmup_steps=0, thinning=1, num_chains=1, **QUIET
    )
    with pytest.raises(ArgumentError, match="no data site"):
        sampler.loo()
    with pytest.raises(ArgumentError, match="only one row"):
        fit_of_all.loo(data=(X[:1], Y[:1]))
    few = ps.BAOA(linear, lr=0.1).run(
        (X, Y), num_samples=5, warmup_steps=0, thinning=1, num_chains=1, **QUIET
    )
    with pytest.raises(ArgumentError, match="5 draws are too few to weigh: 20"):
        few.loo()


@pytest.mark.parametrize("num_rows", [1, 0, 2.5, True])
def test_bad_numbers_of_rows_are_refused(num_rows, fit_of_all):
    with pytest.raises(ArgumentError, match="num_rows="):
        fit_of_all.loo(num_rows)


def lagged_series(x, y=None):
    """`linear` of a series: a row's own x, and the row before it."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    before = torch.cat([torch.zeros(1), x[:-1]])
    with pyro.plate("weeks", len(x)):
        pyro.sample("y", dist.Normal(w[0] * x + w[1] * before, 0.7), obs=y)


def lagged_event(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    before = torch.cat([torch.zeros(1), x[:-1]])
    pyro.sample("y", dist.Normal(w[0] * x + w[1] * before, 0.7).to_event(1), obs=y)


def from_the_second(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("weeks", len(x) - 1):
        pyro.sample(
            "y", dist.Normal(w[0] * x[1:] + w[1] * x[:-1], 0.7), obs=None if y is None else y[1:]
        )


def left_out(x, y):
    """log p(y_i | all others) of a linear regression, `[N]`."""
    found = []
    for i in range(len(x)):
        others = torch.arange(len(x)) != i
        precision = torch.eye(2) + x[others].T @ x[others] / 0.7**2
        mean = torch.linalg.solve(precision, x[others].T @ y[others] / 0.7**2)
        variance = 0.7**2 + x[i] @ torch.linalg.solve(precision, x[i])
        found.append(dist.Normal(x[i] @ mean, variance.sqrt()).log_prob(y[i]))
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "dim"),
    [(lagged_series, "weeks"), (lagged_event, "y_row"), (from_the_second, "weeks")],
)
def test_the_weeks_of_a_series_are_left_out_given_the_others(model, dim):
    x, y = X[:80, 0], Y[:80]
    first = model is from_the_second
    both = torch.stack([x, torch.cat([torch.zeros(1), x[:-1]])], 1)[first:]
    fit = ps.Laplace(model).run((x, y), **QUIET)  # Gaussian, so that it is exact
    found = fit.loo()
    truth = left_out(both, y[first:])
    assert found.num_data == len(truth)
    assert abs(found.elpd - float(truth.sum())) < 0.3
    torch.testing.assert_close(found.pointwise, truth, rtol=0, atol=0.05)
    w = fit.get_samples()["w"]
    expected = dist.Normal(w @ both.T, 0.7).log_prob(y[first:])
    torch.testing.assert_close(fit.log_likelihood()["y"], expected, rtol=1e-9, atol=1e-9)
    idata = fit.to_arviz(posterior_predictive=True)
    assert idata.log_likelihood["y"].dims == ("chain", "draw", dim)
    assert idata.posterior_predictive["y"].shape == (1, 1000, len(truth))
    assert elpd_of(arviz.loo(idata)) == pytest.approx(found.elpd, abs=1e-6)


def test_a_joint_density_says_so():
    def process(x, y=None):
        s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        covariance = (-0.5 * (x[:, None] - x) ** 2).exp() + s * torch.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)

    fit = ps.MAP(process).run((X[:20, 0], Y[:20]), num_steps=10, **QUIET)
    with pytest.raises(ArgumentError, match="site 'y' is one joint density of all rows"):
        fit.loo()


def own_latent(y):
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, tau))
        pyro.sample("y", dist.Normal(z, 0.1), obs=y)


def own_element(y):
    """The same by groups of one row each, in a plate of the same size elsewhere, non-centered."""
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(tau * z[torch.arange(len(y)).flip(0)], 0.1), obs=y)


def shared_element(y):
    """Groups of two rows, one of which is far away: its tail is no latent's of its own."""
    with pyro.plate("groups", len(y) // 2):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(z.repeat(2), 0.1), obs=y)


@pytest.mark.parametrize("model", [own_latent, own_element])
def test_a_latent_of_each_rows_own_is_named(model):
    fit = ps.Laplace(model).run((Y[:60],), **QUIET)
    with pytest.warns(UserWarning, match="each row has a latent of its own \\('z'\\).*sum it out"):
        found = fit.loo()
    assert "sum it out of the likelihood first" in str(found)


def test_shared_latents_are_not_called_a_rows_own():
    fit = ps.Laplace(shared_element).run((Y[:60],), **QUIET)
    with pytest.warns(UserWarning, match="heavier tails"):
        found = fit.loo()
    assert found.note == ""
