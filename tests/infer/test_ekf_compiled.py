"""The filter's compiled loop against its eager steps; params that walk by site, and batches without
rows, against a Kalman filter in covariance form."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from linear import PRIOR_MEAN, SD, D, linear_data, regression, rows
from models import normal, of_rows
from reference import close, double, normals
from repetitions import each_once
from row_datasets import RowByRow
from torch.utils.data import DataLoader

import pyro_scale as ps
from pyro_scale.compile.trace import trace
from pyro_scale.errors import ArgumentError, CompileWarning, DataError, NonFiniteError, NotRunError
from pyro_scale.infer import ekf_filter

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::pyro_scale.errors.ApproximationWarning"),
]

N, BATCH = 23, 5
X, Y = linear_data(N)
COUNTS = torch.poisson((X @ double(0.3, -0.2, 0.1)).exp(), torch.Generator().manual_seed(4))


counts = of_rows(
    lambda x, b, w: dist.Poisson((x @ w + b).exp()),
    b=lambda: dist.Normal(0.1, 0.7),
    w=normal(D, sd=0.5),
)


def filter_of(model, data, compile, structure="dense", **asked):
    fit = ps.EKF(model, structure=structure, compile=compile, **asked)
    return fit.run(data, batch_size=BATCH, seed=0, progress=False)


def both(model, data, structure, **asked):
    """A compiled filter and an eager one."""
    compiled, eager = (filter_of(model, data, how, structure, **asked) for how in (True, False))
    assert compiled.fit.attrs["program"] == "compiled loop"
    assert eager.fit.attrs["program"] == "eager"
    return compiled, eager


def same_fits(one, other, tolerance=1e-12):
    for name in one.filtered.mean:
        close(one.filtered.mean[name], other.filtered.mean[name], tolerance)
        close(one.filtered.sd[name], other.filtered.sd[name], tolerance)
    close(one.filtered.log_lik, other.filtered.log_lik, tolerance)
    for name in ("mean", "precision", "variance"):
        pair = (getattr(fit.fit.gaussians[0], name) for fit in (one, other))
        close(*pair, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "curvature"), each_once(["diag", "dense"], ["empirical_fisher", "ggn"])
)
def test_a_compiled_loop_takes_the_eager_steps(structure, curvature):
    """The last batch of three rows is eager; steps go on with the loop, and with other sizes."""
    asked = {"curvature": curvature, "lr": 0.7, "transition_sd": {"w": double(0.1, 0.0, 0.3)}}
    compiled, eager = both(counts, (X, COUNTS), structure, **asked)
    assert compiled.filtered.mean["w"].shape == (5, D)
    same_fits(compiled, eager)
    for part in (slice(0, BATCH), slice(2, 2 + BATCH), slice(0, 1)):
        value = compiled.step(X[part], COUNTS[part])
        close(double(value), [eager.step(X[part], COUNTS[part])], 1e-12)
    same_fits(compiled, eager)
    stepped = ps.EKF(counts, structure=structure, compile=True, **asked)
    for x, y in zip(X.split(BATCH), COUNTS.split(BATCH), strict=True):
        stepped.step(x, y=y)
    assert stepped.fit.attrs["program"] == "compiled loop"
    close(stepped.fit.trace[0], compiled.fit.trace[0, :5], 1e-12)


@pytest.mark.slow
def test_a_loader_is_a_compiled_loop_too():
    loader = DataLoader(RowByRow(X, COUNTS), BATCH)
    fit = ps.EKF(counts, structure="diag", transition_sd=0.1, compile=True)
    fit.run(loader, seed=0, progress=False)
    assert fit.fit.attrs["program"] == "compiled loop"
    same_fits(fit, filter_of(counts, (X, COUNTS), False, "diag", transition_sd=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("place", [7, 12, 22])
def test_what_is_not_finite_is_said_at_its_step(place):
    y = Y.clone()
    y[place] = math.nan
    with pytest.raises(NonFiniteError, match=f"step {place // BATCH}: the filter's state"):
        filter_of(regression(), (X, y), True, transition_sd=0.3)


@pytest.mark.slow
def test_long_runs_alone_are_compiled():
    """Of a thousand batches that there are, whatever N is."""

    def program(batches, **asked):
        data = X.repeat(300, 1)[: BATCH * batches], COUNTS.repeat(300)[: BATCH * batches]
        return filter_of(counts, data, "auto", "diag", transition_sd=0.1, **asked).fit.attrs[
            "program"
        ]

    assert program(999) == "eager"
    assert program(1000) == "compiled loop"
    assert program(4, num_data=10**6) == "eager"


def branching(x, y):
    w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
    sign = 1.0 if w.sum().item() > -1e9 else -1.0
    with rows(x):
        pyro.sample("y", dist.Normal(sign * (x @ w), SD), obs=y)


@pytest.mark.parametrize(
    ("model", "curvature", "words"),
    [(branching, "empirical_fisher", "in Python"), (regression(), "monte_carlo", "Monte Carlo")],
)
def test_what_cannot_be_compiled_is_eager(model, curvature, words):
    asked = {"curvature": curvature, "transition_sd": 0.1}
    with pytest.warns(CompileWarning, match=words):
        fit = filter_of(model, (X, Y), True, **asked)
    same_fits(fit, filter_of(model, (X, Y), False, **asked), 1e-15)


@pytest.mark.slow
def test_a_second_run_takes_the_program_of_the_first(monkeypatch):
    """Unless the model reads something else by then; a copy has none."""
    factor = [1.0]

    model = of_rows(
        lambda x, w: dist.Normal(x @ w, SD * factor[0]),
        w=lambda: dist.Normal(PRIOR_MEAN, 1.0).to_event(1),
    )
    traces = []
    monkeypatch.setattr(ekf_filter, "trace", lambda *a: traces.append(a) or trace(*a))
    fit = filter_of(model, (X, Y), True, transition_sd=0.3)
    for sd, count in ((1.0, 1), (2.0, 2)):
        factor[0] = sd
        fit.run((X, Y), batch_size=BATCH, seed=0, progress=False)
        assert len(traces) == count
        same_fits(fit, filter_of(model, (X, Y), False, transition_sd=0.3))
    assert fit._programs.program is not None
    assert pickle.loads(pickle.dumps(fit._programs)).program is None


# ------------------------------------------------------------------ walks, empty batches, the prior


def kalman(walk, parts):
    """Means, covariances and log likelihoods of `regression(1.0)` after each of some slices of the
    rows, with a walk of covariance diag(walk) before each."""
    mean, covariance = PRIOR_MEAN, torch.eye(D)
    path = []
    for part in parts:
        x, y = X[part], Y[part]
        covariance = covariance + walk.diag()
        log_lik = dist.Normal(x @ mean, SD).log_prob(y).sum()
        gain = covariance @ x.T @ torch.linalg.inv(x @ covariance @ x.T + SD**2 * torch.eye(len(x)))
        mean = mean + gain @ (y - x @ mean)
        covariance = covariance - gain @ x @ covariance
        path.append((mean, covariance, log_lik))
    return [torch.stack(column) for column in zip(*path, strict=True)]


#: `regression(1.0)`, its first weight a site of its own, which comes last.
two_sites = of_rows(
    lambda x, w, a: dist.Normal(x[:, 0] * a + x[:, 1:] @ w, SD),
    w=lambda: dist.Normal(PRIOR_MEAN[1:], 1.0).to_event(1),
    a=lambda: dist.Normal(PRIOR_MEAN[0], 1.0),
)


WALKS = [
    ({"a": 0.3}, (0.3, 0.0, 0.0)),
    ({"w": double(0.0, 2.0)}, (0.0, 0.0, 2.0)),
    ({"w": 0.4, "a": torch.tensor(0.1)}, (0.1, 0.4, 0.4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile", "sds", "each"),
    [
        *((False, *walk) for walk in WALKS),
        (True, *WALKS[2]),
        *(pytest.param(True, *walk, marks=pytest.mark.long) for walk in WALKS[:2]),
    ],
)
def test_sites_walk_as_far_as_they_are_told(compile, sds, each):
    fit = filter_of(two_sites, (X, Y), compile, transition_sd=sds)
    parts = [slice(i, min(i + BATCH, N)) for i in range(0, N, BATCH)]
    means, covariances, log_liks = kalman(double(*each).square(), parts)
    sd = covariances.diagonal(dim1=1, dim2=2).sqrt()
    path = fit.filtered
    for found, expected in ((path.mean, means), (path.sd, sd)):
        close(found["a"], expected[:, 0], 1e-9)
        close(found["w"], expected[:, 1:], 1e-9)
    close(path.log_lik, log_liks, 1e-9)
    order = [1, 2, 0]
    close(fit.fit.gaussians[0].covariance, covariances[-1][order][:, order], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [True, False])
def test_a_batch_without_rows_brings_the_walk_alone(compile):
    parts = [slice(0, 5), slice(5, 10), slice(0, 0), slice(10, 15), slice(0, 0), slice(15, 23)]
    means, covariances, log_liks = kalman(double(0.09, 0.09, 0.09), parts)
    asked = {"structure": "dense", "transition_sd": 0.3, "compile": compile}
    stepped = ps.EKF(regression(), **asked)
    for place, part in enumerate(parts):
        close(double(stepped.step(X[part], Y[part])), [log_liks[place]], 1e-9)
    batches = [(X[part], Y[part]) for part in parts]
    ran = ps.EKF(regression(), num_data=N, **asked).run(Batches(batches), progress=False)
    for fit in (stepped, ran):
        close(fit.filtered.mean["w"], means, 1e-9)
        close(fit.filtered.sd["w"], covariances.diagonal(dim1=1, dim2=2).sqrt(), 1e-9)
        close(fit.filtered.log_lik, log_liks, 1e-9)
        close(fit.fit.gaussians[0].covariance, covariances[-1], 1e-9)
    assert log_liks[2] == 0 == stepped.filtered.log_lik[2]


class Batches:
    """A loader of batches as they are."""

    def __init__(self, batches):
        self.batches = self.dataset = batches

    def __iter__(self):
        return iter(self.batches)


def test_the_first_batch_needs_rows():
    with pytest.raises(DataError, match="no rows"):
        ps.EKF(regression()).step(X[:0], Y[:0])


def pairs(x, y=None):
    """Each row is observed twice, along the first dimension."""
    w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
    with pyro.plate("twice", 2, dim=-2), rows(x):
        return pyro.sample("y", dist.Normal((x @ w).expand(2, len(x)), SD), obs=y)


@pytest.mark.parametrize("model", [regression(), pairs])
@pytest.mark.parametrize("linearized", [True, False])
def test_predictions_before_the_first_step_are_the_priors(model, linearized):
    """Means x'm, variances x'x + SD^2; observations are not needed."""
    fit = ps.EKF(model, structure="dense")
    new = normals(4, D, seed=8)
    variance = new.square().sum(1) + SD**2
    for x in (new, new[:1]):
        pyro.set_rng_seed(9)
        away = fit.predict(x, linearized=linearized)["y"] - x @ PRIOR_MEAN
        assert away.shape == (1000, *model(x).shape)
        assert float((away.mean(0) / (variance[: len(x)] / 1000).sqrt()).abs().max()) < 4.4
        z = (away.square().mean(0) / variance[: len(x)] - 1) / (2 / 1000) ** 0.5
        assert float(z.abs().max()) < 4.4
    with pytest.raises(NotRunError):
        fit.fit  # noqa: B018


def test_discrete_predictions_before_the_first_step():
    """A Poisson's mean under b + x'w ~ N(0.1, 0.49 + 0.25 x'x): that of a log-normal."""
    small = 0.2 * normals(3, D, seed=8)
    variance = 0.49 + 0.25 * small.square().sum(1)
    expected = (0.1 + variance / 2).exp()
    spread = expected.square() * variance.expm1() + expected
    pyro.set_rng_seed(9)
    draws = ps.EKF(counts).predict(small)["y"]
    assert float(((draws.mean(0) - expected) / (spread / 1000).sqrt()).abs().max()) < 4.4
    observed = ps.EKF(counts).predict(small, torch.zeros(3))["y"]
    assert float(((observed.mean(0) - expected) / (spread / 1000).sqrt()).abs().max()) < 4.4


def test_predictions_before_the_first_step_are_from_the_fit_that_it_starts_from():
    begun = filter_of(regression(), (X, Y), False)
    pyro.set_rng_seed(9)
    expected = begun.predict(X)["y"]
    found = ps.EKF(regression(), structure="dense", init_strategy=begun).predict(X)["y"]
    sd = expected.std(0)
    assert float(((found.mean(0) - expected.mean(0)) / sd).abs().max()) < 4.4 * (2 / 1000) ** 0.5
    assert float((found.std(0) / sd - 1).abs().max()) < 4.4 * 1000**-0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"w": -0.1}, r"transition_sd\['w'\]=-0.1"),
        ({"w": double(0.1, math.nan)}, r"transition_sd\['w'\]"),
        ({"w": "fast"}, r"transition_sd\['w'\]='fast'"),
        ("fast", "transition_sd='fast'"),
    ],
)
def test_what_is_no_sd_is_refused(given, words):
    with pytest.raises(ArgumentError, match=words):
        ps.EKF(two_sites, transition_sd=given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"v": 0.1}, r"\['v'\] are not latent sites of the model, which has \['w', 'a'\]"),
        ({"y": 0.1}, r"\['y'\] are not latent sites"),
        ({"w": double(0.1, 0.2, 0.3)}, r"\['w'\] has the shape \[3\], the site \[2\]"),
        ({"a": double(0.1)}, r"\['a'\] has the shape \[1\], the site \[\]"),
    ],
)
def test_a_walk_of_other_sites_is_refused(given, words):
    with pytest.raises(ArgumentError, match=words):
        filter_of(two_sites, (X, Y), False, transition_sd=given)


def test_a_walk_is_written_down(tmp_path):
    fit = filter_of(two_sites, (X, Y), False, transition_sd={"w": double(0.5, 0.25)})
    fit.save(tmp_path / "fit")
    attrs = ps.EKF.load(tmp_path / "fit", two_sites).fit.attrs
    assert attrs["transition_sd"] == {"w": [0.5, 0.25]}
