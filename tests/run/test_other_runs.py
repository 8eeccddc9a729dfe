"""A checkpoint or a file is taken up with the model and data that it is of, and no others."""

import functools

import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from torch.utils.data import DataLoader, Dataset

import pyro_scale as ps
from pyro_scale.errors import FileError
from pyro_scale.posterior import serialization
from pyro_scale.run import resume

STEPS = {"num_samples": 6, "warmup_steps": 0, "thinning": 1, "num_chains": 2, "seed": 0}
QUIET = {"progress": False}
source = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=source)
Y = (torch.rand(24, generator=source) < 0.5).float()
AT_ZERO = {"w": torch.zeros(2, 3)}


def holding_covariates(x=X, prior=1.0, slope=1.0):
    """A model that holds its covariates, which its arguments do not show."""

    return of_rows(lambda w: dist.Bernoulli(logits=slope * (x @ w)), w=normal(3, sd=prior))


OTHERS = {
    "covariates": (holding_covariates(x=2 * X), "log likelihood beside it"),
    "their order": (holding_covariates(x=X[:, [1, 0, 2]]), "log likelihood beside it"),
    "likelihood": (holding_covariates(slope=3.0), "log likelihood beside it"),
    "prior": (holding_covariates(prior=2.0), "log prior where chain 0 starts"),
}


def baoa(model, **how):
    return ps.BAOA(model, **{"lr": 0.05, "friction": 1.0, "compile": False, **how})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run from zero, where its covariates do not show."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    baoa(holding_covariates(), init_strategy=AT_ZERO).run(
        Y, batch_size=None, checkpoint=directory, **STEPS, **QUIET
    )
    return directory


@pytest.mark.parametrize("other", OTHERS)
def test_a_run_of_another_model_is_not_gone_on_with(other, written):
    model, what = OTHERS[other]
    sampler = baoa(model, init_strategy=AT_ZERO)
    with pytest.raises(FileError, match=f"another run .*the {what}"):
        sampler.run(Y, batch_size=None, resume=written, **STEPS, **QUIET)


def test_rounding_and_threads_do_not_stand_in_the_way(written, monkeypatch):
    exact, threads = resume.model_fingerprint, torch.get_num_threads()
    monkeypatch.setattr(
        resume,
        "model_fingerprint",
        lambda *args: {n: v * (1 + 5e-6) for n, v in exact(*args).items()},
    )
    torch.set_num_threads(2)
    try:
        sampler = baoa(holding_covariates(X.clone()), init_strategy=AT_ZERO)
        longer = {**STEPS, "num_samples": 7}
        sampler.run(Y, batch_size=None, resume=written, **longer, **QUIET)
    finally:
        torch.set_num_threads(threads)
    assert sampler.get_samples(group_by_chain=True)["w"].shape == (2, 7, 3)


class Rows(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], Y[row]


logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(3))


def test_rows_of_a_loader_beyond_its_first_batch_count(tmp_path):
    baoa(logistic).run(DataLoader(Rows(X), batch_size=4), checkpoint=tmp_path, **STEPS, **QUIET)
    x = X.clone()
    x[4:] *= 2
    with pytest.raises(FileError, match="the log likelihood of rows further on was"):
        baoa(logistic).run(DataLoader(Rows(x), batch_size=4), resume=tmp_path, **STEPS, **QUIET)
    again = baoa(logistic)
    again.run(DataLoader(Rows(X.clone()), batch_size=4), resume=tmp_path, **STEPS, **QUIET)


@pytest.mark.slow
def test_another_fit_for_the_coordinates_is_refused(tmp_path):
    """Compiled, since warm-up in a fit's coordinates takes thousands of steps."""
    fit, other = (
        ps.Laplace(logistic, structure="dense").run((X[:n], Y[:n]), seed=0, **QUIET)
        for n in (24, 12)
    )
    whole = {**STEPS, **QUIET, "batch_size": None}
    baoa(logistic, precondition=fit, compile=True).run((X, Y), checkpoint=tmp_path, **whole)
    with pytest.raises(FileError, match="the mean of the precondition was"):
        baoa(logistic, precondition=other, compile=True).run((X, Y), resume=tmp_path, **whole)
    baoa(logistic, precondition=fit, compile=True).run((X, Y), resume=tmp_path, **whole)


@functools.cache
def cached_run(name):
    how = {
        "BAOA": {**STEPS, "batch_size": None},
        "Laplace": {"seed": 0},
        "MAP": {"num_steps": 5, "seed": 0},
        "VI": {"num_steps": 5, "seed": 0},
        "EKF": {"batch_size": 24, "seed": 0},
    }
    method = (
        baoa(holding_covariates()) if name == "BAOA" else getattr(ps, name)(holding_covariates())
    )
    return method.run(Y, **how[name], **QUIET)


@pytest.mark.parametrize("name", ["BAOA", "Laplace", "MAP", "VI", "EKF"])
@pytest.mark.filterwarnings("ignore")
def test_a_file_is_of_one_model(name, tmp_path, monkeypatch):
    path = tmp_path / "fit.ps"
    cached_run(name).save(path)
    for model, _ in OTHERS.values():
        with pytest.raises(FileError, match=r"of the file's batch the log (prior|likelihood)"):
            getattr(ps, name).load(path, model)
    exact = serialization.model_fingerprint
    monkeypatch.setattr(
        serialization,
        "model_fingerprint",
        lambda *args: {n: v * (1 + 5e-4) for n, v in exact(*args).items()},
    )
    getattr(ps, name).load(path, holding_covariates(X.clone()))
