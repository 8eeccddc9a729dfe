"""NUTS on what cannot be sampled, and runs that end early."""

import math
import os
import signal
import sys
import threading
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from linear import linear_data, regression
from models import of_rows
from reference import double
from repetitions import each_once

import pyro_scale as ps
from pyro_scale.errors import (
    ArgumentError,
    CompileWarning,
    ConvergenceWarning,
    DataError,
    PyroScaleWarning,
)
from pyro_scale.exact import nutpie_api

pytest.importorskip("nutpie")
pytestmark = pytest.mark.usefixtures("float64")

QUIET = {"seed": 1, "progress": False}
linear = regression(variance=2.0)
X, Y = linear_data(60)


def broken_beyond(gradient):
    """NaN where x > 1, in the log density or in its gradient alone."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if gradient:
            zero = torch.zeros(1)[0]  # a number would be folded in
            pyro.factor("root", torch.where(x > 1, zero * x, 1 + zero * x).sqrt())
        else:
            pyro.sample("y", dist.Normal(0.0, (1 - x).sqrt()), obs=double(0.3))

    return model


@pytest.mark.slow
@pytest.mark.parametrize(("compiled", "gradient"), each_once([True, False], [False, True]))
def test_what_is_not_finite_is_named(gradient, compiled):
    match = "the log density of site 'y' is NaN there"
    if gradient:
        match = "the gradient at site 'x' is not finite there"
    few = {"num_samples": 100, "warmup_steps": 100, "num_chains": 1, **QUIET}
    start = {"x": double(0.5)}
    with (
        pyro.validation_enabled(False),
        pytest.warns(ConvergenceWarning, match=f"diverged, as {match}"),
    ):
        ps.NUTS(broken_beyond(gradient), compile=compiled, init_strategy=start).run(None, **few)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_depth": 0}, "max_depth"),
        ({"target_accept": 1.0}, r"target_accept=1.0.*inside \(0, 1\)"),
        ({"mass": "dense"}, r"mass='dense'.*low_rank"),
        ({"temperature": 0}, "temperature=0"),
        ({"compile": "yes"}, "compile='yes'"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ArgumentError, match=match):
        ps.NUTS(linear, **arguments)


@pytest.mark.slow
def test_minibatches_are_refused():
    with pytest.raises(ArgumentError, match=r"batch_size=10: NUTS takes all rows.*BAOA"):
        ps.NUTS(linear).run((X, Y), batch_size=10, **QUIET)
    ps.NUTS(linear).run((X, Y), batch_size=60, num_samples=5, warmup_steps=50, **QUIET)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ({"store": "draws.zarr"}, r"fit\.save\(path\)"),
        ({"resume": True}, "another run with another seed"),
        ({"num_warmup": 3}, "warmup_steps="),
        ({"jit_compile": True}, "compile=, which is on"),
        ({"lr": 0.1}, "NUTS adapts its step size"),
    ],
)
def test_arguments_of_others_are_answered(argument, hint):
    with pytest.raises(ArgumentError, match=hint):
        ps.NUTS(linear).run((X, Y), **argument)


def test_low_rank_masses_have_a_bound():
    def wide():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(torch.zeros(10_001), 1.0).to_event(1))

    with pytest.raises(ArgumentError, match=r"mass='low_rank': the model has 10,001 dimensions"):
        ps.NUTS(wide, mass="low_rank").run(None, **QUIET)


def test_a_model_without_a_finite_start_names_the_site():
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=double(math.nan))

    with pytest.raises(ps.errors.ModelError, match="site 'y'"), pyro.validation_enabled(False):
        ps.NUTS(model).run(None, **QUIET)


@pytest.mark.slow
def test_a_start_outside_of_the_support_is_drawn_again():
    """As Pyro's samplers do: of a half-normal by a factor half of all starts are outside."""

    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.factor("positive", torch.where(a > 0, 0.0, -math.inf))

    for seed in range(8):
        draws = ps.NUTS(model).run(None, **{**QUIET, "seed": seed}).get_samples()["a"]
        assert bool((draws > 0).all())


def test_data_of_another_dtype_get_an_error_that_says_what_to_do():
    def model(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=x[:, 0])

    x = torch.randn(9, 2).half()
    with pytest.raises(DataError, match=r"argument x is float16.*: pass x\.double\(\)"):
        ps.NUTS(model).run(x, **QUIET)
    ps.NUTS(model).run(x.double(), **QUIET | {"num_samples": 2})


def test_versions_and_interfaces_that_are_not_known_get_a_python_function(monkeypatch):
    """And the same draws."""
    few = {"num_samples": 50, "warmup_steps": 50, "num_chains": 2, **QUIET}
    pointer = ps.NUTS(linear).run((X, Y), **few).posterior.draws
    assert pointer.attrs["program"] == "compiled log density"
    monkeypatch.setattr(nutpie_api, "KNOWN_VERSIONS", ())
    nutpie_api.takes_pointers.cache_clear()
    python = ps.NUTS(linear).run((X, Y), **few).posterior.draws
    nutpie_api.takes_pointers.cache_clear()
    assert "called from Python (nutpie" in python.attrs["program"]
    assert torch.equal(pointer.positions, python.positions)


def test_a_wrong_interface_is_noticed_in_another_process(monkeypatch, tmp_path):
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(tmp_path))
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    runs = [(crash, False), ("raise AssertionError", False), ("pass", True)]
    for code, passes in [*runs, (crash, True)]:  # the last as it was, of this version
        monkeypatch.setattr(nutpie_api, "_CHECK", code)
        nutpie_api.takes_pointers.cache_clear()
        assert nutpie_api.takes_pointers() == passes


def test_an_error_in_the_model_ends_all_chains():
    """Of a Python function, after some calls."""
    calls = []

    def failing(x, y):
        linear(x, y)
        calls.append(None)
        if len(calls) > 200:
            raise KeyError("my own")

    before = threading.active_count()
    with pytest.raises(KeyError, match="my own"):
        ps.NUTS(failing, compile=False).run((X, Y), num_samples=10**6, **QUIET)
    assert threading.active_count() <= before


def test_nutpie_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nutpie", None)
    with pytest.raises(ArgumentError, match=r"pip install 'pyro-scale\[nuts\]'"):
        ps.NUTS(linear).run((X, Y), **QUIET)


@pytest.mark.slow
def test_control_c_keeps_the_draws(monkeypatch):
    """Of a run that would take minutes, and of a user in a hurry, who presses it again."""
    num_draws, wait, stop = {}, nutpie_api.Chain.wait, nutpie_api.Chain.stop

    def interrupt_a_run(chain, seconds):
        draws = wait(chain, seconds)
        num_draws[chain] = chain.progress.num_draws
        if len(num_draws) == 2 and min(num_draws.values()) > 100:
            os.kill(os.getpid(), signal.SIGINT)
        return draws

    def interrupt_the_end(chain):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return stop(chain)

    monkeypatch.setattr(nutpie_api.Chain, "wait", interrupt_a_run)
    monkeypatch.setattr(nutpie_api.Chain, "stop", interrupt_the_end)
    nuts = ps.NUTS(linear, compile=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job's may ignore it
    try:
        with pytest.warns(PyroScaleWarning, match="interrupted: there are 2 x"):
            nuts.run((X, Y), num_samples=10**6, warmup_steps=50, num_chains=2, **QUIET)
    finally:
        signal.signal(signal.SIGINT, before)
    assert nuts.get_samples(group_by_chain=True)["w"].shape[1] > 40


def test_without_a_compiler_it_runs_eagerly(monkeypatch, tmp_path):
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")

    unseen = of_rows(lambda w: dist.Normal(w, 1.25), w=lambda: dist.Normal(0.125, 1.0))

    few = {"num_samples": 5, "warmup_steps": 5, "num_chains": 1, **QUIET}
    with pytest.warns(CompileWarning, match=r"there is no C\+\+ compiler.*compile=False"):
        program = ps.NUTS(unseen).run(Y, **few).posterior.draws.attrs["program"]
    assert program.startswith("eager log density (there is no C++ compiler")
