"""Full disks, workers that die, models and data sets that raise: what was there before stays."""

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from repetitions import long_but
from stored import (
    X,
    Y,
    draws_of,
    ended_by,
    fitted,
    held_of,
    regression,
    same,
    same_outcome,
)
from stores import buffering, opened
from torch.utils.data import DataLoader, Dataset

import pyro_scale as ps
from pyro_scale.engine import loop
from pyro_scale.errors import FileError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # torch's own, of workers that were shut down on purpose
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DISK = 2 * 2**20
WIDE = 400


def wide(x):
    """3.2 kB a draw: a small disk holds some hundreds."""
    w = pyro.sample("w", dist.Normal(torch.zeros(WIDE).double(), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(torch.zeros(()).double(), 0.3))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w[0] * x[:, 0], s), obs=x[:, 1])


def wide_run(num_samples, **kwargs):
    return fitted(wide, X, num_samples=num_samples, num_chains=1, **kwargs)


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own, in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a disk that is full needs mount ({error})")
    if done.returncode:
        pytest.skip(f"a disk that is full needs the right to mount one ({done.stderr.strip()})")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def room(disk):
    """Makes some."""
    subprocess.run(["mount", "-o", f"remount,size={32 * DISK}", str(disk)], check=True)


@contextlib.contextmanager
def no_room(disk):
    """All of it is taken."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free))
    yield
    ballast.unlink()


# ------------------------------------------------------------------ full disks


WIDE_RUN = {"model": wide, "data": X, "num_chains": 1, "num_samples": 1200}


@pytest.mark.long
def test_checkpoints_fill_the_disk(disk):
    """The draws until then are kept, and the checkpoint before goes on, once there is room."""
    full = FileError, r"cannot be written \(No space left on device\)"
    sampler, error = ended_by(*full, **WIDE_RUN, checkpoint=disk / "run", checkpoint_every=0)
    whole = wide_run(1200)
    count = held_of(sampler, whole)
    assert count < 1200
    said = error.__notes__[-1]
    assert f"get_samples() holds the {count} draws" in said
    assert said.endswith(f"the same call with resume='{disk / 'run'}' goes on")
    assert error.args[0].endswith("put the directory back, or make it writable")
    assert not [file for file in (disk / "run").iterdir() if file.name.startswith(".pyro-scale")]
    with pytest.raises(FileError, match="No space left"):  # still
        wide_run(1200, resume=disk / "run", checkpoint_every=0)
    room(disk)
    same_outcome(wide_run(1200, resume=disk / "run"), whole)


@pytest.mark.parametrize("chunk", long_but([50, 10**6], 50))
@pytest.mark.long
def test_draws_fill_the_disk(chunk, disk, tmp_path):
    pytest.importorskip("zarr")
    with buffering(file_draws=chunk, file_bytes=2**19):
        where = {"store": disk / "draws.zarr", "checkpoint": tmp_path / "run"}
        full = FileError, r"cannot be written \(.*No space left"
        sampler, error = ended_by(*full, **WIDE_RUN, **where, checkpoint_every=0)
        said = error.__notes__[-1]
        assert said.endswith(f"the same call with resume='{tmp_path / 'run'}' goes on")
        whole = wide_run(1200)
        count = held_of(sampler, whole)
        assert count < 1200
        posterior = opened(disk / "draws.zarr").posterior
        assert posterior.sizes["draw"] == count
        assert torch.equal(torch.as_tensor(posterior.w.values), draws_of(sampler)["w"])
        room(disk)
        resumed = wide_run(1200, resume=tmp_path / "run", store=disk / "draws.zarr")
        same_outcome(resumed, whole)


def test_a_disk_that_is_full_from_the_beginning(disk):
    pytest.importorskip("zarr")
    with no_room(disk):
        for where in ({"checkpoint": disk / "run"}, {"store": disk / "draws.zarr"}):
            with pytest.raises(FileError, match=r"No space left on device"):
                wide_run(10, **where)
    same(draws_of(wide_run(10, checkpoint=disk / "run")), draws_of(wide_run(10)))


@pytest.mark.slow
def test_results_fill_the_disk(disk):
    fit = wide_run(300)
    fit.save(disk / "run.ps")
    before, longer = (disk / "run.ps").read_bytes(), wide_run(700)
    with pytest.raises(FileError, match=r"cannot be written \(No space left on device\)"):
        longer.save(disk / "run.ps")
    assert (disk / "run.ps").read_bytes() == before
    assert [file.name for file in disk.iterdir()] == ["run.ps"]
    same(draws_of(ps.BAOA.load(disk / "run.ps", wide)), draws_of(fit))
    room(disk)
    longer.save(disk / "run.ps")
    same(draws_of(ps.BAOA.load(disk / "run.ps", wide)), draws_of(longer))


def test_a_disk_that_becomes_one_to_read_only(disk, tmp_path):
    fit = wide_run(50, checkpoint=disk / "run")
    fit.save(disk / "run.ps")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    same(draws_of(ps.BAOA.load(disk / "run.ps", wide)), draws_of(fit))
    with pytest.raises(FileError, match=r"cannot be written \(Read-only file system\)"):
        fit.save(disk / "run.ps")
    with pytest.raises(FileError, match="Read-only file system"):
        wide_run(60, resume=disk / "run")
    with pytest.raises(FileError, match="Read-only file system"):
        wide_run(60, checkpoint=disk / "other")


def test_a_store_on_a_disk_to_read_only_is_read(disk):
    pytest.importorskip("zarr")
    room(disk)
    fit = wide_run(50, store=disk / "draws.zarr")
    held = draws_of(fit)
    fit.save(disk / "run.ps")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    same(draws_of(fit), held)
    same(draws_of(ps.BAOA.load(disk / "run.ps", wide)), held)
    with pytest.raises(FileError, match="Read-only file system"):
        wide_run(50, store=disk / "other.zarr")


# ------------------------------------------------------------------ workers that die


class Refused(Exception):
    pass


def refuse():
    raise Refused("no more")


class Ends(Dataset):
    """A data set whose reader comes to an end after so many rows."""

    def __init__(self, after, end=refuse):
        self.left, self.end = after, end

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        self.left -= 1
        if self.left < 0:
            self.end()
        return X[i], Y[i]


def from_loader(after, **kwargs):
    return {"data": DataLoader(Ends(after), batch_size=5, **kwargs), "batch_size": None}


LOADED = {"num_samples": 40, "num_chains": 2}


@pytest.mark.slow
@pytest.mark.parametrize("after", long_but([9, 9 * 13], 9 * 13))
def test_a_worker_that_dies_is_an_error_in_a_moment(after, tmp_path):
    """Its draws and its checkpoint are kept, and the run goes on with a worker that lives.

    An epoch has 13 rows, and so has a worker's life where it is not kept over epochs: in the
    former case the first epoch ends it, in the latter it is one that is kept.
    """
    persistent, how = after > len(X), {**LOADED, **from_loader(10**9, num_workers=1)}
    dataset = Ends(after, lambda: os._exit(1))
    dies = DataLoader(dataset, batch_size=5, num_workers=1, persistent_workers=persistent)
    begun = time.monotonic()
    sampler, error = ended_by(
        *(Exception, r"worker .*exited unexpectedly|worker .*is dead"),
        **{**how, "data": dies, "checkpoint": tmp_path, "checkpoint_every": 0},
    )
    assert time.monotonic() - begun < 60  # not as long as a loader waits for its workers
    whole = fitted(**LOADED, **from_loader(10**9))
    if persistent:
        count = held_of(sampler, whole)
        assert count < 40
        assert f"holds the {count} draws" in error.__notes__[-1]
    if list(tmp_path.glob("state-*")):
        same_outcome(fitted(**how, resume=tmp_path), whole)
    else:
        assert not persistent


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_a_data_set_that_raises_at_once_is_that_error(after, workers):
    ended_by(Refused, "no more", **LOADED, **from_loader(after, num_workers=workers))


# ------------------------------------------------------------------ what raises later


def raises_later():
    calls = []

    def model(x, y=None):
        calls.append(1)
        if len(calls) == 150:
            refuse()
        return regression(x, y)

    return {"model": model}


#: (What the run is of, how it ends, the same of a run that does not).
ENDS = {
    "the model": (lambda: {**LOADED, "num_samples": 200}, raises_later, dict),
    "the data set": (lambda: LOADED, lambda: from_loader(200), lambda: from_loader(10**9)),
    "a worker's": (
        lambda: {"num_samples": 100, "num_chains": 1},
        lambda: from_loader(400, num_workers=1, persistent_workers=True),
        lambda: from_loader(10**9),
    ),
    "after the run": (  # when noise is estimated
        lambda: {"num_samples": 20},
        lambda: from_loader(310),
        lambda: from_loader(10**9),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "kept"),
    long_but(
        itertools.product(ENDS, ["memory", "store", "nowhere"]),
        *[("the model", "memory"), ("the data set", "store"), ("after the run", "nowhere")],
        ("a worker's", "memory"),
    ),
)
def test_what_raises_later_leaves_what_there_was(end, kept, tmp_path):
    how, breaks, lasts = ENDS[end]
    where = {"store": {"memory": None, "store": tmp_path / "draws.zarr", "nowhere": False}[kept]}
    sampler, error = ended_by(
        *(Refused, "no more"),
        **{**how(), **breaks(), **where, "checkpoint": tmp_path / "run", "checkpoint_every": 0},
    )
    assert "holds the" in error.__notes__[-1]
    if kept == "nowhere":
        assert sampler.moments()["w"].mean.isfinite().all()
    else:
        count = held_of(sampler, fitted(**how(), **lasts()))
        assert f"get_samples() holds the {count} draws" in error.__notes__[-1]
    resumed = fitted(**how(), **lasts(), **where, resume=tmp_path / "run")
    same_outcome(resumed, fitted(**how(), **lasts(), store=where["store"] and tmp_path / "whole"))


def test_a_model_that_raises_on_the_first_batch_is_that_error():
    def model(x, y=None):
        raise Refused("not for me")

    ended_by(Exception, "not for me", model)


@pytest.mark.slow
def test_a_run_that_ends_early_leaves_no_thread(monkeypatch):
    """Neither that which draws ahead, though the error holds the run's frames."""

    move = loop.Chains.move

    def broken(self, program, batches, block, *others):
        if block.start > 500:
            raise ValueError("the end")
        move(self, program, batches, block, *others)

    monkeypatch.setattr(loop.Chains, "move", broken)
    _, error = ended_by(ValueError, "the end", **{**WIDE_RUN, "num_samples": 5000})
    assert error.__traceback__  # which is held
    assert not [t for t in threading.enumerate() if t.name.startswith("pyro_scale-block")]
