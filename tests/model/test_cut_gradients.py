"""Gradients that something cuts are said, and no others."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import Doubled, normals
from repetitions import long_but
from runs import QUIET
from torch import nn

import pyro_scale as ps
from pyro_scale.errors import ModelWarning, PyroScaleWarning
from pyro_scale.model.diagnose import cut_gradients

X = normals(60, 3, seed=1)
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3 * normals(60, seed=2)
HOW = {"num_samples": 2, "warmup_steps": 1, "thinning": 1, "num_chains": 2}


def without_gradient(value):
    with torch.no_grad():
        return 1.0 * value


CUTS = {
    "detach": lambda value: value.detach(),
    "data": lambda value: value.data,
    "no_grad": without_gradient,
    "its mean": lambda value: value.detach().mean().expand(3),
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


def changed(change, dtype):
    def model(x, y=None):
        zeros = torch.zeros(3, dtype=dtype)
        w = pyro.sample("w", dist.Normal(zeros, 1.0).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(torch.ones((), dtype=dtype)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ change(w), sd), obs=y)

    return model


def cut_warnings(model, data, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.SGLD(model, lr=1e-6, compile=False).run(data, **HOW, **QUIET, **options)
    assert not [each for each in caught if "requires_grad" in str(each.message)]
    found = [str(each.message) for each in caught if issubclass(each.category, ModelWarning)]
    return [message for message in found if "its gradient does not" in message]


@pytest.mark.parametrize("scale", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_named_by_site_and_latent(name, dtype, scale):
    data = X.to(dtype), scale * Y.to(dtype)
    (message,) = cut_warnings(changed(CUTS[name], dtype), data, batch_size=20)
    start = "site 'y': its log density depends on 'w', and its gradient does not"
    assert message.startswith(start)
    assert message.endswith("symptoms.html#cut-gradient")


@pytest.mark.parametrize("scale", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WHOLE)
def test_no_other_model_is_accused(name, dtype, scale):
    assert cut_warnings(changed(WHOLE[name], dtype), (X.to(dtype), scale * Y.to(dtype))) == []


@pytest.mark.parametrize("method", long_but(["Laplace", "MAP", "VI", "NUTS"], "Laplace"))
def test_every_method_says_so(method):
    how = {"num_steps": 2} if method in ("MAP", "VI") else {}
    how |= {"num_samples": 5, "warmup_steps": 5, "num_chains": 1} if method == "NUTS" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", PyroScaleWarning)
        warnings.simplefilter("always", ModelWarning)
        getattr(ps, method)(changed(CUTS["detach"], torch.float64)).run((X, Y), **how, **QUIET)
    assert any("depends on 'w', and its gradient does not" in str(each.message) for each in caught)


def half_linear(value):
    return torch.where(value > 0, value, 0.0)


@pytest.mark.parametrize(
    "kinked",
    [torch.relu, half_linear, nn.functional.relu6, lambda v: torch.relu(v - 1e-5), torch.abs],
)
def test_a_start_at_a_kink_is_not_accused(kinked):
    """Of its gradients there, torch has 0."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ kinked(w), 1.0), obs=y)

    start = {"w": torch.zeros(2, 3, dtype=torch.float64)}
    data, how = (X, Y), {**HOW, **QUIET}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.SGLD(model, lr=1e-6, compile=False, init_strategy=start).run(data, **how)
    assert not [each for each in caught if "its gradient does not" in str(each.message)]


def test_a_model_that_raises_elsewhere_is_not_accused():
    def model(y):
        r = pyro.sample("r", dist.Normal(0.0, 1.0))
        if float(r.detach()) > 0.5:
            raise ZeroDivisionError
        pyro.sample("y", dist.Normal(r.detach(), 1.0), obs=y)

    log_posterior = ps.LogPosterior(model, num_data=1)
    log_posterior.prepare((torch.zeros(()),), lambda site: torch.tensor(0.1))
    data, away, near = (torch.zeros(()),), {"r": torch.tensor(0.1)}, {"r": torch.tensor(0.45)}
    assert cut_gradients(log_posterior, away, data) == {"y": ["r"]}
    assert cut_gradients(log_posterior, near, data) == {}


def test_many_observed_sites_cost_few_runs(monkeypatch):
    runs = []
    run = ps.LogPosterior.run
    monkeypatch.setattr(ps.LogPosterior, "run", lambda *a, **k: runs.append(0) or run(*a, **k))

    def model(ys):
        for i in range(20):
            b = pyro.sample(f"b{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y{i}", dist.Normal(b, 1.0), obs=ys[i])

    log_posterior = ps.LogPosterior(model, num_data=20)
    log_posterior.prepare((torch.randn(20),))
    runs.clear()
    params = {f"b{i}": torch.tensor(0.1) for i in range(20)}
    assert cut_gradients(log_posterior, params, (torch.randn(20),)) == {}
    assert len(runs) == 1


def test_a_network_of_more_sites_than_groups():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.ReLU(), *[nn.Linear(8, 8), nn.ReLU()] * 4, nn.Linear(8, 1)]
    bnn = ps.bayesianize(nn.Sequential(*layers))

    def model(x, y, cut):
        mean = bnn(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean.detach() if cut else mean, 0.3), obs=y)

    data = X.float(), Y.float()
    assert cut_warnings(lambda x, y: model(x, y, cut=False), data) == []
    (message,) = cut_warnings(lambda x, y: model(x, y, cut=True), data)
    assert message.startswith("site 'y'")
