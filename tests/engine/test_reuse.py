"""Later runs, of an object or of samplers of one model, take the compiled step of an earlier one,
where it is the same step."""

import copy
import gc
import pickle
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import double, normals
from repetitions import long_but
from torch.utils.data import DataLoader, StackDataset, TensorDataset

import pyro_scale as ps
from pyro_scale.compile import compiled
from pyro_scale.compile.operations import NotALoop
from pyro_scale.engine import compile_step
from pyro_scale.errors import CompileWarning

N, B = 40, 8
X = normals(N, 2, seed=1)
Y = X @ torch.tensor([1.0, -0.5], dtype=X.dtype) + 0.3 * normals(N, seed=2)
HOW = {"num_samples": 20, "batch_size": B, "progress": False}


class Regression:
    """A model with all that a step may read besides its arguments."""

    def __init__(self):
        self.prior_sd, self.loc, self.sd = 1.0, double(0, 0), double(0.3, 0.3)
        self.weight = torch.nn.Parameter(double(1, 1), requires_grad=False)

    def __call__(self, x, y):
        w = pyro.sample("w", dist.Normal(self.loc, double(self.prior_sd)).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ (w * self.weight), self.sd[0]), obs=y)


@pytest.fixture
def traced(monkeypatch):
    """An entry each time that a step is traced."""
    calls, trace = [], compile_step.trace
    monkeypatch.setattr(compile_step, "trace", lambda *args: (calls.append(args), trace(*args))[1])
    return calls


def sampler(model):
    return ps.BAOA(model, lr=0.01, compile=True)


def outcome_of(method, data=(X, Y), **how):
    """What a run comes to."""
    how = {"seed": 0, "batch_size": B, "progress": False} | how
    if isinstance(method, ps.MAP | ps.VI):
        return method.run(data, num_steps=30, **how).trace
    steps = {"num_samples": 20, "warmup_steps": 0, "thinning": 1, "num_chains": 1}
    return method.run(data, **(steps | how)).posterior.draws.positions


HOW = [
    {"batch_size": B},
    {"batch_size": None},
    {"batch_size": B, "num_chains": 3},
    {"batch_size": B, "num_chains": 2, "share_batches": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("how", long_but(HOW, *HOW[1:3]))
def test_a_step_is_traced_once(how, traced):
    """From other starts, with other noise, other batches and of other lengths."""
    first = sampler(Regression())
    for seed, num_samples in enumerate([20, 7, 60]):
        this = {**how, "seed": seed, "num_samples": num_samples}
        found = outcome_of(first, **this)
        assert len(traced) == 1 + seed  # one, and those of the samplers below
        assert torch.equal(found, outcome_of(sampler(Regression()), **this))


@pytest.mark.slow
def test_every_kind_of_step_is_traced_once(traced):
    """A run that is not tuned trains by one program and samples by another."""
    first, kinds = sampler(Regression()), [{"batch_size": 8}, {"batch_size": 4}, {"num_chains": 2}]
    found = [[outcome_of(first, **kind) for kind in kinds] for _ in range(2)]
    assert len(traced) == len(kinds)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_of_a_loader(traced):
    """The very rows of its data set."""
    first, dataset = sampler(Regression()), TensorDataset(X, Y)
    for _ in range(2):
        outcome_of(first, DataLoader(dataset, B, shuffle=True), batch_size=None)
    assert len(traced) == 1


@pytest.mark.slow
def test_of_a_step_that_is_no_loop(traced, monkeypatch):
    def refuse(*_):
        raise NotALoop("an operation")

    monkeypatch.setattr(compiled, "library_for", refuse)
    first = sampler(Regression())
    with pytest.warns(CompileWarning):
        outcome_of(first)
    found = outcome_of(first, seed=1)
    assert len(traced) == 1
    assert first.to_arviz().posterior.attrs["program"] == "compiled step"
    with pytest.warns(CompileWarning):
        assert torch.equal(found, outcome_of(sampler(Regression()), seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ps.MAP, ps.VI])
def test_of_optimizers(kind, traced):
    first = kind(Regression(), compile=True)
    for seed in range(2):
        found = outcome_of(first, seed=seed)
        assert len(traced) == 1 + seed
        assert torch.equal(found, outcome_of(kind(Regression(), compile=True), seed=seed))


CHANGES = {
    "a number": lambda model: setattr(model, "prior_sd", 1.0 + 1e-9),
    "another tensor": lambda model: setattr(model, "sd", model.sd * (1 + 1e-9)),
    "an equal tensor": lambda model: setattr(model, "sd", model.sd.clone()),
    "written to": lambda model: model.loc.add_(1e-9),
    "a weight": lambda model: model.weight.data.mul_(1 + 1e-9),
    "a weight's memory": lambda model: setattr(model.weight, "data", double(1, 2)),
    "its shape": lambda model: setattr(model.weight, "data", double(2)),
    "data": lambda model: Y.add_(1e-9),
}


@pytest.mark.parametrize("change", long_but(CHANGES, "a number", "a weight's memory"))
def test_what_changes_is_seen(change):
    """Changes of a billionth are: a run is what a new sampler's is."""
    before = Y.clone()
    try:
        model = Regression()
        first = sampler(model)
        outcome_of(first)
        CHANGES[change](model)
        assert torch.equal(outcome_of(first), outcome_of(sampler(copy.deepcopy(model))))
    finally:
        Y.copy_(before)


OTHER_CALLS = {
    "data": {"data": (X.clone(), Y)},
    "fewer rows": {"batch_size": 4},
    "all rows": {"batch_size": None},
    "chains": {"num_chains": 2},
    "a loader": {"data": DataLoader(StackDataset(X, Y), B), "batch_size": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("call", long_but(OTHER_CALLS, "data", "fewer rows"))
def test_another_call_is_traced(call, traced):
    first = sampler(Regression())
    outcome_of(first)
    found = outcome_of(first, **OTHER_CALLS[call])
    assert len(traced) == 2
    assert torch.equal(found, outcome_of(sampler(Regression()), **OTHER_CALLS[call]))


@pytest.mark.slow
def test_a_frozen_branch_is_seen_at_the_new_point(traced):
    """What Python decides between runs."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(double(0, 0), 1.0).to_event(1))
        family = dist.StudentT(50.0, x @ w, 0.3) if heavy else dist.Normal(x @ w, 0.3)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", family, obs=y)

    heavy, first = False, sampler(model)
    outcome_of(first)
    heavy = True
    assert torch.equal(outcome_of(first), outcome_of(sampler(lambda x, y: model(x, y))))
    assert len(traced) == 3


def test_nothing_is_held():
    """Neither the data nor what the model reads."""
    model, data = Regression(), (X.clone(), Y.clone())
    first = sampler(model)
    outcome_of(first, data)
    kept = first._earlier
    watched = [weakref.ref(x) for x in (*data, model.loc, model.sd, model.weight)]
    del first, model, data
    gc.collect()
    assert kept._shared.kept
    assert [ref() for ref in watched] == [None] * 5


@pytest.mark.slow
def test_copies_of_a_sampler_trace_for_themselves(traced):
    first = sampler(Regression())
    expected = outcome_of(first)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(outcome_of(other), expected)
    assert len(traced) == 3


def test_samplers_of_a_model_trace_once(traced):
    """While one of them exists."""
    model, how = Regression(), {"lr": 0.02, "compile": True}
    first = sampler(model)
    outcome_of(first)
    second = ps.BAOA(model, **how)
    found = outcome_of(second)
    assert len(traced) == 1
    assert torch.equal(found, outcome_of(ps.BAOA(Regression(), **how)))
    del first, second
    gc.collect()
    outcome_of(sampler(model))
    assert len(traced) == 3


OWN = {
    "mass": {"mass": {"w": double(1, 2)}},
    "another mass": {"mass": {"w": double(1, 2 + 1e-9)}},
    "control variates": {"control_variates": {"w": double(1, -0.5)}},
    "another kernel": {"friction": 1.0},
}


@pytest.mark.slow
def test_what_a_sampler_has_of_its_own_is_not_shared(traced):
    model = Regression()
    first = sampler(model)
    outcome_of(first)
    for count, (name, own) in enumerate(OWN.items(), 1):
        kind = ps.SGHMC if name == "another kernel" else ps.BAOA
        alike = [kind(each, lr=0.01, compile=True, **own) for each in (model, Regression())]
        found, expected = map(outcome_of, alike)
        assert torch.equal(found, expected)
        assert len(traced) == 1 + 2 * count
