"""Models in which nothing is observed, and masks and totals that leave nothing of what is."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import weights
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ModelError, ModelWarning, SiteError

X = torch.linspace(-1.0, 1.0, 24).reshape(12, 2)
Y = (X[:, 0] > 0).float()
NOTHING = "no observed site and no factor"


def linear_model(x, y=None, likelihood=lambda eta: dist.Normal(eta, 1.0), infer=None):
    w = weights()
    with pyro.plate("data", len(x)):
        return pyro.sample("y", likelihood(x @ w), obs=y, infer=infer)


def bernoulli_of(eta):
    return dist.Bernoulli(logits=eta)


enumerated = functools.partial(
    linear_model, likelihood=bernoulli_of, infer={"enumerate": "parallel"}
)

METHODS = {
    "BAOA": lambda m: ps.BAOA(m).run((X,), seed=0, progress=False),
    "SGLD": lambda m: ps.SGLD(m, lr=0.1).run((X,), seed=0, progress=False),
    "GHMC": lambda m: ps.GHMC(m).run((X,), seed=0, progress=False),
    "NUTS": lambda m: ps.NUTS(m).run((X,), seed=0, progress=False),
    "Laplace": lambda m: ps.Laplace(m).run((X,), seed=0),
    "VI": lambda m: ps.VI(m).run((X,), num_steps=5, seed=0),
    "MAP": lambda m: ps.MAP(m).run((X,), num_steps=5, seed=0),
    "EKF": lambda m: ps.EKF(m).run((X,), seed=0, batch_size=1),
    "IVON": lambda m: ps.IVON(m).run((X,), num_steps=5, seed=0),
    "SVGD": lambda m: ps.SVGD(m).run((X,), num_steps=5, seed=0),
    "step": lambda m: ps.BAOA(m, lr=0.1, friction=1.0, num_data=12).step(X),
    "step of MAP": lambda m: ps.MAP(m, num_data=12).step(X),
    "minibatches": lambda m: ps.BAOA(m).run((X,), batch_size=3, seed=0, progress=False),
    "a loader": lambda m: ps.BAOA(m).run(DataLoader(TensorDataset(X), 3), seed=0, progress=False),
    "explain": lambda m: ps.explain(m, (X,)),
    "LogPosterior": lambda m: ps.LogPosterior(m, num_data=12).init(0, X),
}


@pytest.mark.parametrize("likelihood", [linear_model, enumerated])
@pytest.mark.parametrize("method", METHODS)
def test_no_method_draws_from_the_prior_of_a_model_that_observes_nothing(method, likelihood):
    with pytest.raises(ModelError, match=f"{NOTHING}.*'y', by which site 'y' in plate 'data'") as e:
        METHODS[method](likelihood)
    assert e.value.code == "no-observation"
    assert "pyro.infer.Predictive" in str(e.value)


@pytest.mark.parametrize(
    "likelihood",
    [lambda eta: dist.Normal(eta, 1.0), bernoulli_of, lambda eta: dist.Poisson(eta.exp())],
    ids=["real", "binary", "counts"],
)
def test_the_reason_is_the_argument_only_where_passing_it_would_help(likelihood):
    def forgotten(x, y=None):
        w = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", likelihood(x @ w))

    with pytest.raises(ModelError, match=r"argument 'y', by which site 'y' .* is None: pass y"):
        ps.explain(functools.partial(linear_model, likelihood=likelihood), (X,))
    for data in ((X,), (X, Y)):
        with pytest.raises(ModelError, match=r"site 'y' in plate 'data' looks .* give its .* obs="):
            ps.explain(forgotten, data)


def test_the_argument_is_found_whatever_it_is_called():
    def renamed(x, mask=None, labels=None):
        w = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=labels)

    class Module(nn.Module):
        def forward(self, x, y=None):
            return linear_model(x, y)

    for each, name, data in (
        (renamed, "labels", (X,)),
        (renamed, "labels", {"x": X}),
        (functools.partial(linear_model, y=None), "y", (X,)),
        (Module(), "y", (X,)),
        (poutine.condition(linear_model, data={"z": Y}), "y", (X,)),
        (poutine.scale(linear_model, scale=2.0), "y", (X,)),
    ):
        with pytest.raises(ModelError, match=f"argument '{name}', by which site 'y'"):
            ps.LogPosterior(each, num_data=12).prepare(data)


def test_sites_without_a_plate_are_found_by_their_rows_and_weights_are_not_blamed():
    def no_plate(x):
        pyro.sample("y", dist.Normal(x @ weights(), 1.0))

    def no_likelihood(x):
        return x @ weights()

    net = ps.bayesianize(nn.Linear(2, 12))
    with pytest.raises(ModelError, match="site 'y' looks like the data's"):
        ps.explain(no_plate, X)
    with pytest.raises(ModelError, match=f"{NOTHING}.*give the likelihood's pyro.sample obs="):
        ps.explain(no_likelihood, X)
    with pytest.raises(ModelError, match=r"is a network: .* a model that observes its output"):
        ps.explain(net, X)


def test_what_reparam_replaces_and_deterministic_sites_are_no_observations():
    def hierarchy(x):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        effect = pyro.sample("effect", dist.Normal(torch.zeros(3), scale).to_event(1))
        pyro.deterministic("sum", effect.sum())

    noncentered = poutine.reparam(hierarchy, config={"effect": LocScaleReparam(0.0)})
    for each in (hierarchy, noncentered):
        with pytest.raises(ModelError, match=NOTHING):
            ps.explain(each, X)


@pytest.mark.parametrize(
    "observe",
    [
        lambda x, w: pyro.factor("f", -(w**2).sum()),
        lambda x, w: pyro.sample("known", dist.Normal(w.sum(), 1.0), obs=torch.tensor(1.0)),
    ],
    ids=["a factor", "a site outside of the plate"],
)
def test_one_observation_of_any_kind_is_enough(observe):
    with pytest.warns(ModelWarning, match="no site follows the rows"):
        ps.Laplace(lambda x: observe(x, weights())).run((X,), seed=0)


def test_conditioned_models_and_functions_have_their_data():
    conditioned = poutine.condition(linear_model, data={"y": Y})
    assert ps.explain(conditioned, X).num_data == 12
    log_posterior = ps.LogPosterior.from_function(
        lambda params, batch: -params["w"].square().sum() / 2, {"w": torch.ones(2)}, num_data=1
    )
    draws = ps.NUTS(log_posterior).run(None, seed=0, num_samples=50, progress=False)
    assert draws.get_samples()["w"].shape == (200, 2)


def left_out(x, mask, value=Y, likelihood=lambda eta: dist.Normal(eta, 1.0)):
    w = weights()
    with pyro.plate("data", len(x)), poutine.mask(mask=mask):
        pyro.sample("y", likelihood(x @ w), obs=value)


NONE = torch.zeros(12, dtype=torch.bool)
ZEROS = torch.zeros(12)


@pytest.mark.parametrize(
    ("each", "data", "why"),
    [
        (left_out, (X, NONE), "mask leaves out every element"),
        (functools.partial(left_out, mask=False), (X,), "mask leaves out every element"),
        (
            functools.partial(
                left_out,
                mask=True,
                value=Y * torch.nan,
                likelihood=lambda eta: dist.NanMaskedNormal(eta, 1.0),
            ),
            (X,),
            "mask leaves out every element",
        ),
        (
            functools.partial(
                left_out,
                mask=True,
                value=ZEROS,
                likelihood=lambda eta: dist.Binomial(ZEROS, logits=eta),
            ),
            (X,),
            "all of its totals are 0",
        ),
    ],
    ids=["a mask", "False", "NaN", "totals"],
)
def test_what_leaves_nothing_of_the_observations_is_refused(each, data, why):
    with pytest.raises(ModelError, match=f"site 'y': .*{why}.*learn nothing"):
        ps.Laplace(each).run(data, seed=0)


def test_batches_without_a_value_are_refused_only_where_no_batch_has_one():
    some = torch.arange(12) >= 6  # the first batch has none
    run = {"batch_size": 3, "num_samples": 5, "warmup_steps": 5, "thinning": 1, "num_chains": 1}
    sampler = ps.SGLD(lambda x, y, mask: left_out(x, mask, y), lr=1e-3)
    sampler.run((X, Y, some), **run, seed=0, progress=False)
    with pytest.raises(ModelError, match="mask leaves out every element"):
        sampler.run((X, Y, NONE), **run, seed=0, progress=False)


def test_totals_of_zero_in_some_rows_add_nothing():
    totals = torch.tensor([0.0, 3.0] * 6)
    counts = torch.minimum(totals, torch.arange(12.0) % 4)

    def binomial(x, totals, counts):
        w = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Binomial(totals, logits=x @ w), obs=counts)

    some = totals > 0
    whole, part = (
        ps.Laplace(binomial).run(data, seed=0)
        for data in ((X, totals, counts), (X[some], totals[some], counts[some]))
    )
    torch.testing.assert_close(whole.get_samples(), part.get_samples(), rtol=1e-4, atol=1e-4)


def test_a_site_that_a_mask_leaves_out_beside_another_is_warned_of():
    def both(x, y, mask):
        left_out(x, mask, y)
        pyro.sample("other", dist.Normal(x[:, 0].mean(), 1.0), obs=torch.tensor(0.0))

    with pytest.warns(ModelWarning, match="site 'y': its mask leaves out every element"):
        ps.Laplace(both).run((X, Y, NONE), seed=0)


@pytest.mark.parametrize("shape", [(12, 1), (7,), (2, 12)])
@pytest.mark.parametrize("imputes", [False, True])
def test_masks_of_another_shape_are_refused(shape, imputes):
    mask = torch.ones(shape, dtype=torch.bool)

    def imputing(x, y):
        w = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y, obs_mask=mask)

    each = imputing if imputes else lambda x, y: left_out(x, mask, y)
    with pytest.raises(ModelError, match=rf"site 'y.*': its mask has shape .*{shape[0]}.*\[12\]"):
        ps.explain(each, (X, Y))


def test_masks_that_are_no_booleans_are_refused():
    with pytest.raises(ModelError, match=r"a mask is not of booleans .*mask.bool\(\)"):
        ps.explain(left_out, (X, torch.ones(12)))


@pytest.mark.parametrize("value", [[0.0] * 12, Y.numpy(), 3.0])
def test_observed_values_that_are_no_tensors_are_refused(value):
    def linear_model(x):
        mean = x @ weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=value)

    with pytest.raises(SiteError, match=r"site 'y': its obs= is a .*pass a tensor"):
        ps.explain(linear_model, X)


def test_a_mask_without_observations_is_refused():
    def without(x, y, mask):
        w = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs_mask=mask)
            pyro.sample("other", dist.Normal(w[0], 1.0), obs=y)

    with pytest.raises(ModelError, match=r"site 'y': .*obs_mask= and without obs="):
        ps.explain(without, (X, Y, ~NONE))
