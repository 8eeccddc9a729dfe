"""Models whose rows depend on their batch, where the first rows do not show it."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import linear_regression, regression_of
from models import normal, of_rows
from reference import double, normals
from row_datasets import RowByRow, Stream
from runs import ONE_CHAIN, QUIET
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import PlateError, SiteError
from pyro_scale.model.classify import close
from pyro_scale.model.other_batches import same_support

pytestmark = pytest.mark.usefixtures("float64")

N, B = 400, 20
ONE_STEP = {**ONE_CHAIN, "num_samples": 1}
#: Alike at first: 100 rows of zeros, or of one label, and all kinds after them.
X = torch.cat([torch.zeros(100, 2), normals(300, 2)])
Y = torch.cat([torch.zeros(100), normals(300, seed=1)])
LABELS = torch.cat([torch.zeros(100), (normals(300, seed=2) > 0).double()])


def lagged(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    before = torch.cat([torch.zeros(1), y[:-1]])
    with pyro.plate("time", len(y)):
        pyro.sample("y", dist.Normal(a * before, 1.0), obs=y)


def weighted(x, y):
    """Each class counts as much as the other."""
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    share = (y.mean() + 1) / 2
    with pyro.plate("data", len(y)), pyro.poutine.scale(scale=torch.where(y > 0, 1 / share, 1.0)):
        pyro.sample("y", dist.Bernoulli(logits=b), obs=y)


def in_units(x, y):
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    scaled = y / y.abs().max().clamp(min=1.0)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(b, 1.0), obs=scaled)


def event_count(x, y):
    rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    events = (y > 0).sum()
    pyro.factor("events", events * rate.log())
    with pyro.plate("data", len(y)):
        pyro.factor("exposure", -rate * torch.ones(len(y)))


BY_BATCH = {
    "a lag": (lagged, Y, "y"),
    "centered": (linear_regression(features=lambda x: x - x.mean(0)), Y, "y"),
    "ranks": (linear_regression(features=lambda x: x.argsort(0).argsort(0) / N), Y, "y"),
    "running sums": (linear_regression(features=lambda x: x.cumsum(0)), Y, "y"),
    "a softmax": (linear_regression(features=lambda x: (50 * x).softmax(0)), Y, "y"),
    "class weights": (weighted, LABELS, "y"),
    "a maximum": (in_units, 3 * Y, "y"),
    "a count": (event_count, LABELS, "events"),
}


@pytest.mark.parametrize("how", ["tensors", "loader"])
@pytest.mark.parametrize("name", BY_BATCH)
def test_what_a_batch_decides_is_found_on_other_batches(name, how):
    model, y, site = BY_BATCH[name]
    if how == "tensors":
        data, size = (X, y), {"batch_size": B}
    else:
        data, size = DataLoader(TensorDataset(X, y), batch_size=B), {}
    with pytest.raises(PlateError, match=f"site '{site}'"):
        ps.explain(model, data, **size)
    with pytest.raises(PlateError, match=f"site '{site}'"):
        ps.BAOA(model, lr=0.01, compile=False).run(data, **ONE_STEP, **size, **QUIET)


@pytest.mark.parametrize("name", ["a lag", "class weights", "a maximum"])
def test_a_stream_is_looked_at_as_it_comes(name):
    model, y, site = BY_BATCH[name]
    sampler = ps.BAOA(model, lr=0.01, compile=False)
    with pytest.raises(PlateError, match=f"site '{site}'"):
        sampler.run(
            DataLoader(Stream(X, y), batch_size=B), **{**ONE_STEP, "num_samples": 100}, **QUIET
        )


RIGHT = {
    "rows alone": linear_regression(),
    "centered beforehand": linear_regression(features=lambda x: x - X.mean(0).to(x)),
    "squares": linear_regression(features=lambda x: x.square()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", RIGHT)
def test_what_rows_decide_passes(name, dtype):
    """In units of 1e-6 and 1e6, too."""
    for unit in (1e-6, 1.0, 1e6):
        x, y = (X * unit).to(dtype), Y.to(dtype)

        def model(x, y, unit=unit):
            RIGHT[name](x / unit, y)

        found = ps.explain(model, (x, y), batch_size=B)
        assert found.rows[-1]["ours"] == "N/B = 20"


def test_the_draws_are_those_of_a_run_that_was_not_looked_at(monkeypatch):
    def draws():
        sampler = ps.BAOA(RIGHT["rows alone"], lr=0.05, compile=False)
        return sampler.run(
            (X, Y), batch_size=B, num_samples=70, **ONE_CHAIN, **QUIET
        ).get_samples()["w"]

    looked_at = draws()
    monkeypatch.setattr("pyro_scale.run.run.is_checked", lambda known: False)
    assert torch.equal(looked_at, draws())


def centered(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 5.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * (x - x.mean()), 1.0), obs=y)


def centered_by_itself(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 5.0))
    with pyro.plate("data", N, subsample_size=B) as i:
        pyro.sample("y", dist.Normal(w * (x[i] - x[i].mean()), 1.0), obs=y[i])


def centered_beside_a_constant(x, y):
    pyro.factor("c", torch.tensor(-2e6))
    centered(x, y)


COLUMN = torch.cat([torch.zeros(200), normals(200, seed=3) + 3])


@pytest.mark.parametrize(
    ("model", "unit", "how"),
    [
        (centered, 1.0, {"batch_size": 1}),
        (centered, 1e4, {"batch_size": B}),
        (centered_by_itself, 1.0, {}),
        (centered_beside_a_constant, 1.0, {"batch_size": B}),
    ],
    ids=["single rows", "far out", "subsamples by itself", "beside a large constant"],
)
def test_it_is_found_in_batches_of_any_kind(model, unit, how):
    with pytest.raises(PlateError, match="site 'y'"):
        ps.explain(model, (unit * COLUMN, unit * Y), **how)


def test_rows_that_a_model_takes_by_itself_pass():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 5.0))
        with pyro.plate("data", N, subsample_size=B) as i:
            pyro.sample("y", dist.Normal(w * x[i], 1.0), obs=y[i])

    assert ps.explain(model, (COLUMN, Y)).batch_size == B
    ps.BAOA(model, lr=0.01, compile=False).run(
        (COLUMN, Y), num_samples=70, warmup_steps=0, thinning=1, num_chains=1, **QUIET
    )


def inducing(x, y):
    """In float32 its Cholesky factor loses half of the digits, and fails at some prior draws."""
    z = torch.linspace(-2, 2, 15, dtype=x.dtype)
    size = pyro.sample("size", dist.LogNormal(x.new_zeros(()), 3.0))
    u = pyro.sample("u", dist.Normal(x.new_zeros(15), 1.0).to_event(1))

    def kernel(a, b):
        return torch.exp(-0.5 * ((a[:, None] - b) / size) ** 2)

    root = torch.linalg.cholesky(kernel(z, z) + 1e-6 * torch.eye(15, dtype=x.dtype))
    f = kernel(x, z) @ torch.linalg.solve_triangular(root.T, u[:, None], upper=True)[:, 0]
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_not_taken_for_the_rows(dtype):
    x = normals(N, seed=4).to(dtype)
    take_one_step(inducing, (x, Y.to(dtype)), lr=1e-6, batch_size=B, seed=1)

    def years(x, y):
        """Cancels but for a few digits in float32."""
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(2000 + x @ w, 0.1), obs=y)

    ps.explain(years, (normals(N, 3, seed=5).to(dtype), (Y + 2000).to(dtype)), batch_size=B)


# ------------------------------------------------------------------ rows outside of the support


counts = regression_of(lambda fit: dist.Poisson(fit.exp()), sd=0.3)


categorical = of_rows(lambda x, w: dist.Categorical(logits=x @ w), w=normal(2, 3))


@pytest.mark.parametrize(
    ("model", "value", "y"),
    [
        (counts, -1.0, LABELS),
        (counts, 2.5, LABELS),
        (counts, torch.nan, LABELS),
        (categorical, 255, LABELS.long()),
        (categorical, -100, LABELS.long()),
    ],
)
@pytest.mark.parametrize("batch_size", [B, None])
def test_a_row_outside_of_the_support_is_named(model, value, y, batch_size):
    y = y.clone()
    y[317] = value
    row = r"row 317, (2\.5|-1\.0|nan|255|-100)," if batch_size else "(outside the support|is NaN)"
    for call in (ps.explain, take_one_step, functools.partial(take_one_step, method=ps.SGLD)):
        with pytest.raises(SiteError, match=f"site 'y': an observed value.*{row}"):
            call(model, (X, y), batch_size=batch_size)


def take_one_step(model, data, method=ps.BAOA, lr=0.01, **kwargs):
    return method(model, lr=lr, compile=False).run(data, **{**ONE_STEP, **QUIET, **kwargs})


def test_masked_rows_and_those_that_are_not_validated_pass():
    y = LABELS.clone()
    y[317] = 0.5

    def masked(x, y):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)), pyro.poutine.mask(mask=y != 0.5):
            pyro.sample("y", dist.Bernoulli(logits=b), obs=y)

    def plain(validate, x, y):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=b, validate_args=validate), obs=y)

    ps.explain(masked, (X, y), batch_size=B)
    ps.explain(functools.partial(plain, False), (X, y), batch_size=B)
    with pytest.raises(SiteError, match="row 317"):
        ps.explain(functools.partial(plain, None), (X, y), batch_size=B)


def test_a_support_that_a_latent_decides_is_left_to_the_density():
    model = of_rows(lambda b: dist.Uniform(0.0, b), b=lambda: dist.Gamma(200.0, 100.0))

    y = torch.full((N,), 0.1)
    y[317] = 50.0
    assert ps.explain(model, y, batch_size=B).num_data == N


def test_supports_are_compared_with_their_bounds():
    one, same, other = (dist.Uniform(0.0, double(b)).support for b in (1.0, 1.0, 2.0))
    assert same_support(one, same)
    assert not same_support(one, other)
    independent = [dist.Uniform(0.0, double(b)).to_event(1).support for b in (1.0, 2.0)]
    assert not same_support(*independent)
    assert same_support(
        dist.Categorical(torch.ones(3)).support, dist.Categorical(torch.ones(3)).support
    )
    assert not same_support(dist.Categorical(torch.ones(3)).support, dist.Bernoulli(0.5).support)


# ------------------------------------------------------------------ tolerances


def test_small_terms_are_compared_in_their_own_size():
    a = 1e-6 * torch.ones(4, dtype=torch.float64)
    assert close(a, a * (1 + 1e-12))
    assert not close(a, a * 1.01)
    assert close(torch.ones(4), torch.ones(4) + 1e-9)


def test_a_site_in_half_precision_does_not_loosen_the_others():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        v = pyro.sample("v", dist.Normal(torch.zeros(()).bfloat16(), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(v.expand(len(x)), 1.0), obs=torch.zeros(len(x)).bfloat16())
            # a difference of 1e-4: far below the digits of bfloat16
            pyro.sample("y", dist.Normal(x @ w + 1e-4 * y.mean(), 1.0), obs=y)

    with pytest.raises(PlateError, match="site 'y'"):
        ps.explain(model, (normals(N, 2), normals(N, seed=1) + 1), batch_size=B)


def test_a_loader_is_read_by_index_no_more_than_it_takes():
    found = ps.explain(RIGHT["rows alone"], DataLoader(RowByRow(X, Y), batch_size=B, shuffle=True))
    assert found.batch_size == B
