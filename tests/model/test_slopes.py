"""Gradients that something cuts are said, and no others."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import Doubled, normals
from repetitions import long_but
from torch import nn

import pyro_scale as ps
from pyro_scale.errors import ModelWarning, PyroScaleWarning

X = normals(60, 3, seed=1)
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3 * normals(60, seed=2)
HOW = {"num_samples": 2, "warmup_steps": 1, "thinning": 1, "num_chains": 2}
QUIET = {"seed": 0, "progress": False}


def without_gradient(value):
    with torch.no_grad():
        return 1.0 * value


CUTS = {
    "detach": lambda value: value.detach(),
    "data": lambda value: value.data,
    "no_grad": without_gradient,
    "some of it": lambda value: torch.cat([value[:1].detach(), value[1:]]),
}
WHOLE = {
    "nothing": lambda value: value,
    "a function of its own": lambda value: Doubled.apply(value) / 2,
    "a kink": lambda value: value.abs(),
    "a step": lambda value: value + torch.round(value),
    "a bound": lambda value: value.clamp(-0.3, 0.3),
    "no way": lambda value: 0 * value,
    "a unit that is dead": lambda value: torch.relu(value - 10.0),
    "a unit at its bound": lambda value: torch.relu(value.detach() - value) + value,
}


def model_of(change, dtype):
    def model(x, y=None):
        zeros = torch.zeros(3, dtype=dtype)
        w = pyro.sample("w", dist.Normal(zeros, 1.0).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(torch.ones((), dtype=dtype)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ change(w), sd), obs=y)

    return model


def told(model, data, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.SGLD(model, lr=1e-6, compile=False).run(data, **HOW, **QUIET, **options)
    found = [str(each.message) for each in caught if issubclass(each.category, ModelWarning)]
    return [message for message in found if "its gradient does not" in message]


@pytest.mark.parametrize("scale", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_named_by_site_and_latent(name, dtype, scale):
    data = X.to(dtype), scale * Y.to(dtype)
    (message,) = told(model_of(CUTS[name], dtype), data, batch_size=20)
    start = "site 'y': its log density depends on 'w', and its gradient does not"
    assert message.startswith(start)
    assert message.endswith("symptoms.html#cut-gradient")


@pytest.mark.parametrize("scale", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WHOLE)
def test_no_other_model_is_accused(name, dtype, scale):
    assert told(model_of(WHOLE[name], dtype), (X.to(dtype), scale * Y.to(dtype))) == []


@pytest.mark.parametrize("method", long_but(["Laplace", "MAP", "VI", "NUTS"], "Laplace"))
def test_every_method_says_so(method):
    how = {"num_steps": 2} if method in ("MAP", "VI") else {}
    how |= {"num_samples": 5, "warmup_steps": 5, "num_chains": 1} if method == "NUTS" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", PyroScaleWarning)
        warnings.simplefilter("always", ModelWarning)
        getattr(ps, method)(model_of(CUTS["detach"], torch.float64)).run((X, Y), **how, **QUIET)
    assert any("depends on 'w', and its gradient does not" in str(each.message) for each in caught)


def test_a_network_of_more_sites_than_groups():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.ReLU(), *[nn.Linear(8, 8), nn.ReLU()] * 4, nn.Linear(8, 1)]
    bnn = ps.bayesianize(nn.Sequential(*layers))

    def model(x, y, cut):
        mean = bnn(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean.detach() if cut else mean, 0.3), obs=y)

    data = X.float(), Y.float()
    assert told(lambda x, y: model(x, y, cut=False), data) == []
    (message,) = told(lambda x, y: model(x, y, cut=True), data)
    assert message.startswith("site 'y'")
