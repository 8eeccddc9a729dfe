"""Full disks, workers that die, models and data sets that raise: what was there before stays."""

import contextlib
import os
import shutil
import subprocess
import threading
import time

import pyro
import pyro.distributions as dist
import pytest
import stored
import torch
from repetitions import long_but
from stored import QUIET, X, Y, draws_of, fitted, regression, same, unconstrained
from torch.utils.data import DataLoader, Dataset

import pyro_scale as ps
from pyro_scale.engine import loop
from pyro_scale.errors import FileError
from pyro_scale.posterior import sinks

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
    how = {"model": wide, "data": X, "num_chains": 1, **kwargs}
    return fitted(num_samples=num_samples, **how)


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


@pytest.mark.long
def test_checkpoints_fill_the_disk(disk):
    """The draws until then are kept, and the checkpoint before goes on, once there is room."""
    sampler = ps.BAOA(wide, lr=0.05, compile=False)
    how = {
        "num_samples": 1200,
        "warmup_steps": 0,
        "thinning": 1,
        "num_chains": 1,
        "batch_size": 5,
        **QUIET,
    }
    with pytest.raises(FileError, match=r"cannot be written \(No space left on device\)") as raised:
        sampler.run(X, checkpoint=disk / "run", checkpoint_every=0, **how)
    whole = wide_run(1200)
    kept = draws_of(sampler)["w"]
    count = kept.shape[1]
    assert 0 < count < 1200
    said = raised.value.__notes__[-1]
    assert f"get_samples() holds the {count} draws" in said
    assert said.endswith(f"the same call with resume='{disk / 'run'}' goes on")
    assert raised.value.args[0].endswith("put the directory back, or make it writable")
    assert torch.equal(kept, draws_of(whole)["w"][:, :count])
    assert not [file for file in (disk / "run").iterdir() if file.name.startswith(".pyro-scale")]
    with pytest.raises(FileError, match="No space left"):  # still
        wide_run(1200, resume=disk / "run", checkpoint_every=0)
    room(disk)
    resumed = wide_run(1200, resume=disk / "run")
    same(draws_of(resumed), draws_of(whole))
    same(resumed.posterior.draws.sample_stats, whole.posterior.draws.sample_stats)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", long_but([50, 10**6], 50))
@pytest.mark.long
def test_draws_fill_the_disk(chunk, disk, tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    import xarray

    monkeypatch.setattr(sinks, "_MOST_DRAWS", chunk)
    monkeypatch.setattr(sinks, "_FILE_BYTES", 2**19)
    sampler = ps.BAOA(wide, lr=0.05, compile=False)
    how = {
        "num_samples": 1200,
        "warmup_steps": 0,
        "thinning": 1,
        "num_chains": 1,
        "batch_size": 5,
        "store": disk / "draws.zarr",
        **QUIET,
    }
    with pytest.raises(FileError, match=r"cannot be written \(.*No space left") as raised:
        sampler.run(X, checkpoint=tmp_path / "run", checkpoint_every=0, **how)
    said = raised.value.__notes__[-1]
    assert said.endswith(f"the same call with resume='{tmp_path / 'run'}' goes on")
    whole = wide_run(1200)
    kept = draws_of(sampler)
    count = kept["w"].shape[1]
    assert 0 < count < 1200
    stored.near(kept, {name: value[:, :count] for name, value in draws_of(whole).items()})
    posterior = xarray.open_datatree(disk / "draws.zarr", engine="zarr", chunks=None).posterior
    assert posterior.sizes["draw"] == count
    assert torch.equal(torch.as_tensor(posterior.w.values), kept["w"])
    room(disk)
    resumed = wide_run(1200, resume=tmp_path / "run", store=disk / "draws.zarr")
    same(unconstrained(resumed), unconstrained(whole))
    same(resumed.posterior.draws.sample_stats, whole.posterior.draws.sample_stats)


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


class Dies(Dataset):
    """A data set whose reader is gone after so many rows."""

    def __init__(self, after, how=os._exit):
        self.left, self.how = after, how

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        self.left -= 1
        if self.left < 0:
            self.how(1)
        return X[i], Y[i]


class Gone(Exception):
    pass


def gone(code):
    raise Gone("the rows are gone")


LOADED = {"num_samples": 40, "warmup_steps": 0, "thinning": 1, "num_chains": 2, **QUIET}


def from_loader(dataset, **kwargs):
    loader = DataLoader(dataset, batch_size=5, num_workers=kwargs.pop("workers", 1))
    return ps.BAOA(regression, lr=0.05, compile=False), loader, {**LOADED, **kwargs}


@pytest.mark.slow
@pytest.mark.parametrize("after", long_but([9, 9 * 13], 9 * 13))
def test_a_worker_that_dies_is_an_error_in_a_moment(after, tmp_path):
    """Its draws and its checkpoint are kept, and the run goes on with a worker that lives.

    An epoch has 13 rows, and so has a worker's life where it is not kept over epochs: in the
    former case the first epoch ends it, in the latter it is one that is kept.
    """
    persistent = after > len(X)
    dataset = Dies(after)
    loader = DataLoader(dataset, batch_size=5, num_workers=1, persistent_workers=persistent)
    sampler, _, how = from_loader(dataset)
    begun = time.monotonic()
    with pytest.raises(Exception, match=r"worker .*exited unexpectedly|worker .*is dead") as raised:
        sampler.run(loader, checkpoint=tmp_path, checkpoint_every=0, **how)
    assert time.monotonic() - begun < 60  # not as long as a loader waits for its workers
    whole, loader, how = from_loader(Dies(10**9), workers=0)
    whole.run(loader, **how)
    if persistent:
        kept = draws_of(sampler)
        count = kept["w"].shape[1]
        assert 0 < count < 40
        assert f"holds the {count} draws" in raised.value.__notes__[-1]
        same(kept, {name: value[:, :count] for name, value in draws_of(whole).items()})
    resumed, loader, how = from_loader(Dies(10**9))
    if list(tmp_path.glob("state-*")):
        same(draws_of(resumed.run(loader, resume=tmp_path, **how)), draws_of(whole))
    else:
        assert not persistent


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_a_data_set_that_raises_at_once_is_that_error(after, workers):
    sampler, loader, how = from_loader(Dies(after, gone), workers=workers)
    with pytest.raises(Gone, match="the rows are gone"):
        sampler.run(loader, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kept", long_but(["memory", "store", "nowhere"], "store"))
def test_a_data_set_that_raises_later_leaves_what_there_was(kept, tmp_path):
    where = {"memory": None, "store": tmp_path / "draws.zarr", "nowhere": False}[kept]
    sampler, loader, how = from_loader(Dies(200, gone), workers=0, store=where)
    with pytest.raises(Gone, match="the rows are gone") as raised:
        sampler.run(loader, checkpoint=tmp_path / "run", checkpoint_every=0, **how)
    assert "draws" in raised.value.__notes__[-1]
    whole, loader, how = from_loader(Dies(10**9, gone), workers=0)
    whole.run(loader, **how)
    if kept != "nowhere":
        found = draws_of(sampler)
        count = found["w"].shape[1]
        assert 0 < count < 40
        same(found, {name: value[:, :count] for name, value in draws_of(whole).items()})
    resumed, loader, how = from_loader(Dies(10**9, gone), workers=0, store=where)
    resumed.run(loader, resume=tmp_path / "run", **how)
    if kept == "nowhere":
        for name, found in resumed.moments().items():
            expected = whole.moments()[name]
            torch.testing.assert_close(found.mean, expected.mean, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(found.sd, expected.sd, rtol=1e-11, atol=1e-11)
    else:
        same(draws_of(resumed), draws_of(whole))


# ------------------------------------------------------------------ models that raise


class Refused(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kept", long_but(["memory", "store", "nowhere"], "memory"))
def test_a_model_that_raises_at_a_later_step_leaves_what_there_was(kept, tmp_path):
    calls = []

    def model(x, y=None):
        calls.append(1)
        if len(calls) == 150:
            raise Refused("no more")
        regression(x, y)

    where = {"memory": None, "store": tmp_path / "draws.zarr", "nowhere": False}[kept]
    sampler = ps.BAOA(model, lr=0.05, compile=False)
    how = {
        "num_samples": 200,
        "warmup_steps": 0,
        "thinning": 1,
        "num_chains": 2,
        "batch_size": 5,
        **QUIET,
    }
    with pytest.raises(Refused, match="no more") as raised:
        sampler.run((X, Y), checkpoint=tmp_path / "run", checkpoint_every=0, store=where, **how)
    whole = fitted(num_samples=200, num_chains=2)
    if kept == "nowhere":
        assert sampler.moments()["w"].mean.isfinite().all()
    else:
        found = draws_of(sampler)
        count = found["w"].shape[1]
        assert 0 < count < 200
        assert f"get_samples() holds the {count} draws" in raised.value.__notes__[-1]
        stored.near(found, {name: value[:, :count] for name, value in draws_of(whole).items()})
    resumed = fitted(num_samples=200, num_chains=2, resume=tmp_path / "run", store=where)
    if kept != "nowhere":
        same(unconstrained(resumed), unconstrained(whole))


def test_a_model_that_raises_on_the_first_batch_is_that_error():
    def model(x, y=None):
        raise Refused("not for me")

    with pytest.raises(Exception, match="not for me"):
        fitted(model)


@pytest.mark.slow
def test_a_run_that_ends_early_leaves_no_thread(monkeypatch):
    """Neither that which draws ahead, though the error holds the run's frames."""

    move = loop.Chains.move

    def broken(self, program, batches, block, *others):
        if block.start > 500:
            raise ValueError("the end")
        move(self, program, batches, block, *others)

    monkeypatch.setattr(loop.Chains, "move", broken)
    with pytest.raises(ValueError, match="the end") as error:
        ps.BAOA(wide, lr=0.05, compile=False).run(
            X, num_samples=5000, warmup_steps=0, thinning=1, num_chains=1, batch_size=5, **QUIET
        )
    assert error.traceback  # which is held
    assert not [t for t in threading.enumerate() if t.name.startswith("pyro_scale-block")]
