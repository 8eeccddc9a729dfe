"""Importance weights of approximations, against posteriors that are known exactly."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from linear import linear_data, regression
from models import normal, of_rows
from reference import close
from runs import QUIET

import pyro_scale as ps
from pyro_scale.errors import ApproximationWarning, ArgumentError, ModelError

pytestmark = pytest.mark.usefixtures("float64")

X, Y = linear_data(37)
EFFECTS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])


def eight_schools(y, error):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    away = pyro.sample("away", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
    with pyro.plate("schools", 8):
        pyro.sample("y", dist.Normal(mu + tau * away, error), obs=y)


skewed = of_rows(lambda rate: dist.Poisson(rate), rate=lambda: dist.Gamma(2.0, 1.0))


@pytest.mark.slow
def test_gaussian_posteriors_are_exact_and_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ApproximationWarning)
        for variance in (0.1, 1.0, 10.0):
            for temperature in (0.25, 1.0, 2.0):
                fit = ps.Laplace(regression(variance), temperature=temperature)
                fit.run((X, Y), **QUIET)
                assert fit.psis().pareto_k == 0 == fit.diagnostics().pareto_k[0]
                assert fit.fit.attrs["structure"] == "dense"


def test_eight_schools_are_warned_of():
    with pytest.warns(ApproximationWarning, match="does not fit the posterior"):
        fit = ps.Laplace(eight_schools).run((EFFECTS, ERRORS), **QUIET)
    assert fit.diagnostics().pareto_k[0] > 0.7


def test_a_diagonal_of_correlated_elements_has_a_large_k():
    model = of_rows(lambda w: dist.Normal(w.sum(), 1.0), w=normal(8, sd=10.0))

    with pytest.warns(ApproximationWarning):
        fit = ps.Laplace(model, structure="diag").run((Y,), **QUIET)
    assert fit.psis().pareto_k > 0.7
    assert ps.Laplace(model).run((Y,), **QUIET).psis().pareto_k == 0


def test_a_fit_that_is_too_narrow_is_warned_of_where_k_is_small():
    """Its draws do not reach the tail of its weights."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=source)
    x = torch.stack([x[:, 0], 0.99 * x[:, 0] + 0.14 * x[:, 1]], 1)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 10.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    fit = ps.Laplace(model, structure="diag")
    for seed in range(3):
        with pytest.warns(ApproximationWarning, match="fit the posterior.*structure='dense'"):
            fit.run((x, x.sum(1)), seed=seed, progress=False)
    assert fit.psis().spread > 3
    x[:, 1] -= x[:, 0] * (x[:, 0] @ x[:, 1]) / x[:, 0].square().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ApproximationWarning)
        fit.run((x, x.sum(1)), **QUIET)
    close(torch.tensor(fit.psis().spread), torch.tensor(1.0), 1e-4)


@pytest.mark.slow
def test_resampling_brings_means_to_the_posterior():
    y = torch.tensor([1.0, 0.0, 2.0])
    fit = ps.Laplace(skewed).run((y,), **QUIET)
    exact, sd = 5 / 4, 5**0.5 / 4  # Gamma(2 + 3, 1 + 3)
    drawn = fit.sample(20_000, seed=1)["rate"]
    better = fit.sample(20_000, seed=1, resample=True)["rate"]
    assert abs(float(drawn.mean()) - exact) > 10 * sd / 20_000**0.5
    assert abs(float(better.mean()) - exact) < 4 * (2 / 20_000) ** 0.5 * sd
    same = fit.sample(20_000, seed=1, resample=True)["rate"]
    close(same, better, 0.0)


def test_weights_of_a_tempered_posterior_and_of_several_starts():
    """The weights are p^(1/T) / q by hand, q a mixture over equal starts."""
    y = torch.tensor([1.0, 0.0, 2.0])
    fit = ps.Laplace(skewed, temperature=0.5).run((y,), num_chains=2, **QUIET)
    z = fit.fit.result.positions.flatten()
    log_p = 5 * z - 4 * z.exp()  # Gamma(5, 4) of exp(z), with its Jacobian
    gaussian = fit.fit.gaussians[0]
    log_q = dist.Normal(
        gaussian.mean, gaussian.sd if hasattr(gaussian, "sd") else gaussian.scale_tril[0]
    ).log_prob(z)
    expected = 2 * log_p - log_q
    found = fit.psis().log_weights
    body = expected < expected.quantile(0.7)  # which smoothing leaves alone
    shift = (found - expected)[body]
    close(shift, shift[0].expand_as(shift), 1e-6)


@pytest.mark.slow
def test_some_rows_stand_for_all():
    """And pieces for the whole."""
    torch.manual_seed(0)
    x = torch.randn(9000, 2)
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -0.5])))

    logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(2))

    fit = ps.Laplace(logistic).run((x, y), **QUIET)
    some, every = fit.psis(num_rows=3000), fit.psis()
    assert 0 < some.error < 0.2
    assert every.error == 0
    assert (some.log_weights - every.log_weights).std() < 2 * some.error
    w = fit.fit.result.positions[0]
    by_hand = dist.Bernoulli(logits=w @ x.T).log_prob(y).sum(1) - w.square().sum(1) / 2
    log_q = torch.vmap(fit.fit.gaussians[0].log_prob)(w)
    ratio = by_hand - log_q
    body = ratio < ratio.quantile(0.7)
    shift = (every.log_weights - ratio)[body]
    assert shift.std() < 1e-6


def test_what_has_no_density_is_refused():
    mode = ps.MAP(regression(), compile=False).run((X, Y), num_steps=2, **QUIET)
    with pytest.raises(ArgumentError, match="a mode has no density"):
        mode.psis()
    cold = ps.Laplace(regression(), temperature=0.0).run((X, Y), **QUIET)
    with pytest.raises(ArgumentError, match="temperature 0"):
        cold.psis()


def test_the_hessian_takes_the_place_of_a_ggn_that_is_not_there():
    def process(x, y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        covariance = scale**2 * torch.exp(-((x[:, None] - x) ** 2)) + torch.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)

    x = torch.linspace(0, 3, 9)
    with pytest.warns(ApproximationWarning) as told:
        fit = ps.Laplace(process).run((x, x.cos()), **QUIET)
    assert "dense" not in str(told[0].message)  # which it is
    same = ps.Laplace(process, curvature="hessian").run((x, x.cos()), **QUIET)
    close(fit.fit.gaussians[0].scale_tril, same.fit.gaussians[0].scale_tril, 1e-12)
    assert "the data have no GGN" in fit.fit.attrs["curvature"]
    with pytest.raises(ModelError, match="hessian"):
        ps.Laplace(process, curvature="empirical_fisher").run((x, x.cos()), **QUIET)
