"""Gaussians at the mode, against posteriors and evidences that are known exactly.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.
"""

import functools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from linear import PRIOR_MEAN, SD, D, linear_data, linear_posterior, regression, rows
from models import normal, of_rows
from reference import close, double, normals
from repetitions import each_once, long_but
from row_datasets import RowByRow, Stream
from runs import QUIET
from torch.distributions import MultivariateNormal, constraints
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.core import memory
from pyro_scale.errors import ArgumentError, DataError, ModelError, NotRunError, SiteError

pytestmark = pytest.mark.usefixtures("float64")

KINDS = ["ggn", "monte_carlo", "empirical_fisher", "hessian"]
STRUCTURES = ["diag", "dense"]
N = 37
X, Y = linear_data(N)


def posterior(variance=1.0, x=X, y=Y):
    return linear_posterior(variance, x, y)


def evidence(variance=1.0, x=X, y=Y):
    """The exact log marginal likelihood of `regression`: that of y ~ N(x PRIOR_MEAN, SD^2 I +
    variance x x'), by Woodbury's identity, which loses no digits where the variance is large."""
    residual, inner = (y - x @ PRIOR_MEAN) / SD, torch.eye(D) + variance * x.T @ x / SD**2
    pulled = variance**0.5 * x.T @ residual / SD
    quadratic = residual.square().sum() - pulled @ torch.linalg.solve(inner, pulled)
    log_det = torch.logdet(inner) + len(x) * math.log(2 * math.pi * SD**2)
    return -(quadratic + log_det) / 2


def test_woodburys_evidence_is_the_marginals():
    covariance = SD**2 * torch.eye(N) + 2.0 * X @ X.T
    close(evidence(2.0), MultivariateNormal(X @ PRIOR_MEAN, covariance).log_prob(Y), 1e-10)


def laplace(model, data, structure="dense", **kwargs):
    run = {k: kwargs.pop(k) for k in ("mode", "tune", "batch_size", "num_chains") if k in kwargs}
    return ps.Laplace(model, structure=structure, **kwargs).run(data, **run, **QUIET)


def gaussian_of(fit, start=0):
    return fit.fit.gaussians[start]


# ------------------------------------------------------------------ linear regression


WAYS = {
    "whole": ((X, Y), {}),
    "one batch of all": ((X, Y), {"batch_size": N}),
    "ragged": ((X, Y), {"batch_size": 5}),
    "rows": ((X, Y), {"batch_size": 1}),
    "all but one": ((X, Y), {"batch_size": N - 1}),
    "by name, backwards": ({"y": Y.flip(0), "x": X.flip(0)}, {"batch_size": 8}),
    "loader": (DataLoader(TensorDataset(X, Y), 5, shuffle=True), {}),
    "loader dropping the last": (DataLoader(TensorDataset(X, Y), 5, drop_last=True), {}),
    "row by row": (DataLoader(RowByRow(X, Y), 10, shuffle=True), {}),
    "stream": (DataLoader(Stream(X, Y), 7), {}),
}


@pytest.mark.parametrize(("way", "variance"), each_once(WAYS, [1.0, 1e8]))
def test_a_linear_regression_has_its_exact_posterior(way, variance):
    data, kwargs = WAYS[way]
    fit = laplace(regression(variance), data, **kwargs)
    mean, precision = posterior(variance)
    close(gaussian_of(fit).mean, mean, 1e-8)
    close(gaussian_of(fit).precision, precision, 1e-8)
    close(gaussian_of(fit).covariance, torch.linalg.inv(precision), 1e-8)
    close(fit.log_marginal_likelihood(), evidence(variance), 1e-8)


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_diagonal_is_that_of_the_precision(kind, batch_size):
    fit = laplace(regression(), (X, Y), "diag", curvature=kind, batch_size=batch_size)
    mean, precision = posterior()
    close(gaussian_of(fit).mean, mean, 1e-6)
    close(gaussian_of(fit).precision, precision.diagonal(), 1e-8)
    close(gaussian_of(fit).sd, precision.diagonal().rsqrt(), 1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_temperature_multiplies_the_covariance(structure):
    """Of the evidence, it is none of its business."""
    one = laplace(regression(), (X, Y), structure)
    cold = laplace(regression(), (X, Y), structure, temperature=0.09)
    close(gaussian_of(cold).variance, 0.09 * gaussian_of(one).variance, 1e-10)
    close(gaussian_of(cold).precision, gaussian_of(one).precision / 0.09, 1e-10)
    close(gaussian_of(cold).mean, gaussian_of(one).mean, 1e-10)
    close(cold.log_marginal_likelihood(), one.log_marginal_likelihood(), 1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_at_temperature_zero_draws_are_the_mode(structure):
    fit = laplace(regression(), (X, Y), structure, temperature=0)
    close(fit.get_samples()["w"], posterior()[0].expand(1000, D), 1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_gaussians_moments(structure):
    fit = laplace(regression(), (X, Y), structure, temperature=2.0)
    mean, precision = posterior()
    covariance = 2 * torch.linalg.inv(precision)
    if structure == "diag":
        covariance = (2 / precision.diagonal()).diag()
    for draws in (fit.get_samples()["w"], fit.sample(4000, seed=3)["w"]):
        away = draws - mean
        found, variance = away.T @ away / len(draws), covariance.diagonal()
        errors = ((variance * variance[:, None] + covariance**2) / len(draws)).sqrt()
        assert float((away.mean(0) / (variance / len(draws)).sqrt()).abs().max()) < 4.4
        assert float(((found - covariance) / errors).abs().max()) < 4.4


# ------------------------------------------------------------------ the prior


def of_nothing(prior):
    """Rows that say nothing of v, of which there are two elements."""

    def model(x, y):
        v = prior()
        with rows(x):
            pyro.sample("y", dist.Normal(x * v.sum(), 1.0), obs=y)

    return model


def independent():
    pyro.factor("no data", torch.zeros(()))
    return pyro.sample("v", dist.Normal(double(1.0, -2.0), double(0.5, 3.0)).to_event(1))


def correlated():
    pyro.factor("no data", torch.zeros(()))
    return pyro.sample("v", dist.MultivariateNormal(torch.zeros(2), double([2, 1], [1, 3])))


def tied():
    v = pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.factor("tie", -0.5 * 4 * (v[0] - v[1]) ** 2)
    return v


def positive():
    """log v has precision 1/0.25, with the Jacobian."""
    pyro.factor("no data", torch.zeros(()))
    return pyro.sample("v", dist.LogNormal(torch.zeros(2), 0.5).to_event(1))


PRIORS = {
    "independent": (independent, double([4, 0], [0, 1 / 9])),
    "correlated": (correlated, torch.linalg.inv(double([2, 1], [1, 3]))),
    "tied": (tied, double([5, -4], [-4, 5])),
    "positive": (positive, double([4, 0], [0, 4])),
}


@pytest.mark.parametrize(("name", "kind", "structure"), each_once(PRIORS, KINDS, STRUCTURES))
def test_the_prior_is_in_every_precision_once(name, kind, structure):
    """Nothing else is there, however many batches."""
    prior, precision = PRIORS[name]
    data = torch.zeros(9), normals(9, seed=4)
    fit = laplace(of_nothing(prior), data, structure, curvature=kind, batch_size=2)
    expected = precision if structure == "dense" else precision.diagonal()
    close(gaussian_of(fit).precision, expected, 1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prior_is_in_every_precision_beside_the_rows(kind):
    """A stiffer prior adds what it should and no more."""
    mode, data = {"w": double(0.3, 0.2, -0.1)}, (X, Y)
    loose, stiff = (
        gaussian_of(laplace(regression(v), data, mode=mode, curvature=kind)).precision
        for v in (1.0, 1e-2)
    )
    close(stiff - loose, 99 * torch.eye(D), 1e-8)


# ------------------------------------------------------------------ curvatures


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_empirical_fisher_is_of_squared_gradients(structure, batch_size):
    fit = laplace(
        regression(), (X, Y), structure, curvature="empirical_fisher", batch_size=batch_size
    )
    mean, _ = posterior()
    slopes = (Y - X @ mean)[:, None] / SD**2 * X
    expected = torch.eye(D) + slopes.T @ slopes
    close(gaussian_of(fit).mean, mean, 1e-6)
    close(
        gaussian_of(fit).precision, expected if structure == "dense" else expected.diagonal(), 1e-5
    )


@pytest.mark.parametrize("batch_size", [None, 500])
def test_monte_carlo_is_the_ggn_on_average(batch_size):
    """One drawn residual a row: its square over SD^2 has mean 1 and variance 2."""
    x = torch.ones(4000, 1)

    model = of_rows(lambda x, w: dist.Normal(x[:, 0] * w, SD), w=normal())
    data = x, normals(4000, seed=5)
    fit = laplace(model, data, "diag", curvature="monte_carlo", batch_size=batch_size)
    ratio = (float(gaussian_of(fit).precision) - 1) / (4000 / SD**2)
    assert 0 < abs((ratio - 1) / (2 / 4000) ** 0.5) < 4.4


def test_a_family_of_ones_own_is_estimated_from_a_hundred_draws():
    """Its density is the user's, so its Fisher information is not known; `attrs` says so."""

    class Own(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value)

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with rows(y):
            pyro.sample("y", Own(w.expand(len(y)), SD), obs=y)

    fit = laplace(model, (normals(100, seed=5),), "diag")
    ratio = (float(gaussian_of(fit).precision) - 1) / (100 / SD**2)
    assert 0 < abs((ratio - 1) / (2 / 10_000) ** 0.5) < 4.4
    assert fit.fit.attrs["curvature"] == "ggn, site 'y' by Monte Carlo, 100 draws a row"


X2 = normals(40, 2, seed=6)


def of_outputs(family, width=None):
    """A generalized linear model of a prior N(0, 1)."""

    def model(x, y):
        shape = (2,) if width is None else (2, width)
        w = pyro.sample("w", dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
        with rows(x):
            pyro.sample("y", family(x @ w), obs=y)

    return model


def draw(fn):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return fn.sample()


ETA = X2 @ double(0.9, -0.6)
ETAS = X2 @ double([0.9, -0.6, 0.1], [0.2, 0.5, -1.0])
CANONICAL = {
    "Bernoulli": (lambda eta: dist.Bernoulli(logits=eta), ETA, None),
    "Bernoulli's probs": (lambda eta: dist.Bernoulli(eta.sigmoid()), ETA, None),
    "Binomial": (lambda eta: dist.Binomial(5, logits=eta), ETA, None),
    "Poisson": (lambda eta: dist.Poisson(eta.exp()), ETA, None),
    "Categorical": (lambda eta: dist.Categorical(logits=eta), ETAS, 3),
    "Categorical's probs": (lambda eta: dist.Categorical(eta.softmax(-1)), ETAS, 3),
}


@pytest.mark.parametrize(("name", "structure"), each_once(CANONICAL, STRUCTURES))
def test_the_ggn_is_the_hessian_where_the_link_is_canonical(name, structure):
    family, eta, width = CANONICAL[name]
    data, model = (X2, draw(family(eta))), of_outputs(family, width)
    ggn = laplace(model, data, structure, batch_size=7)
    mode = {"w": ggn.fit.centers[0].reshape((2, *eta.shape[1:]))}
    exact = laplace(model, data, structure, curvature="hessian", mode=mode)
    close(gaussian_of(ggn).precision, gaussian_of(exact).precision, 1e-8)
    close(ggn.log_marginal_likelihood(), exact.log_marginal_likelihood(), 1e-8)


def test_a_logistic_regressions_precision_by_hand():
    y = draw(dist.Bernoulli(logits=ETA))
    fit = laplace(of_outputs(CANONICAL["Bernoulli"][0]), (X2, y))
    w = gaussian_of(fit).mean
    p = (X2 @ w).sigmoid()
    close(X2.T @ (y - p) - w, torch.zeros(2), 1e-8)  # the mode
    precision = torch.eye(2) + (X2 * (p * (1 - p))[:, None]).T @ X2
    close(gaussian_of(fit).precision, precision, 1e-8)
    log_joint = (
        dist.Normal(0.0, 1.0).log_prob(w).sum() + dist.Bernoulli(logits=X2 @ w).log_prob(y).sum()
    )
    expected = log_joint + math.log(2 * math.pi) - torch.logdet(precision) / 2
    close(fit.log_marginal_likelihood(), expected, 1e-8)


#: Student's t around x w, its scale unknown.
robust = of_rows(
    lambda x, w, s: dist.StudentT(4.0, x @ w, s),
    w=normal(2, sd=2.0),
    s=lambda: dist.LogNormal(0.1, 0.6),
)


def robust_by_hand(position, x, y):
    """Its log joint at [w, log s]."""
    w, u = position[:2], position[2]
    prior = dist.Normal(0.0, 2.0).log_prob(w).sum() + dist.Normal(0.1, 0.6).log_prob(u)
    return prior + dist.StudentT(4.0, x @ w, u.exp()).log_prob(y).sum()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_size", [None, 6])
def test_the_hessian_is_that_of_the_log_joint(structure, batch_size):
    y = X2 @ double(1.0, 2.0) + normals(40, seed=8)
    fit = laplace(robust, (X2, y), structure, curvature="hessian", batch_size=batch_size)
    log_joint = functools.partial(robust_by_hand, x=X2, y=y)
    mode = gaussian_of(fit).mean
    close(torch.func.grad(log_joint)(mode), torch.zeros(3), 1e-8 if structure == "dense" else 1e-4)
    expected = -torch.func.hessian(log_joint)(mode)
    close(
        gaussian_of(fit).precision, expected if structure == "dense" else expected.diagonal(), 1e-8
    )
    ggn = laplace(robust, (X2, y), structure)
    assert float((gaussian_of(ggn).variance / gaussian_of(fit).variance - 1).abs().max()) > 1e-2


bent = of_rows(
    lambda w, v: dist.Normal(w**2 + 0.1 * v, 1.0),
    w=normal(),
    v=normal(),
)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_curvature_that_is_not_positive_names_the_site(structure):
    """At w = 0 it is 1 - 2 sum y; at the GGN's it is the prior's."""
    y, mode = double(3.0, 4.0), {"w": torch.tensor(0.0), "v": torch.tensor(0.0)}
    with pytest.raises(ModelError, match=r"site 'w'.*curvature there is -13.*not a mode"):
        laplace(bent, (y,), structure, mode=mode, curvature="hessian")
    fit = laplace(bent, (y,), structure, mode=mode)
    close(gaussian_of(fit).variance, [1, 1 / 1.02], 1e-8)


# ------------------------------------------------------------------ positive sites


COUNTS = double(3, 0, 2, 4, 1, 1, 0)


poisson = of_rows(lambda r: dist.Poisson(r), r=lambda: dist.Gamma(2.0, 3.0))


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_gaussian_is_of_unconstrained_values(structure, kind):
    """u = log r, with the Jacobian, has density (a + S) u - (b + n) e^u: its mode is at
    log((a + S) / (b + n)), and its precision there is a + S."""
    fit = laplace(poisson, (COUNTS,), structure, curvature=kind)
    close(gaussian_of(fit).mean, [math.log(13 / 10)], 1e-6)
    close(gaussian_of(fit).variance, [1 / 13], 1e-6)
    draws = fit.get_samples()["r"].log()
    assert abs(float((draws.mean() - math.log(1.3)) * (13 * 1000) ** 0.5)) < 4.4
    constant = 2 * math.log(3.0) - math.lgamma(2.0) - float(torch.lgamma(COUNTS + 1).sum())
    exact = constant + math.lgamma(13.0) - 13 * math.log(10.0)
    stirling = 12.5 * math.log(13) - 13 + 0.5 * math.log(2 * math.pi)  # for lgamma(13)
    close(fit.log_marginal_likelihood(), exact - math.lgamma(13.0) + stirling, 1e-6)


SIZES = double(0.4, 1.7, 0.2, 2.5, 1.1, 0.9, 0.3)


log_normal = of_rows(lambda m: dist.LogNormal(m.log(), 1.3), m=lambda: dist.LogNormal(0.5, 0.8))


LOG_PRECISION = 1 / 0.64 + 7 / 1.69


@pytest.mark.parametrize("structure", STRUCTURES)
def test_log_normal_sites_are_exact(structure):
    fit = laplace(log_normal, (SIZES,), structure)
    mean = (0.5 / 0.64 + float(SIZES.log().sum()) / 1.69) / LOG_PRECISION
    close(gaussian_of(fit).mean, [mean], 1e-6)
    close(gaussian_of(fit).variance, [1 / LOG_PRECISION], 1e-8)
    logs = MultivariateNormal(torch.full((7,), 0.5), 1.69 * torch.eye(7) + 0.64)
    expected = logs.log_prob(SIZES.log()) - SIZES.log().sum()
    close(fit.log_marginal_likelihood(), expected, 1e-6)


# ------------------------------------------------------------------ evidence


@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_diagonals_evidence_is_exact_where_features_are_orthogonal(batch_size):
    x = torch.linalg.qr(X).Q * double(3.0, 1.0, 0.2)
    fit = laplace(regression(2.0), (x, Y), "diag", batch_size=batch_size)
    close(fit.log_marginal_likelihood(), evidence(2.0, x), 1e-8)
    correlated = laplace(regression(2.0), (X, Y), "diag")
    assert float(correlated.log_marginal_likelihood()) < float(evidence(2.0)) - 1e-2


two_wells = of_rows(lambda w: dist.Normal(w**2, 1.0), w=lambda: dist.Normal(0.7, 1.0))


def test_of_several_starts_the_evidence_is_the_largest():
    """Both wells by hand: the mode's log joint, and the curvature there."""
    y, starts = double(1.0, 1.4), double(-1.0, 1.0, -2.0)
    fit = laplace(two_wells, (y,), curvature="hessian", num_chains=3, init_strategy={"w": starts})
    centers = fit.fit.centers[:, 0]
    assert float(centers[1]) < 0 < float(centers[0])  # in the order of their evidence
    close(centers[2], centers[1], 1e-8)

    def log_joint(w):
        return dist.Normal(0.7, 1.0).log_prob(w) + dist.Normal(w**2, 1.0).log_prob(y).sum()

    expected = []
    for start, w in enumerate(centers):
        close(torch.func.grad(log_joint)(w), 0.0, 1e-8)
        precision = -torch.func.hessian(log_joint)(w)
        close(gaussian_of(fit, start).variance, [1 / precision], 1e-8)
        expected.append(log_joint(w) + 0.5 * math.log(2 * math.pi) - precision.log() / 2)
    assert expected[0] > expected[1] + 0.5
    close(fit.log_marginal_likelihood(), expected[0], 1e-8)
    table = fit.diagnostics()
    close(torch.tensor(table["log_evidence"].to_numpy()), torch.stack(expected), 1e-8)
    assert table.index.name == "start"
    assert float(table["distance"].max()) < 1e-6


# ------------------------------------------------------------------ where the mode is


MAP_MODE = ((0.5 / 0.64 + float(SIZES.log().sum()) / 1.69) - 1) / LOG_PRECISION


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_map_gives_the_place_and_the_distance_is_told(structure):
    """The mode without Jacobian is 1/precision below in log m: 1/sqrt(precision) sds."""
    found = ps.MAP(log_normal, structure="dense", optimizer=torchopt.sgd(0.5))
    found.run((SIZES,), num_steps=50, **QUIET)
    fit = laplace(log_normal, (SIZES,), structure, mode=found)
    close(gaussian_of(fit).mean, [MAP_MODE], 1e-8)
    close(gaussian_of(fit).variance, [1 / LOG_PRECISION], 1e-8)
    close(torch.tensor(fit.diagnostics()["distance"].to_numpy()), [LOG_PRECISION**-0.5], 1e-6)
    with pytest.warns(UserWarning, match="0.42 posterior sds away"):
        low = fit.log_marginal_likelihood()
    best = laplace(log_normal, (SIZES,), structure).log_marginal_likelihood()
    close(best - low, 0.5 / LOG_PRECISION, 1e-6)
    by_hand = laplace(log_normal, (SIZES,), structure, mode={"m": torch.tensor(MAP_MODE).exp()})
    close(gaussian_of(by_hand).mean, [MAP_MODE], 1e-12)


def test_a_map_of_several_starts_gives_several_gaussians():
    y, starts = double(1.0, 1.4), {"w": double(-1.0, 1.0)}
    found = ps.MAP(two_wells, structure="dense", init_strategy=starts, optimizer=torchopt.sgd(0.05))
    found.run((y,), num_steps=100, num_chains=2, **QUIET)
    fit = laplace(two_wells, (y,), mode=found)
    assert len(fit.fit.gaussians) == 2
    assert torch.equal(fit.fit.centers.sort(0).values, found.fit.centers.sort(0).values)
    assert fit.get_samples(group_by_chain=True)["w"].shape == (2, 1000)


@pytest.mark.parametrize(
    "mode",
    [{}, {"w": torch.zeros(2)}, {"w": torch.zeros(3), "v": torch.zeros(3)}, "here", 0.5],
    ids=["missing", "shape", "unknown", "word", "number"],
)
def test_a_mode_that_does_not_fit_is_refused(mode):
    with pytest.raises(ArgumentError, match="mode"):
        laplace(regression(), (X, Y), mode=mode)


def test_a_map_of_another_model_is_refused():
    found = ps.MAP(two_wells).run((COUNTS,), num_steps=1, **QUIET)
    with pytest.raises(ArgumentError, match=r"mode: it has the sites \['w'\]"):
        laplace(regression(), (X, Y), mode=found)


# ------------------------------------------------------------------ tune


def with_params(x, y):
    """w ~ N(0, tau^2), y ~ N(x w, sigma^2), both of them params."""
    tau = pyro.param("tau", torch.tensor(2.0), constraint=constraints.positive)
    sigma = pyro.param("sigma", torch.tensor(1.0), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(D), tau).to_event(1))
    with rows(x):
        pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def evidence_of(tau, sigma):
    covariance = sigma**2 * torch.eye(N) + tau**2 * X @ X.T
    return MultivariateNormal(torch.zeros(N), covariance).log_prob(Y)


def best_of(function, size):
    """Where a function of the logarithms of `size` numbers is largest: (those numbers, it)."""
    logs = torch.zeros(size, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logs], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10
    )

    def closure():
        optimizer.zero_grad()
        loss = -function(*logs.exp())
        loss.backward()
        return loss

    optimizer.step(closure)
    return logs.detach().exp(), function(*logs.detach().exp())


@pytest.mark.usefixtures("store")
@pytest.mark.long
def test_tune_finds_the_params_of_most_evidence():
    fit = laplace(with_params, (X, Y), tune=("tau", "sigma"), batch_size=10)
    (tau, sigma), best = best_of(evidence_of, 2)
    close(fit.params["tau"], tau, 1e-4)
    close(fit.params["sigma"], sigma, 1e-4)
    close(fit.log_marginal_likelihood(), best, 1e-7)
    precision = torch.eye(D) / fit.params["tau"] ** 2 + X.T @ X / fit.params["sigma"] ** 2
    close(gaussian_of(fit).precision, precision, 1e-8)
    close(
        gaussian_of(fit).mean,
        torch.linalg.solve(precision, X.T @ Y) / fit.params["sigma"] ** 2,
        1e-8,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("structure", long_but(STRUCTURES, "dense"))
def test_a_single_param_is_tuned(structure):
    """Features are orthogonal, so that a diagonal evidence is exact, too."""
    x = torch.linalg.qr(X).Q * double(3.0, 1.0, 0.2)

    def model(x, y):
        tau = pyro.param("tau", torch.tensor(2.0), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(D), tau).to_event(1))
        with rows(x):
            pyro.sample("y", dist.Normal(x @ w, SD), obs=y)

    def exact(tau):
        covariance = SD**2 * torch.eye(N) + tau**2 * x @ x.T
        return MultivariateNormal(torch.zeros(N), covariance).log_prob(Y)

    fit = laplace(model, (x, Y), structure, tune=["tau"])
    (tau,), best = best_of(exact, 1)
    close(fit.params["tau"], tau, 1e-3)
    close(fit.log_marginal_likelihood(), best, 1e-6)


@pytest.mark.usefixtures("store")
@pytest.mark.long
def test_params_that_are_not_tuned_are_part_of_the_mode():
    """sigma^2 is then the mean square of what is left at the mode: no degree of freedom off."""

    def model(x, y):
        sigma = pyro.param("sigma", torch.tensor(1.0), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
        with rows(x):
            pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    fit = laplace(model, (X, Y))
    mean, sigma = gaussian_of(fit).mean, fit.params["sigma"]
    close(sigma**2, (Y - X @ mean).square().mean(), 1e-5)
    close(gaussian_of(fit).precision, torch.eye(D) + X.T @ X / sigma**2, 1e-8)
    tuned = laplace(model, (X, Y), tune=["sigma"])
    assert float(tuned.params["sigma"]) > float(sigma) * 1.02
    assert float(tuned.log_marginal_likelihood()) > float(fit.log_marginal_likelihood())


def classes_of_a_network(scale, dtype):
    """A model whose prior is made in it, and data of which the GGN is no Hessian: by its steps the
    mode is not found to the digits that a slope of the evidence needs."""
    x = normals(60, 3, seed=1)
    classes = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    net = net.to(dtype)

    def model(x, y):
        sd = scale()
        logits = ps.bayesianize(net, prior=lambda name, weight: dist.Normal(weight * 0, sd))(x)
        with rows(x):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model, (x.to(dtype), classes)


@pytest.mark.usefixtures("store")
@pytest.mark.filterwarnings("ignore:the approximation does not fit")
@pytest.mark.long
def test_the_prior_of_a_network_is_tuned_in_single_precision():
    """Against fits at fixed scales in double precision, from the same mode: the top of the
    parabola through three of them."""

    def param():
        return pyro.param("s", torch.tensor(1.0).float(), constraint=constraints.positive)

    fit = laplace(*classes_of_a_network(param, torch.float32), tune=["s"])
    mode = fit.fit.log_posterior.constrain(fit.fit.layout.unflatten(fit.fit.centers[0]))
    best, starts = float(mode.pop("s")), {n: v[None].double() for n, v in mode.items()}

    def evidence_at(scale):
        model, data = classes_of_a_network(lambda: torch.tensor(scale), torch.float64)
        return float(laplace(model, data, init_strategy=starts).log_marginal_likelihood())

    below, there, above = (evidence_at(best * math.exp(step)) for step in (-0.1, 0.0, 0.1))
    assert there > max(below, above)
    assert best > 1.5
    assert abs(0.05 * (above - below) / (2 * there - above - below)) < 0.01
    assert float(fit.log_marginal_likelihood()) == pytest.approx(there, abs=1e-3)


@pytest.mark.usefixtures("store")
def test_a_param_without_influence_is_not_tuned():
    def model(x, y):
        tau = pyro.param("tau", torch.tensor(2.0), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(D), tau.detach()).to_event(1))
        with rows(x):
            pyro.sample("y", dist.Normal(x @ w, SD), obs=y)

    with pytest.raises(ArgumentError, match=r"tune: .* does not change with pyro.param \['tau'\]"):
        laplace(model, (X, Y), tune=["tau"])


# ------------------------------------------------------------------ more data


HALVES = (slice(0, 15), slice(15, N))
THIRDS = (slice(0, 9), slice(9, 20), slice(20, N))
#: Each row has one feature: those are independent in any part.
ALONE = torch.eye(D).repeat(13, 1)[:N] * normals(N, 1, seed=9)


@pytest.mark.parametrize(
    ("structure", "kind", "temperature"), each_once(STRUCTURES, ["ggn", "hessian"], [1.0, 0.3])
)
@pytest.mark.parametrize("parts", [HALVES, THIRDS], ids=["two", "three"])
def test_parts_one_after_another_are_all_at_once(parts, kind, temperature, structure):
    x = X if structure == "dense" else ALONE
    first, *others = parts
    asked = {"curvature": kind, "temperature": temperature}
    fit = laplace(regression(2.0), (x[first], Y[first]), structure, batch_size=4, **asked)
    total = fit.log_marginal_likelihood()
    for part in others:
        assert fit.update((x[part], Y[part]), batch_size=5, progress=False) is fit
        total = total + fit.log_marginal_likelihood()
    mean, precision = posterior(2.0, x)
    tolerance = 1e-8 if structure == "dense" else 1e-6
    close(gaussian_of(fit).mean, mean, tolerance)
    close(gaussian_of(fit).variance, temperature * torch.linalg.inv(precision).diagonal(), 1e-8)
    if structure == "dense":
        close(gaussian_of(fit).precision, precision / temperature, 1e-8)
    close(total, evidence(2.0, x), 1e-7)


def test_an_update_takes_loaders_and_gives_draws():
    first, other = HALVES
    fit = laplace(regression(), (X[first], Y[first]))
    fit.update(DataLoader(TensorDataset(X[other], Y[other]), 4, shuffle=True), progress=False)
    mean, precision = posterior()
    close(gaussian_of(fit).precision, precision, 1e-8)
    away = fit.get_samples()["w"].mean(0) - mean
    assert float((away / torch.linalg.inv(precision).diagonal().sqrt()).abs().max()) < 4.4 / 31
    assert fit.predict(X[:2])["y"].shape == (1000, 2)


def test_an_update_of_several_starts_updates_each():
    y, starts = double(1.0, 1.4), double(-1.0, 1.0)
    fit = laplace(two_wells, (y,), num_chains=2, init_strategy={"w": starts})
    before = fit.fit.centers[:, 0].clone()
    precision = torch.cat([gaussian_of(fit, start).variance for start in (0, 1)]).reciprocal()
    more = double(1.2, 0.9)
    fit.update((more,), progress=False)
    after = fit.fit.centers[:, 0]
    slope = -precision * (after - before) + 2 * after * (more.sum() - 2 * after**2)
    close(slope, torch.zeros(2), 1e-8)
    assert float(after[1]) < 0 < float(after[0])
    found = torch.cat([gaussian_of(fit, start).variance for start in (0, 1)]).reciprocal()
    close(found, precision + 2 * (2 * after) ** 2, 1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_curvature_is_updated(kind):
    """What the old one said stays in the precision, to which new rows add."""
    first, other = HALVES
    mode = {"w": posterior()[0]}
    fit = laplace(regression(), (X[first], Y[first]), curvature=kind, mode=mode)
    old = gaussian_of(fit).precision
    alone = gaussian_of(laplace(regression(), (X[other], Y[other]), curvature=kind, mode=mode))
    fit.update((X[other], Y[other]), mode=mode, progress=False)
    close(gaussian_of(fit).precision, old + alone.precision - torch.eye(D), 1e-8)


@pytest.mark.filterwarnings("ignore:the log joint still rose")
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_map_of_the_new_prior_finds_the_updated_mode(temperature):
    first, other = HALVES
    fit = laplace(regression(2.0), (X[first], Y[first]), temperature=temperature)
    found = ps.MAP(fit.as_prior(), structure="dense", optimizer=torchopt.sgd(0.2))
    found.run((X[other], Y[other]), num_steps=50, batch_size=5, **QUIET)
    mean, precision = posterior(2.0)
    close(found.get_samples()["w"][0], mean, 1e-8)
    fit.update((X[other], Y[other]), mode=found, progress=False)
    close(gaussian_of(fit).mean, mean, 1e-8)
    close(gaussian_of(fit).precision, precision / temperature, 1e-8)


@pytest.mark.filterwarnings("ignore:the log joint still rose")
@pytest.mark.long
def test_steps_with_the_new_prior_find_the_updated_mode():
    """On batches of the new rows, whose number the old posterior does not know."""
    first, other = HALVES
    fit = laplace(regression(2.0), (X[first], Y[first]))
    twice = X[other].repeat(2, 1), Y[other].repeat(2)
    expected = ps.MAP(fit.as_prior(), structure="dense", optimizer=torchopt.sgd(0.01))
    expected.run(twice, num_steps=10, **QUIET)
    found = ps.MAP(fit.as_prior(), optimizer=torchopt.sgd(0.02), num_data=len(twice[0]))
    for _ in range(2000):
        found.step(X[other], Y[other])
    close(found.get_samples()["w"], expected.get_samples()["w"], 1e-8)


def test_steps_by_adamw_say_nothing_of_its_operations():
    found = ps.MAP(regression(2.0), optimizer=torchopt.adamw(0.1), num_data=len(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.step(X, Y)


def test_a_laplace_of_the_new_prior_is_an_update():
    first, other = HALVES
    old = laplace(regression(2.0), (X[first], Y[first]))
    evidence_of_first = old.log_marginal_likelihood()
    new = laplace(old.as_prior(), (X[other], Y[other]), batch_size=3)
    mean, precision = posterior(2.0)
    close(gaussian_of(new).mean, mean, 1e-8)
    close(gaussian_of(new).precision, precision, 1e-8)
    close(evidence_of_first + new.log_marginal_likelihood(), evidence(2.0), 1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_positive_sites_are_updated_in_unconstrained_space(structure):
    """Log-normal and so exact: the Jacobian is in the old posterior already."""
    fit = laplace(log_normal, (SIZES[:3],), structure)
    total = fit.log_marginal_likelihood()
    fit.update((SIZES[3:],), progress=False)
    whole = laplace(log_normal, (SIZES,), structure)
    close(gaussian_of(fit).mean, gaussian_of(whole).mean, 1e-6)
    close(gaussian_of(fit).variance, gaussian_of(whole).variance, 1e-8)
    close(total + fit.log_marginal_likelihood(), whole.log_marginal_likelihood(), 1e-6)


def test_updates_that_cannot_be_are_refused():
    with pytest.raises(NotRunError):
        ps.Laplace(regression()).update((X, Y))
    with pytest.raises(ArgumentError, match="a Gaussian over all latent sites is needed"):
        laplace(two_sites, (X, Y), sites=["b"]).update((X, Y), progress=False)

    def joint(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        covariance = torch.eye(len(y)) + 0.5
        pyro.sample("y", dist.MultivariateNormal(w.expand(len(y)), covariance), obs=y)

    fit = laplace(joint, (SIZES,), curvature="hessian")
    with pytest.raises(ArgumentError, match="joint density of all rows"):
        fit.update((SIZES,), progress=False)


def test_without_a_spread_there_is_nothing_to_update():
    """At temperature 0, that of temperature 1 is not known any more."""
    fit = laplace(regression(), (X, Y), temperature=0)
    for go_on in (fit.as_prior, lambda: fit.update((X, Y), progress=False)):
        with pytest.raises(ArgumentError, match="temperature"):
            go_on()


# ------------------------------------------------------------------ some of the sites


def two_sites(x, y=None):
    """The first feature's weight is a, those of the others b; the sd is s."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(D - 1), 2.0).to_event(1))
    s = pyro.sample("sd.s", dist.LogNormal(-0.5, 0.4))
    with rows(x):
        return pyro.sample("y", dist.Normal(x[:, 0] * a + x[:, 1:] @ b, s), obs=y)


def two_sites_by_hand(position):
    a, b, u = position[0], position[1:3], position[3]
    prior = (
        dist.Normal(0.0, 1.0).log_prob(a)
        + dist.Normal(0.0, 2.0).log_prob(b).sum()
        + dist.Normal(-0.5, 0.4).log_prob(u)
    )
    return prior + dist.Normal(X[:, 0] * a + X[:, 1:] @ b, u.exp()).log_prob(Y).sum()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("patterns", "places"),
    [
        (["b"], [1, 2]),
        (["sd.*"], [3]),
        (["b", "a"], [0, 1, 2]),
        (["[ab]", "sd.s"], [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_some_sites_are_conditional_on_the_others_at_the_mode(patterns, places, structure):
    """Their block of the precision; the evidence, too, is over them alone."""
    kind = {"curvature": "hessian"}
    fit = laplace(two_sites, (X, Y), structure, sites=patterns, batch_size=8, **kind)
    whole = laplace(two_sites, (X, Y), **kind)
    mode = whole.fit.centers[0]
    precision = -torch.func.hessian(two_sites_by_hand)(mode)[places][:, places]
    if structure == "diag":
        precision = precision.diagonal().diag()
    close(gaussian_of(fit).mean, mode[places], 1e-5)
    close(gaussian_of(fit).variance, torch.linalg.inv(precision).diagonal(), 1e-5)
    constant = len(places) * math.log(2 * math.pi) - torch.logdet(precision)
    expected = two_sites_by_hand(mode) + constant / 2
    close(fit.log_marginal_likelihood(), expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sites_without_a_gaussian_stay_at_the_mode(kind):
    fit = laplace(two_sites, (X, Y), sites=["b"], curvature=kind)
    draws, mode = fit.get_samples(), fit.fit.centers[0]
    close(draws["a"], mode[0].expand(1000), 1e-12)
    close(draws["sd.s"], mode[3].exp().expand(1000), 1e-12)
    away = (draws["b"] - mode[1:3]) / gaussian_of(fit).variance.sqrt()
    assert float(away.mean(0).abs().max()) < 4.4 / 1000**0.5
    assert float((away.square().mean(0) - 1).abs().max()) < 4.4 * (2 / 1000) ** 0.5


@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
def test_a_block_of_the_rows_curvature(kind):
    mode = {"a": torch.tensor(0.5), "b": double(-1.0, 0.2), "sd.s": torch.tensor(0.6)}
    some = laplace(two_sites, (X, Y), sites=["b"], mode=mode, curvature=kind)
    whole = laplace(two_sites, (X, Y), mode=mode, curvature=kind)
    close(gaussian_of(some).precision, gaussian_of(whole).precision[1:3, 1:3], 1e-8)


# ------------------------------------------------------------------ linearized predictions


NEW = normals(4, D, seed=10)


def test_linearized_predictions_of_a_linear_model_are_exact():
    """Means x'm, covariances x'Sx + SD^2 I; so are plain ones."""
    fit = laplace(regression(), (X[:6], Y[:6]))
    mean, precision = posterior(1.0, X[:6], Y[:6])
    covariance = NEW @ torch.linalg.solve(precision, NEW.T) + SD**2 * torch.eye(4)
    variance = covariance.diagonal()
    errors = ((variance * variance[:, None] + covariance**2) / 1000).sqrt()
    for linearized in (True, False):
        pyro.set_rng_seed(11)
        drawn = fit.predict(NEW, linearized=linearized)["y"]
        assert drawn.shape == (1000, 4)
        away = drawn - NEW @ mean
        assert float((away.mean(0) / (variance / 1000).sqrt()).abs().max()) < 4.4
        assert float(((away.T @ away / 1000 - covariance) / errors).abs().max()) < 4.4


def tanh_network(noise):
    """One hidden layer of two tanh units."""

    def outputs(w, v, x):
        return torch.tanh(x @ w) @ v

    model = of_rows(
        lambda x, w, v: dist.Normal(outputs(w, v, x), noise[0]), w=normal(D, 2), v=normal(2)
    )
    return model, outputs


@pytest.mark.long
def test_a_recurrent_networks_outputs_are_linear_in_its_weights():
    """The same of an LSTM, which float32 runs by oneDNN; its Jacobian is by differences."""
    noise, x = [SD], normals(6, 3, D, seed=12)
    net = torch.nn.LSTM(D, 2, batch_first=True).float()
    bayesian = ps.bayesianize(net)

    def model(x, y=None):
        means = bayesian(x)[0][:, -1, 0]
        with rows(x):
            return pyro.sample("y", dist.Normal(means, noise[0]), obs=y)

    mode = bayesian.weights()
    fit = ps.Laplace(model).run((x.float(), torch.zeros(6).float()), mode=mode, progress=False)
    noise[0] = 1e-9
    drawn = fit.predict(x.float(), linearized=True, num_samples=5)["y"]
    weights = fit.get_samples(5)
    assert len(weights["bias_hh_l0"]) == 5

    def outputs(draw, share):
        moved = {n: w.double() + share * (weights[n][draw] - w).double() for n, w in mode.items()}
        return torch.func.functional_call(net.double(), moved, x)[0][:, -1, 0]

    for draw, found in enumerate(drawn):
        change = (outputs(draw, 1e-4) - outputs(draw, -1e-4)) / 2e-4
        close(found.double(), outputs(draw, 0.0) + change, 1e-5)


def test_few_draws_are_those_of_all_of_them():
    """Of 1,000 a start, without them, for a model of an odd number of params."""
    fit = laplace(regression(), (X, Y), num_chains=2).fit
    chosen = torch.tensor([0, 15, 16, 999, 1000, 1500, 1999])
    assert fit.thin(chosen).positions.equal(fit.result.positions.flatten(0, 1)[chosen][None])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_another_temperature_without_another_pass(structure):
    """The covariance is T times that at 1, wherever the fit was."""
    at = {t: laplace(regression(), (X, Y), structure, temperature=t) for t in (0.5, 2.0, 0.0)}
    other = at[0.5].at_temperature(2.0)
    close(other.sample(50, seed=1)["w"], at[2.0].sample(50, seed=1)["w"], 1e-10)
    assert other.fit.temperature == other.temperature == 2.0
    assert at[0.5].fit.temperature == at[0.5].temperature == 0.5
    close(at[0.5].at_temperature(0).get_samples()["w"], at[0.0].get_samples()["w"], 1e-12)
    with pytest.raises(ArgumentError, match="temperature=-1"):
        at[0.5].at_temperature(-1)
    with pytest.raises(ArgumentError, match="no spread"):
        at[0.0].at_temperature(1.0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sites", [None, ["v"]], ids=["all", "last"])
def test_a_networks_outputs_are_linear_in_its_weights(structure, sites):
    """f(x, mode) + J (w - mode) with a Jacobian made by hand, for each draw of the weights."""
    noise = [SD]
    model, outputs = tanh_network(noise)
    fit = laplace(model, (X, Y), structure, sites=sites)
    noise[0] = 1e-9
    drawn = fit.predict(NEW, linearized=True)["y"]
    w, v = fit.fit.centers[0][:6].reshape(D, 2), fit.fit.centers[0][6:]
    hidden = torch.tanh(NEW @ w)
    of_w = torch.einsum("nd,nh->ndh", NEW, (1 - hidden**2) * v)
    weights = fit.get_samples()
    expected = hidden @ v + torch.einsum("ndh,sdh->sn", of_w, weights["w"] - w)
    expected = expected + (weights["v"] - v) @ hidden.T
    close(drawn, expected, 1e-7)
    if sites is None:
        plain = torch.stack(
            [outputs(*pair, NEW) for pair in zip(weights["w"], weights["v"], strict=True)]
        )
        assert float((plain - expected).abs().max()) > 1e-2


def logistic(family):
    return of_rows(lambda x, w: family(x @ w), w=normal(2))


def softmax(family):
    return of_rows(lambda x, w: family(x @ w), w=normal(2, 3))


#: Families of logits and of probs, and chances of their values, given logits.
LINKS = {
    "Bernoulli": (
        logistic(lambda eta: dist.Bernoulli(logits=eta)),
        logistic(lambda eta: dist.Bernoulli(probs=eta.sigmoid())),
        ETA,
        lambda eta: dist.Bernoulli(logits=eta),
        lambda eta: eta.sigmoid()[..., None],
        double(1.0),
    ),
    "Categorical": (
        softmax(lambda eta: dist.Categorical(logits=eta)),
        softmax(lambda eta: dist.Categorical(probs=eta.softmax(-1))),
        ETAS,
        lambda eta: dist.Categorical(logits=eta),
        lambda eta: eta.softmax(-1),
        torch.arange(3),
    ),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", LINKS)
def test_probs_and_logits_are_the_same_and_plain_for_linear_models(name, structure):
    """Draws by draws the chances are those of x w: the model is linear before its link."""
    of_logits, of_probs, eta, family, chances, values = LINKS[name]
    y, new = draw(family(eta)), normals(5, 2, seed=12)
    for model in (of_logits, of_probs):
        fit = laplace(model, (X2, y), structure)
        p = chances(torch.einsum("nd,sd...->sn...", new, fit.get_samples()["w"]))
        for linearized in (True, False):
            pyro.set_rng_seed(13)
            drawn = fit.predict(new, linearized=linearized)["y"]
            found = (drawn[..., None] == values).double()
            z = (found - p).sum(0) / (p * (1 - p)).sum(0).sqrt()
            assert float(z.abs().max()) < 4.4


def test_a_poissons_rate_is_linear_before_its_exponential():
    y, new = draw(dist.Poisson(ETA.exp())), normals(5, 2, seed=12)
    fit = laplace(logistic(lambda eta: dist.Poisson(eta.exp())), (X2, y))
    rates = (fit.get_samples()["w"] @ new.T).exp()
    for linearized in (True, False):
        pyro.set_rng_seed(14)
        drawn = fit.predict(new, linearized=linearized)["y"]
        assert float(((drawn - rates).sum(0) / rates.sum(0).sqrt()).abs().max()) < 4.4


OTHER_FAMILIES = {
    "Binomial": lambda eta: dist.Binomial(5, logits=eta),
    "Multinomial": lambda eta: dist.Multinomial(5, logits=torch.stack([eta, 0 * eta], -1)),
    "OneHotCategorical": lambda eta: dist.OneHotCategorical(logits=torch.stack([eta, 0 * eta], -1)),
    "StudentT": lambda eta: dist.StudentT(5.0, eta, 0.3),
    "LogNormal": lambda eta: dist.LogNormal(eta, 0.3),
    "Exponential": lambda eta: dist.Exponential(eta.exp()),
    "Gamma": lambda eta: dist.Gamma(2.0, eta.exp()),
    "MultivariateNormal": lambda eta: dist.MultivariateNormal(
        torch.stack([eta, 0 * eta], -1), 0.1 * torch.eye(2)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(OTHER_FAMILIES, *OTHER_FAMILIES.keys() - {"Multinomial"}))
def test_linearized_draws_of_other_families_have_the_plain_ones_mean(name):
    """All of them are linear before their links."""
    family = OTHER_FAMILIES[name]
    y, new = draw(family(ETA)), 0.5 * normals(5, 2, seed=12)
    fit = laplace(logistic(family), (X2, y))
    means = []
    for linearized in (True, False):
        pyro.set_rng_seed(15)
        means.append(fit.predict(new, linearized=linearized)["y"].double())
    one, other = means
    assert one.shape == other.shape
    errors = ((one.var(0) + other.var(0)) / 1000).sqrt().clamp(min=1e-12)
    assert float(((one.mean(0) - other.mean(0)) / errors).abs().max()) < 4.4
    close(one.var(0), other.var(0), 0.5)


def test_linearized_predictions_of_fewer_draws_and_rows_at_a_time():
    fit = laplace(regression(), (X, Y))
    assert fit.predict(NEW, linearized=True, num_samples=7)["y"].shape == (7, 4)
    assert fit.predict(NEW, linearized=True, batch_size=3)["y"].shape == (1000, 4)
    assert list(fit.predict(NEW, linearized=True, return_sites=["y"])) == ["y"]
    with pytest.raises(ArgumentError, match="not 'w'"):
        fit.predict(NEW, linearized=True, return_sites=["w"])


# ------------------------------------------------------------------ errors


def test_what_is_tuned_moves_the_mode():
    with pytest.raises(ArgumentError, match="tune moves the mode"):
        laplace(regression(), (X, Y), mode={"w": PRIOR_MEAN}, tune=["tau"])


@pytest.mark.usefixtures("store")
def test_unknown_params_and_sites_are_refused():
    with pytest.raises(ArgumentError, match=r"tune: no pyro.param 'w'; the model has \['tau'"):
        laplace(with_params, (X, Y), tune=["tau", "w"])
    with pytest.raises(ArgumentError, match=r"sites: no site 'layer\.\*'; the model has \['w'\]"):
        laplace(regression(), (X, Y), sites=["w", "layer.*"])


@pytest.mark.parametrize(
    "asked",
    [
        {"structure": "blocks"},
        {"curvature": "fisher"},
        {"sites": "w"},
        {"sites": []},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": "cold"},
    ],
    ids=str,
)
def test_unknown_arguments_are_refused(asked):
    with pytest.raises(ArgumentError, match=next(iter(asked))):
        ps.Laplace(regression(), **asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_data_that_do_not_hold_n_rows_are_refused(structure, kind):
    with pytest.raises(DataError, match="the data hold 37 rows, not N = 200"):
        laplace(regression(), (X, Y), structure, curvature=kind, num_data=200)


def test_a_factor_has_no_fisher_information():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
        with rows(x):
            pyro.factor("fit", -0.5 * ((y - x @ w) / SD) ** 2)

    with pytest.raises(SiteError, match=r"site 'fit': a pyro.factor has no distribution"):
        laplace(model, (X, Y), curvature="monte_carlo")
    mean, precision = posterior()
    exact = gaussian_of(laplace(model, (X, Y)))  # by the Hessian, which takes the GGN's place
    close(exact.mean, mean, 1e-8)
    close(exact.precision, precision, 1e-8)
    slopes = (Y - X @ mean)[:, None] / SD**2 * X
    empirical = gaussian_of(laplace(model, (X, Y), curvature="empirical_fisher"))
    close(empirical.precision, torch.eye(D) + slopes.T @ slopes, 1e-6)


huge = of_rows(lambda w, v: dist.Normal(w.mean() + v, 1.0), w=normal(200_000), v=normal())


def test_what_does_not_fit_into_memory_is_refused_before_it_is_made(monkeypatch):
    """6 matrices of 200,001 x 200,001 float64 are 1.75 TiB."""
    monkeypatch.setattr(memory, "bytes_of", lambda device: 2**30)
    words = r"200,001 dimensions needs 1.75 TiB.*there are 1 GiB.*structure='diag'.*sites="
    with pytest.raises(ArgumentError, match=words):
        laplace(huge, (double(1.0, 2.0),))
    mode = {"w": torch.zeros(200_000), "v": torch.tensor(0.0)}
    with pytest.raises(ArgumentError, match=words):
        laplace(huge, (double(1.0, 2.0),), mode=mode)
    assert gaussian_of(laplace(huge, (double(1.0, 2.0),), "diag")).sd.shape == (200_001,)
    last = gaussian_of(laplace(huge, (double(1.0, 2.0),), sites=["v"]))
    close(last.covariance, [[1 / 3]], 1e-8)


def test_nothing_is_there_before_a_run():
    fit = ps.Laplace(regression())
    for read in (fit.log_marginal_likelihood, fit.diagnostics, fit.as_prior, fit.get_samples):
        with pytest.raises(NotRunError, match="Laplace has no fit yet"):
            read()


#: A layer of weights on all reals, and a scale that is positive.
scaled_classes = of_rows(
    lambda x, w, scale: dist.Categorical(logits=scale * (x @ w)),
    w=normal(D, 3),
    scale=lambda: dist.HalfNormal(1.0),
)


LABELS = (Y > 0).long() + (Y > 1).long()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["ggn", "empirical_fisher"])
def test_all_that_comes_of_a_pass_at_a_given_mode(curvature, structure):
    """Precision, evidence and distance, by the matrix and the gradient of all rows."""
    mode = {"w": normals(D, 3, seed=5), "scale": torch.tensor(0.7)}
    fit = laplace(scaled_classes, (X, LABELS), structure, curvature=curvature, mode=mode)
    known = ps.LogPosterior(scaled_classes, num_data=N)
    params = {"w": mode["w"], "scale": mode["scale"].log()}
    by_site, evaluation = known.grad(params, (X, LABELS))
    slope = torch.cat([by_site["w"].flatten(), by_site["scale"][None]])
    matrix = ps.Curvature(known, curvature).dense(params, (X, LABELS))
    prior = torch.ones(len(matrix))
    prior[-1] = 2 * mode["scale"] ** 2  # of -scale^2 / 2 + log scale, in log scale
    precision = matrix + torch.diag(prior)
    if structure == "diag":
        precision = torch.diag(precision.diagonal())
    own = precision if structure == "dense" else precision.diagonal()
    close(gaussian_of(fit).precision, own, 1e-9)
    close(gaussian_of(fit).mean, torch.cat([params["w"].flatten(), params["scale"][None]]), 1e-12)
    total = (len(prior) * math.log(2 * math.pi) - torch.logdet(precision)) / 2
    attrs = fit.fit.attrs
    close(double(attrs["log_evidence"][0]), (evaluation.log_joint + total)[None], 1e-9)
    distance = slope @ torch.linalg.solve(precision, slope)
    close(double(attrs["distance"][0]), distance[None], 1e-9)


@pytest.mark.parametrize(("curvature", "runs"), [("ggn", 12), ("empirical_fisher", 11)])
def test_a_given_mode_takes_few_runs_of_the_model(curvature, runs):
    """Nine of the preflight, one that the next run is compared with, one for all that is asked at
    the mode, and the GGN's note of what is estimated, on one row; and one whose arithmetic is
    counted where there are threads to choose from."""
    calls = []

    def classes(x, y):
        calls.append(len(x))
        w = pyro.sample("w", dist.Normal(torch.zeros(D, 40), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    mode = {"w": normals(D, 40, seed=5)}
    laplace(classes, (X, LABELS), "diag", curvature=curvature, mode=mode)
    assert len(calls) <= runs + (torch.get_num_threads() > 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_mode_that_is_not_finite(bad):
    with pytest.raises(SiteError, match="off its support"):
        laplace(regression(1.0), (X, Y), mode={"w": torch.full((D,), bad)})


def test_chain_0_starts_where_the_preflight_was():
    known = ps.LogPosterior(scaled_classes, num_data=N)
    drawn = known.prepare((X, LABELS), seed=3)
    again = known.start((X, LABELS), seed=3)
    assert drawn.keys() == again.keys()
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)
    assert known.prepare((X, LABELS), seed=3) is None
