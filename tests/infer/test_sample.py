"""`ps.sample`: the method is chosen by the work that it is, not by the clock."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import pyro.distributions as dist
import pytest
import torch
from models import normal, of_network, of_rows
from reference import normals
from runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.data.open import open_data
from pyro_scale.errors import ArgumentError
from pyro_scale.infer import sample as infer_sample
from pyro_scale.infer.sample import _choose, _timed
from pyro_scale.kernels import Hyperparameters
from pyro_scale.run.problem import as_log_posterior, prepare

X = normals(400, 2, seed=0).float()
Y = X @ torch.tensor([1.0, -0.5]) + normals(400, seed=1).float()


line = of_rows(lambda x, beta: dist.Normal(x @ beta, 1.0), beta=normal(2))


def check_moments(run):
    """Means and sds of beta, within 6 standard errors of 1,000 effective draws."""
    precision = (X.T @ X + torch.eye(2)).double()
    mean = torch.linalg.solve(precision, (X.T @ Y).double())
    sd = precision.inverse().diagonal().sqrt()
    draws = run.get_samples()["beta"].double()
    assert float(((draws.mean(0) - mean) / sd).abs().max()) < 6 / 1000**0.5
    assert float((draws.std(0) / sd).log().abs().max()) < 6 / 2000**0.5


@pytest.mark.slow
def test_small_data_are_sampled_exactly():
    pytest.importorskip("nutpie")
    run = ps.sample(line, (X, Y), **QUIET)
    assert isinstance(run, ps.NUTS)
    assert run.diagnostics().attrs["sample"].startswith("NUTS, which is exact")
    check_moments(run)


def find_nutpie(monkeypatch, found):
    """What is found under its name; torch still looks its own modules up."""
    find = importlib.util.find_spec

    def find_spec(name, *more):
        return found if name == "nutpie" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def without_nutpie(monkeypatch):
    find_nutpie(monkeypatch, None)


@pytest.mark.slow
def test_without_nutpie_small_data_are_sampled_exactly(monkeypatch):
    without_nutpie(monkeypatch)
    run = ps.sample(line, (X, Y), **QUIET)
    assert isinstance(run, ps.GHMC)
    why = run.diagnostics().attrs["sample"]
    assert why == "GHMC, which is exact, as NUTS needs pyro-scale[nuts]"
    check_moments(run)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["short", "loader"])
def test_what_is_not_for_ghmc_is_for_baoa(monkeypatch, case):
    """Too little time for all rows; a loader's batches."""
    without_nutpie(monkeypatch)
    data = (X, Y)
    if case == "loader":
        data = DataLoader(TensorDataset(X, Y), batch_size=100)
    seconds = 0.05 if case == "short" else 60.0
    run = ps.sample(line, data, seconds=seconds, **QUIET)
    assert isinstance(run, ps.BAOA)
    assert "BAOA, as NUTS needs pyro-scale[nuts]" in run.diagnostics().attrs["sample"]


def problem_of(data):
    opened = open_data(data, None, None, None)
    return prepare(as_log_posterior(line, opened.num_data), opened, Hyperparameters(), None, 1, 0)


@pytest.mark.parametrize(
    ("nuts", "few_rows", "kind"),
    [
        (9.0, 0, ps.NUTS),  # under a sixth of the time
        (40.0, 0, ps.BAOA),  # over it, and BAOA has minibatches
        (40.0, 400, ps.NUTS),
        (70.0, 400, ps.BAOA),  # which ends after 60 s
    ],
)
def test_exactness_is_worth_a_sixth_of_the_time(monkeypatch, nuts, few_rows, kind):
    find_nutpie(monkeypatch, object())
    policy = dataclasses.replace(infer_sample.TRAINING, few_rows=few_rows)
    monkeypatch.setattr(infer_sample, "TRAINING", policy)
    chosen, why = _choose(problem_of((X, Y)), SimpleNamespace(nuts=nuts, ghmc=nuts), 60.0)
    assert chosen is kind
    assert "exact" in why if kind is ps.NUTS else f"as NUTS would take about {nuts:.2g} s" in why


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60.0, 7.0])
def test_a_slow_machine_gets_fewer_draws_of_the_same_method(monkeypatch, seconds):
    """The pilot's 250 draws took as long as 20 s of 2,000 would."""
    pytest.importorskip("nutpie")
    monkeypatch.setattr(infer_sample, "_timed", lambda *args, **kwargs: 20.0)
    run = ps.sample(line, (X, Y), seconds=seconds, **QUIET)
    assert isinstance(run, ps.NUTS)
    count = 1000 if seconds == 60 else 350
    assert run.posterior.draws.positions.shape[1] == count
    assert "about 20 s" in run.diagnostics().attrs["sample"]


def test_what_nuts_takes_is_measured_by_a_short_run():
    calls = []

    class Short:
        posterior = SimpleNamespace(draws=SimpleNamespace(attrs={"sampling_time": 2.5}))

        def run(self, data, **how):
            calls.append(how)

    assert _timed(Short(), (X, Y), num_samples=3000, num_chains=2, seed=5) == pytest.approx(42.0)
    assert calls[0]["num_samples"] + calls[0]["warmup_steps"] == 250
    assert (calls[0]["num_chains"], calls[0]["seed"]) == (2, 5)


@pytest.mark.long
def test_a_network_is_an_ensemble():
    net = ps.bayesianize(nn.Sequential(nn.Linear(2, 200), nn.Tanh(), nn.Linear(200, 2)))

    model = of_network(net, lambda f: dist.Categorical(logits=f))

    run = ps.sample(model, (X, (Y > 0).long()), num_samples=50, **QUIET)
    assert "the model is a network" in run.diagnostics().attrs["sample"]
    assert run.report().verdict in ("ensemble", "unknown", "no")


@pytest.mark.parametrize("seconds", [0, -1.0, "60", True])
def test_seconds_are_a_number_above_0(seconds):
    with pytest.raises(ArgumentError, match="seconds="):
        ps.sample(line, (X, Y), seconds=seconds, **QUIET)
