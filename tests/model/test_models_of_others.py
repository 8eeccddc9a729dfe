"""Models as people have them: nested, conditioned, with local latents, with validation off."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import initialize, linear_regression
from pyro import poutine
from pyro.infer import TraceEnum_ELBO
from reference import double, normals
from repetitions import long_but

import pyro_scale as ps
from pyro_scale.errors import ModelError, PlateError, SiteError

pytestmark = pytest.mark.usefixtures("float64")

N, QUIET = 6, {"progress": False, "seed": 0}
X, Y = normals(N, 2), normals(N, seed=1)

regression = linear_regression()


def log_joint(model, params, *batch):
    """By our converter, and by Pyro's own trace at the same values of real sites."""
    log_posterior = ps.LogPosterior(model, num_data=N)
    log_posterior.prepare(batch)
    trace = poutine.trace(pyro.condition(model, params)).get_trace(*batch)
    return float(log_posterior(params, batch).log_joint), float(trace.log_prob_sum())


# ------------------------------------------------------------------ a model inside of a model


def test_a_log_posterior_inside_of_a_function_counts_once():
    log_posterior, params = initialize(regression, X, Y, num_data=N)
    around = ps.LogPosterior.from_function(
        lambda params, batch: log_posterior(params, batch).log_joint / N, params, num_data=N
    )
    own, nested = (each.grad(params, (X, Y)) for each in (log_posterior, around))
    assert float(nested[1].log_joint) == pytest.approx(float(own[1].log_joint), rel=1e-14)
    torch.testing.assert_close(nested[0]["w"], own[0]["w"], rtol=1e-13, atol=1e-13)
    draws = [
        ps.SGLD(each, lr=0.1, compile=False)
        .run((X, Y), num_samples=20, warmup_steps=0, thinning=1, num_chains=1, **QUIET)
        .get_samples()["w"]
        for each in (log_posterior, around)
    ]
    assert draws[0].shape == draws[1].shape
    assert list(around.latents) == ["w"]


def test_a_log_posterior_inside_of_a_pyro_model_counts_once():
    inner = ps.LogPosterior(regression, num_data=N)
    inner.prepare((X, Y))

    def outer(x, y):
        v = pyro.sample("v", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        with pyro.plate("rows", len(x)), poutine.scale(scale=0.5), poutine.mask(mask=y > -9):
            found = inner({"w": v}, (x, y))
            assert torch.equal(found.log_prior, own.log_prob(v).sum())
            pyro.factor("inner", found.log_lik)

    own, params = dist.Normal(torch.zeros(2), 1.0), {"v": double(0.3, -0.7)}
    log_posterior = ps.LogPosterior(outer, num_data=N)
    found = log_posterior(params, (X, Y))
    likelihood = dist.Normal(X @ params["v"], 1.0).log_prob(Y)
    torch.testing.assert_close(found.log_lik, likelihood / 2, rtol=1e-14, atol=1e-14)
    assert list(log_posterior.model_info.sites) == ["v", "rows", "inner"]


# ------------------------------------------------------------------ the user's data are theirs


@pytest.mark.parametrize("how", ["by position", "by name", "bound", "closed over"])
def test_a_model_that_writes_to_its_data_is_refused_and_they_are_as_they_were(how):
    x, other = X.clone(), X.clone()

    def model(x, y, bound=None):
        for written in (x, bound, other)[["by", "bound", "closed"].index(how.split()[0]) :][:1]:
            written.sub_(1.0)
        return regression(x, y)

    model = functools.partial(model, bound=X.clone()) if how == "bound" else model
    batch = {"x": x, "y": Y} if how == "by name" else (x, Y)
    named = {"by position": "argument 0", "by name": "argument 'x'", "bound": "'bound'"}
    with pytest.raises(ModelError, match=f"writes to .*{named.get(how, 'other')}.* in place"):
        ps.explain(model, batch)
    assert torch.equal(x, X)


class Counting:
    def __init__(self):
        self.calls = torch.zeros(())

    def __call__(self, x, y):
        self.calls.add_(1)
        return regression(x, y)


def test_numpys_writes_and_those_to_an_objects_tensors_are_found_too():
    def model(x, y):
        x.numpy()[:] *= 0.9
        return regression(x, y)

    x = X.clone()
    with pytest.raises(ModelError, match="writes to its argument 0"):
        ps.explain(model, (x, Y))
    assert torch.equal(x, X)
    with pytest.raises(ModelError, match="writes to 'calls'"):
        ps.explain(Counting(), (X, Y))


def test_tensors_and_variables_that_cannot_be_watched_are_no_obstacle():
    with torch.inference_mode():
        features = torch.ones(())
    if X is None:
        missing = 1.0

    def model(x, y):
        return regression(x * features if X is not None else missing, y)

    assert ps.explain(model, (X, Y)).num_data == N


# ------------------------------------------------------------------ local latents, all rows

SDS = double(0.5, 1.0, 1.5, 0.7, 1.2, 0.9)


def schools_in(plate, y, sds):
    """Given tau = 1: theta and mu have a Gaussian posterior."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("schools", len(y) if plate == "follows" else N):
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(theta, sds), obs=y)


def exact_posterior():
    """Mean and covariance of (mu, theta)."""
    precision = torch.zeros(N + 1, N + 1)
    precision[0, 0] = 0.25 + N
    precision[0, 1:] = precision[1:, 0] = -1.0
    precision[1:, 1:] = torch.diag(1 + 1 / SDS**2)
    linear = torch.cat([torch.zeros(1), Y / SDS**2])
    return torch.linalg.solve(precision, linear), precision.inverse()


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, N])
@pytest.mark.parametrize("plate", ["follows", "fixed"])
def test_with_the_whole_data_local_latents_are_like_any_other(plate, size):
    model, (mean, covariance) = functools.partial(schools_in, plate), exact_posterior()
    sampler = ps.BAOA(model, lr=0.3, compile=False)
    starts = {"mu": mean[:1].expand(400), "theta": mean[1:].expand(400, N)}
    sampler = ps.BAOA(model, lr=0.3, compile=False, init_strategy=starts)
    sampler.run(
        (Y, SDS),
        batch_size=size,
        num_samples=1,
        thinning=1,
        warmup_steps=80,
        num_chains=400,
        **QUIET,
    )
    draws = sampler.get_samples()
    both = torch.cat([draws["mu"][:, None], draws["theta"]], 1)
    assert ((both.mean(0) - mean) / (covariance.diagonal() / 400).sqrt()).abs().max() < 4.4
    assert (both.var(0) / covariance.diagonal() - 1).abs().max() < 4.4 * (2 / 400) ** 0.5
    assert sampler.log_likelihood()["y"].shape == (400, N)
    assert sampler.predict(Y, SDS, num_samples=3)["y"].shape == (3, N)
    assert dict(sampler.to_arviz().posterior.sizes) == {"chain": 400, "draw": 1, "schools": N}
    with pytest.raises((SiteError, ModelError, PlateError), match=r"theta|schools|rows"):
        sampler.predict(Y[:3], SDS[:3], num_samples=3)


@pytest.mark.slow
@pytest.mark.parametrize("plate", long_but(["follows", "fixed"], "fixed"))
def test_approximations_find_local_latents_too(plate):
    model, (mean, covariance) = functools.partial(schools_in, plate), exact_posterior()
    fit = ps.Laplace(model, structure="dense").run((Y, SDS), progress=False)
    (gaussian,) = fit.fit.gaussians
    torch.testing.assert_close(gaussian.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gaussian.precision.inverse(), covariance, rtol=1e-6, atol=1e-6)
    found = ps.MAP(model).run((Y, SDS), num_steps=1500, **QUIET)
    torch.testing.assert_close(found.get_samples()["theta"][0], mean[1:], rtol=1e-2, atol=1e-2)


def test_latents_of_rows_are_summed_out_of_minibatches():
    model = functools.partial(schools_in, "follows")
    rows = ps.explain(model, (Y, SDS), batch_size=3).rows
    assert [row["site"] for row in rows if row["kind"] == "local"] == ["theta"]


# ------------------------------------------------------------------ all rows or none


def dirichlet_process(y):
    """Numbers of rows and of parts are the model's own."""
    with pyro.plate("breaks", 2):
        b = pyro.sample("b", dist.Beta(1.0, 2.0))
    with pyro.plate("parts", 3):
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
    rest = torch.cumprod(1 - b, 0)
    weights = torch.cat([b, torch.ones(1)]) * torch.cat([torch.ones(1), rest])
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(m[z], 1.0), obs=y)


def multinomial(y):
    """The total follows the rows."""
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    counts = torch.nn.functional.one_hot((y > 0).long() + (y > 0.5).long(), 3).sum(0).double()
    pyro.sample("counts", dist.Multinomial(int(counts.sum()), p), obs=counts)


LENGTHS = [3, 1, 2, 3, 2, 1]


def sequences(y):
    """A loop over sequences of unequal lengths, each summed out by itself."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    for i in pyro.plate("sequences", len(y)):
        x = torch.tensor(0)
        for t in pyro.markov(range(LENGTHS[i] if i < 3 else 1)):
            chance = torch.where(x == 0, p, 1 - p)
            x = pyro.sample(f"x_{i}_{t}", dist.Bernoulli(chance), infer=PARALLEL).long()
            pyro.sample(f"y_{i}_{t}", dist.Normal(x.double(), 1.0), obs=y[i])


PARALLEL = {"enumerate": "parallel"}


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (pyro.condition(regression, {"y": Y}), (X,)),
        (dirichlet_process, (Y,)),
        (multinomial, (Y,)),
        (sequences, (Y,)),
    ],
    ids=["conditioned", "rows counted by the model", "multinomial", "a loop of sequences"],
)
def test_what_half_of_the_rows_cannot_be_run_on_is_run_on_all(model, batch):
    """The density is Pyro's own, enumerated sites summed out."""
    log_posterior, params = initialize(model, *batch, num_data=N)
    values = log_posterior.constrain(params)
    sites = log_posterior.run(params, batch).sites.values()
    jacobian = sum(site.log_det for site in sites if site.log_det is not None)
    with pyro.validation_enabled(False):
        elbo = TraceEnum_ELBO(max_plate_nesting=1)
        expected = -elbo.loss(pyro.condition(model, values), lambda *_: None, *batch)
    found = float(log_posterior(params, batch).log_joint - jacobian)
    assert found == pytest.approx(expected, rel=1e-10)
    assert (
        ps.BAOA(model, lr=0.01)
        .run(batch, num_samples=3, warmup_steps=0, thinning=1, num_chains=1, **QUIET)
        .get_samples()
    )


def test_on_minibatches_they_are_refused():
    for model, batch in [
        (pyro.condition(regression, {"y": Y}), (X,)),
        (dirichlet_process, (Y,)),
        (multinomial, (Y,)),
    ]:
        with pytest.raises(ModelError):
            ps.explain(model, batch, batch_size=3)


def test_masked_mixtures_are_summed_out():
    def model(y):
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(p), infer=PARALLEL)
            parts = dist.Exponential(1.0), dist.LogNormal(0.0, 1.0)
            pyro.sample("y", dist.MaskedMixture(z.bool(), *parts), obs=y)

    log_posterior = ps.LogPosterior(model, num_data=N)
    y, params = Y.exp(), {"p": double(0.4)[0]}
    p = torch.sigmoid(params["p"])
    parts = [dist.Exponential(1.0).log_prob(y), dist.LogNormal(0.0, 1.0).log_prob(y)]
    expected = torch.logaddexp(parts[0] + torch.log1p(-p), parts[1] + p.log())
    found = log_posterior(params, (y,)).log_lik
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(SiteError, match="site 'y': an observed value"):
        ps.explain(model, (-y,))


# ------------------------------------------------------------------ validation is the user's word


def shares(validate, y):
    """A likelihood that is defined beyond its support, as of images between 0 and 1."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=w, validate_args=validate), obs=y)


def test_a_site_without_validation_is_not_checked_against_its_support():
    y = torch.sigmoid(Y)
    explained = ps.explain(functools.partial(shares, False), (y,))
    assert "observed" in str(explained)
    for validate in (None, True):
        with pytest.raises(SiteError, match=r"site 'y': .*outside the support"):
            ps.explain(functools.partial(shares, validate), (y,))
    with pyro.validation_enabled(False):
        ps.explain(functools.partial(shares, None), (y,))
    assert pyro.infer.util.is_validation_enabled()


def test_a_density_that_is_nan_stops_without_validation_too():
    with pyro.validation_enabled(False), pytest.raises(SiteError, match="density is NaN"):
        ps.explain(functools.partial(shares, False), (torch.full((N,), torch.nan),))
