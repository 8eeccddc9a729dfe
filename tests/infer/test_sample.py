"""`ps.sample`: the method is chosen by the work that it is, not by the clock."""

import importlib.util

import pyro.distributions as dist
import pytest
import torch
from models import normal, of_network, of_rows
from reference import normals
from runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ArgumentError

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


def without_nutpie(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.slow
def test_without_nutpie_small_data_are_sampled_exactly(monkeypatch):
    without_nutpie(monkeypatch)
    run = ps.sample(line, (X, Y), **QUIET)
    assert isinstance(run, ps.GHMC)
    why = run.diagnostics().attrs["sample"]
    assert why.startswith("GHMC, which is exact, as NUTS needs pyro-scale[nuts] (GHMC about")
    check_moments(run)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["short", "loader"])
def test_what_is_not_for_ghmc_is_for_baoa(monkeypatch, case):
    """Too little time for all rows; a loader's batches."""
    without_nutpie(monkeypatch)
    data = (X, Y)
    if case == "loader":
        data = DataLoader(TensorDataset(X, Y), batch_size=100)
    seconds = 1.0 if case == "short" else 60.0
    run = ps.sample(line, data, seconds=seconds, **QUIET)
    assert isinstance(run, ps.BAOA)
    assert "BAOA, as NUTS needs pyro-scale[nuts]" in run.diagnostics().attrs["sample"]


def test_without_the_time_for_nuts_it_is_baoa():
    run = ps.sample(line, (X, Y), seconds=2.0, **QUIET)
    assert isinstance(run, ps.BAOA)
    why = run.diagnostics().attrs["sample"]
    assert "NUTS would take longer than seconds=2 (NUTS about" in why or "pyro-scale[nuts]" in why


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
