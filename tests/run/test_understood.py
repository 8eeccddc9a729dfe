"""What a run has understood of its model serves the next one, unless anything has changed."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_rows
from reference import double, normals
from repetitions import long_but

import pyro_scale as ps
from pyro_scale.errors import ModelError, PlateError, SiteError
from pyro_scale.model import log_posterior
from pyro_scale.run import problem, run

pytestmark = pytest.mark.usefixtures("store")

N, B = 40, 8


class Regression:
    """A model with all that may change between two runs."""

    def __init__(self):
        self.loc, self.sd, self.scale = double(0, 0), 0.3, double(1.0)
        self.told = double(1.0)
        self.net = torch.nn.Linear(2, 2, dtype=torch.float64)
        torch.nn.init.eye_(self.net.weight)
        self.free = torch.nn.Linear(2, 1, dtype=torch.float64)
        torch.nn.init.ones_(self.free.weight)
        self.dropout = torch.nn.Dropout(0.5).eval()
        self.extra = self.centered = self.whole_plate = False

    def __call__(self, x, y):
        if self.centered:
            x = x - x.mean(0)
        w = pyro.sample("w", dist.Normal(self.loc, double(1.0)).to_event(1))
        if self.extra:
            pyro.sample("v", dist.Normal(double(0.0), 1.0))
        pyro.deterministic("told", self.told)
        pyro.module("free", self.free)
        mean = self.dropout(self.net(x)) @ w + self.free(x)[:, 0]
        size = {} if self.whole_plate else {"subsample_size": len(x)}
        plate = pyro.plate("data", len(x) if self.whole_plate else N, **size)
        with plate, pyro.poutine.scale(scale=self.scale):
            pyro.sample("y", dist.Normal(mean, self.sd), obs=y)


def data():
    x = normals(N, 2, seed=1)
    return x, x @ double(1, -0.5) + 0.3 * normals(N, seed=2)


def positions_of(method, rows, **how):
    steps = {"num_samples": 5, "warmup_steps": 0, "thinning": 1, "num_chains": 2, "seed": 0}
    method.run(rows, **{**steps, "batch_size": B, "progress": False, **how})
    return method.posterior.draws.positions


def baoa(model):
    return ps.BAOA(model, lr=0.01, compile=False)


@pytest.fixture
def understood(monkeypatch):
    """An entry for each preflight, and for each time that other batches are tried."""
    calls = []

    def counted(module, name):
        function = getattr(module, name)

        def call(*args):
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, call)

    counted(log_posterior, "examine_model")
    counted(problem, "check_batches")
    return calls


@pytest.mark.slow
def test_what_is_known_serves_again(understood):
    """From other starts, for other numbers of chains; the draws are a new sampler's."""
    model, rows = Regression(), data()
    first = baoa(model)
    positions_of(first, rows)
    for how in ({"seed": 1}, {"seed": 2, "num_chains": 3}):
        understood.clear()
        found = positions_of(first, rows, **how)
        assert understood == []
        assert torch.equal(found, positions_of(baoa(model), rows, **how))
        assert understood == ["examine_model", "check_batches"]


def test_what_is_known_serves_laplace_again(understood):
    """At a mode that is given, another one, and where the model has changed."""
    model, rows = Regression(), data()
    fit = ps.Laplace(model, structure="diag")
    for w, calls in ((double(1, 0), 1), (double(0, 1), 0)):
        understood.clear()
        fit.run(rows, mode={"w": w}, seed=0, progress=False)
        assert understood == ["examine_model"] * calls
        new = ps.Laplace(model, structure="diag")
        new.run(rows, mode={"w": w}, seed=0, progress=False)
        assert torch.equal(fit.fit.gaussians[0].sd, new.fit.gaussians[0].sd)
        assert fit.fit.attrs["log_evidence"] == new.fit.attrs["log_evidence"]
    understood.clear()
    model.sd = 0.5
    fit.run(rows, mode={"w": double(0, 1)}, seed=0, progress=False)
    assert understood == ["examine_model"]


CHANGES = {
    "a number": lambda model, x, y: setattr(model, "sd", 0.3 * (1 + 1e-9)),
    "a tensor": lambda model, x, y: setattr(model, "loc", double(0, 1e-9)),
    "a tensor written to": lambda model, x, y: model.loc.add_(1e-9),
    "a scale written to": lambda model, x, y: model.scale.mul_(1 + 1e-9),
    "a value written to": lambda model, x, y: model.told.add_(1e-9),
    "a frozen weight": lambda model, x, y: model.net.weight.data.mul_(1 + 1e-9),
    "a free weight": lambda model, x, y: model.free.weight.data.mul_(1 + 1e-9),
    "an equal parameter": lambda model, x, y: setattr(
        model.free, "weight", torch.nn.Parameter(model.free.weight.detach().clone())
    ),
    "a weight that is frozen": lambda model, x, y: model.free.requires_grad_(False),
    "another site": lambda model, x, y: setattr(model, "extra", True),
    "another plate": lambda model, x, y: setattr(model, "whole_plate", True),
    "data": lambda model, x, y: y[-1:].add_(1e-9),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    long_but(
        CHANGES,
        *["a number", "a tensor written to", "a frozen weight", "another site", "another plate"],
        "data",
    ),
)
def test_what_changes_is_seen(change, understood):
    model, rows = Regression(), data()
    first = baoa(model)
    positions_of(first, rows)
    understood.clear()
    CHANGES[change](model, *rows)
    found = positions_of(first, rows)
    assert understood == ["examine_model", "check_batches"]
    assert torch.equal(found, positions_of(baoa(model), rows))


def copy_of(rows):
    return tuple(column.clone() for column in rows)


@pytest.mark.parametrize(
    ("rows_of", "how"),
    [(tuple, {"batch_size": B + 1}), (tuple, {"batch_size": None}), (copy_of, {})],
    ids=["other batches", "all rows", "equal data"],
)
def test_other_batches_and_equal_data_are_another_problem(rows_of, how, understood):
    first, rows = baoa(Regression()), data()
    positions_of(first, rows)
    understood.clear()
    positions_of(first, rows_of(rows), **how)
    assert "examine_model" in understood


WRONG = {
    "random": (lambda model, x, y: model.dropout.train(), ModelError),
    "rows that depend on others": (
        lambda model, x, y: setattr(model, "centered", True),
        PlateError,
    ),
    "values off the support": (
        lambda model, x, y: y.numpy().__setitem__(-1, float("nan")),
        SiteError,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_went_wrong_is_refused(name):
    """NumPy writes to the last row unseen by torch: its value is looked at in every run."""
    break_it, error = WRONG[name]
    model, rows = Regression(), data()
    first = baoa(model)
    positions_of(first, rows)
    break_it(model, *rows)
    with pytest.raises(error):
        positions_of(first, rows)


def test_a_copy_understands_for_itself(understood):
    model, rows = Regression(), data()
    first = baoa(model)
    found = positions_of(first, rows)
    understood.clear()
    other = copy.deepcopy(first)
    assert torch.equal(positions_of(other, rows), found)
    assert "examine_model" in understood


def test_first_steps_are_inspected_once(monkeypatch):
    model = of_rows(
        lambda x, w: dist.Normal(x @ w, 0.3), w=lambda: dist.Normal(double(0, 0), 1.0).to_event(1)
    )
    looks, first, rows = [], baoa(model), data()
    monkeypatch.setattr(run, "check_batch", lambda *args: looks.append(args))
    positions_of(first, rows, num_samples=20)
    assert len(looks) == 2
    positions_of(first, rows, num_samples=20)
    assert len(looks) == 3
