"""Rows predicted in batches: those that were asked for, each as beside all others, or a refusal."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, CallError, DataError
from pyro_scale.posterior import row_batches

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]
N = 60
SOURCE = torch.Generator().manual_seed(0)
X = torch.randn(N, generator=SOURCE, dtype=torch.float64)
Y = X + 0.3 * torch.randn(N, generator=SOURCE, dtype=torch.float64)


def slope():
    return pyro.sample("b", dist.Normal(0.0, 5.0))


def observe(mean, y, size):
    with pyro.plate("data", size):
        pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def lagged(x, y=None):
    observe(slope() * (x + torch.cat([torch.zeros(1), x[:-1]])), y, len(x))


def lagged_event(x, y=None):
    mean = slope() * (x + torch.cat([torch.zeros(1), x[:-1]]))
    pyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)


def centered(x, y=None):
    observe(slope() * (x - x.mean()), y, len(x))


def ranked(x, y=None):
    observe(slope() * x.argsort().argsort() / len(x), y, len(x))


def late(x, y=None):
    """Rows that depend on others only where x is large."""
    b = slope()
    observe(torch.where(x > 1.5, b * x.flip(0), b * x), y, len(x))


def in_prediction_alone(x, y=None):
    b = slope()
    observe(b * x if y is not None else b * x.cumsum(0), y, len(x))


def running_total(x, y=None):
    b = slope()
    pyro.deterministic("total", (b * x).cumsum(0))
    observe(b * x, y, len(x))


def grand_total(x, y=None):
    b = slope()
    pyro.deterministic("total", (b * x).sum())
    observe(b * x, y, len(x))


def without_the_first(x, y=None):
    observe(slope() * x[:-1], None if y is None else y[1:], len(x) - 1)


def gaussian_process(x, y=None):
    covariance = (-0.5 * (x[:, None] - x) ** 2).exp() + slope() ** 2 * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


def own_latents(x, y=None):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z + x, 0.3), obs=y)


DEPENDENT = [
    lagged,
    lagged_event,
    centered,
    ranked,
    late,
    in_prediction_alone,
    running_total,
    grand_total,
    without_the_first,
    gaussian_process,
    own_latents,
]


def map_fit(model, *data):
    return ps.MAP(model).run(data or (X, Y), num_steps=100, seed=0, progress=False)


@pytest.mark.parametrize("model", DEPENDENT)
def test_rows_that_depend_on_others_are_not_split(model):
    fit = map_fit(model)
    shapes = {name: value.shape for name, value in fit.predict(X).items()}
    for size in (7, 20, 59):
        for reduce in (None, "mean"):
            with pytest.raises(ArgumentError, match=f"batch_size={size}: site '.*leave batch_size"):
                fit.predict(X, batch_size=size, reduce=reduce)
    for size in (N, N + 1):
        found = fit.predict(X, batch_size=size)
        assert {name: value.shape for name, value in found.items()} == shapes


def test_rows_that_depend_on_others_in_the_last_batches_alone_are_not_split():
    with pytest.raises(ArgumentError, match=r"batch_size=7: site 'y' .*leave batch_size"):
        map_fit(late).predict(X.sort().values, batch_size=7)


@pytest.mark.parametrize("model", [lagged, in_prediction_alone, running_total])
def test_rows_that_depend_on_others_are_predicted_together_by_default(model, monkeypatch):
    fit = map_fit(model)
    whole = fit.predict(X, reduce="mean")
    monkeypatch.setattr(row_batches, "CHUNK_ROWS", 13)
    for name, value in fit.predict(X, reduce="mean").items():
        assert torch.equal(value, whole[name])


def several(x, y=None):
    """Sites of all kinds whose rows are apart: one that depends on another, one without rows, one
    that is there in predictions alone, and rows in the last dimension but one."""
    b = slope()
    pyro.sample("known", dist.Normal(b, 3.0), obs=torch.tensor(0.0))
    pyro.deterministic("doubled", 2 * b)
    with pyro.plate("outputs", 3, dim=-1), pyro.plate("data", len(x), dim=-2):
        y = pyro.sample("y", dist.Normal((b * x)[:, None].expand(-1, 3), 0.3), obs=y)
        pyro.deterministic("mean", (b * x)[:, None] + torch.zeros(3))
        pyro.sample("z", dist.Normal(y, 1e-9), obs=y)


@pytest.mark.parametrize("size", [1, 7, 20, 59, 60, 100])
@pytest.mark.slow
def test_rows_apart_are_those_of_all_rows(size):
    fit = map_fit(several, X, Y[:, None].expand(-1, 3).contiguous())
    whole, parts = fit.predict(X), fit.predict(x=X, batch_size=size)
    assert {k: v.shape for k, v in parts.items()} == {k: v.shape for k, v in whole.items()}
    torch.testing.assert_close(parts["mean"], whole["mean"], rtol=1e-12, atol=0)
    torch.testing.assert_close(parts["z"], parts["y"], rtol=0, atol=1e-7)
    means = fit.predict(X, batch_size=size, reduce="mean")
    b = fit.get_samples()["b"]
    torch.testing.assert_close(means["y"], (b * X)[:, None].expand(-1, 3), rtol=1e-12, atol=1e-12)


def test_sites_of_predictions_alone_have_all_rows():
    def model(x, y=None):
        b = slope()
        observe(b * x, y, len(x))
        if y is None:
            pyro.deterministic("mean", b * x)

    fit = map_fit(model)
    found = fit.predict(X, batch_size=25)["mean"]
    torch.testing.assert_close(found, fit.get_samples()["b"][:, None] * X, rtol=1e-12, atol=0)


def test_the_sites_that_are_asked_for_decide():
    fit = map_fit(running_total)
    assert fit.predict(X, batch_size=7, return_sites=["y"])["y"].shape == (1, N)
    with pytest.raises(ArgumentError, match="site 'total'"):
        fit.predict(X, batch_size=7, return_sites=["total"])


def test_batches_leave_torchs_generator_as_whole_rows_do():
    fit = map_fit(several, X, Y[:, None].expand(-1, 3).contiguous())
    torch.manual_seed(0)
    one = fit.predict(X, batch_size=N)
    torch.manual_seed(0)
    assert torch.equal(one["y"], fit.predict(X)["y"])


def test_a_model_that_draws_by_itself_is_predicted_in_batches():
    def model(x, y=None):
        b = slope()
        observe(b * x + (0.0 if y is not None else torch.randn(len(x))), y, len(x))

    assert map_fit(model).predict(X, batch_size=7)["y"].shape == (1, N)


@pytest.mark.parametrize("how", [{"linearized": True}, {"linearized": True, "reduce": "mean"}])
def test_linearized_predictions_are_split_alike(how):
    fit = ps.Laplace(lagged).run((X, Y), seed=0, progress=False)
    with pytest.raises(ArgumentError, match=r"site 'y'.*leave batch_size out"):
        fit.predict(X, batch_size=20, num_samples=10, **how)
    assert fit.predict(X, num_samples=10, **how)["y"].shape[-1] == N


def test_subsampling_models_take_no_batch_of_rows():
    def model(x, y=None):
        b = slope()
        with pyro.plate("data", N, subsample_size=16) as i:
            pyro.sample("y", dist.Normal(b * x[i], 0.3), obs=None if y is None else y[i])

    fit = ps.MAP(model).run((X, Y), num_steps=100, seed=0, progress=False)
    b = fit.get_samples()["b"]
    for size in (None, 20, 50):
        means = fit.predict(X, batch_size=size, reduce="mean")["y"]
        torch.testing.assert_close(means, b * X, rtol=1e-12, atol=1e-12)


def test_nothing_to_predict_is_refused():
    fit = map_fit(lagged)
    with pytest.raises(DataError, match="no rows"):
        fit.predict(X[:0])
    with pytest.raises(CallError, match=r"takes \(x, y=None\): missing a required argument: 'x'"):
        fit.predict()
