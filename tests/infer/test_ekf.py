"""The filter against Bayes' rule on linear models, a Kalman filter in covariance form, and steps
that are written out by hand.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from linear import PRIOR_MEAN, SD, D, linear_data, linear_posterior, regression, rows
from models import normal, of_rows
from pyro.infer.autoguide import init_to_value
from reference import close, double, normals
from row_datasets import RowByRow, Stream
from torch.distributions import constraints
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.core import memory
from pyro_scale.errors import (
    ArgumentError,
    DataError,
    ModelError,
    NonFiniteError,
    NotRunError,
    PyroScaleError,
)

pytestmark = pytest.mark.usefixtures("float64")

QUIET = {"progress": False}
STRUCTURES = ["diag", "dense"]
N = 23
X, Y = linear_data(N)
SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(3))


def posterior(variance=1.0, x=X, y=Y, power=1.0):
    return linear_posterior(variance, x, y, power)


def ekf(model, data=(X, Y), structure="dense", batch_size=None, **kwargs):
    return ps.EKF(model, structure=structure, **kwargs).run(
        data, batch_size=batch_size, seed=0, **QUIET
    )


def gaussian_of(fit):
    return fit.fit.gaussians[0]


# ------------------------------------------------------------------ Bayes' rule


WAYS = {
    "whole": ((X, Y), None),
    "one batch of all": ((X, Y), N),
    "ragged": ((X, Y), 5),
    "rows": ((X, Y), 1),
    "all but one": ((X, Y), N - 1),
    "by name, backwards": ({"y": Y.flip(0), "x": X.flip(0)}, 4),
    "shuffled": ((X[SHUFFLED], Y[SHUFFLED]), 6),
    "loader": (DataLoader(TensorDataset(X, Y), 5), None),
    "row by row": (DataLoader(RowByRow(X, Y), 10), None),
    "stream": (DataLoader(Stream(X, Y), 7), None),
}


@pytest.mark.parametrize("variance", [1.0, 1e8])
@pytest.mark.parametrize("way", WAYS)
def test_a_linear_regression_has_its_exact_posterior(way, variance):
    data, batch_size = WAYS[way]
    fit = ekf(regression(variance), data, batch_size=batch_size)
    mean, precision = posterior(variance)
    close(gaussian_of(fit).mean, mean, 1e-8)
    close(gaussian_of(fit).precision, precision, 1e-8)
    close(gaussian_of(fit).covariance, torch.linalg.inv(precision), 1e-8)
    close(fit.fit.centers[0], mean, 1e-8)


@pytest.mark.parametrize("variance", [1.0, 1e8])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_diagonal_filter_is_exact_where_each_row_has_one_feature(variance, batch_size):
    x = torch.eye(D).repeat(8, 1)[:N] * normals(N, 1, seed=4)
    fit = ekf(regression(variance), (x, Y), "diag", batch_size)
    mean, precision = posterior(variance, x)
    close(gaussian_of(fit).mean, mean, 1e-8)
    close(gaussian_of(fit).precision, precision.diagonal(), 1e-8)


@pytest.mark.parametrize("lr", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_lr_is_a_power_of_the_likelihood(lr, batch_size):
    fit = ekf(regression(2.0), lr=lr, batch_size=batch_size)
    mean, precision = posterior(2.0, power=lr)
    close(gaussian_of(fit).mean, mean, 1e-8)
    close(gaussian_of(fit).precision, precision, 1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_size", [1, 5, None])
def test_n_is_irrelevant(structure, batch_size):
    one = ekf(regression(), structure=structure, batch_size=batch_size)
    other = ekf(regression(), structure=structure, batch_size=batch_size, num_data=10**6)
    close(gaussian_of(other).mean, gaussian_of(one).mean, 1e-12)
    close(gaussian_of(other).precision, gaussian_of(one).precision, 1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_gaussians_moments(structure):
    fit = ekf(regression(), (X[:5], Y[:5]), structure)
    mean, covariance = gaussian_of(fit).mean, gaussian_of(fit).variance.diag()
    if structure == "dense":
        covariance = torch.linalg.inv(posterior(1.0, X[:5], Y[:5])[1])
    variance = covariance.diagonal()
    for draws in (fit.get_samples()["w"], fit.sample(4000, seed=3)["w"]):
        away = draws - mean
        errors = ((variance * variance[:, None] + covariance**2) / len(draws)).sqrt()
        assert float((away.mean(0) / (variance / len(draws)).sqrt()).abs().max()) < 4.4
        assert float(((away.T @ away / len(draws) - covariance) / errors).abs().max()) < 4.4


# ------------------------------------------------------------------ filters by hand


def kalman(transition_sd, batch_size, variance=1.0, structure="dense"):
    """Means, covariances and log likelihoods of a Kalman filter in covariance form, whose state
    walks at random before each batch; a diagonal one drops what is off the diagonal of the
    information that a batch brings."""
    mean, covariance = PRIOR_MEAN, variance * torch.eye(D)
    means, covariances, log_liks = [], [], []
    for x, y in zip(X.split(batch_size), Y.split(batch_size), strict=True):
        covariance = covariance + transition_sd**2 * torch.eye(D)
        log_liks.append(dist.Normal(x @ mean, SD).log_prob(y).sum())
        if structure == "dense":
            gain = (
                covariance
                @ x.T
                @ torch.linalg.inv(x @ covariance @ x.T + SD**2 * torch.eye(len(x)))
            )
            mean = mean + gain @ (y - x @ mean)
            covariance = (torch.eye(D) - gain @ x) @ covariance
        else:
            information = (x**2).sum(0) / SD**2
            covariance = (1 / (1 / covariance.diagonal() + information)).diag()
            mean = mean + covariance @ x.T @ (y - x @ mean) / SD**2
        means.append(mean)
        covariances.append(covariance)
    return torch.stack(means), torch.stack(covariances), torch.stack(log_liks)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("transition_sd", [0.0, 0.3, 20.0])
@pytest.mark.parametrize("variance", [1.0, 100.0])
def test_a_textbooks_kalman_filter(variance, transition_sd, batch_size, structure):
    """Step by step, the transition before the first batch, too; the last batch is ragged."""
    fit = ekf(
        regression(variance),
        structure=structure,
        batch_size=batch_size,
        transition_sd=transition_sd,
    )
    means, covariances, log_liks = kalman(transition_sd, batch_size, variance, structure)
    path = fit.filtered
    close(path.mean["w"], means, 1e-8)
    close(path.sd["w"], covariances.diagonal(dim1=1, dim2=2).sqrt(), 1e-8)
    close(path.log_lik, log_liks, 1e-8)
    close(fit.fit.trace[0], log_liks, 1e-8)
    if structure == "dense":
        close(gaussian_of(fit).covariance, covariances[-1], 1e-8)
    table = fit.diagnostics()
    assert table["steps"].tolist() == [len(means)]
    close(torch.tensor(table["log_lik"].to_numpy()), log_liks.sum()[None], 1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("transition_sd", [0.0, 0.3])
def test_covariances_of_every_step(structure, transition_sd):
    """Whole Gaussians, one `step` after another."""
    fit = ps.EKF(regression(), structure=structure, transition_sd=transition_sd)
    means, covariances, log_liks = kalman(transition_sd, 5, structure=structure)
    for place, (x, y) in enumerate(zip(X.split(5), Y.split(5), strict=True)):
        close(torch.tensor(fit.step(x, y)), log_liks[place], 1e-8)
        found = gaussian_of(fit)
        close(found.mean, means[place], 1e-8)
        expected = covariances[place]
        if structure == "dense":
            close(found.covariance, expected, 1e-8)
        else:
            close(found.variance, expected.diagonal(), 1e-8)


X2 = normals(12, 2, seed=5)
FLIPS = (X2 @ double(1.5, -0.5) + normals(12, seed=6) > 0).double()


logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(2, sd=1.5))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
@pytest.mark.parametrize("lr", [1.0, 0.4])
def test_a_logistic_regression_by_hand(lr, kind, structure):
    """The curvature at the mean before the batch: p (1 - p) x x', or (y - p)^2 x x'."""
    fit = ekf(logistic, (X2, FLIPS), structure, 5, curvature=kind, lr=lr)
    mean, precision = torch.zeros(2), torch.eye(2) / 1.5**2
    for x, y in zip(X2.split(5), FLIPS.split(5), strict=True):
        p = (x @ mean).sigmoid()
        weights = p * (1 - p) if kind == "ggn" else (y - p) ** 2
        added = (x * weights[:, None]).T @ x
        precision = precision + lr * (added if structure == "dense" else added.diagonal().diag())
        mean = mean + lr * torch.linalg.solve(precision, x.T @ (y - p))
    close(gaussian_of(fit).mean, mean, 1e-8)
    expected = precision if structure == "dense" else precision.diagonal()
    close(gaussian_of(fit).precision, expected, 1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_empirical_fisher_adds(structure):
    """One observation, prior variance 1: precision 1 + (y - m)^2 / SD^4."""

    model = of_rows(lambda m: dist.Normal(m, SD), m=lambda: dist.Normal(0.3, 1.0))
    fit = ekf(model, (double(1.1),), structure, curvature="empirical_fisher")
    precision = 1 + 0.8**2 / SD**4
    close(gaussian_of(fit).precision.reshape(-1), [precision], 1e-10)
    close(gaussian_of(fit).mean, [0.3 + 0.8 / SD**2 / precision], 1e-10)


def test_monte_carlo_is_the_ggn_on_average_and_a_seed_repeats_it():
    """One drawn residual a row: its square over SD^2 has mean 1 and variance 2."""

    model = of_rows(lambda x, m: dist.Normal(x * m, SD), m=normal())
    data = torch.ones(4000), normals(4000, seed=7)
    one, again = (ekf(model, data, "diag", 500, curvature="monte_carlo") for _ in range(2))
    ratio = (float(gaussian_of(one).precision) - 1) / (4000 / SD**2)
    assert 0 < abs((ratio - 1) / (2 / 4000) ** 0.5) < 4.4
    assert torch.equal(gaussian_of(one).precision, gaussian_of(again).precision)
    added = one.filtered.sd["m"].pow(-2).diff()
    assert float(added.std()) > 1e-3 * float(added.mean())  # each batch has draws of its own


def test_a_positive_site_is_filtered_in_logarithms():
    """log r ~ N(0.2, 0.25), y ~ Poisson(r): the batch's gradient is sum (y - r), its curvature
    B r; neither has the Jacobian's."""

    model = of_rows(lambda r: dist.Poisson(r), r=lambda: dist.LogNormal(0.2, 0.5))
    y = double(3, 0, 2, 4, 1)
    fit = ekf(model, (y,), batch_size=2)
    mean, precision = 0.2, 4.0
    for batch in y.split(2):
        r = math.exp(mean)
        precision += len(batch) * r
        mean += float((batch - r).sum()) / precision
    close(gaussian_of(fit).mean, [mean], 1e-10)
    close(gaussian_of(fit).variance, [1 / precision], 1e-10)
    close(fit.filtered.mean["r"][-1], mean, 1e-10)
    draws = fit.get_samples()["r"].log()
    assert abs(float((draws.mean() - mean) * (1000 * precision) ** 0.5)) < 4.4


# ------------------------------------------------------------------ step, run, loaders


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["ggn", "empirical_fisher"])
def test_steps_are_a_run(structure, curvature):
    asked = {"structure": structure, "curvature": curvature, "transition_sd": 0.1, "lr": 0.7}
    run = ekf(logistic, (X2, FLIPS), batch_size=5, **asked)
    stepped = ps.EKF(logistic, **asked)
    values = [stepped.step(x, y=y) for x, y in zip(X2.split(5), FLIPS.split(5), strict=True)]
    close(double(*values), run.filtered.log_lik, 1e-12)
    for name in ("mean", "precision"):
        close(getattr(gaussian_of(stepped), name), getattr(gaussian_of(run), name), 1e-12)
    close(stepped.filtered.mean["w"], run.filtered.mean["w"], 1e-12)
    close(stepped.filtered.sd["w"], run.filtered.sd["w"], 1e-12)


def test_steps_go_on_from_a_run_and_are_of_any_size():
    fit = ekf(regression(), (X[:4], Y[:4]), batch_size=3)
    for part in (slice(4, 5), slice(5, 20), slice(20, N)):
        fit.step(X[part], Y[part])
    mean, precision = posterior()
    close(gaussian_of(fit).mean, mean, 1e-8)
    close(gaussian_of(fit).precision, precision, 1e-8)
    assert fit.filtered.mean["w"].shape == (5, D)
    alone = ps.EKF(regression(), structure="dense")
    for part in (slice(0, 1), slice(1, N)):
        alone.step(x=X[part], y=Y[part])
    close(gaussian_of(alone).mean, mean, 1e-8)


def test_a_run_begins_anew():
    fit = ekf(regression())
    fit.run((X, Y), batch_size=5, **QUIET)
    close(gaussian_of(fit).precision, posterior()[1], 1e-8)
    assert fit.filtered.mean["w"].shape == (5, D)


@pytest.mark.parametrize("name", ["loader", "row by row", "stream"])
def test_a_loader_is_read_in_its_order(name):
    """A diagonal filter depends on the order; so does the path."""
    loader = WAYS[name][0]
    path = ekf(regression(), loader, "diag").filtered
    other = ekf(regression(), structure="diag", batch_size=loader.batch_size).filtered
    close(path.mean["w"], other.mean["w"], 1e-12)
    close(path.log_lik, other.log_lik, 1e-12)
    backwards = ekf(regression(), (X.flip(0), Y.flip(0)), "diag", loader.batch_size)
    assert float((backwards.filtered.mean["w"][-1] - other.mean["w"][-1]).abs().max()) > 1e-3


def test_a_model_that_subsamples_by_itself_sees_every_row_once():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=6) as index:
            pyro.sample("y", dist.Normal(x[index] @ w, SD), obs=y[index])

    fit = ekf(model)
    mean, precision = posterior()
    close(gaussian_of(fit).mean, mean, 1e-8)
    close(gaussian_of(fit).precision, precision, 1e-8)
    close(fit.filtered.log_lik, kalman(0.0, 6)[2], 1e-8)


def test_several_sites_by_name():
    """a ~ N(0, 1) and b ~ N(0, 4), x = (x_a, x_b): together they are one w."""

    model = of_rows(
        lambda x, b, a: dist.Normal(x[:, 0] * a + x[:, 1:] @ b, SD),
        b=normal(D - 1, sd=2.0),
        a=normal(),
    )
    path = ekf(model, batch_size=5).filtered
    precision = double(1.0, 0.25, 0.25).diag() + X.T @ X / SD**2
    mean = torch.linalg.solve(precision, X.T @ Y / SD**2)
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    close(path.mean["a"][-1], mean[0], 1e-8)
    close(path.mean["b"][-1], mean[1:], 1e-8)
    close(path.sd["a"][-1], sd[0], 1e-8)
    close(path.sd["b"][-1], sd[1:], 1e-8)


# ------------------------------------------------------------------ where it starts


def start_of(prior, structure, seed=0):
    """Where a filter starts, which a row that says nothing does not change."""

    def model(y):
        total = prior()
        with rows(y):
            pyro.sample("y", dist.Normal(0 * total, 1.0), obs=y)

    fit = ps.EKF(model, structure=structure).run((double(0.3),), seed=seed, **QUIET)
    return gaussian_of(fit)


def of_normals():
    v = pyro.sample("v", dist.Normal(double(1.0, -2.0), double(0.5, 3.0)).to_event(1))
    with pyro.plate("group", 2):
        u = pyro.sample("u", dist.Normal(double(4.0, 5.0), 0.1))
    return v.sum() + u.sum()


COVARIANCE = double([2, 1], [1, 3])


def of_multivariate_normals():
    v = pyro.sample("v", dist.MultivariateNormal(double(1.0, -2.0), COVARIANCE))
    with pyro.plate("group", 2):
        mean = double([0, 1], [2, 3])
        u = pyro.sample(
            "u", dist.MultivariateNormal(mean, torch.stack([COVARIANCE, 4 * COVARIANCE]))
        )
    return v.sum() + u.sum()


def of_log_normals():
    v = pyro.sample("v", dist.LogNormal(double(1.0, -2.0), double(0.5, 3.0)).to_event(1))
    return v.log().sum() + pyro.sample("u", dist.LogNormal(0.2, 0.7)).log()


EXACT = {
    "Normal": (of_normals, double(1, -2, 4, 5), double(0.25, 9, 0.01, 0.01).diag()),
    "MultivariateNormal": (
        of_multivariate_normals,
        double(1, -2, 0, 1, 2, 3),
        torch.block_diag(COVARIANCE, COVARIANCE, 4 * COVARIANCE),
    ),
    "LogNormal": (of_log_normals, double(1, -2, 0.2), double(0.25, 9, 0.49).diag()),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", EXACT)
def test_gaussian_priors_are_exact(name, structure):
    prior, mean, covariance = EXACT[name]
    found = start_of(prior, structure)
    close(found.mean, mean, 1e-10)
    if structure == "dense":
        close(found.covariance, covariance, 1e-10)
    else:
        close(found.variance, covariance.diagonal(), 1e-10)


#: Prior draws whose moments are taken.
DRAWS = 10_000


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_gamma_prior_has_the_moments_of_its_logarithm(structure):
    """log r of Gamma(a, b): mean digamma(a) - log b, variance trigamma(a), fourth cumulant
    polygamma(3, a).  At 10,000 draws an error of one hundredth of an sd shows."""
    a, b = torch.tensor(2.5), 3.0
    found = start_of(lambda: pyro.sample("r", dist.Gamma(a, b)).log(), structure)
    mean, variance = torch.digamma(a) - math.log(b), torch.polygamma(1, a)
    error = ((torch.polygamma(3, a) + 2 * variance**2) / DRAWS).sqrt()
    assert 0 < abs(float((found.mean - mean) / (variance / DRAWS).sqrt())) < 4.4
    assert 0 < abs(float((found.variance - variance) / error)) < 4.4


def hierarchy():
    """m ~ N(1, 4), w_i ~ N(m, 1): w has mean 1, variance 5 and covariance 4."""
    m = pyro.sample("m", dist.Normal(1.0, 2.0))
    return pyro.sample("w", dist.Normal(m.expand(2), 1.0).to_event(1)).sum()


def test_a_dense_start_has_the_hierarchys_covariance():
    found = start_of(hierarchy, "dense")
    expected = double([4, 4, 4], [4, 5, 4], [4, 4, 5])
    variance = expected.diagonal()
    errors = ((variance * variance[:, None] + expected**2) / DRAWS).sqrt()
    assert float(((found.mean - 1) / (variance / DRAWS).sqrt()).abs().max()) < 4.4
    assert float(((found.covariance - expected) / errors).abs().max()) < 4.4


def test_a_diagonal_start_is_exact_site_by_site():
    found = start_of(hierarchy, "diag")
    close(found.mean[:1], [1.0], 1e-12)
    close(found.variance[:1], [4.0], 1e-12)
    assert float(((found.mean[1:] - 1) / (5 / DRAWS) ** 0.5).abs().max()) < 4.4
    assert float(((found.variance[1:] / 5 - 1) / (2 / DRAWS) ** 0.5).abs().max()) < 4.4
    assert float((found.variance[1:] / 5 - 1).abs().min()) > 0


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_hierarchys_scale_widens_what_is_below(structure):
    """t ~ LogNormal(0, 0.3^2), w ~ N(0, t^2): E w^2 = e^0.18, E w^4 = 3 e^0.72."""

    def prior():
        t = pyro.sample("t", dist.LogNormal(0.0, 0.3))
        return pyro.sample("w", dist.Normal(0.0, t))

    found = start_of(prior, structure)
    second, fourth = math.exp(0.18), 3 * math.exp(0.72)
    assert abs(float(found.mean[1]) / (second / DRAWS) ** 0.5) < 4.4
    assert abs((float(found.variance[1]) - second) / ((fourth - second**2) / DRAWS) ** 0.5) < 4.4
    errors = double(0.09, 0.09 * 2**0.5) / DRAWS**0.5
    assert abs(float(found.variance[0]) - 0.09) < 4.4 * float(errors[1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_seed_repeats_prior_draws():
    def mean(seed):
        prior = lambda: pyro.sample("r", dist.Gamma(2.5, 3.0)).log()  # noqa: E731
        return float(start_of(prior, "diag", seed).mean)

    assert mean(1) == mean(1) != mean(2)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("first", STRUCTURES)
def test_it_starts_from_a_fit(first, structure):
    """A Laplace of some rows, then a filter of the others; a diagonal keeps variances."""
    begun = ps.Laplace(regression(), structure=first)
    begun.run((X[:9], Y[:9]), seed=0, **QUIET)
    mean, precision = posterior(1.0, X[:9], Y[:9])
    if first == "diag":
        precision = precision.diagonal().diag()
    if structure == "diag":
        precision = torch.linalg.inv(precision).diagonal().reciprocal().diag()
    fit = ekf(regression(), (X[9:], Y[9:]), structure, init_strategy=begun)
    added = X[9:].T @ X[9:] / SD**2
    after = precision + (added if structure == "dense" else added.diagonal().diag())
    expected = mean + torch.linalg.solve(after, X[9:].T @ (Y[9:] - X[9:] @ mean) / SD**2)
    close(gaussian_of(fit).mean, expected, 1e-6)
    close(gaussian_of(fit).variance, torch.linalg.inv(after).diagonal(), 1e-8)
    if first == structure == "dense":
        close(gaussian_of(fit).mean, posterior()[0], 1e-8)


def test_it_starts_from_a_filter():
    fit = ekf(regression(), (X[9:], Y[9:]), init_strategy=ekf(regression(), (X[:9], Y[:9])))
    close(gaussian_of(fit).mean, posterior()[0], 1e-8)
    close(gaussian_of(fit).precision, posterior()[1], 1e-8)


WHERE = double(0.2, -0.9, 0.1)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "init_strategy",
    [{"w": WHERE[None]}, init_to_value(values={"w": WHERE})],
    ids=["dict", "Pyro's"],
)
def test_the_mean_starts_where_it_is_told(init_strategy, structure):
    """The covariance is the prior's."""
    fit = ekf(regression(2.0), structure=structure, init_strategy=init_strategy)
    precision = posterior(2.0)[1]
    if structure == "diag":
        precision = precision.diagonal().diag()
    step = torch.linalg.solve(precision, X.T @ (Y - X @ WHERE) / SD**2)
    close(gaussian_of(fit).mean, WHERE + step, 1e-8)
    close(gaussian_of(fit).variance, torch.linalg.inv(precision).diagonal(), 1e-8)


def test_a_start_that_does_not_fit_is_refused():
    for start in ({"w": WHERE}, {"w": WHERE[None], "v": WHERE[None]}):
        with pytest.raises(ArgumentError, match="init_strategy"):
            ekf(regression(), init_strategy=start)


def test_the_old_posterior_as_the_models_prior_is_where_it_starts():
    for old in (
        ps.Laplace(regression(), structure="dense").run((X[:9], Y[:9]), **QUIET),
        ekf(regression(), (X[:9], Y[:9])),
    ):
        fit = ekf(old.as_prior(), (X[9:], Y[9:]))
        close(gaussian_of(fit).mean, posterior()[0], 1e-8)
        close(gaussian_of(fit).precision, posterior()[1], 1e-8)


def with_a_factor(x, y):
    w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
    pyro.factor("tie", -0.5 * 9 * (w[0] - w[1]) ** 2)
    with rows(x):
        pyro.sample("y", dist.Normal(x @ w, SD), obs=y)


def with_an_observation(x, y):
    w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
    pyro.sample("tie", dist.Normal(w[0] - w[1], 1 / 3), obs=torch.tensor(0.0))
    with rows(x):
        pyro.sample("y", dist.Normal(x @ w, SD), obs=y)


def with_a_scale(x, y):
    with pyro.poutine.scale(scale=4.0):
        w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
    with rows(x):
        pyro.sample("y", dist.Normal(x @ w, SD), obs=y)


TIE = 9 * double([1, -1, 0], [-1, 1, 0], [0, 0, 0])


@pytest.mark.parametrize(
    ("model", "precision", "shift"),
    [
        (with_a_factor, torch.eye(D, dtype=torch.float64) + TIE, PRIOR_MEAN),
        (with_an_observation, torch.eye(D, dtype=torch.float64) + TIE, PRIOR_MEAN),
        (with_a_scale, 4 * torch.eye(D, dtype=torch.float64), 4 * PRIOR_MEAN),
    ],
)
def test_all_of_the_log_prior_counts_or_is_refused(model, precision, shift):
    try:
        fit = ekf(model)
    except PyroScaleError:
        return
    precision = precision + X.T @ X / SD**2
    close(gaussian_of(fit).precision, precision, 1e-8)
    close(gaussian_of(fit).mean, torch.linalg.solve(precision, shift + X.T @ Y / SD**2), 1e-8)


def test_a_prior_without_a_variance_names_the_site():
    """One of 1e-16 of the largest: its draws are all alike, but for rounding."""

    model = of_rows(
        lambda w, u: dist.Normal(w + 0 * u, 1.0),
        w=normal(),
        u=lambda: dist.Gamma(1e14, 1e14),
    )
    with pytest.raises(ModelError, match="site 'u': its prior has no variance that 10,000 draws"):
        ekf(model, (double(0.3),))


# ------------------------------------------------------------------ params


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_params_stay_as_they_are(structure):
    def model(x, y):
        sd = pyro.param("sd", torch.tensor(SD), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
        with rows(x):
            pyro.sample("y", dist.Normal(x @ w, sd), obs=y)

    fit, plain = (ekf(m, structure=structure, batch_size=5) for m in (model, regression()))
    close(gaussian_of(fit).mean, gaussian_of(plain).mean, 1e-10)
    close(gaussian_of(fit).precision, gaussian_of(plain).precision, 1e-10)
    close(fit.params["sd"], SD, 1e-12)
    assert set(fit.get_samples()) == {"w"}
    assert set(fit.filtered.mean) == {"w"}


def test_predictions():
    """Means x'm, variances x'Sx + SD^2."""
    fit = ekf(regression(), (X[:6], Y[:6]))
    new, (mean, precision) = normals(4, D, seed=8), posterior(1.0, X[:6], Y[:6])
    variance = (new @ torch.linalg.inv(precision) * new).sum(1) + SD**2
    for linearized in (True, False):
        pyro.set_rng_seed(9)
        away = fit.predict(new, linearized=linearized)["y"] - new @ mean
        assert float((away.mean(0) / (variance / 1000).sqrt()).abs().max()) < 4.4
        z = (away.square().mean(0) / variance - 1) / (2 / 1000) ** 0.5
        assert float(z.abs().max()) < 4.4


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_epochs": 2}, "num_epochs=2: a filter absorbs every row once"),
        ({"num_chains": 2}, "num_chains=2: a filter has one start"),
    ],
)
def test_rows_are_not_seen_again(asked, words):
    fit = ps.EKF(regression())
    with pytest.raises(ArgumentError, match=words):
        fit.run((X, Y), **asked, **QUIET)
    with pytest.raises(NotRunError):
        fit.fit  # noqa: B018


def test_a_joint_density_is_refused():
    def joint(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        covariance = torch.eye(len(y)) + 0.5
        pyro.sample("y", dist.MultivariateNormal(w.expand(len(y)), covariance), obs=y)

    with pytest.raises(ModelError, match="joint density of all rows"):
        ekf(joint, (Y,))


@pytest.mark.parametrize(
    "asked",
    [
        {"structure": "kron"},
        {"curvature": "hessian"},
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": math.inf},
        {"transition_sd": -0.1},
        {"transition_sd": math.nan},
        {"transition_sd": True},
        {"transition_sd": {"w": True}},
        {"init_strategy": 3},
    ],
    ids=str,
)
def test_unknown_arguments_are_refused(asked):
    with pytest.raises(ArgumentError, match=next(iter(asked))):
        ps.EKF(regression(), **asked)


def test_a_fit_that_is_no_gaussian_over_the_sites_is_refused():
    other = of_rows(lambda x, v: dist.Normal(x @ v, SD), v=normal(D))

    smaller = of_rows(lambda x, w: dist.Normal(x[:, 1:] @ w, SD), w=normal(D - 1))

    laplace = ps.Laplace(other, structure="dense").run((X, Y), **QUIET)
    mode = ps.MAP(regression()).run((X, Y), num_steps=1, **QUIET)
    small = ps.Laplace(smaller, structure="dense").run((X, Y), **QUIET)
    for fit in (laplace, mode, small):
        with pytest.raises(ArgumentError, match="init_strategy"):
            ekf(regression(), init_strategy=fit)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_not_finite_is_said_so(structure):
    y = Y.clone()
    y[12] = math.nan
    fit = ps.EKF(regression(), structure=structure)
    with pytest.raises(NonFiniteError, match="step 2: the filter's state became NaN"):
        fit.run((X, y), batch_size=5, **QUIET)
    with pytest.raises(NotRunError):
        fit.get_samples()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_step_that_fails_leaves_the_filter_as_it_was(structure):
    fit = ekf(regression(), (X[:9], Y[:9]), structure)
    before = gaussian_of(fit)
    with pytest.raises(NonFiniteError, match="step 1"):
        fit.step(X[9:], Y[9:] * math.nan)
    fit.step(X[9:], Y[9:])
    assert fit.filtered.mean["w"].shape == (2, D)
    assert torch.equal(fit.filtered.mean["w"][0], before.mean)
    if structure == "dense":
        close(gaussian_of(fit).mean, posterior()[0], 1e-8)


def test_no_rows_are_refused():
    with pytest.raises(DataError, match="the data have no rows"):
        ekf(regression(), (X[:0], Y[:0]))


def test_what_does_not_fit_into_memory_is_refused_before_it_is_made(monkeypatch):
    """8 matrices of 200,000 x 200,000 float64 are 2.33 TiB."""
    monkeypatch.setattr(memory, "bytes_of", lambda device: 2**30)

    huge = of_rows(lambda w: dist.Normal(w.mean(), 1.0), w=normal(200_000))

    words = r"200,000 dimensions needs 2.33 TiB.*there are 1 GiB.*structure='diag'"
    with pytest.raises(ArgumentError, match=words):
        ekf(huge, (double(0.3),))
    with pytest.raises(ArgumentError, match=words):
        ps.EKF(huge, structure="dense").step(double(0.3))
    assert ekf(huge, (double(0.3),), "diag").filtered.sd["w"].shape == (1, 200_000)


def test_nothing_is_there_before_a_run():
    fit = ps.EKF(regression())
    for name in ("fit", "filtered"):
        with pytest.raises(NotRunError, match="EKF has no fit yet"):
            getattr(fit, name)


def test_a_row_without_its_dimension_is_refused_at_every_step():
    """Its columns would count as rows."""

    model = of_rows(lambda x, w: dist.Normal(x @ w, 1.0), w=normal(3))
    x, y = normals(6, 3, seed=1), normals(6, seed=2)
    ekf = ps.EKF(model)
    ekf.step(x[:3], y[:3])
    with pytest.raises(DataError, match="one row is"):
        ekf.step(x[3], y[3])
