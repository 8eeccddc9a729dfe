"""Control-C, and what other signal handlers raise, in runs of NUTS and of samplers."""

import functools
import os
import signal

import pyro.distributions as dist
import pytest
import torch
from linear import linear_data, regression
from models import normal, of_rows
from repetitions import each_once

import pyro_scale as ps
from pyro_scale.engine import compile_step
from pyro_scale.errors import ArgumentError, PyroScaleWarning
from pyro_scale.exact import chains, log_density
from pyro_scale.exact.nutpie_api import ChainDraws
from pyro_scale.infer import nuts as infer_nuts

pytest.importorskip("nutpie")
pytestmark = pytest.mark.usefixtures("float64")

QUIET = {"seed": 1, "progress": False}
linear = regression(variance=2.0)
X, Y = linear_data(60)


def draws_of(count, first):
    positions = first + torch.arange(count).double()[:, None]
    return ChainDraws(positions, {"lp": positions[:, 0]}, False)


def test_finished_chains_are_whole_and_others_are_left_over():
    done = {2: draws_of(10, 200), 0: draws_of(10, 0)}
    stopped = {3: draws_of(4, 300), 1: draws_of(7, 100)}
    draws = chains._together(done, stopped, True)
    assert draws.numbers == [0, 2]
    assert torch.equal(
        draws.positions[..., 0], torch.stack([torch.arange(10.0), 200 + torch.arange(10.0)])
    )
    assert torch.equal(draws.sample_stats["lp"], draws.positions[..., 0])
    assert draws.unfinished[:, 0].tolist() == [*range(100, 107), *range(300, 304)]


def test_if_none_has_finished_chains_are_cut_to_the_shortest_with_draws():
    draws = chains._together({}, {1: draws_of(7, 100), 3: draws_of(4, 300)}, "time")
    assert draws.numbers == [1, 3]
    assert draws.positions.shape == (2, 4, 1)
    assert draws.unfinished[:, 0].tolist() == [104, 105, 106]


@pytest.mark.slow
def test_results_have_finished_chains_whole_and_the_draws_of_others(monkeypatch, tmp_path):
    def sample(*args):
        every = chains.sample(*args)
        kept = [0, 2]
        return every._replace(
            numbers=kept,
            positions=every.positions[kept],
            sample_stats={name: values[kept] for name, values in every.sample_stats.items()},
            unfinished=every.positions[1, :7],
            ended_by="Control-C",
        )

    how = {"num_samples": 50, "warmup_steps": 50, "num_chains": 3, **QUIET}
    whole = ps.NUTS(linear, compile=False).run((X, Y), **how)
    by_chain = whole.get_samples(group_by_chain=True)["w"]
    monkeypatch.setattr(infer_nuts, "sample", sample)
    fit = ps.NUTS(linear, compile=False)
    with pytest.warns(PyroScaleWarning, match=r"2 x 50 draws; get_samples\(\) has 7 more"):
        fit.run((X, Y), **how)
    fit.save(tmp_path / "fit.ps")
    for each in (fit, ps.NUTS.load(tmp_path / "fit.ps", linear)):
        assert torch.equal(each.get_samples(group_by_chain=True)["w"], by_chain[[0, 2]])
        flat = each.get_samples()["w"]
        assert torch.equal(flat, torch.cat([by_chain[0], by_chain[2], by_chain[1, :7]]))
        assert len(each.predict(X[:2], None)["y"]) == 107
        assert each.log_likelihood((X, Y))["y"].shape == (107, 60)
        posterior = each.to_arviz(log_likelihood=True, data=(X, Y))
        assert posterior["posterior"].chain.values.tolist() == [0, 2]
        assert posterior["log_likelihood"].y.shape == (2, 50, 60)
        assert len(each.summary()) == by_chain[0, 0].numel()


# ------------------------------------------------------------------ max_seconds


@pytest.mark.slow
def test_a_run_whose_time_is_over_has_the_draws_so_far():
    fit = ps.NUTS(linear).run((X, Y), num_samples=10, warmup_steps=50, **QUIET)  # compiles
    with pytest.warns(PyroScaleWarning, match="max_seconds are over: there are 4 x"):
        fit.run((X, Y), num_samples=10**6, warmup_steps=50, max_seconds=3, **QUIET)
    draws = fit.posterior.draws
    assert 0 < draws.positions.shape[1] < 10**6
    assert len(draws.positions) == 4  # all run at once, whatever the number of cores
    assert fit.report().verdict != "yes"


@pytest.mark.slow
def test_time_that_ends_in_warm_up_is_an_error():
    with pytest.raises(ArgumentError, match="before the 100000 draws of warm-up"):
        ps.NUTS(linear, compile=False).run((X, Y), warmup_steps=100_000, max_seconds=1, **QUIET)


@pytest.mark.parametrize("seconds", [0, -1, "3", True])
def test_max_seconds_are_a_number_above_0(seconds):
    with pytest.raises(ArgumentError, match="max_seconds="):
        ps.NUTS(linear).run((X, Y), max_seconds=seconds, **QUIET)


# ------------------------------------------------------------------ other handlers


class Mine(Exception):
    """A user's own."""


#: What the handlers raise.
ERRORS = Mine(), TimeoutError("late"), SystemExit(3)


class Handler:
    def __init__(self, error):
        self.error = error

    def __call__(self, number, frame):
        raise self.error

    def method(self, number, frame):
        raise self.error


def handlers(error):
    def function(number, frame):
        raise error

    def with_more(more, number, frame):
        raise error

    return [function, Handler(error), Handler(error).method, functools.partial(with_more, 1)]


@pytest.fixture
def alarm():
    """Has a handler called after some seconds."""
    before = signal.getsignal(signal.SIGALRM)

    def after(handler, seconds):
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield after
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "error"), each_once(range(4), ERRORS), ids=repr)
def test_what_a_handler_raises_leaves_a_run_of_nuts(kind, error, alarm):
    """Of a run that would take minutes."""
    nuts = ps.NUTS(linear, compile=False)
    nuts.run((X, Y), num_samples=5, warmup_steps=5, **QUIET)  # imports take their time
    alarm(handlers(error)[kind], 0.5)
    with pytest.raises(type(error)) as raised:
        nuts.run((X, Y), num_samples=10**6, warmup_steps=50, num_chains=2, **QUIET)
    assert raised.value is error


@pytest.mark.parametrize("where", ["NUTS", "BAOA", "in float64"])
@pytest.mark.slow
def test_what_a_handler_raises_is_no_reason_not_to_compile(where, monkeypatch, alarm):
    error = TimeoutError("late")

    def in_the_middle(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGALRM)
        raise AssertionError("no signal has come")

    model = of_rows(lambda mu: dist.Normal(mu, 1.0), mu=normal())
    alarm(Handler(error), 0)
    how = {"num_samples": 5, "warmup_steps": 5, **QUIET}
    if where == "BAOA":
        monkeypatch.setattr(compile_step, "Blueprint", in_the_middle)
        method = ps.BAOA(model, lr=0.1, friction=1.0, compile=True)
        how["thinning"] = 1
    else:
        name = "trace" if where == "NUTS" else "_in_float64"
        monkeypatch.setattr(log_density, name, in_the_middle)
        method = ps.NUTS(model)
    with pytest.raises(TimeoutError) as raised:
        method.run(Y, **how)
    assert raised.value is error
