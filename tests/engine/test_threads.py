"""Runs in several threads of one process: what they give is what each gives alone, and Pyro's and
torch's global state is as it was."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.poutine.runtime import _PYRO_STACK
from reference import normals
from repetitions import long_but
from runs import ONE_CHAIN

import pyro_scale as ps

N, B, PAIRS = 60, 10, 10
X = normals(N, 2, seed=1).float()
Y = X @ torch.tensor([1.0, -0.5]) + 0.3 * normals(N, seed=2).float()
HOW = {**ONE_CHAIN, "num_samples": 30, "warmup_steps": 10, "batch_size": B}
HOW |= {"seed": 3, "progress": False}


def with_subsamples(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


def with_positive_site(x, y):
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(0.0, s), obs=y)


def draws_of(model, compile):
    sampler = ps.BAOA(model, lr=0.01, compile=compile).run((X, Y), **HOW)
    return next(iter(sampler.get_samples().values()))


def map_centers():
    found = ps.MAP(with_subsamples, compile=False)
    found.run((X, Y), num_steps=60, batch_size=B, seed=1, progress=False)
    return found.fit.centers


def side_by_side(*works):
    """What each of some functions gives, all of them begun at once."""
    together = Barrier(len(works))

    def begun(work):
        together.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as threads:
        return [each.result(timeout=300) for each in [threads.submit(begun, w) for w in works]]


@pytest.fixture
def as_it_was():
    stack, validates = list(_PYRO_STACK), pyro.infer.util.is_validation_enabled()
    store, drawn = pyro.get_param_store().get_state()["params"], torch.random.get_rng_state()
    yield
    assert list(_PYRO_STACK) == stack
    assert pyro.infer.util.is_validation_enabled() == validates
    assert pyro.get_param_store().get_state()["params"] == store
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not [each for each in warnings.filters if "performance" in str(each[1])]
    trace = pyro.poutine.trace(with_subsamples).get_trace(X)
    assert set(trace.nodes) >= {"w", "y"}


@pytest.mark.slow
@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("compile", long_but([False, True], True))
def test_pairs_of_runs(compile):
    works = [
        lambda: draws_of(with_subsamples, compile),
        lambda: draws_of(with_positive_site, compile),
    ]
    alone = [work() for work in works]
    for _ in range(PAIRS):
        for found, expected in zip(side_by_side(*works), alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.long
def test_a_fit_beside_a_run():
    works = [
        map_centers,
        lambda: draws_of(with_positive_site, True),
        lambda: draws_of(with_subsamples, False),
    ]
    alone = [work() for work in works]
    for _ in range(PAIRS // 3):
        for found, expected in zip(side_by_side(*works), alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.slow
def test_predictions_beside_a_run():
    sampler = ps.BAOA(with_subsamples, lr=0.01, compile=False).run((X, Y), **HOW)
    works = [lambda: sampler.predict(X)["y"], lambda: draws_of(with_positive_site, False)]
    torch.manual_seed(5)  # which rules all of the process's draws, so not in one of the threads
    alone = [work() for work in works]
    for _ in range(PAIRS // 3):
        torch.manual_seed(5)
        for found, expected in zip(side_by_side(*works), alone, strict=True):
            assert torch.equal(found, expected)
