"""Posteriors and data at which samplers are easily wrong: a run is right, or it says what is not.

Where the posterior is known, means are compared within 0.1 sds and sds within 5%, and what a
few standard errors of some thousand draws add.
"""

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import linear_regression
from dtypes import default_dtype
from models import of_rows
from reference import double, normals
from repetitions import long_but

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, VerdictWarning

pytestmark = pytest.mark.usefixtures("float64")

NOISE = normals(200, seed=1)
TABLE = normals(200, 3, seed=0)


def run_alone(model, data=None, **how):
    return ps.BAOA(model).run(data, seed=0, progress=False, **how)


def check_right(fit, **truth):
    """Against (mean, sd) of each site; and it says so."""
    assert fit.report().verdict == "yes", str(fit.report())
    for site, (mean, sd) in truth.items():
        draws = fit.get_samples()[site].double()
        assert float(((draws.mean(0) - mean) / sd).abs().max()) < 0.1 + 3 * 0.03
        assert float((draws.std(0) / sd - 1).abs().max()) < 0.05 + 3 * 0.02


def line_moments(x, y, prior_sd):
    """(Mean, sd) of each coefficient."""
    prior = torch.eye(x.shape[-1]) / torch.as_tensor(prior_sd) ** 2
    covariance = torch.linalg.inv(x.mT @ x + prior)
    return covariance @ (x.mT @ y), covariance.diagonal().sqrt()


def logistic_with(prior):
    return of_rows(lambda x, beta: dist.Bernoulli(logits=x @ beta), beta=prior)


def flat(*shape):
    return dist.ImproperUniform(dist.constraints.real, (), shape)


def collinear():
    """Two columns that differ by 1e-8 of themselves: along their difference there is the prior."""
    x = TABLE.clone()
    x[:, 2] = x[:, 1] + 1e-8 * x[:, 2]
    return x, x @ double(1.0, 2.0, -1.0) + NOISE, 10.0


def constant():
    """Columns of 0, of 3 and of 5."""
    x = torch.stack([TABLE[:, 0], *(torch.full((200,), c) for c in (0.0, 3.0, 5.0))], 1)
    return x, x[:, 0] + 2 + NOISE, 10.0


def units():
    """Columns in units of 1e6, 1 and 1e-6."""
    x = TABLE * double(1e6, 1.0, 1e-6)
    return x, x @ double(1e-6, 1.0, 1e6) + NOISE, double(10.0, 10.0, 1e7)


@pytest.mark.slow
@pytest.mark.parametrize("make", [collinear, constant, units])
def test_columns_of_any_kind(make):
    x, y, prior_sd = make()
    check_right(
        run_alone(linear_regression(sd=prior_sd, name="beta"), (x, y)),
        beta=line_moments(x, y, prior_sd),
    )


@pytest.mark.long
def test_collinear_columns_in_single_precision():
    """Which rounds to one column in places."""
    x, y, prior_sd = collinear()
    x, y = x.float(), y.float()
    with default_dtype(torch.float32):
        fit = run_alone(linear_regression(sd=prior_sd, name="beta"), (x, y))
    if fit.report().verdict == "yes":
        check_right(fit, beta=line_moments(x.double(), y.double(), prior_sd))


@pytest.mark.long
def test_a_million_rows_of_two_dimensions():
    """In batches, which nobody asked for."""
    x = torch.stack([torch.ones(10**6), normals(10**6, seed=5)], 1)
    y = x @ double(1.0, 2.0) + normals(10**6, seed=6)
    fit = run_alone(linear_regression(sd=10.0, name="beta"), (x, y))
    check_right(fit, beta=line_moments(x, y, 10.0))
    assert fit.diagnostics().attrs["batch_size"] < 10**4


@pytest.mark.slow
def test_twenty_rows():
    """A normal's mean and precision, which are conjugate."""

    def model(y):
        tau = pyro.sample("tau", dist.Gamma(2.0, 2.0))
        mu = pyro.sample("mu", dist.Normal(0.0, (4 * tau) ** -0.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mu, tau**-0.5), obs=y)

    y = 1 + NOISE[:20]
    misfit = (y - y.mean()).square().sum() + 4 * 20 / 24 * y.mean().square()
    a, b = torch.tensor(12.0), 2 + misfit / 2
    mu_sd = (b / (24 * (a - 1))).sqrt()
    check_right(run_alone(model, y), tau=(a / b, a.sqrt() / b), mu=(20 * y.mean() / 24, mu_sd))


@pytest.mark.slow
def test_labels_of_one_class():
    """The prior holds what the likelihood does not."""
    x, y = torch.stack([torch.ones(100), normals(100, seed=3)], 1), torch.ones(100)
    grid = torch.meshgrid(torch.linspace(-5, 30, 401), torch.linspace(-15, 15, 401), indexing="ij")
    beta = torch.stack([each.flatten() for each in grid], 1)
    values = torch.nn.functional.logsigmoid(beta @ x.mT).sum(1) - beta.square().sum(1) / 50
    weight = torch.softmax(values, 0)
    mean = weight @ beta
    sd = (weight @ (beta - mean).square()).sqrt()
    prior = lambda: dist.Normal(torch.zeros(2), 5.0).to_event(1)  # noqa: E731
    check_right(run_alone(logistic_with(prior), (x, y)), beta=(mean, sd))


@pytest.mark.slow
@pytest.mark.parametrize("labels", long_but(["one class", "separable"]))
def test_a_mode_at_infinity(labels):
    """Without a prior there is no posterior."""
    x = torch.stack([torch.ones(100), normals(100, seed=3)], 1)
    y = torch.ones(100) if labels == "one class" else (x[:, 1] > 0).double()
    with pytest.warns(VerdictWarning, match="'beta'"):
        fit = run_alone(logistic_with(lambda: flat(2)), (x, y), max_rows=20_000_000)
    assert fit.report().verdict == "no"


@pytest.mark.long
def test_a_mode_at_infinity_of_a_hierarchy():
    """The density of a centered hierarchy is infinite where its scale is 0."""

    def model():
        pyro.factor("no data", torch.zeros(()))
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        pyro.sample("x", dist.Normal(torch.zeros(5), scale).to_event(1))

    with pytest.warns(VerdictWarning, match=r"'(scale|x)'.*LocScaleReparam"):
        fit = run_alone(model, max_rows=200_000)
    assert fit.report().verdict != "yes"


@pytest.mark.slow
def test_a_flat_direction():
    """Of one site, and of a sum of two."""

    def alone():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("fine", dist.Normal(0.0, 1.0))
        pyro.sample("flat", flat())

    with pytest.raises(ArgumentError, match=r"direction of site 'flat'.*'flat' a proper prior"):
        run_alone(alone)

    def summed(y):
        a, b = pyro.sample("a", flat()), pyro.sample("b", flat())
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a + b, 1.0), obs=y)

    with pytest.warns(VerdictWarning, match="site '[ab]'"):
        fit = run_alone(summed, NOISE, max_rows=20_000_000)
    assert fit.report().verdict != "yes"


@pytest.mark.slow
def test_a_nearly_flat_direction():
    """A sum of two, each with a wide prior."""

    def model(y):
        a, b = (pyro.sample(name, dist.Normal(0.0, 1000.0)) for name in "ab")
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a + b, 1.0), obs=y)

    check_right(run_alone(model, NOISE), a=(NOISE.mean() / 2, 1000 / 2**0.5))


@pytest.mark.slow
@pytest.mark.long
def test_a_budget_that_is_too_small_for_a_warm_up():
    """Too small to begin, and spent on searches for modes; what is advised is right, or says that
    it is too small."""
    x, y, prior_sd = units()
    with pytest.raises(ArgumentError, match=r"max_rows=10,000 is .* pass max_rows="):
        run_alone(linear_regression(sd=prior_sd, name="beta"), (x, y), max_rows=10_000)
    with pytest.raises(ArgumentError, match=r"pass max_rows=") as raised:
        run_alone(linear_regression(sd=prior_sd, name="beta"), (x, y), max_rows=2_300_000)
    enough = re.search(r"pass max_rows=([\d,]+)", str(raised.value))[1].replace(",", "")
    fit = run_alone(linear_regression(sd=prior_sd, name="beta"), (x, y), max_rows=int(enough))
    if fit.report().verdict == "yes":
        check_right(fit, beta=line_moments(x, y, prior_sd))
    else:
        assert "max_rows=" in fit.report().headline


@pytest.mark.slow
@pytest.mark.long
def test_a_fit_of_other_data_is_a_geometry_that_is_mended():
    """Its center is hundreds of its sds off, and it is ten times too narrow."""
    beta, y_sd = double(1.0, -2.0, 0.5), NOISE
    x, many = TABLE, normals(20_000, 3, seed=2)
    other = ps.Laplace(linear_regression(sd=10.0, name="beta"), structure="dense").run(
        (many, many @ -beta + normals(20_000, seed=3)), progress=False
    )
    y = x @ beta + y_sd
    for size in (None, 20):
        fit = ps.BAOA(linear_regression(sd=10.0, name="beta"), precondition=other)
        fit.run((x, y), batch_size=size, seed=0, progress=False)
        check_right(fit, beta=line_moments(x, y, 10.0))
