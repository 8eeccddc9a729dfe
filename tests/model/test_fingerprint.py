"""Numbers that tell models and data apart whose sites and shapes are the same."""

import math

import pyro
import pyro.distributions as dist
import torch

from pyro_scale.model.fingerprint import first_difference, model_fingerprint
from pyro_scale.model.log_posterior import LogPosterior

X = torch.linspace(-1.0, 2.0, 24).reshape(8, 3).double().sin()
Y = torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 1]).double()
AT_ZERO = {"w": torch.zeros(3).double()}


def fingerprint(x=X, prior=1.0, slope=1.0, y=Y):
    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3).double(), prior).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=slope * (x @ w)), obs=y)

    log_posterior = LogPosterior(model, len(y))
    log_posterior.prepare((y,))
    return model_fingerprint(log_posterior, AT_ZERO, (y,))


def test_they_are_the_log_prior_and_the_log_likelihood():
    found = list(fingerprint().values())
    log_prior = dist.Normal(0.0, 1.0).log_prob(AT_ZERO["w"]).sum()
    assert found[0] == float(log_prior)
    assert math.isclose(found[1], 8 * math.log(0.5))
    beside = 0.1 * torch.tensor([1.0, 2.0, 3.0]).double().sin()
    expected = dist.Bernoulli(logits=X @ beside).log_prob(Y).sum()
    assert math.isclose(found[3], float(expected), rel_tol=1e-12)


def test_at_weights_of_zero_the_second_point_tells_covariates_apart():
    here = fingerprint()
    for other in (fingerprint(x=2 * X), fingerprint(x=X[:, [1, 0, 2]]), fingerprint(slope=2.0)):
        assert first_difference(here, other, 1e-6).startswith("the log likelihood beside it")
    assert first_difference(here, fingerprint(prior=2.0), 1e-6).startswith(
        "the log prior at the start"
    )
    assert first_difference(here, fingerprint(y=1 - Y), 1e-6) is not None
    assert first_difference(here, fingerprint(), 0.0) is None


def test_rounding_is_no_difference_and_nan_is_a_number():
    then = {"a": 1e6, "b": math.nan, "c": 0.0}
    assert first_difference(then, {"a": 1e6 + 1, "b": math.nan, "c": 1e-6}, 1e-5) is None
    assert first_difference(then, {**then, "a": 1e6 + 20}, 1e-5) == "the a was 1000000, is 1000020"
    assert first_difference(then, {**then, "b": 0.0}, 1e-5) == "the b was nan, is 0"
    assert first_difference(then, {"a": 1e6, "b": math.nan}, 1e-5) is not None


def test_where_a_density_cannot_be_had_the_numbers_are_nan():
    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3).double(), 1.0).to_event(1))
        matrix = torch.eye(3).double() * (0.01 - w.square().sum())  # definite at zero alone
        scale = torch.linalg.cholesky(matrix)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(scale[0, 0], 1.0), obs=y)

    log_posterior = LogPosterior(model, 8)
    log_posterior.prepare((Y,), lambda site: torch.zeros(3).double())
    found = model_fingerprint(log_posterior, AT_ZERO, (Y,))
    assert [math.isnan(value) for value in found.values()] == [False, False, True, True]
