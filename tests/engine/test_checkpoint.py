"""Runs that were cut short go on as if they had not been: bit for bit, or not at all."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from places import SUPPORT
from repetitions import long_but
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pyro_scale as ps
from pyro_scale.engine import checkpoint, loop, progress
from pyro_scale.errors import ArgumentError, FileError, NonFiniteError
from pyro_scale.run.run import RunPlan

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]

N, B = 60, 8
QUIET = {"seed": 3, "progress": False}
STEPS = {"num_samples": 40, "warmup_steps": 11, "thinning": 3, "num_chains": 1}


def rows(count=N):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2, generator=source, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0], dtype=torch.float64)


X, Y = rows()


def regression(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.3))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def other_prior(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.1).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.3))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def subsampling(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", N, subsample_size=B) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def with_point(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    s = pyro.param("sd", torch.tensor(1.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


class Noisy(Dataset):
    """Rows with noise of their own each time that they are read, from torch's generator."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return X[i] + 0.1 * torch.randn(2), Y[i]


class Endless(IterableDataset):
    """Rows in an order of their own in every epoch."""

    def __iter__(self):
        return ((X[i] + 0.1 * torch.randn(2), Y[i]) for i in torch.randperm(N).tolist())


def head():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    net = ps.bayesianize(net, include="2")

    def model(x, y=None):
        mean = net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return model


SMALL = {"lr": 0.02, "compile": False}
IN_BATCHES = {"batch_size": B, "num_chains": 2}
#: (method, data, how it is run)
CASES = {
    **{
        name: (lambda name=name: getattr(ps, name)(regression, **SMALL), (X, Y), IN_BATCHES)
        for name in ("SGLD", "SGHMC", "SGNHT", "BAOA", "UBU", "pSGLD")
    },
    "all rows": (lambda: ps.BAOA(regression, **SMALL), (X, Y), {}),
    "compiled": (lambda: ps.BAOA(regression, lr=0.02, compile=True), (X, Y), IN_BATCHES),
    "replacement": (
        lambda: ps.BAOA(regression, **SMALL),
        (X, Y),
        {**IN_BATCHES, "sampling": "replacement"},
    ),
    "symmetric": (
        lambda: ps.UBU(regression, **SMALL),
        (X, Y),
        {**IN_BATCHES, "sampling": "symmetric"},
    ),
    "shared batches": (
        lambda: ps.BAOA(regression, **SMALL),
        (X, Y),
        {**IN_BATCHES, "share_batches": True},
    ),
    "schedules": (
        lambda: ps.BAOA(regression, lr=ps.schedules.cosine_decay(0.03, 131), compile=False),
        (X, Y),
        IN_BATCHES,
    ),
    "cycles": (
        lambda: ps.SGHMC(regression, lr=ps.schedules.Cyclical(0.03, 60), compile=False),
        (X, Y),
        IN_BATCHES,
    ),
    "by site": (
        lambda: ps.BAOA(regression, lr={"w": 0.02, "s": 0.01}, compile=False),
        (X, Y),
        IN_BATCHES,
    ),
    "control variates": (
        lambda: ps.BAOA(regression, control_variates=True, **SMALL),
        (X, Y),
        IN_BATCHES,
    ),
    "noise taken off": (
        lambda: ps.BAOA(regression, subtract_noise=True, **SMALL),
        (X, Y),
        IN_BATCHES,
    ),
    "a chosen step": (
        lambda: ps.BAOA(regression, lr="auto", precondition=None, compile=False),
        (X, Y),
        IN_BATCHES,
    ),
    "own subsamples": (lambda: ps.BAOA(subsampling, **SMALL), (X, Y), {"num_chains": 2}),
    "points": (lambda: ps.BAOA(with_point, **SMALL), (X, Y), IN_BATCHES),
    "frozen base": (lambda: ps.BAOA(head(), **SMALL), (X, Y), IN_BATCHES),
    "a loader by index": (
        lambda: ps.BAOA(regression, **SMALL),
        DataLoader(Noisy(), batch_size=B, shuffle=True),
        {"num_chains": 2},
    ),
    "frozen base, a loader": (
        lambda: ps.BAOA(head(), **SMALL),
        DataLoader(Noisy(), batch_size=B, shuffle=True),
        {"num_chains": 2},
    ),
    "workers": (
        lambda: ps.BAOA(regression, **SMALL),
        DataLoader(Noisy(), batch_size=B, num_workers=2),
        {"num_chains": 2},
    ),
    "a stream": (
        lambda: ps.BAOA(regression, num_data=N, **SMALL),
        DataLoader(Endless(), batch_size=B),
        {"num_chains": 3},
    ),
    "a stream of lists": (
        lambda: ps.BAOA(regression, num_data=N, **SMALL),
        [(X[:B], Y[:B]), (X[B:40], Y[B:40]), (X[40:43], Y[40:43])],
        {"num_chains": 3},
    ),
}


def run(case, changes=None, **options):
    method, data, how = CASES[case]
    return method().run(data, **{**STEPS, **how, **QUIET, **options, **(changes or {})})


def same(one, other):
    draws, expected = one.get_samples(group_by_chain=True), other.get_samples(group_by_chain=True)
    assert draws.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(draws[name], value), name
    for name in ("lp", "step"):
        assert torch.equal(
            one.posterior.draws.sample_stats[name], other.posterior.draws.sample_stats[name]
        )
    assert one.params.keys() == other.params.keys()
    assert all(torch.equal(value, other.params[name]) for name, value in one.params.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    long_but(
        CASES,
        *["SGNHT", "compiled", "points", "a loader by index", "a stream"],
    ),
)
def test_a_run_that_was_cut_short_goes_on_bit_for_bit(case, cut, tmp_path, monkeypatch):
    whole = run(case)
    for step in (70, 100):
        cut(step)
        where = {"resume": tmp_path} if step == 100 else {"checkpoint": tmp_path}
        part = run(case, **where, checkpoint_every=0)
        assert part.get_samples()["w" if "w" in whole.get_samples() else "2.weight"].shape[0] > 0
        monkeypatch.undo()
    same(run(case, resume=tmp_path), whole)
    assert len(list(tmp_path.glob("state-*"))) == 2


# ------------------------------------------------------------------ what ends a run


@pytest.mark.slow
def test_an_interrupt_leaves_the_draws_until_then(cut):
    whole = run("BAOA")
    cut(100)
    with pytest.warns(
        UserWarning, match=r"interrupted after 95 steps; get_samples\(\) holds the 28"
    ) as told:
        part = run("BAOA")
    assert not [each for each in told if "resume" in str(each.message)]  # nothing is written down
    drawn, expected = (each.get_samples(group_by_chain=True)["w"] for each in (part, whole))
    assert torch.equal(drawn, expected[:, :28])
    assert part.to_arviz().posterior.attrs["num_samples"] == 28
    assert part.summary().shape[0] == 3


def test_an_interrupt_before_the_first_draw_is_one(cut, tmp_path):
    cut(9)
    with pytest.raises(KeyboardInterrupt) as raised:
        run("BAOA")
    assert raised.value.__notes__[-1].endswith("steps; no draws")
    with pytest.raises(KeyboardInterrupt) as raised:
        run("BAOA", checkpoint=tmp_path)
    assert raised.value.__notes__[-1].endswith(f"; the same call with resume='{tmp_path}' goes on")


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(cut, tmp_path, monkeypatch):
    cut(100)
    with pytest.warns(UserWarning, match=r"interrupted .*; the same call with resume='") as told:
        run("BAOA", checkpoint=tmp_path)
    said = next(str(each.message) for each in told if "interrupted" in str(each.message))
    monkeypatch.undo()
    same(run("BAOA", resume=said.split("'")[1]), run("BAOA"))


class Breaks(Dataset):
    """A data set that cannot be read any more after so many rows."""

    def __init__(self, after):
        self.left = after

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return X[i], Y[i]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "after"),  # in the run, and when noise is estimated after it
    long_but(product([0, 1], [900, 1200]), (1, 1200)),
)
def test_a_loader_that_breaks_leaves_draws_and_checkpoint(workers, after, tmp_path):
    sampler = ps.BAOA(regression, **SMALL)
    loader = DataLoader(Breaks(after), batch_size=B, num_workers=workers)
    with pytest.raises(OSError, match="the disk is gone") as raised:
        sampler.run(loader, checkpoint=tmp_path, checkpoint_every=0, **STEPS, **QUIET)
    assert "get_samples() holds the" in raised.value.__notes__[-1]
    whole = ps.BAOA(regression, **SMALL).run(
        DataLoader(Breaks(10**9), batch_size=B), **STEPS, **QUIET
    )
    kept = sampler.get_samples()["w"]
    assert 0 < len(kept) <= 40
    assert torch.equal(kept, whole.get_samples()["w"][: len(kept)])
    resumed = ps.BAOA(regression, **SMALL).run(
        DataLoader(Breaks(10**9), batch_size=B), resume=tmp_path, **STEPS, **QUIET
    )
    same(resumed, whole)


@pytest.mark.slow
def test_a_model_that_raises_leaves_the_draws(tmp_path):
    calls = []

    def model(x, y=None):
        calls.append(1)
        if len(calls) == 120:
            raise ValueError("no more")
        regression(x, y)

    sampler = ps.BAOA(model, **SMALL)
    with pytest.raises(ValueError, match="no more"):
        sampler.run((X, Y), batch_size=B, **STEPS, **QUIET)
    assert len(sampler.get_samples()["w"]) > 0


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_leaves_the_draws_and_the_last_one(
    tmp_path, monkeypatch
):
    whole, write = run("BAOA"), checkpoint.files.write

    def full(path, contents, kind="results"):
        if contents.get("step", 0) > 60:
            raise FileError(f"'{path}' cannot be written (No space left on device)")
        write(path, contents, kind)

    monkeypatch.setattr(checkpoint.files, "write", full)
    sampler = CASES["BAOA"][0]()
    how = {**STEPS, **IN_BATCHES, **QUIET}
    with pytest.raises(FileError, match="No space left"):
        sampler.run((X, Y), checkpoint=tmp_path, checkpoint_every=0, **how)
    kept = sampler.get_samples(group_by_chain=True)["w"]
    assert torch.equal(kept, whole.get_samples(group_by_chain=True)["w"][:, : kept.shape[1]])
    monkeypatch.undo()
    same(run("BAOA", resume=tmp_path), whole)


@pytest.mark.slow
def test_a_directory_that_is_deleted_leaves_the_draws(tmp_path):
    """There is nothing then to go on with."""
    calls, path = [], tmp_path / "run"

    def model(x, y=None):
        calls.append(1)
        if len(calls) == 120:
            shutil.rmtree(path)
        regression(x, y)

    sampler = ps.BAOA(model, **SMALL)
    with pytest.raises(FileError, match=r"cannot be written \(No such file.*put the dir") as raised:
        sampler.run((X, Y), batch_size=B, checkpoint=path, checkpoint_every=0, **STEPS, **QUIET)
    assert raised.value.__notes__[-1].endswith("draws a chain until then")
    assert len(sampler.get_samples()["w"]) > 0


@pytest.mark.slow
def test_a_chain_that_stopped_stays_so(tmp_path, cut, monkeypatch):
    def cliff(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("cliff", w * torch.where(w > 1.5, torch.nan, 0.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, 30.0), obs=y)

    def sampler():
        return ps.SGLD(cliff, lr=5.0, compile=False, init_strategy={"w": torch.zeros(6)})

    how = {**STEPS, "batch_size": B, "num_chains": 6, **QUIET}
    whole, part = sampler(), sampler()
    with pytest.raises(NonFiniteError) as expected:
        whole.run((X, Y), **how)
    stops = re.findall(r"chain (\d+) at step (\d+)", str(expected.value))
    assert len(stops) > 1
    cut(min(int(step) for _, step in stops) + 40)
    with pytest.raises((NonFiniteError, KeyboardInterrupt)):
        part.run((X, Y), checkpoint=tmp_path, checkpoint_every=0, **how)
    monkeypatch.undo()
    resumed = sampler()
    with pytest.raises(NonFiniteError) as found:
        resumed.run((X, Y), resume=tmp_path, **how)
    # Of chains that stopped before the checkpoint their last steps, and so their sites, are lost.
    assert re.findall(r"chain (\d+) at step (\d+)", str(found.value)) == stops
    assert "site 'cliff': its log density is NaN" in str(found.value)
    same(resumed, whole)


# ------------------------------------------------------------------ going on


@pytest.mark.slow
def test_a_finished_run_is_extended(tmp_path):
    longer = run("BAOA", num_samples=70)
    run("BAOA", checkpoint=tmp_path)
    same(run("BAOA", resume=tmp_path), run("BAOA"))  # nothing is left to do
    same(run("BAOA", num_samples=70, resume=tmp_path), longer)
    with pytest.raises(ArgumentError, match=r"num_samples=40: .* holds 70 draws a chain already"):
        run("BAOA", resume=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", long_but([False, True], True))
@pytest.mark.long
def test_a_run_is_extended_by_the_program_that_it_was_run_by(compiled, tmp_path, monkeypatch):
    """Bit for bit: compiled steps and others differ by rounding."""
    how = {**STEPS, **IN_BATCHES, **QUIET}

    def ran(compile, num_samples=40, **where):
        method = ps.BAOA(regression, lr=0.02, compile=compile)
        return method.run((X, Y), **{**how, "num_samples": num_samples}, **where)

    longer = ran(compiled, num_samples=70)
    ran(compiled, checkpoint=tmp_path)
    limit = 10_000 if compiled else 1  # by which "auto" would choose the other one
    monkeypatch.setattr("pyro_scale.engine.compile_step._REPAID_AFTER", limit)
    extended = ran("auto", num_samples=70, resume=tmp_path)
    same(extended, longer)
    finished = ran("auto", num_samples=70, resume=tmp_path)  # nothing is left to do
    for each in (extended, finished):
        assert each.posterior.draws.attrs["program"] == ("compiled loop" if compiled else "eager")


@pytest.mark.slow
def test_the_seed_is_that_of_the_run(tmp_path):
    whole = run("BAOA", checkpoint=tmp_path)
    same(run("BAOA", resume=tmp_path, seed=None), whole)


@pytest.fixture(scope="module")
def finished(float64, tmp_path_factory):
    """The checkpoints of a run."""
    directory = tmp_path_factory.mktemp("finished")
    run("BAOA", checkpoint=directory)
    return directory


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"seed": 4}, r"seed was 3, is 4"),
        ({"num_chains": 3}, r"num_chains was 2, is 3"),
        ({"warmup_steps": 12}, r"warmup_steps was 11, is 12"),
        ({"thinning": 1}, r"thinning was 3, is 1"),
        ({"batch_size": 9}, r"batch_size was 8, is 9"),
        ({"sampling": "replacement"}, r"sampling was 'shuffle', is 'replacement'"),
        ({"share_batches": True}, r"share_batches was 0, is 1"),
        ({"method": lambda: ps.BAOA(regression, lr=0.03, compile=False)}, r"'lr'\] was 0.02"),
        ({"method": lambda: ps.UBU(regression, **SMALL)}, "method was 'BAOA', is 'UBU'"),
        ({"method": lambda: ps.BAOA(subsampling, **SMALL)}, "sites.* is not there"),
        ({"method": lambda: ps.BAOA(other_prior, **SMALL)}, "log prior where chain 0 starts was"),
        ({"data": (X, Y + (torch.arange(N) == N - 1))}, "data was 'tensors [0-9a-f]{16}', is 'te"),
        ({"data": (X[:50], Y[:50])}, "num_data was 60, is 50"),
    ],
)
def test_another_run_is_refused_with_what_differs(changed, what, finished):
    before = {file.name: file.read_bytes() for file in finished.iterdir()}
    method, data, how = CASES["BAOA"]
    changed = dict(changed)
    method, data = changed.pop("method", method), changed.pop("data", data)
    how = {**STEPS, **how, **QUIET, **changed}
    if "not there" in what:
        how.pop("batch_size")
    with pytest.raises(FileError, match=rf"is another run \(.*{what}"):
        method().run(data, resume=finished, **how)
    assert before == {file.name: file.read_bytes() for file in finished.iterdir()}


def test_of_hyperparameters_by_site_those_that_differ_are_named(tmp_path):
    how = {**STEPS, **IN_BATCHES, **QUIET}
    ps.BAOA(regression, lr={"w": 0.02, "s": 0.01}, compile=False).run(
        (X, Y), checkpoint=tmp_path, **how
    )
    other = ps.BAOA(regression, lr={"w": 0.03, "s": 0.01}, compile=False)
    with pytest.raises(
        FileError, match=re.escape("(hyperparameters['lr']['w'] was 0.02, is 0.03)")
    ):
        other.run((X, Y), resume=tmp_path, **how)


class Plain(Dataset):
    """The rows, but not as tensors that can be seen."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return X[i], Y[i]


class Mine:
    """A loader of one's own."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(DataLoader(self.dataset, B))


KINDS = {
    "tensors": ((X, Y), {"batch_size": B}),
    "a data set": (DataLoader(Plain(), B), {}),
    "another one": (DataLoader(Noisy(), B), {}),
    "as they come": (DataLoader(Plain(), batch_sampler=[*torch.arange(N).split(B)]), {}),
    "another loader": (Mine(Plain()), {}),
}


@pytest.mark.parametrize(
    ("then", "now"),
    long_but(product(KINDS, KINDS), ("tensors", "tensors"), *pairwise([*KINDS, "tensors"])),
)
def test_the_kind_of_data_counts(then, now, tmp_path, monkeypatch):
    """Though the first batch is the same, the later ones would be others."""
    monkeypatch.setattr(Noisy, "__getitem__", Plain.__getitem__)
    how = {**STEPS, **QUIET, "num_samples": 3, "warmup_steps": 0, "thinning": 1}

    def ran(kind, **where):
        data, options = KINDS[kind]
        ps.BAOA(regression, **SMALL).run(data, **options, **how, **where)

    ran(then, checkpoint=tmp_path)
    if then == now:
        ran(now, resume=tmp_path)
        return
    with pytest.raises(FileError, match=r"is another run \(data was '.*', is '.*'\)"):
        ran(now, resume=tmp_path)


@pytest.mark.slow
def test_the_bar_of_a_run_that_goes_on_shows_no_log_joint_before_there_is_one(
    tmp_path, monkeypatch, capfd
):
    run("BAOA", checkpoint=tmp_path)
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, mininterval=0, miniters=1))
    run("BAOA", num_samples=70, resume=tmp_path, progress=True)
    shown = capfd.readouterr().err
    assert "log joint -" in shown
    assert "131/221 [" in shown
    assert "nan" not in shown


def test_the_version_counts(tmp_path, monkeypatch):
    run("BAOA", checkpoint=tmp_path)
    monkeypatch.setattr("pyro_scale.run.resume.version", lambda _: "9.9")
    with pytest.raises(FileError, match=r"version was '.*', is '9.9'"):
        run("BAOA", resume=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"checkpoint": 3}, ArgumentError, "path=3"),
        ({"checkpoint_every": -1.0}, ArgumentError, "checkpoint_every=-1.0: pass seconds"),
        ({"checkpoint_every": "60"}, ArgumentError, "checkpoint_every='60'"),
        ({"checkpoint": "nowhere/at/all"}, FileError, "cannot be made .*whose parent is there"),
        ({"resume": "nowhere"}, FileError, "resume='nowhere' is no directory: pass"),
        ({"resume": "."}, FileError, "resume='.' holds no checkpoint: pass"),
        ({"checkpoint": ""}, ArgumentError, "path=''"),
        ({"checkpoint": "x" * 300}, FileError, "cannot be"),
    ],
)
def test_bad_arguments_are_refused(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        run("BAOA", **options)
    assert not list(tmp_path.iterdir())


def test_a_runs_checkpoints_are_not_written_over(tmp_path):
    run("BAOA", checkpoint=tmp_path)
    with pytest.raises(ArgumentError, match=r"holds the checkpoints of a run: pass resume="):
        run("BAOA", checkpoint=tmp_path)
    with pytest.raises(ArgumentError, match="leave checkpoint out"):
        run("BAOA", checkpoint=tmp_path / "other", resume=tmp_path)
    run("BAOA", checkpoint=tmp_path, resume=tmp_path)


@pytest.mark.slow
def test_one_run_at_a_time_writes_into_a_directory(tmp_path):
    run("BAOA", {"checkpoint": tmp_path}, num_samples=5)
    other = "import sys; from pathlib import Path; from pyro_scale.storage import files\n"
    other += "with files.locked(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", other, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"in\n"
        before = sorted(tmp_path.iterdir())
        with pytest.raises(FileError, match="another run is writing into"):
            run("BAOA", {"resume": tmp_path}, num_samples=8)
        assert sorted(tmp_path.iterdir()) == before
        process.kill()
    run("BAOA", {"resume": tmp_path}, num_samples=8)


def test_checkpoints_leave_nothing_behind(tmp_path):
    (tmp_path / ".pyro-scale-0123456789abcdef").write_bytes(b"of a run that was killed")
    own = {"draws-final.nc", "draws-2024.csv", "state-notes.txt", ".pyro-scale-mine"}
    for name in own:
        (tmp_path / name).write_text("the user's own")
    run("BAOA", checkpoint=tmp_path, checkpoint_every=0)
    names = {file.name for file in tmp_path.iterdir()} - own
    assert len(list(tmp_path.iterdir())) == len(names) + len(own)
    assert {re.sub("[0-9]+", "", name) for name in names} == {"state-", "draws-"}


@pytest.mark.slow
@pytest.mark.long
def test_schedules_of_ours_are_compared(tmp_path):
    run("cycles", checkpoint=tmp_path)
    method = ps.SGHMC(regression, lr=ps.schedules.Cyclical(0.03, 50), compile=False)
    with pytest.raises(FileError, match=r"is another run .*cycle_steps"):
        method.run((X, Y), resume=tmp_path, **{**STEPS, **IN_BATCHES, **QUIET})


@pytest.mark.slow
@pytest.mark.long
def test_a_step_that_was_chosen_is_for_its_number_of_steps(tmp_path):
    sampler = CASES["a chosen step"][0]()
    how = {**STEPS, **IN_BATCHES, **QUIET}
    sampler.run((X, Y), checkpoint=tmp_path, **how)
    drawn = sampler.get_samples()["w"]
    with pytest.raises(FileError, match="num_samples was 40, is 80"):
        CASES["a chosen step"][0]().run((X, Y), resume=tmp_path, **{**how, "num_samples": 80})
    with pytest.raises(FileError, match="is another run"):
        sampler.run((X, Y), resume=tmp_path, **{**how, "seed": 5})
    assert torch.equal(sampler.get_samples()["w"], drawn)  # a refusal takes nothing away


# ------------------------------------------------------------------ damage


def damaged(path, source):
    """A byte changed, cut off from somewhere, or something behind the end."""
    held = bytearray(path.read_bytes())
    place = source.randrange(len(held))
    kind = source.choice(["flip", "cut", "append", "zero"])
    if kind == "flip":
        held[place] ^= 1 << source.randrange(8)
    elif kind == "cut":
        del held[place:]
    elif kind == "append":
        held += bytes([place % 256])
    else:
        held[place : place + 16] = bytes(len(held[place : place + 16]))
        if held == path.read_bytes():
            held[place] ^= 1
    path.write_bytes(held)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """(The files of a run that was cut short, the whole run)."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    directory = tmp_path_factory.mktemp("unfinished")
    move = loop.Chains.move

    def interrupted(self, program, batches, block, *others):
        if block.stop > 100:
            raise KeyboardInterrupt
        move(self, program, batches, block, *others)

    whole = run("BAOA")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(loop.Chains, "move", interrupted)
        run("BAOA", checkpoint=directory, checkpoint_every=0)
    torch.set_default_dtype(default)
    files = (file for file in directory.iterdir() if not file.name.startswith("."))
    return {file.name: file.read_bytes() for file in files}, whole


@pytest.mark.slow
@pytest.mark.parametrize("seed", long_but(range(200), *range(20)))  # of 20, every file
def test_damage_is_noticed(seed, unfinished, tmp_path):
    """The draws are those of the whole run, or it is refused; the latest state may be lost."""
    held, whole = unfinished
    for name, contents in held.items():
        (tmp_path / name).write_bytes(contents)
    source = random.Random(seed)
    name = sorted(held)[seed % len(held)]
    damaged(tmp_path / name, source)
    latest = max((n for n in held if "state" in n), key=lambda n: int(n.partition("-")[2]))
    older = {n for n in held if "state" in n} - {latest}
    if name in older:
        same(run("BAOA", resume=tmp_path), whole)
    elif name == latest or name not in parts_of(tmp_path / older.pop()):
        with pytest.warns(UserWarning, match="the one before it is taken"):
            resumed = run("BAOA", resume=tmp_path)
        same(resumed, whole)
    else:
        with pytest.raises(FileError, match=rf"holds no intact checkpoint: .*{name}"):
            run("BAOA", resume=tmp_path)


@pytest.mark.slow
def test_a_state_that_was_whole_stays_as_the_one_before(unfinished, tmp_path):
    """However often the latest one is damaged, the one that was taken instead is not dropped."""
    held, whole = unfinished
    for name, contents in held.items():
        (tmp_path / name).write_bytes(contents)
    for _ in range(3):
        states = sorted(tmp_path.glob("state-*"), key=lambda file: int(file.name[6:]))
        assert len(states) == 2
        states[1].write_bytes(states[1].read_bytes()[:-50])
        with pytest.warns(UserWarning, match=f"{states[1].name}.*the one before it is taken"):
            resumed = run("BAOA", resume=tmp_path, checkpoint_every=1000)
        same(resumed, whole)
        assert states[0].exists()
        assert not states[1].exists()


def parts_of(state):
    return checkpoint.files.read(state, "checkpoint")["parts"]


def test_a_file_that_is_gone_is_named(unfinished, tmp_path):
    held, _ = unfinished
    for name, contents in held.items():
        (tmp_path / name).write_bytes(contents)
    first = min((n for n in held if "draws" in n), key=lambda n: int(n.partition("-")[2]))
    (tmp_path / first).unlink()
    with pytest.raises(FileError, match=rf"{first}' cannot be read"):
        run("BAOA", resume=tmp_path)


# ------------------------------------------------------------------ kill -9

CHILD = """
import sys, time, warnings
import torch
torch.set_default_dtype(torch.float64)
sys.path[:0] = [{support!r}, {own!r}]
warnings.simplefilter("ignore")
import test_checkpoint as t
from pathlib import Path
path, saved = Path(sys.argv[1]), sys.argv[2]
where = "resume" if list(path.glob("state-*")) else "checkpoint"
print("ready", flush=True)
fit = t.run(sys.argv[3], {{where: path}}, num_samples={draws}, checkpoint_every=0)
torch.save(fit.get_samples(group_by_chain=True), saved)
"""


def killed_again_and_again(case, draws, kills, tmp_path, seed):
    """The draws of a run that was killed so often; how often before it could finish."""
    source, path, saved = random.Random(seed), tmp_path / "run", tmp_path / "draws.pt"
    child = CHILD.format(support=str(SUPPORT), own=str(Path(__file__).parent), draws=draws)
    done = 0
    while not saved.exists():
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(path), str(saved), case],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        process.stdout.readline()
        if done < kills:
            time.sleep(source.uniform(0.0, 1.0))
            done += process.poll() is None
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert done < kills or process.returncode in (0, -signal.SIGKILL)
    return torch.load(saved), done


@pytest.mark.parametrize(
    ("case", "kills", "draws"),
    [
        # `make test` kills a run in tests/storage/test_zarr_resumed.py, with its store
        pytest.param("a stream", 1, 600, marks=pytest.mark.long),
        pytest.param("a stream", 2, 600, marks=pytest.mark.long),
        pytest.param("BAOA", 50, 6000, marks=pytest.mark.long),
        pytest.param("a stream", 50, 6000, marks=pytest.mark.long),
    ],
)
def test_killed_at_any_moment_it_goes_on_bit_for_bit(case, kills, draws, tmp_path):
    found, done = killed_again_and_again(case, draws, kills, tmp_path, seed=kills)
    assert done >= min(kills, 2)
    expected = run(case, num_samples=draws).get_samples(group_by_chain=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_an_interrupt_ends_the_search_for_a_step_size_too(monkeypatch):
    """A chain that diverged would have had the run begun again."""
    begun = []

    def broken(self, program, batches, block, *others):
        begun.extend([block.start] * (block.start == 0))
        if block.stop > 40:
            raise KeyboardInterrupt
        self.failures = [checkpoint.Failure(0, 0, "w", False)]
        self.alive = torch.tensor([False, True])
        self.count = block.stop

    def unstopped(self, *args, stop, **kwargs):
        return execute(self, *args, **kwargs)

    execute = RunPlan.execute
    monkeypatch.setattr(loop.Chains, "move", broken)
    monkeypatch.setattr(RunPlan, "execute", unstopped)
    with pytest.raises(NonFiniteError):
        CASES["a chosen step"][0]().run((X, Y), **{**STEPS, **IN_BATCHES, **QUIET})
    assert begun == [0]
