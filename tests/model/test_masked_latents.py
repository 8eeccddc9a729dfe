"""Latents of which masks leave elements out: those of `obs_mask=`, and others."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import initialize, weights
from pyro import poutine
from pyro.infer import config_enumerate
from reference import normals

import pyro_scale as ps
from pyro_scale.data.open import open_data
from pyro_scale.errors import SiteError
from pyro_scale.marginal.summed import sum_out
from pyro_scale.model.diagnose import improper_latents

pytestmark = pytest.mark.usefixtures("float64")

N = 24
X = normals(N)
SEEN = normals(N, seed=1) < 0.6
Y = 1.0 + 2.0 * X + normals(N, seed=2)
WITH_NAN = torch.where(SEEN, Y, torch.nan)
DESIGN = torch.stack([torch.ones(N).double(), X], 1)


def with_intercept(x, y=None, seen=None, likelihood=lambda mean: dist.Normal(mean, 1.0)):
    b = weights(sd=5.0, name="b")
    with pyro.plate("data", len(x)):
        return pyro.sample("y", likelihood(b[0] + b[1] * x), obs=y, obs_mask=seen)


def exact_coefficients():
    """(Mean, covariance) of b given the rows that were seen."""
    precision = DESIGN[SEEN].T @ DESIGN[SEEN] + torch.eye(2) / 25
    covariance = torch.linalg.inv(precision)
    return covariance @ DESIGN[SEEN].T @ Y[SEEN], covariance


def log_evidence():
    covariance = 25 * DESIGN[SEEN] @ DESIGN[SEEN].T + torch.eye(int(SEEN.sum()))
    mean = torch.zeros(len(covariance))
    return dist.MultivariateNormal(mean, covariance).log_prob(Y[SEEN])


@pytest.mark.parametrize("y", [Y, WITH_NAN], ids=["numbers", "NaN"])
@pytest.mark.parametrize("structure", ["dense", "diag"])
def test_the_log_joint_is_that_of_seen_rows_and_imputed_values(y, structure):
    log_posterior = ps.LogPosterior(with_intercept, num_data=N)
    b, missing = torch.tensor([0.3, -0.4]), normals(int((~SEEN).sum()), seed=3)
    log_posterior.init(0, X, y, SEEN)
    params = {"b": b, "y_unobserved": missing}
    expected = dist.Normal(0.0, 5.0).log_prob(b).sum()
    expected += dist.Normal((DESIGN @ b)[SEEN], 1.0).log_prob(Y[SEEN]).sum()
    expected += dist.Normal((DESIGN @ b)[~SEEN], 1.0).log_prob(missing).sum()
    gradient, evaluation = log_posterior.grad(params, (X, y, SEEN))
    torch.testing.assert_close(evaluation.log_joint, expected)
    torch.testing.assert_close(gradient["y_unobserved"], (DESIGN @ b)[~SEEN] - missing)
    values = log_posterior.constrain(params)["y_unobserved"]
    assert torch.equal(values[SEEN], Y[SEEN])
    assert torch.equal(values[~SEEN], missing)
    back = log_posterior.unconstrain({"b": b, "y_unobserved": values})
    torch.testing.assert_close(back, params)


@pytest.mark.parametrize("y", [Y, WITH_NAN], ids=["numbers", "NaN"])
def test_laplace_has_the_posterior_and_the_evidence_of_the_seen_rows(y):
    fit = ps.Laplace(with_intercept, structure="dense").run((X, y, SEEN), seed=0)
    mean, covariance = exact_coefficients()
    torch.testing.assert_close(fit.fit.centers[0, :2], mean, rtol=1e-6, atol=1e-6)
    own = fit.fit.gaussians[0].covariance[:2, :2]
    torch.testing.assert_close(own, covariance, rtol=1e-6, atol=1e-6)
    assert fit.fit.attrs["log_evidence"][0] == pytest.approx(float(log_evidence()), abs=1e-6)
    draws = fit.get_samples()
    for name in ("y", "y_unobserved"):
        assert torch.equal(draws[name][:, SEEN], Y[SEEN].expand(1_000, -1))
    new = DESIGN[~SEEN]
    expected = new @ mean
    sds = (1 + (new @ covariance * new).sum(1)).sqrt()
    z_scores = (draws["y"][:, ~SEEN].mean(0) - expected) / sds * 1_000**0.5
    assert float(z_scores.abs().max()) < 4


@pytest.mark.slow
@pytest.mark.parametrize("method", [ps.BAOA, ps.NUTS])
def test_samplers_have_the_posterior_of_the_seen_rows(method):
    run = method(with_intercept).run((X, WITH_NAN, SEEN), seed=0, progress=False)
    assert run.report().verdict == "yes"
    mean, covariance = exact_coefficients()
    draws = run.get_samples()
    off = (draws["b"].mean(0) - mean) / covariance.diagonal().sqrt()
    assert float(off.abs().max()) < 0.1
    ratio = draws["b"].std(0) / covariance.diagonal().sqrt()
    assert float((ratio - 1).abs().max()) < 0.06
    assert torch.equal(draws["y"][:, SEEN], Y[SEEN].expand(len(draws["y"]), -1))
    assert float(draws["y"][:, ~SEEN].std(0).min()) > 0.9


def test_where_all_were_seen_there_is_nothing_to_impute():
    everything = torch.ones(N, dtype=torch.bool)
    log_posterior, _ = initialize(with_intercept, X, Y, everything, num_data=N)
    assert log_posterior.latents == ("b",)
    params = {"b": torch.tensor([0.3, -0.4])}
    plain = ps.LogPosterior(with_intercept, num_data=N)(params, (X, Y))
    assert torch.equal(log_posterior(params, (X, Y, everything)).log_joint, plain.log_joint)
    fit = ps.Laplace(with_intercept).run((X, Y, everything), seed=0)
    assert torch.equal(fit.get_samples()["y"], Y.expand(1_000, N))


def gamma_of(mean):
    return dist.Gamma(2.0, torch.exp(mean / 5))


def test_jacobians_are_of_the_imputed_values_alone():
    log_posterior = ps.LogPosterior(
        functools.partial(with_intercept, likelihood=gamma_of), num_data=N
    )
    b, logs = torch.tensor([0.3, -0.4]), normals(int((~SEEN).sum()), seed=3)
    data = (X, WITH_NAN.abs(), SEEN)
    log_posterior.init(0, *data)
    value = log_posterior({"b": b, "y_unobserved": logs}, data)
    likelihood = gamma_of(DESIGN @ b)
    whole = torch.where(SEEN, Y.abs(), torch.ones(N).double().masked_scatter(~SEEN, logs.exp()))
    expected = dist.Normal(0.0, 5.0).log_prob(b).sum() + likelihood.log_prob(whole).sum()
    torch.testing.assert_close(value.log_joint, expected + logs.sum())


@pytest.mark.parametrize("batch_size", [N, 8])
@pytest.mark.parametrize(
    "likelihood",
    [
        gamma_of,
        lambda mean: dist.LogNormal(mean, 1.0),
        lambda mean: dist.Weibull(mean.exp(), 1.5),
        lambda mean: dist.Pareto(mean.exp() / 100, 3.0),
    ],
)
def test_values_that_a_mask_leaves_out_may_be_nan(likelihood, batch_size):
    def model(x, y, seen):
        b = weights(sd=5.0, name="b")
        with pyro.plate("data", len(x)), poutine.mask(mask=seen):
            pyro.sample("y", likelihood(b[0] + b[1] * x), obs=y)

    log_posterior = ps.LogPosterior(model, num_data=N)
    b = torch.tensor([0.3, -0.4]).requires_grad_()
    log_joint = dist.Normal(0.0, 5.0).log_prob(b).sum()
    y = torch.where(SEEN, 3.0 + Y.abs(), torch.nan)
    log_joint = log_joint + likelihood((DESIGN @ b)[SEEN]).log_prob(y[SEEN]).sum()
    found = [
        log_posterior.grad({"b": b.detach()}, tuple(each[part] for each in (X, y, SEEN)))
        for part in torch.arange(N).split(batch_size)
    ]
    values = torch.stack([evaluation.log_joint for _, evaluation in found])
    torch.testing.assert_close(values.mean(), log_joint.detach())
    (gradient,) = torch.autograd.grad(log_joint, b)
    torch.testing.assert_close(torch.stack([each["b"] for each, _ in found]).mean(0), gradient)


KEPT = torch.tensor([True, True, False, True])


def in_plate(prior, mask):
    with pyro.plate("groups", 4), poutine.mask(mask=mask):
        return pyro.sample("z", prior)


def in_event(prior, mask):
    return pyro.sample("z", prior.expand([4]).mask(mask).to_event(1))


def in_both(prior, mask):
    with pyro.plate("pairs", 2), poutine.mask(mask=mask[:2] | True):
        return pyro.sample("z", prior.expand([2, 2]).mask(mask.reshape(2, 2)).to_event(1)).flatten()


@pytest.mark.parametrize("write", [in_plate, in_event, in_both])
@pytest.mark.parametrize(
    "prior", [dist.Normal(1.0, 2.0), dist.Gamma(2.0, 3.0), dist.Beta(2.0, 3.0)]
)
def test_elements_that_nothing_depends_on_leave_the_params(write, prior):
    def model(y):
        z = write(prior, KEPT)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z[0] + z[3], 1.0), obs=y)

    def without(y):
        with pyro.plate("groups", 3):
            z = pyro.sample("z", prior)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z[0] + z[2], 1.0), obs=y)

    params = {"z": torch.tensor([0.2, -0.3, 0.5])}
    own, other = (ps.LogPosterior(each, num_data=100) for each in (model, without))
    for log_posterior in (own, other):
        log_posterior.init(0, Y[:8])
    assert own.layout == other.layout
    torch.testing.assert_close(own.grad(params, (Y[:8],)), other.grad(params, (Y[:8],)))
    values = own.constrain(params)["z"].flatten()
    assert torch.equal(values[KEPT], other.constrain(params)["z"])


def test_elements_of_several_numbers_leave_whole():
    def model(y):
        z = in_plate(dist.Dirichlet(torch.ones(3)), KEPT)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z[0, 0] + z[3, 1], 1.0), obs=y)

    log_posterior, _ = initialize(model, Y[:8], num_data=8)
    assert log_posterior.layout.shapes == ((3, 2),)
    values = log_posterior.constrain({"z": normals(3, 2)})["z"]
    torch.testing.assert_close(values.sum(-1), torch.ones(4))


def test_elements_that_something_depends_on_stay_with_a_flat_prior():
    def model(y):
        z = in_plate(dist.Normal(0.0, 1.0), KEPT)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z[torch.arange(len(y)) % 4], 1.0), obs=y)

    log_posterior, params = initialize(model, Y[:8], num_data=8)
    assert params["z"].shape == (4,)
    assert improper_latents(log_posterior, params, (Y[:8],)) == ["z"]
    gradient, _ = log_posterior.grad(params, (Y[:8],))
    expected = (Y[:8].reshape(2, 4) - params["z"]).sum(0) - torch.where(KEPT, params["z"], 0)
    torch.testing.assert_close(gradient["z"], expected)


def test_missing_covariates_are_imputed_by_what_depends_on_them():
    def model(x, y, seen):
        b = weights(sd=5.0, name="b")
        with pyro.plate("data", len(x)):
            x = pyro.sample("x", dist.Normal(0.0, 1.0), obs=x, obs_mask=seen)
            pyro.sample("y", dist.Normal(b[0] + b[1] * x, 1.0), obs=y)

    log_posterior = ps.LogPosterior(model, num_data=N)
    data = (torch.where(SEEN, X, torch.nan), Y, SEEN)
    log_posterior.init(0, *data)
    b, missing = torch.tensor([0.3, -0.4]), normals(int((~SEEN).sum()), seed=3)
    gradient, _ = log_posterior.grad({"b": b, "x_unobserved": missing}, data)
    expected = -missing + b[1] * (Y[~SEEN] - b[0] - b[1] * missing)
    torch.testing.assert_close(gradient["x_unobserved"], expected)


def test_a_mask_that_depends_on_a_latent_is_refused():
    def model(y):
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        in_plate(dist.Normal(0.0, 1.0), torch.arange(4) < 2 + 3 * scale)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(scale, 1.0), obs=y)

    with pytest.raises(SiteError, match="site 'z': its mask depends on another latent"):
        ps.explain(model, Y)


@pytest.mark.parametrize("seen", [SEEN, torch.ones(N, dtype=torch.bool)])
def test_imputed_values_are_summed_out_of_minibatches(seen):
    def masked(x, y, seen):
        b = weights(sd=5.0, name="b")
        with pyro.plate("data", len(x)), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(b[0] + b[1] * x, 1.0), obs=y)

    (row,) = [
        row
        for row in ps.explain(with_intercept, (X, Y, seen), batch_size=8).rows
        if row["kind"] == "local"
    ]
    assert row["site"] == "y_unobserved"
    summed = sum_out(ps.LogPosterior(with_intercept), open_data((X, Y, seen), 8), seed=0)
    params = {"b": torch.tensor([0.3, -0.4], dtype=X.dtype)}
    log_lik = summed.log_posterior(params, summed.data.arguments).log_lik
    expected = ps.LogPosterior(masked, num_data=N)(params, (X, Y, seen)).log_lik
    torch.testing.assert_close(log_lik, expected, rtol=1e-5, atol=1e-5)
    assert ps.explain(masked, (X, WITH_NAN, SEEN), batch_size=8).warnings == ()


def test_discrete_values_are_summed_out_or_the_way_out_is_told():
    binary = functools.partial(with_intercept, likelihood=lambda mean: dist.Bernoulli(logits=mean))
    labels = (Y > 0).double()
    with pytest.raises(SiteError, match=r"'y_unobserved': obs_mask= makes .*config_enumerate"):
        ps.explain(binary, (X, labels, SEEN))
    counts = functools.partial(with_intercept, likelihood=lambda mean: dist.Poisson(mean.exp()))
    with pytest.raises(SiteError, match=r"a Poisson cannot be enumerated.*poutine.mask"):
        ps.explain(counts, (X, labels, SEEN))
    params = {"b": torch.tensor([0.3, -0.4])}
    summed_out = ps.LogPosterior(config_enumerate(binary, "parallel"), num_data=N)
    seen = ps.LogPosterior(binary, num_data=int(SEEN.sum()))
    torch.testing.assert_close(
        summed_out(params, (X, labels, SEEN)).log_joint,
        seen(params, (X[SEEN], labels[SEEN])).log_joint,
    )


def test_starts_files_and_later_runs_know_the_params(tmp_path):
    starts = {"b": torch.zeros(2, 2), "y_unobserved": torch.full((2, N), 3.0)}
    sampler = ps.SGLD(with_intercept, lr=1e-9, init_strategy=starts)
    run = {"num_samples": 2, "warmup_steps": 0, "thinning": 1, "num_chains": 2, "progress": False}
    draws = sampler.run((X, Y, SEEN), **run, seed=0).get_samples()
    assert torch.allclose(draws["y_unobserved"][:, ~SEEN], torch.tensor(3.0), atol=1e-2)
    fit = ps.Laplace(with_intercept).run((X, Y, SEEN), seed=0)
    fit.save(tmp_path / "fit")
    loaded = ps.Laplace.load(tmp_path / "fit", with_intercept)
    torch.testing.assert_close(loaded.get_samples(), fit.get_samples(), rtol=0, atol=0)
    again = fit.get_samples()["b"]
    assert torch.equal(fit.run((X, Y, SEEN), seed=0).get_samples()["b"], again)
    other = fit.run((X, Y, ~SEEN), seed=0).get_samples()
    assert torch.equal(other["y"][0, ~SEEN], Y[~SEEN])


def test_predictions_of_new_rows_and_of_rows_that_are_missing_now():
    fit = ps.Laplace(with_intercept, structure="dense").run((X, Y, SEEN), seed=0)
    mean, covariance = exact_coefficients()
    spread = (1 + (DESIGN @ covariance * DESIGN).sum(1)).sqrt()
    new = fit.predict(X)["y"]
    flipped = fit.predict(X, Y, ~SEEN, return_sites=["y"])["y"]
    for values in (new, flipped):
        assert values.shape == (1_000, N)
        z_scores = (values.mean(0) - DESIGN @ mean) / spread * 1_000**0.5
        assert float(z_scores.abs().max()) < 4.5
        assert float((values.std(0) / spread - 1).abs().max()) < 0.12
