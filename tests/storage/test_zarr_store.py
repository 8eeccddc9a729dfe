"""Draws in a store are those of a run in memory, whoever reads them, whenever, whatever happens."""

import functools
import itertools
import random
import re
import shutil
import subprocess
import sys
import time

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import stored as s
import torch
from both_arviz import as_own, dataset_of, groups_of, identical
from dtypes import default_dtype
from models import normal, of_network, of_rows
from places import SUPPORT
from processes import launch
from reference import double
from repetitions import long_but
from stored import (
    HOW,
    QUIET,
    SIZE,
    X,
    Y,
    draws_of,
    fitted,
    of_two_params,
    same,
)
from stores import buffering, opened, small_files
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from warned import quiet, without_replay

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, NonFiniteError, NotRunError

zarr = pytest.importorskip("zarr")
pytestmark = [
    pytest.mark.usefixtures("small_store_files", "store"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def of_many_supports(x):
    one = torch.ones((), dtype=torch.float64)
    chol = pyro.sample("L", dist.LKJCholesky(2, one))
    pyro.deterministic("corr", chol @ chol.mT)
    pyro.sample("half", dist.HalfNormal(one))
    top = pyro.sample("top", dist.Uniform(one, 3.0))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3).double()))
    below = pyro.sample("below", dist.Uniform(0 * one, top))
    with pyro.plate("data", len(x)):
        scale = p[0] * below * chol
        pyro.sample("y", dist.MultivariateNormal(0 * x[0], scale_tril=scale), obs=x)


def of_scalars(y):
    m = pyro.sample("m", dist.Normal(double(0.0)[0], 1.0))
    s = pyro.sample("s", dist.HalfNormal(double(1.0)[0]))
    pyro.deterministic("large", m > 0.5)
    pyro.deterministic("whole", (10 * m).long())
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m, s), obs=y)


def with_plates(x, group, y):
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(double(0.0)[0], 1.0))
        s = pyro.sample("s", dist.Gamma(double(2.0)[0], 1.0))
        with pyro.plate("sides", 2):
            pyro.sample("both", dist.Normal(double(0.0)[0], 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(level[group], s[group]), obs=y)


of_two_dtypes = of_rows(
    lambda x, w, s: dist.Normal(x @ w.double(), s),
    w=normal(2),
    s=lambda: dist.LogNormal(double(0.0)[0], 0.5),
)


def network():
    torch.manual_seed(0)
    net = ps.bayesianize(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double())

    return of_network(net, lambda f: dist.Normal(f[:, 0], 1.0))


def decaying(step):
    return 0.05 / (1 + step) ** 0.3


GROUP = torch.arange(SIZE) % 3
CYCLES = ps.schedules.Cyclical(0.05, 20)
#: (how it is fitted, what to predict for)
CASES = {
    "whole data": ({"batch_size": None}, (X[:4],)),
    "minibatches": ({}, (X[:4],)),
    "one chain": ({"num_chains": 1, "num_samples": 60}, (X[:4],)),
    "thinned": ({"thinning": 3, "warmup_steps": 5}, (X[:4],)),
    "compiled": ({"compile": True, "thinning": 2}, (X[:4],)),
    "single precision": ({"data": (X.float(), Y.float())}, (X[:4].float(),)),
    "two dtypes": ({"model": of_two_dtypes}, (X, Y)),
    "loader": ({"data": DataLoader(TensorDataset(X, Y), 5), "batch_size": None}, (X[:4],)),
    "supports": ({"model": of_many_supports, "data": X}, (X[:4],)),
    "points": ({"model": of_two_params}, (X, Y)),
    "scalars": ({"model": of_scalars, "data": Y}, (Y,)),
    "plates": ({"model": with_plates, "data": (X, GROUP, Y)}, (X, GROUP, Y)),
    "network": ({"model": network()}, (X[:4],)),
    "weights": ({"method": ps.SGLD, "lr": decaying}, (X[:4],)),
    "cycles": ({"method": ps.SGHMC, "lr": CYCLES}, (X[:4],)),
    "by site": ({"lr": {"w": 0.05, "s": 0.02}}, (X[:4],)),
    "a chosen step": ({"lr": "auto", "precondition": None}, (X[:4],)),
    "chosen coordinates": ({"lr": "auto"}, (X[:4],)),
    "no momentum": ({"method": ps.SGLD}, (X[:4],)),
    "a file more than full": ({"num_samples": 29}, (X[:4],)),
    "full files": ({"num_samples": 28}, (X[:4],)),
    "less than a file": ({"num_samples": 6, "num_chains": 4}, (X[:4],)),
    "shared batches": ({"share_batches": True}, (X[:4],)),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """By case: a run whose draws are in a store, and the same in memory."""

    @functools.cache
    def pair(case):
        how, _ = CASES[case]
        with small_files():
            path = tmp_path_factory.mktemp("pair") / "draws.zarr"
            return fitted(**how, store=path), fitted(**how)

    return pair


#: What of two runs is alike.
ALIKE = {
    "draws": s.same_draws,
    "tables": s.same_tables,
    "likelihoods": s.same_likelihoods,
    "groups": lambda stored, inside: s.same_trees(stored.to_arviz(), inside.to_arviz()),
    "moments": s.same_moments,
}


#: What differs from plain runs in memory; the other cases do so in the same way.
QUICK = ["compiled", "supports", "weights", "a file more than full"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ALIKE)
@pytest.mark.parametrize("case", long_but(CASES, *QUICK))
def test_a_run_with_a_store_is_one_in_memory(case, what, pairs):
    if case == "weights" and what == "moments":
        pytest.skip("draws with weights have none")
    ALIKE[what](*pairs(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", long_but(CASES, "supports", "weights"))
def test_predictions_are_those_of_a_run_in_memory(case, pairs):
    """Of the same seed, as torch's generator is used."""
    s.same_predictions(*pairs(case), CASES[case][1])


@pytest.mark.slow
@pytest.mark.parametrize("reduce", long_but(["mean", "variance", [0.1, 0.5]], "variance"))
def test_reduced_predictions_are_those_of_a_run_in_memory(reduce, pairs):
    one, other = (
        s.predicted(fit, (X[:4],), reduce=reduce, num_samples=90)["y"]
        for fit in pairs("minibatches")
    )
    for part, expected in zip(one, other, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", long_but(["minibatches", "supports"], "minibatches"))
@pytest.mark.long
def test_the_size_of_files_changes_nothing(case, tmp_path):
    how = {**CASES[case][0], "num_samples": 9}
    inside = fitted(**how)
    for draws in (1, 2, 8, 9, 10):
        with buffering(file_draws=draws):
            s.same_draws(fitted(**how, store=tmp_path / f"{draws}.zarr"), inside)


@pytest.mark.parametrize("bound", [{"file_bytes": 5 * 8 * 9}, {"waiting_bytes": 5 * 3 * 8 * 9}])
@pytest.mark.long
def test_a_file_is_of_bounded_size(bound, tmp_path):
    """Not the number of draws alone bounds it, nor what all chains hold of them."""
    with buffering(file_draws=10**6, **bound):
        stored = fitted(store=tmp_path / "draws.zarr")
    files = list((tmp_path / "draws.zarr/posterior/w").iterdir())
    chunks = [file for file in files if not file.name.startswith(".")]
    assert len(chunks) > 3 * 4
    same(draws_of(stored), draws_of(fitted()))


def cliff(x, y=None):
    """Chains that come too far to the right break."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.1))
    pyro.deterministic("twice", 2 * w)
    pyro.factor("cliff", w * torch.where(w > 2.0, torch.nan, 0.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w, 30.0 * s), obs=y)


def indefinite(x, y=None):
    """Chains that come too far from 0 have a matrix that cannot be factorized."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.1))
    chol = pyro.deterministic("chol", torch.linalg.cholesky((5 - w**2).reshape(1, 1)))
    pyro.deterministic("right", w > 0)
    pyro.deterministic("nearest", w.round().long())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w + 0 * chol[0, 0], 30.0 * s), obs=y)


@pytest.fixture
def float64():
    """For a test, as models of other tests have two dtypes."""
    with default_dtype(torch.float64):
        yield


def with_broken_chains(model=cliff, **kwargs):
    start = {"w": torch.zeros(6), "s": torch.ones(6)}
    fit = ps.SGLD(model, lr=0.3, compile=False, init_strategy=start)
    with pytest.raises(NonFiniteError) as raised:
        fit.run((X, Y), **{**HOW, "num_chains": 6}, **QUIET, **kwargs)
    return fit, str(raised.value)


@pytest.mark.long
def test_chains_that_broke_are_left_out(tmp_path, float64):
    inside, said = with_broken_chains()
    stored, told = with_broken_chains(store=tmp_path / "draws.zarr")
    assert without_replay(told) == without_replay(said)
    chains = inside.posterior.draws.num_chains
    assert 0 < chains < 6
    for alike in ALIKE.values():
        alike(stored, inside)
    steps = [int(step) for step in re.findall(r"step (\d+)", said)]
    assert max(steps) > 7  # half-way
    stored.save(tmp_path / "run.ps")
    same(draws_of(ps.SGLD.load(tmp_path / "run.ps", cliff)), draws_of(inside))


@pytest.mark.slow
def test_what_holds_the_finished_chains_is_named(tmp_path, float64):
    for store, by in ((None, "get_samples()"), (False, "moments()")):
        fit, said = with_broken_chains(store=store)
        assert f". Finished, and in {by}: chains " in said
        assert fit.moments()["w"].mean.isfinite()


def test_where_the_draws_of_chains_are_that_all_stopped(tmp_path, float64):
    path = tmp_path / "draws.zarr"
    fit = ps.SGLD(cliff, lr=0.3, compile=False, init_strategy={"w": 1.9 * torch.ones(2)})
    with pytest.raises(NonFiniteError):
        fit.run((X, Y), **{**HOW, "num_samples": 10_000, "num_chains": 2}, store=path, **QUIET)
    with pytest.raises(NotRunError) as raised:
        fit.get_samples()
    assert f"their draws up to then are in the store '{path}'" in str(raised.value)
    held = opened(path)["posterior"]["w"].values
    assert np.isfinite(held[:, 0]).all()


@pytest.mark.long
def test_chains_have_the_numbers_that_the_error_counts_by(tmp_path, float64):
    """In all groups, in memory and on disk, of a run and of its file."""
    inside, said = with_broken_chains()
    stored, _ = with_broken_chains(store=tmp_path / "draws.zarr")
    broken = {int(chain) for chain in re.findall(r"chain (\d+)", said)}
    finished = sorted({*range(6)} - broken)
    assert finished != [*range(len(finished))]
    for fit in (inside, stored):
        fit.save(tmp_path / "run.ps")
        for each in (fit, ps.SGLD.load(tmp_path / "run.ps", cliff)):
            idata = each.to_arviz(data=(X, Y), posterior_predictive=True)
            groups = groups_of(idata) - {"observed_data"}
            assert groups == {
                *("posterior", "sample_stats", "log_likelihood", "posterior_predictive")
            }
            for group in groups:
                assert idata[group].chain.values.tolist() == finished
    assert opened(tmp_path / "draws.zarr").sample_stats.chain.values.tolist() == finished


@pytest.mark.slow
def test_of_chains_that_broke_the_store_has_what_there_was(tmp_path, float64):
    """By their numbers, and the statistics of the others by theirs."""
    inside, _ = with_broken_chains()
    with_broken_chains(store=tmp_path / "draws.zarr")
    tree = opened(tmp_path / "draws.zarr")
    assert tree.posterior.w.shape == (6, 31)
    finished = tree.sample_stats.chain.values
    assert len(finished) == inside.posterior.draws.num_chains
    found = tree.posterior.w.sel(chain=finished).values
    np.testing.assert_array_equal(found, draws_of(inside)["w"])
    broken = sorted({*range(6)} - {*finished.tolist()})
    assert np.isnan(tree.posterior.w.sel(chain=broken).values[:, -1]).all()


@pytest.mark.slow
def test_chains_that_broke_do_not_count_in_moments(float64):
    inside, said = with_broken_chains()
    nowhere, told = with_broken_chains(store=False)
    said = said.replace("get_samples()", "moments()")
    assert without_replay(told) == without_replay(said)
    for name, expected in inside.moments().items():
        for part, other in zip(nowhere.moments()[name], expected, strict=True):
            torch.testing.assert_close(part, other, equal_nan=True)


@pytest.mark.parametrize(
    "most", long_but([1, 7, 100], 7)
)  # in a file: what breaks a chain is in its last draw
@pytest.mark.long
def test_of_chains_that_broke_the_model_is_not_asked(most, tmp_path, float64):
    """Where it cannot say anything, at the state that breaks a chain and NaN after that."""
    inside, said = with_broken_chains(indefinite)
    with buffering(file_draws=most):
        stored, told = with_broken_chains(indefinite, store=tmp_path / "draws.zarr")
        nowhere, _ = with_broken_chains(indefinite, store=False)
    assert without_replay(told) == without_replay(said)
    same(draws_of(stored), draws_of(inside))
    for name, expected in inside.moments().items():
        found = nowhere.moments()[name]
        for part in ("mean", "sd", "r_hat"):
            torch.testing.assert_close(
                getattr(found, part), getattr(expected, part), equal_nan=True
            )
    broken = {
        int(chain): int(step) for chain, step in re.findall(r"chain (\d+) at step (\d+)", said)
    }
    assert 0 < len(broken) < 6
    posterior = opened(tmp_path / "draws.zarr").posterior
    for chain, step in broken.items():
        chol, w = posterior.chol.values[chain, :, 0, 0], posterior.w.values[chain]
        np.testing.assert_allclose(chol[: step - 1] ** 2, 5 - w[: step - 1] ** 2)
        assert np.isnan(chol[step - 1 :]).all()
        assert np.isnan(w[step:]).all()


# ------------------------------------------------------------------ moments


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    long_but(
        [
            *["minibatches", "thinned", "supports", "points", "scalars", "plates", "network"],
            *["cycles", "one chain", "compiled", "single precision", "two dtypes"],
            "shared batches",
        ],
        *["supports", "cycles", "compiled", "single precision"],
    ),
)
def test_without_draws_there_is_what_they_come_to(case):
    how, _ = CASES[case]
    inside, nowhere = fitted(**how), fitted(**how, store=False)
    same(nowhere.params, inside.params)
    samples, found = draws_of(inside), nowhere.moments([0.25, 0.5])
    assert list(found) == list(samples)
    for name, value in samples.items():
        flat, moments = value.flatten(0, 1).double(), found[name]
        torch.testing.assert_close(moments.mean, flat.mean(0), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(moments.sd, flat.std(0), rtol=1e-11, atol=1e-12)
        assert moments.quantiles.shape == (2, *value.shape[2:])
        torch.testing.assert_close(
            moments.r_hat, inside.moments()[name].r_hat, rtol=1e-9, atol=0.0, equal_nan=True
        )
    table = nowhere.summary()
    assert list(table.columns) == ["mean", "sd", "q5", "q50", "q95", "ess", "r_hat"]
    whole = quiet(inside.summary)
    assert list(table.index) == list(whole.index)
    np.testing.assert_allclose(table["mean"], whole["mean"], atol=1.1e-3)
    np.testing.assert_allclose(table["sd"], whole["sd"], atol=1.1e-3)
    tables = [quiet(fit.diagnostics) for fit in (nowhere, inside)]
    assert list(tables[0].index) == list(tables[1].index)
    assert set(tables[0]) <= set(tables[1])


@pytest.mark.slow
def test_moments_of_all_runs_are_the_same(tmp_path):
    fits = [fitted(num_samples=20, store=store) for store in (None, tmp_path / "s.zarr", False)]
    flat = fits[0].get_samples()
    levels = [0.05, 0.5, 0.95]
    for fit in fits:
        for name, found in fit.moments().items():
            exact = flat[name].quantile(double(*levels), dim=0)
            torch.testing.assert_close(found.quantiles, exact, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(found.sd, flat[name].std(0), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_one_site_of_many_elements_is_one_row():
    def wide(x):
        big = pyro.sample("big", dist.Normal(torch.zeros(11, 10).double(), 1.0).to_event(2))
        pyro.sample("small", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(big.sum(), 1.0), obs=x[:, 0])

    fit = fitted(wide, X, store=False, num_samples=250)
    table = fit.summary()
    assert list(table.index) == ["big [11x10], worst", "small[0]", "small[1]"]
    named = fit.summary(["big"])
    assert len(named) == 110
    assert named.index[12] == "big[1, 2]"
    assert table["r_hat"].iloc[0] == named["r_hat"].max()
    assert table["ess"].iloc[0] == named["ess"].min()
    with pytest.raises(ArgumentError, match="no site 'nothing'"):
        fit.summary(["nothing"])


def test_without_draws_what_needs_them_is_refused(tmp_path):
    fit = fitted(store=False)
    for ask in (
        fit.get_samples,
        fit.to_arviz,
        fit.log_likelihood,
        fit.loo,
        lambda: fit.predict(X),
    ):
        with pytest.raises(ArgumentError, match=r"kept no draws \(store=False\): summary\(\)"):
            ask()


@pytest.mark.parametrize("levels", [[], [1.1], [-0.1, 0.5], ["0.5"], [float("nan")], [None]])
def test_levels_out_of_range_are_refused(levels):
    with pytest.raises(ArgumentError, match=r"levels=.*from 0 to 1"):
        fitted().moments(levels)


@pytest.mark.slow
def test_draws_with_weights_have_no_plain_moments(tmp_path):
    how, _ = CASES["weights"]
    for fit in (fitted(**how), fitted(**how, store=tmp_path / "draws.zarr")):
        with pytest.raises(ArgumentError, match="weights"):
            fit.moments()
    with pytest.raises(ArgumentError, match=r"store=False adds draws up alike.*constant lr"):
        fitted(**how, store=False)


# ------------------------------------------------------------------ other readers


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    long_but(["minibatches", "supports", "plates", "network", "weights"], "weights"),
)
def test_xarray_and_arviz_open_it_by_themselves(case, tmp_path):
    how, _ = CASES[case]
    stored = fitted(**how, store=tmp_path / "draws.zarr")
    expected = fitted(**how).to_arviz()
    tree = opened(tmp_path / "draws.zarr")
    assert {"posterior", "sample_stats"} <= set(tree)
    for group in ("posterior", "sample_stats"):
        assert identical(tree[group], expected[group])
        assert tree[group].attrs["num_data"] == SIZE
        assert tree[group].attrs["inference_library"] == "pyro_scale"
    for key, value in stored.to_arviz().attrs.items():
        assert tree.attrs[key] == value
    table = arviz.summary(tree.posterior.to_dataset(), round_to=12)
    assert table.equals(
        arviz.summary(dataset_of(expected.posterior)[list(tree.posterior)], round_to=12)
    )


@pytest.mark.slow
def test_arviz_reads_it_as_its_own(tmp_path):
    fitted(store=tmp_path / "draws.zarr")
    expected = fitted().to_arviz()
    tree = opened(tmp_path / "draws.zarr")
    found = as_own(tree)
    assert {"posterior", "sample_stats"} <= groups_of(found)
    assert identical(found.posterior, expected.posterior)
    assert arviz.ess(found, var_names=["w"]).equals(arviz.ess(expected, var_names=["w"]))


@pytest.mark.slow
def test_the_order_of_sites_is_the_models(tmp_path):
    fit = fitted(store=tmp_path / "draws.zarr")
    assert list(fit.get_samples()) == ["w", "s", "twice"]
    assert list(fit.to_arviz().posterior) == ["w", "s", "twice"]
    assert [name.partition("[")[0] for name in fit.summary().index][::2] == ["w", "s", "twice"]


@pytest.fixture
def reads(monkeypatch):
    """The files of draws that are read."""
    found, local = [], zarr.storage.LocalStore

    def counting(read):
        def counted(self, key, *args, **kwargs):
            if re.fullmatch(r"(?:unconstrained_)?posterior/\w+/[\d.]+", key):
                found.append(key)
            return read(self, key, *args, **kwargs)  # to be awaited, of `get`

        return counted

    for name in {"get", "get_sync"} & {*dir(local)}:
        monkeypatch.setattr(local, name, counting(getattr(local, name)))
    return found


def of_sites(keys):
    """Those that are not of coordinates."""
    return [key for key in keys if re.search(r"/(?:w|s|twice)/", key)]


@pytest.mark.slow
def test_draws_are_read_when_they_are_needed(tmp_path, reads):
    fit = fitted(store=tmp_path / "draws.zarr", num_samples=70)
    reads.clear()
    idata = fit.to_arviz(log_likelihood=False)
    assert len(of_sites(reads)) <= 2  # of one draw, at which the model is run for the observed data
    reads.clear()
    assert idata.posterior.w.shape == (3, 70, 2)
    assert float(idata.posterior.w[1, 20, 0]) == float(draws_of(fit)["w"][1, 20, 0])
    reads.clear()
    idata.posterior.w[1, 20:22, 0].load()
    assert of_sites(reads) == ["posterior/w/1.2.0", "posterior/w/1.3.0"]


@pytest.mark.long
def test_only_files_that_are_needed_are_read(tmp_path, reads):
    fit = fitted(store=tmp_path / "draws.zarr", num_samples=70)
    for wanted, most in (({"num_samples": 1}, 1), ({"num_samples": 3}, 3)):
        reads.clear()
        fit.get_samples(**wanted)
        assert 0 < len(of_sites(reads)) <= most * 3  # sites
    reads.clear()
    fit.get_samples()
    assert sorted(of_sites(reads)) == sorted(set(of_sites(reads)))  # each once
    assert len(of_sites(reads)) == 3 * 3 * 10


@pytest.mark.long
def test_a_large_store_needs_little_memory(tmp_path):
    """In a process of its own: what it reads is a part of what is there."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(SUPPORT)!r})
import torch, pyro, pyro.distributions as dist, pyro_scale as ps
def wide():
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("w", dist.Normal(torch.zeros(20_000), 1.0).to_event(1))
how = dict(thinning=1, warmup_steps=0, seed=0, progress=False)
ps.BAOA(wide, lr=0.3, compile=False).run(None, num_samples=20, **how)
begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fit = ps.BAOA(wide, lr=0.3, compile=False)
fit.run(None, num_samples=4000, store={str(tmp_path / "draws.zarr")!r}, **how)
idata = fit.to_arviz()
some = fit.get_samples(10)["w"]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun
print(grown // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 230  # MiB, of 305 in the store


# ------------------------------------------------------------------ while it runs


@pytest.fixture
def snapshots(tmp_path, monkeypatch):
    """What is on disk after each of the files that are written or deleted, or after some."""
    source, kept, numbers = random.Random(0), [], itertools.count()
    path = tmp_path / "draws.zarr"

    def snapshot():
        if source.random() < 0.25 and (path / ".zmetadata").exists():
            copy = tmp_path / "snapshots" / str(next(numbers))
            try:
                shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.partial"))
            except shutil.Error:  # a file that was replaced at this moment
                return
            kept.append(copy)

    for name in ("set", "delete", "delete_dir"):
        original = getattr(zarr.storage.LocalStore, name)

        async def watched(self, *args, original=original, **kwargs):
            snapshot()
            found = await original(self, *args, **kwargs)
            snapshot()
            return found

        monkeypatch.setattr(zarr.storage.LocalStore, name, watched)
    return path, kept


def whole_until_some_draw(tree, expected):
    """How many draws a reader sees, all of which are as they should be."""
    count = tree.posterior.sizes["draw"]
    np.testing.assert_array_equal(tree.posterior.draw, np.arange(count))
    for name, value in expected.items():
        array = tree.posterior[name]
        assert array.dims[:2] == ("chain", "draw")
        np.testing.assert_array_equal(tree.posterior.chain, np.arange(len(value)))
        np.testing.assert_array_equal(array.values, value[:, :count].numpy())
    return count


@pytest.mark.long
def test_at_any_moment_a_reader_sees_whole_draws(snapshots):
    path, kept = snapshots
    fitted(store=path)
    expected = draws_of(fitted())
    counts = [whole_until_some_draw(opened(copy), expected) for copy in kept]
    assert len(kept) > 40
    assert counts == sorted(counts)
    assert set(counts) == {0, 7, 14, 21, 28, 31}


@pytest.mark.long
def test_at_any_moment_a_reader_of_a_run_that_goes_on_sees_whole_draws(snapshots, tmp_path):
    path, kept = snapshots
    fitted(store=path, checkpoint=tmp_path / "run", num_samples=17)
    kept.clear()
    fitted(store=path, resume=tmp_path / "run")
    expected = draws_of(fitted())
    counts = [whole_until_some_draw(opened(copy), expected) for copy in kept]
    assert counts == sorted(counts)
    assert set(counts) == {17, 21, 28, 31}


CHILD = """
import stored, stores
path, draws = sys.argv[1], int(sys.argv[2])
ready()
"""
BY_FILE = f"""{CHILD}
with stores.buffering(file_draws=70):
    stored.fitted(num_samples=draws, store=path)
"""
#: Writes all the time, again and again a file that readers see.
BUSY = f"""{CHILD}
with stores.buffering(file_draws=500, wait_seconds=0.0, wait_times=0):
    stored.fitted(num_samples=draws, store=path)
"""


@pytest.mark.long
def test_another_process_reads_while_it_runs(tmp_path):
    draws, path = 800, tmp_path / "draws.zarr"
    process, seen = launch(BY_FILE, path, draws), []
    expected = draws_of(fitted(num_samples=draws))
    while process.poll() is None:
        if (path / ".zmetadata").exists():
            seen.append(whole_until_some_draw(opened(path), expected))
        time.sleep(0.02)
    assert process.returncode == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 4
    assert whole_until_some_draw(opened(path), expected) == draws


@pytest.mark.slow
@pytest.mark.parametrize("kills", long_but([1, 3, 100], 1))
def test_killed_at_any_moment_it_has_written_whole_draws(kills, tmp_path):
    """Without a checkpoint: what a reader has seen once is there in the end, bit for bit."""
    source, counts = random.Random(kills), []
    draws = 300 if kills == 1 else 5000  # the one kill comes after some two
    expected = draws_of(fitted(num_samples=draws))
    for kill in range(kills):
        path = tmp_path / f"{kill}.zarr"
        process = launch(BUSY, path, draws)
        wanted, seen = 10 ** source.uniform(0, 2), 0
        while seen < wanted and process.poll() is None:
            if (path / ".zmetadata").exists():
                seen = opened(path).posterior.sizes["draw"]
            time.sleep(0.002)
        time.sleep(source.uniform(0, 0.1))
        process.kill()
        process.wait()
        counts.append(whole_until_some_draw(opened(path), expected))
        assert counts[-1] >= seen
        shutil.rmtree(path)
    if kills > 1:
        assert len({count % 500 for count in counts}) > 1  # kills came at different moments
