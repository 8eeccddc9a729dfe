"""Runs with a store, or without draws, that are cut short, damaged, moved or misused."""

import errno
import itertools
import random
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import stored
import torch
from damage import damage
from places import ROOT
from processes import kill_until_done, launch
from repetitions import each_once, long_but
from stored import (
    X,
    Y,
    draws_of,
    ended_by,
    fitted,
    held_of,
    outcome,
    regression,
    same,
    same_outcome,
    unconstrained,
)
from stores import buffering, opened, small_files
from warned import quiet

import pyro_scale as ps
from pyro_scale.engine import chains, loop
from pyro_scale.errors import ArgumentError, FileError, PyroScaleError
from pyro_scale.posterior import sinks
from pyro_scale.run import config
from pyro_scale.storage import zarr_store

zarr = pytest.importorskip("zarr")
pytestmark = [
    pytest.mark.usefixtures("small_store_files"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: How draws are kept: on disk, or nowhere.
KEPT = ["store", "nowhere"]


def at(kept, tmp_path):
    return {"store": tmp_path / "draws.zarr" if kept == "store" else False}


# ------------------------------------------------------------------ interrupts and errors


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_an_interrupt_leaves_what_there_was_until_then(kept, cut, tmp_path):
    whole = fitted(num_samples=300)
    cut(100)
    with pytest.warns(UserWarning, match=r"interrupted after (\d+) steps") as told:
        fit = fitted(num_samples=300, **at(kept, tmp_path))
    said = next(str(each.message) for each in told if "interrupted" in str(each.message))
    count = fit.posterior.draws.sample_stats["lp"].shape[1]
    assert 0 < count <= 100
    assert f"after {count} steps" in said  # no warm-up, no thinning
    if kept == "store":
        assert re.search(rf"holds the {count} draws", said)
        assert held_of(fit, whole) == count
        assert opened(tmp_path / "draws.zarr").posterior.sizes["draw"] == count
        assert fit.to_arviz().posterior.sizes["draw"] == count
        assert len(quiet(fit.summary)) == 5
        return
    for name, found in fit.moments().items():
        until = draws_of(whole)[name][:, :count].flatten(0, 1)
        torch.testing.assert_close(found.mean, until.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.sd, until.std(0), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_full_disk_costs_what_had_not_been_written_and_says_how_much(tmp_path, monkeypatch):
    """Without a checkpoint: seven draws are on disk, and some more were to be the next seven."""
    whole, put = fitted(), zarr.storage.LocalStore.set

    async def full(self, key, *args, **kwargs):
        if key.endswith("/w/2.1.0"):
            raise OSError(errno.ENOSPC, "No space left on device")
        await put(self, key, *args, **kwargs)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", full)
    sampler, error = ended_by(FileError, "No space left on device", **at("store", tmp_path))
    said = re.search(
        r"after (\d+) steps; get_samples\(\) holds the 7 draws .*, (\d+) more could not be written",
        error.__notes__[-1],
    )
    assert int(said[1]) == 7 + int(said[2])  # no warm-up, no thinning
    assert held_of(sampler, whole) == 7
    posterior = opened(tmp_path / "draws.zarr").posterior
    assert posterior.sizes["draw"] == 7
    assert torch.equal(torch.as_tensor(posterior.w.values), draws_of(sampler)["w"])


# ------------------------------------------------------------------ by time


AT_ONCE = {"file_draws": 7, "wait_seconds": 0.0, "wait_times": 0}


@pytest.mark.long
def test_draws_that_wait_for_a_full_file_are_written_by_time(tmp_path, monkeypatch):
    """Whoever looks after a step sees its draw; what is there in the end is as ever."""
    counts, show = [], zarr_store.DrawStore.show

    def seen(self, count):
        show(self, count)
        counts.append(opened(self.path).posterior.sizes["draw"])

    how = {"num_samples": 100, "batch_size": 5, "num_chains": 3}
    with monkeypatch.context() as patch, buffering(**AT_ONCE):
        patch.setattr(zarr_store.DrawStore, "show", seen)
        fit = fitted(**how, **at("store", tmp_path))
    assert counts == sorted(counts)
    assert {2, 7, 100} <= set(counts)  # the first block is of 2 steps
    assert any(count % 7 for count in counts[:-2])
    other = fitted(**how, **at("store", tmp_path / "other"))
    same(draws_of(fit), draws_of(other))
    same(unconstrained(fit), unconstrained(other))


@pytest.mark.slow
def test_writing_is_a_small_part_of_the_time(tmp_path, monkeypatch):
    """The next one comes after 20 times what the last one took, by a clock of ours."""
    now, when = [0.0], []
    monkeypatch.setattr(sinks, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    append, move = zarr_store.DrawStore.write, chains.Chains.move

    def slow(self, *args):
        when.append(now[0])
        now[0] += 1.0 if len(when) < 3 else 0.1
        append(self, *args)

    def at_a_step_a_second(self, program, batches, block, *others):
        now[0] += len(block)
        move(self, program, batches, block, *others)

    monkeypatch.setattr(zarr_store.DrawStore, "write", slow)
    monkeypatch.setattr(chains.Chains, "move", at_a_step_a_second)
    monkeypatch.setattr(loop, "steps_within_budget", lambda *args: 1)
    with buffering(file_draws=10**6, wait_seconds=5.0):
        fitted(num_samples=60, **at("store", tmp_path))
    assert when[:4] == pytest.approx([5.0, 26.0, 47.0, 52.1], abs=1.0)


@pytest.mark.parametrize("cut_at", long_but([3, 9, 17], 9))
@pytest.mark.long
def test_what_was_written_by_time_stays_where_a_run_goes_on(cut_at, tmp_path, monkeypatch, cut):
    """Readers lose no draw that the checkpoint holds."""
    counts, truncate = [], zarr_store.DrawStore.truncate
    with pytest.MonkeyPatch.context() as patch, buffering(**AT_ONCE):
        patch.setattr(zarr_store.DrawStore, "put", lambda *args: None)
        cut(cut_at)
        fitted(checkpoint=tmp_path / "run", **at("store", tmp_path))
    monkeypatch.undo()
    before = zarr_store.DrawStore.open(tmp_path / "draws.zarr").count

    def seen(self, count):
        truncate(self, count)
        counts.append(self.count)

    monkeypatch.setattr(zarr_store.DrawStore, "truncate", seen)
    resumed = fitted(resume=tmp_path / "run", **at("store", tmp_path))
    assert counts == [before]
    same(draws_of(resumed), draws_of(fitted(**at("store", tmp_path / "other"))))


# ------------------------------------------------------------------ going on


@pytest.mark.parametrize("first", long_but([7, 17], 17))
@pytest.mark.long
def test_a_finished_run_is_extended(first, tmp_path):
    where = at("store", tmp_path)
    short = fitted(num_samples=first, checkpoint=tmp_path / "run", **where)
    begun = draws_of(short)
    longer = fitted(num_samples=31, resume=tmp_path / "run", **where)
    stored.same_draws(longer, fitted(num_samples=31))
    stored.same_trees(longer.to_arviz(), fitted(num_samples=31).to_arviz())
    same(draws_of(short), begun)  # which reads its own draws and no more
    again = fitted(num_samples=31, resume=tmp_path / "run", **where)
    stored.same_draws(again, longer)
    with pytest.raises(ArgumentError, match="num_samples"):
        fitted(num_samples=20, resume=tmp_path / "run", **where)


def test_a_finished_run_without_draws_is_not_extended(tmp_path):
    whole = fitted(store=False, checkpoint=tmp_path)
    same_outcome(fitted(store=False, resume=tmp_path), whole)
    with pytest.raises(FileError, match="num_samples was 31, is 40"):
        fitted(store=False, num_samples=40, resume=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("now", "then"), each_once(["memory", "store", "nowhere"], ["store", "nowhere", "memory"])
)
def test_draws_stay_where_they_were(then, now, tmp_path):
    if then == now:
        return
    where = {"memory": None, "store": tmp_path / "draws.zarr", "nowhere": False}
    fitted(store=where[then], checkpoint=tmp_path / "run", num_samples=10)
    with pytest.raises(FileError, match="draws in was"):
        fitted(store=where[now], resume=tmp_path / "run", num_samples=20)
    assert then == "store" or not (tmp_path / "draws.zarr").exists()


@pytest.mark.long
def test_the_store_of_another_run_is_refused(tmp_path):
    where = at("store", tmp_path)
    fitted(checkpoint=tmp_path / "run", num_samples=10, **where)
    other = fitted(store=tmp_path / "other.zarr", num_samples=20)
    held = draws_of(other)
    with pytest.raises(FileError, match="does not hold the draws of the run that goes on: pass"):
        fitted(resume=tmp_path / "run", store=tmp_path / "other.zarr")
    same(draws_of(other), held)
    stored.same_draws(fitted(resume=tmp_path / "run", **where), fitted())


@pytest.mark.long
def test_a_store_that_is_gone_is_an_error_and_nothing_else(tmp_path):
    where = at("store", tmp_path)
    sampler = fitted(num_samples=10, checkpoint=tmp_path / "run", **where)
    moved = shutil.move(where["store"], tmp_path / "elsewhere.zarr")
    how = {**stored.HOW, **stored.QUIET, **where, "resume": tmp_path / "run"}
    with pytest.raises(FileError, match=r"draws\.zarr' cannot be read"):
        sampler.run((X, Y), **how)
    assert not where["store"].exists()  # none is begun in its place
    shutil.move(moved, where["store"])
    assert draws_of(sampler)["w"].shape[1] == 10  # a refusal takes nothing away
    resumed = fitted(resume=tmp_path / "run", **where)
    stored.same_draws(resumed, fitted())


@pytest.mark.long
def test_a_store_that_goes_while_it_is_written_is_said_to_be_gone(tmp_path):
    """And once it is back, the run goes on."""
    calls, where = [], at("store", tmp_path)

    def model(x, y=None):
        calls.append(1)
        if len(calls) == 60:
            where["store"].rename(tmp_path / "elsewhere.zarr")
        regression(x, y)

    how = {"checkpoint": tmp_path / "run", "checkpoint_every": 0, **where}
    with pytest.raises(FileError, match=r"\(the store is gone: put it back, or begin") as raised:
        fitted(model, num_samples=200, **how)
    assert re.search(r"; no draws.*resume='.*run' goes on$", raised.value.__notes__[-1])
    assert not where["store"].exists()
    (tmp_path / "elsewhere.zarr").rename(where["store"])
    resumed = fitted(num_samples=200, resume=tmp_path / "run", **where)
    stored.same_draws(resumed, fitted(num_samples=200))


@pytest.mark.long
def test_one_run_at_a_time_writes_into_a_store(tmp_path, monkeypatch):
    """Another one is refused before it has changed anything; readers are not."""
    path = tmp_path / "draws.zarr"
    fit = fitted(checkpoint=tmp_path / "run", num_samples=10, store=path)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "link.zarr").symlink_to(path)
    other = """
from pyro_scale.storage.zarr_store import writing_into
with writing_into(sys.argv[1]), writing_into(sys.argv[2]):
    ready()
    sys.stdin.read()
"""
    with launch(other, path, tmp_path / "new/draws.zarr", stdin=subprocess.PIPE) as process:
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        with monkeypatch.context() as patch:
            patch.setattr(chains.Chains, "move", None)
            for link in (path, tmp_path / "link.zarr"):
                with pytest.raises(FileError, match=r"another run is writing into .*draws\.zarr'"):
                    fitted(resume=tmp_path / "copy", store=link)
            with pytest.raises(FileError, match=r"another run is writing into .*new/draws\.zarr'"):
                fitted(store=tmp_path / "new/draws.zarr")
        assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        same(draws_of(fit), draws_of(fitted(num_samples=10)))
        posterior = opened(path).posterior
        assert posterior.sizes["draw"] == 10
        process.kill()
    stored.same_draws(fitted(resume=tmp_path / "copy", store=path), fitted())
    stored.same_draws(fitted(store=tmp_path / "new/draws.zarr"), fitted())
    assert not list(tmp_path.rglob("*.lock"))


RACER = """
import zarr, stored
from pyro_scale.errors import PyroScaleError
ready()
sys.stdin.readline()
try:
    torch.save(stored.outcome(stored.fitted(num_samples=500, store=sys.argv[1])), sys.argv[2])
    print("written")
except PyroScaleError as error:
    print(type(error).__name__)
"""


@pytest.mark.long
def test_of_runs_that_start_at_once_one_has_the_store(tmp_path):
    expected = draws_of(fitted(num_samples=500))
    for i in range(5):
        path = tmp_path / f"{i}.zarr"
        racers = [
            launch(RACER, path, tmp_path / f"{i}-{j}.pt", stdin=subprocess.PIPE) for j in range(3)
        ]
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        said = sorted(racer.communicate()[0].strip() for racer in racers)
        assert said.count("written") == 1
        assert {*said} <= {"written", "FileError", "ArgumentError"}
        same(torch.load(next(tmp_path.glob(f"{i}-*.pt"))), expected)
        posterior = opened(path).posterior
        same({name: torch.as_tensor(posterior[name].values) for name in expected}, expected)


@pytest.mark.long
def test_a_store_may_be_moved_while_nothing_runs(tmp_path):
    fitted(checkpoint=tmp_path / "run", num_samples=10, **at("store", tmp_path))
    moved = Path(shutil.move(tmp_path / "draws.zarr", tmp_path / "elsewhere.zarr"))
    stored.same_draws(fitted(resume=tmp_path / "run", store=moved), fitted())


CHILD = """
import shutil, stored, stores
where, path, saved, draws = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
kind = "resume" if list(where.glob("state-*")) else "checkpoint"
if kind == "checkpoint":
    shutil.rmtree(path, ignore_errors=True)  # killed before its first checkpoint
store = False if path == "nowhere" else path
ready()
with stores.buffering(file_draws=200, wait_seconds=0.0):
    fit = stored.fitted(num_samples=draws, store=store, checkpoint_every=0, **{kind: where})
torch.save(stored.outcome(fit), saved)
"""


@pytest.mark.parametrize(
    ("kept", "kills", "draws"),
    [
        ("store", 1, 800),
        pytest.param("store", 2, 2000, marks=pytest.mark.long),
        pytest.param("nowhere", 2, 2000, marks=pytest.mark.long),
        *(pytest.param(kept, 20, 20_000, marks=pytest.mark.long) for kept in KEPT),
    ],
)
@pytest.mark.long
def test_killed_at_any_moment_it_goes_on_bit_for_bit(kept, kills, draws, tmp_path):
    saved = tmp_path / "outcome.pt"
    path = tmp_path / "draws.zarr" if kept == "store" else "nowhere"
    arguments = (tmp_path / "run", path, saved, draws)
    kill_until_done(lambda: launch(CHILD, *arguments), tmp_path / "run", saved, kills)
    whole = fitted(num_samples=draws, **({"store": False} if kept == "nowhere" else {}))
    found, expected = torch.load(saved), outcome(whole)
    if kept == "store":
        same(found, expected)
        return
    assert found.keys() == expected.keys()
    for (
        name,
        value,
    ) in expected.items():  # whose rounding, and bins, are those of blocks as they came
        site, _, part = name.partition(" ")
        atol = 0.15 * float(expected[f"{site} sd"].max()) if part == "quantiles" else 0.0
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=atol)


# ------------------------------------------------------------------ save and load


@pytest.mark.slow
def test_what_is_loaded_reads_the_store(tmp_path):
    fit = fitted(**at("store", tmp_path))
    fit.save(tmp_path / "run.ps")
    assert (tmp_path / "run.ps").stat().st_size < 30_000
    loaded = ps.BAOA.load(tmp_path / "run.ps", regression)
    stored.same_draws(loaded, fit)
    stored.same_tables(loaded, fit)
    stored.same_moments(loaded, fit)
    stored.near(loaded.log_likelihood((X, Y)), fit.log_likelihood())
    stored.same_trees(loaded.to_arviz(data=(X, Y)), fit.to_arviz())
    loaded.save(tmp_path / "again.ps")
    stored.same_draws(ps.BAOA.load(tmp_path / "again.ps", regression), fit)


@pytest.mark.slow
def test_a_file_and_its_store_may_be_moved_together(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    fit = fitted(**at("store", there))
    expected = draws_of(fit)
    fit.save(there / "run.ps")
    shutil.move(there, here)
    loaded = ps.BAOA.load(here / "run.ps", regression)
    same(draws_of(loaded), expected)
    loaded.save(tmp_path / "again.ps")
    same(draws_of(ps.BAOA.load(tmp_path / "again.ps", regression)), expected)


@pytest.mark.slow
def test_what_is_loaded_has_the_moments(tmp_path):
    fit = fitted(num_samples=200, store=False)
    fit.save(tmp_path / "run.ps")
    loaded = ps.BAOA.load(tmp_path / "run.ps", regression)
    same_outcome(loaded, fit)
    stored.same_tables(loaded, fit)
    loaded.save(tmp_path / "again.ps")
    same_outcome(ps.BAOA.load(tmp_path / "again.ps", regression), fit)
    with pytest.raises(ArgumentError, match="kept no draws"):
        loaded.get_samples()


@pytest.mark.slow
def test_a_relative_path_is_read_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit = fitted(store="draws.zarr")
    held = draws_of(fit)
    fit.save("run.ps")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    same(draws_of(ps.BAOA.load(tmp_path / "run.ps", regression)), held)
    same(draws_of(fit), held)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", long_but(["moved", "deleted", "another", "a file", "emptied"], "deleted", "another")
)
def test_a_store_that_is_not_there_any_more_is_an_error(what, tmp_path):
    path = tmp_path / "draws.zarr"
    fit = fitted(store=path)
    fit.save(tmp_path / "run.ps")
    if what == "moved":
        path.rename(tmp_path / "elsewhere.zarr")
    else:
        shutil.rmtree(path)
    if what == "another":
        fitted(store=path)
    elif what == "a file":
        path.write_text("not a store")
    elif what == "emptied":
        path.mkdir()
    with pytest.raises(FileError, match=r"draws\.zarr"):
        ps.BAOA.load(tmp_path / "run.ps", regression)
    if what != "another":  # the draws of which are alike, of plan
        for ask in (fit.get_samples, lambda: fit.predict(X), fit.moments, fit.log_likelihood):
            with pytest.raises(FileError, match=r"draws\.zarr"):
                ask()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["deleted", "another", "a file"])
def test_what_arviz_has_not_read_yet_is_an_error_once_it_is_gone(what, tmp_path):
    """And not NaN, which Zarr takes it for."""
    path = tmp_path / "draws.zarr"
    fit = fitted(store=path)
    idata, expected = fit.to_arviz(), draws_of(fit)
    first = idata.posterior.w[:, 8:9].load()
    if what == "a file":
        (path / "posterior/w/1.2.0").unlink()
    else:
        shutil.rmtree(path)
    if what == "another":
        fitted(store=path)
    for read in (lambda: idata.posterior.w.load(), lambda: idata.posterior.w[1, 14].values):
        with pytest.raises(FileError, match=r"draws\.zarr"):
            read()
    assert torch.equal(torch.as_tensor(first.values), expected["w"][:, 8:9])
    if what == "a file":
        found = idata.posterior.w[1, :14].values
        assert torch.equal(torch.as_tensor(found), expected["w"][1, :14])


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (7, ArgumentError, r"=7: pass a str or a Path"),
        (True, ArgumentError, r"=True: pass"),
        (0, ArgumentError, r"=0: pass"),
        (b"draws.zarr", ArgumentError, "pass a str or a Path"),
        ("", ArgumentError, "=''"),
        ("a\0b", ArgumentError, "pass a str or a Path"),
        ("there", ArgumentError, r"store='there' is there already: pass another path, or resume="),
        ("file", ArgumentError, r"store='file' is there already"),
        ("file/draws.zarr", FileError, "cannot be written"),
        ("/proc/draws.zarr", FileError, "cannot be written"),
        ("x" * 300, FileError, "cannot be written"),
    ],
)
def test_paths_that_cannot_be_are_refused(value, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "own.txt").write_text("the user's own")
    (tmp_path / "file").write_text("the user's own")
    with pytest.raises(error, match=message):
        fitted(store=value)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file", "own.txt", "there"]


@pytest.mark.slow
def test_a_run_does_not_write_over_its_own_store(tmp_path):
    path = tmp_path / "draws.zarr"
    held = draws_of(fitted(store=path))
    for _ in range(2):
        with pytest.raises(ArgumentError, match="is there already"):
            fitted(store=path, seed=9)
    same(draws_of(fitted(store=None)), held)


@pytest.mark.slow
def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "draws.zarr").mkdir()
    stored.same_draws(fitted(store=tmp_path / "draws.zarr"), fitted())


def test_without_zarr_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ArgumentError, match=r"needs the package zarr: pip install"):
        fitted(store=tmp_path / "draws.zarr")
    fitted()
    fitted(store=False)
    assert not list(tmp_path.iterdir())


def test_the_extra_that_is_named_is_there():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert any("zarr" in each for each in extras.get("store", []))


@pytest.mark.parametrize("name", ["a/w", "chain", "draw", "..", ".", "__w", ".zarray", "w" * 300])
def test_names_of_sites_that_cannot_be_files_are_refused(name, tmp_path):
    def model(x):
        w = pyro.sample(name, dist.LogNormal(torch.zeros(2).double(), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=x[:, 0])

    with pytest.raises(PyroScaleError, match=re.escape(name)):
        fitted(model, X, store=tmp_path / "draws.zarr")
    assert not (tmp_path / "draws.zarr").exists()


@pytest.mark.parametrize(
    "names",
    [
        ("p", "p_dim_0"),
        ("é", "w w"),
        pytest.param(("p_dim_0", "p"), marks=pytest.mark.long),
        pytest.param(("p", "p.q"), marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_names_that_look_like_others_are_kept_apart(names, tmp_path):
    def model(x):
        for name in names:
            p = pyro.sample(name, dist.Dirichlet(torch.ones(3).double()))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(p[0], 1.0), obs=x[:, 0])

    inside, fit = fitted(model, X), fitted(model, X, store=tmp_path / "draws.zarr")
    stored.same_draws(fit, inside)
    stored.same_trees(fit.to_arviz(), inside.to_arviz())
    tree = opened(tmp_path / "draws.zarr")
    for name in names:
        assert tree.unconstrained_posterior[name].shape == (3, 31, 2)


@pytest.mark.slow
def test_runs_that_memory_does_not_hold_are_refused(tmp_path):
    """3 chains of 3 numbers of 8 bytes: 72 bytes a draw."""
    fitted(num_samples=10, memory_budget=720)
    with pytest.raises(ArgumentError) as raised:
        fitted(num_samples=10, memory_budget=719)
    for said in (
        "num_samples=10",
        "3 x 3 numbers",
        "720 bytes",
        "719 bytes",
        "store='draws.zarr'",
        "store=False",
        "thinning",
        "memory_budget=",
    ):
        assert said in str(raised.value)
    fitted(num_samples=10, memory_budget=1, store=False)
    fitted(num_samples=10, memory_budget=1, store=tmp_path / "draws.zarr")


def test_by_default_half_of_the_machine_is_for_draws(monkeypatch):
    monkeypatch.setattr(config, "bytes_of", lambda device: 1440)
    fitted(num_samples=10)
    with pytest.raises(ArgumentError, match="792 bytes of memory, and 720 bytes are available"):
        fitted(num_samples=11)


def test_it_is_refused_before_any_step(monkeypatch):
    monkeypatch.setattr(loop.Chains, "move", None)
    with pytest.raises(ArgumentError, match="num_samples=1,000,000,000,000"):
        ps.BAOA(regression, lr=0.1).run(
            (X, Y), num_samples=10**12, warmup_steps=0, thinning=1, num_chains=1, progress=False
        )


@pytest.mark.parametrize("value", [-1, "1GB", 0.5, True, float("nan")])
def test_a_budget_is_a_number_of_bytes(value):
    with pytest.raises(ArgumentError, match="memory_budget="):
        fitted(memory_budget=value)


def test_a_refusal_takes_no_draws_away(tmp_path):
    sampler = fitted()
    held = draws_of(sampler)
    (tmp_path / "file").write_text("")
    for wrong in ({"store": tmp_path / "file"}, {"memory_budget": 1}, {"store": 3}):
        with pytest.raises(PyroScaleError):
            sampler.run((X, Y), **stored.HOW, **stored.QUIET, **wrong)
        same(draws_of(sampler), held)


# ------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """(A file of results, the store that it speaks of, a copy of that, the draws)."""
    directory = tmp_path_factory.mktemp("whole")
    with small_files():
        fit = fitted(store=directory / "draws.zarr")
    fit.save(directory / "run.ps")
    shutil.copytree(directory / "draws.zarr", directory / "copy")
    return directory / "run.ps", directory / "draws.zarr", directory / "copy", draws_of(fit)


@pytest.fixture
def intact(original):
    """(A file of results, an intact store, which the test may damage, the draws)."""
    saved, path, copy, draws = original
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(copy, path)
    return saved, path, draws


KINDS = ["flip", "flip", "cut", "empty", "append", "zero", "gone"]


def is_of_draws(file):
    return file.parent.name in ("w", "s", "twice") and not file.name.startswith(".")


@pytest.mark.parametrize("seed", long_but(range(100), *range(6)))
@pytest.mark.parametrize("kind", ["draws", "facts"])
def test_damage_is_noticed(kind, seed, intact):
    """It is an error of ours, or the draws are right; for xarray, any error, or NaN."""
    saved, path, expected = intact
    source = random.Random(seed)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    of_kind = [file for file in files if is_of_draws(file) == (kind == "draws")]
    how = damage(source.choice(of_kind), source, KINDS)
    assert is_noticed(saved, path, expected), how


def is_noticed(saved, path, expected):
    """Whether all that is read is right, or an error."""
    try:
        loaded = ps.BAOA.load(saved, regression)
        found, bare = draws_of(loaded), unconstrained(loaded)
        posterior = loaded.to_arviz(log_likelihood=False).posterior.load()
    except PyroScaleError:
        pass
    else:
        right = all(torch.equal(found[name], value) for name, value in expected.items())
        right = right and torch.allclose(bare["s"].exp(), expected["s"])
        right = right and torch.equal(bare["w"], expected["w"])
        for name, value in expected.items():
            right = right and torch.equal(torch.as_tensor(posterior[name].values), value)
        for dim, size in posterior.sizes.items():
            right = right and np.array_equal(posterior[dim], np.arange(size))
        if not right:
            return False
    try:
        posterior = opened(path).posterior.load()
    except Exception:
        return True
    alike = {n: torch.as_tensor(posterior[n].values) for n in expected if n in posterior}
    return all(
        torch.equal(value[~value.isnan()], expected[name][~value.isnan()])
        for name, value in alike.items()
    )


@pytest.mark.parametrize(
    ("file", "how"),
    long_but(
        itertools.product(
            ["chain/0", "draw/0", "w_dim_0/0", "s/1.2", "w/1.2.0", "../.zmetadata"],
            ["gone", "damaged"],
        ),
        *[("draw/0", "damaged"), ("s/1.2", "gone"), ("../.zmetadata", "damaged")],
    ),
)
def test_what_arviz_cannot_read_is_an_error_of_ours(file, how, intact):
    saved, path, _ = intact
    loaded = ps.BAOA.load(saved, regression)
    name = path / "posterior" / file
    held = name.read_bytes()
    if how == "gone":
        name.unlink()
    else:
        name.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    with pytest.raises(FileError, match=r"draws\.zarr"):
        loaded.to_arviz(log_likelihood=False).posterior.load()
    name.write_bytes(held)
    assert (
        loaded.to_arviz(log_likelihood=False).posterior.load().equals(fitted().to_arviz().posterior)
    )


def test_coordinates_of_one_chain_and_one_draw_are_there(tmp_path):
    """Zarr writes no files of zeros by itself."""
    how = {"num_samples": 1, "num_chains": 1}
    posterior = fitted(store=tmp_path / "draws.zarr", **how).to_arviz().posterior
    assert posterior.load().equals(fitted(**how).to_arviz().posterior)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", long_but([".zmetadata", "posterior/w/.zarray", ".zattrs"], "posterior/w/.zarray")
)
def test_no_digit_or_letter_can_change_unnoticed(file, intact):
    """Of what says how draws are to be read, of which Zarr has no checksum."""
    saved, path, expected = intact
    held, source = (path / file).read_text(), random.Random(0)
    heads = [
        match.start() for match in re.finditer(r'"(?:dtype|shape|chunks|order|filters)"', held)
    ]
    places = [i for h in heads for i in range(h + 8, min(h + 60, len(held))) if held[i].isalnum()]
    places = places or [i for i, letter in enumerate(held) if letter.isalnum()]
    missed = []
    for place in source.sample(places, min(15, len(places))):
        letter = chr(ord(held[place]) ^ source.choice([1, 2, 4, 8]))
        (path / file).write_text(held[:place] + letter + held[place + 1 :])
        try:
            if not is_noticed(saved, path, expected):
                missed.append(held[place - 20 : place] + letter)
        except Exception as error:  # not one of ours
            missed.append(f"{held[place - 20 : place]}{letter}: {type(error).__name__}")
    assert not missed
