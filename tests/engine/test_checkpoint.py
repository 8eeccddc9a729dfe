"""Runs that were cut short go on as if they had not been: bit for bit, or not at all."""

import random
import re
import shutil
import subprocess
import warnings
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from damage import damage
from models import of_network
from processes import kill_until_done, launch
from reference import double, normals
from repetitions import long_but
from row_datasets import RowByRow
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import pyro_scale as ps
from pyro_scale.engine import checkpoint, loop, progress
from pyro_scale.errors import ArgumentError, FileError, NonFiniteError
from pyro_scale.run.run import RunPlan

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]

N, B = 60, 8
QUIET = {"seed": 3, "progress": False}
STEPS = {"num_samples": 40, "warmup_steps": 11, "thinning": 3, "num_chains": 1}


X = normals(N, 2)
Y = X @ double(1.0, -2.0)


def with_prior(sd):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), sd).to_event(1))
        s = pyro.sample("s", dist.LogNormal(0.0, 0.3))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, s), obs=y)

    return model


line = with_prior(1.0)


def subsampling(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", N, subsample_size=B) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def with_point(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    s = pyro.param("sd", torch.tensor(1.0), constraint=dist.constraints.positive)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


class Twin(RowByRow):
    """Another class with the same rows."""


class Noisy(RowByRow):
    """Rows with noise of their own each time that they are read, from torch's generator."""

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

    return of_network(net, lambda f: dist.Normal(f[:, 0], 1.0))


def method_of(method=ps.BAOA, model=line, lr=0.02, compile=False, **options):
    return lambda: method(model, lr=lr, compile=compile, **options)


def loader(dataset, **options):
    return DataLoader(dataset, batch_size=B, **options)


SMALL = {"lr": 0.02, "compile": False}
IN_BATCHES, TWO, THREE = {"batch_size": B, "num_chains": 2}, {"num_chains": 2}, {"num_chains": 3}
LISTS = [(X[:B], Y[:B]), (X[B:40], Y[B:40]), (X[40:43], Y[40:43])]
#: (method, data, how it is run)
CASES = {
    **{
        method.__name__: (method_of(method), (X, Y), IN_BATCHES)
        for method in (ps.SGLD, ps.SGHMC, ps.SGNHT, ps.BAOA, ps.UBU, ps.pSGLD)
    },
    "all rows": (method_of(), (X, Y), {}),
    "compiled": (method_of(compile=True), (X, Y), IN_BATCHES),
    "replacement": (method_of(), (X, Y), {**IN_BATCHES, "sampling": "replacement"}),
    "symmetric": (method_of(ps.UBU), (X, Y), {**IN_BATCHES, "sampling": "symmetric"}),
    "shared batches": (method_of(), (X, Y), {**IN_BATCHES, "share_batches": True}),
    "schedules": (method_of(lr=ps.schedules.cosine_decay(0.03, 131)), (X, Y), IN_BATCHES),
    "cycles": (method_of(ps.SGHMC, lr=ps.schedules.Cyclical(0.03, 60)), (X, Y), IN_BATCHES),
    "by site": (method_of(lr={"w": 0.02, "s": 0.01}), (X, Y), IN_BATCHES),
    "control variates": (method_of(control_variates=True), (X, Y), IN_BATCHES),
    "noise taken off": (method_of(subtract_noise=True), (X, Y), IN_BATCHES),
    "a chosen step": (method_of(lr="auto", precondition=None), (X, Y), IN_BATCHES),
    "own subsamples": (method_of(model=subsampling), (X, Y), TWO),
    "points": (method_of(model=with_point), (X, Y), IN_BATCHES),
    "frozen base": (lambda: ps.BAOA(head(), **SMALL), (X, Y), IN_BATCHES),
    "a loader by index": (method_of(), loader(Noisy(X, Y), shuffle=True), TWO),
    "frozen base, a loader": (
        lambda: ps.BAOA(head(), **SMALL),
        loader(Noisy(X, Y), shuffle=True),
        TWO,
    ),
    "workers": (method_of(), loader(Noisy(X, Y), num_workers=2), TWO),
    "a stream": (method_of(num_data=N), loader(Endless()), THREE),
    "a stream of lists": (method_of(num_data=N), LISTS, THREE),
}


def run_case(case, changes=None, **options):
    method, data, how = CASES[case]
    return method().run(data, **{**STEPS, **how, **QUIET, **options, **(changes or {})})


def same_runs(one, other):
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
    whole = run_case(case)
    for step in (70, 100):
        cut(step)
        where = {"resume": tmp_path} if step == 100 else {"checkpoint": tmp_path}
        part = run_case(case, **where, checkpoint_every=0)
        assert part.get_samples()["w" if "w" in whole.get_samples() else "2.weight"].shape[0] > 0
        monkeypatch.undo()
    same_runs(run_case(case, resume=tmp_path), whole)
    assert len(list(tmp_path.glob("state-*"))) == 2


# ------------------------------------------------------------------ what ends a run


@pytest.mark.slow
def test_an_interrupt_leaves_the_draws_until_then(cut):
    whole = run_case("BAOA")
    cut(100)
    with pytest.warns(
        UserWarning, match=r"interrupted after 9\d steps; get_samples\(\) holds"
    ) as told:
        part = run_case("BAOA")
    assert not [each for each in told if "resume" in str(each.message)]  # nothing is written down
    steps = int(
        re.search(r"after (\d+) steps", str(told[0].message))[1]
    )  # a block's end, by the clock
    kept = (steps - 11) // 3
    drawn, expected = (each.get_samples(group_by_chain=True)["w"] for each in (part, whole))
    assert torch.equal(drawn, expected[:, :kept])
    assert part.to_arviz().posterior.attrs["num_samples"] == kept
    assert part.summary().shape[0] == 3


def test_an_interrupt_before_the_first_draw_is_one(cut, tmp_path):
    cut(9)
    with pytest.raises(KeyboardInterrupt) as raised:
        run_case("BAOA")
    assert raised.value.__notes__[-1].endswith("steps; no draws")
    with pytest.raises(KeyboardInterrupt) as raised:
        run_case("BAOA", checkpoint=tmp_path)
    assert raised.value.__notes__[-1].endswith(f"; the same call with resume='{tmp_path}' goes on")


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(cut, tmp_path, monkeypatch):
    cut(100)
    with pytest.warns(UserWarning, match=r"interrupted .*; the same call with resume='") as told:
        run_case("BAOA", checkpoint=tmp_path)
    said = next(str(each.message) for each in told if "interrupted" in str(each.message))
    monkeypatch.undo()
    same_runs(run_case("BAOA", resume=said.split("'")[1]), run_case("BAOA"))


@pytest.mark.slow
def test_a_directory_that_is_deleted_leaves_the_draws(tmp_path):
    """There is nothing then to go on with."""
    calls, path = [], tmp_path / "run"

    def model(x, y=None):
        calls.append(1)
        if len(calls) == 120:
            shutil.rmtree(path)
        line(x, y)

    method = ps.BAOA(model, **SMALL)
    with pytest.raises(FileError, match=r"cannot be written \(No such file.*put the dir") as raised:
        method.run((X, Y), batch_size=B, checkpoint=path, checkpoint_every=0, **STEPS, **QUIET)
    assert raised.value.__notes__[-1].endswith("draws a chain until then")
    assert len(method.get_samples()["w"]) > 0


@pytest.mark.slow
def test_a_chain_that_stopped_stays_so(tmp_path, cut, monkeypatch):
    def cliff(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("cliff", w * torch.where(w > 1.5, torch.nan, 0.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, 30.0), obs=y)

    how = {**STEPS, "batch_size": B, "num_chains": 6, **QUIET}
    method = method_of(ps.SGLD, cliff, lr=5.0, init_strategy={"w": torch.zeros(6)})
    whole, part, resumed = method(), method(), method()
    with pytest.raises(NonFiniteError) as expected:
        whole.run((X, Y), **how)
    stops = re.findall(r"chain (\d+) at step (\d+)", str(expected.value))
    assert len(stops) > 1
    cut(min(int(step) for _, step in stops) + 40)
    with pytest.raises((NonFiniteError, KeyboardInterrupt)):
        part.run((X, Y), checkpoint=tmp_path, checkpoint_every=0, **how)
    monkeypatch.undo()
    with pytest.raises(NonFiniteError) as found:
        resumed.run((X, Y), resume=tmp_path, **how)
    # Of chains that stopped before the checkpoint their last steps, and so their sites, are lost.
    assert re.findall(r"chain (\d+) at step (\d+)", str(found.value)) == stops
    assert "site 'cliff': its log density is NaN" in str(found.value)
    same_runs(resumed, whole)


# ------------------------------------------------------------------ going on


@pytest.mark.slow
def test_a_finished_run_is_extended(tmp_path):
    longer = run_case("BAOA", num_samples=70)
    run_case("BAOA", checkpoint=tmp_path)
    same_runs(run_case("BAOA", resume=tmp_path), run_case("BAOA"))  # nothing is left to do
    same_runs(run_case("BAOA", num_samples=70, resume=tmp_path), longer)
    with pytest.raises(ArgumentError, match=r"num_samples=40: .* holds 70 draws a chain already"):
        run_case("BAOA", resume=tmp_path)


@pytest.mark.parametrize("compiled", long_but([False, True], True))
@pytest.mark.long
def test_a_run_is_extended_by_the_program_that_it_was_run_by(compiled, tmp_path):
    """Bit for bit: compiled steps and others differ by rounding."""
    most = 70 if compiled else 1000  # of which "auto" would choose the other one

    def ran(compile, num_samples=40, **where):
        how = {**STEPS, **IN_BATCHES, **QUIET, "num_samples": num_samples}
        return method_of(compile=compile)().run((X, Y), **how, **where)

    longer = ran(compiled, most)
    ran(compiled, checkpoint=tmp_path)
    extended = ran("auto", most, resume=tmp_path)
    same_runs(extended, longer)
    finished = ran("auto", most, resume=tmp_path)  # nothing is left to do
    for each in (extended, finished):
        assert each.posterior.draws.attrs["program"] == ("compiled loop" if compiled else "eager")


@pytest.mark.slow
def test_the_seed_is_that_of_the_run(tmp_path):
    whole = run_case("BAOA", checkpoint=tmp_path)
    same_runs(run_case("BAOA", resume=tmp_path, seed=None), whole)


@pytest.fixture(scope="module")
def finished_checkpoints(float64, tmp_path_factory):
    """The checkpoints of a run."""
    directory = tmp_path_factory.mktemp("finished")
    run_case("BAOA", checkpoint=directory)
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
        ({"method": method_of(lr=0.03)}, r"'lr'\] was 0.02"),
        ({"method": method_of(ps.UBU)}, "method was 'BAOA', is 'UBU'"),
        ({"method": method_of(model=subsampling)}, "sites.* is not there"),
        ({"method": method_of(model=with_prior(1.1))}, "log prior where chain 0 starts was"),
        ({"data": (X, Y + (torch.arange(N) == N - 1))}, "data was 'tensors [0-9a-f]{16}', is 'te"),
        ({"data": (X[:50], Y[:50])}, "num_data was 60, is 50"),
    ],
)
def test_another_run_is_refused_with_what_differs(changed, what, finished_checkpoints):
    before = {file.name: file.read_bytes() for file in finished_checkpoints.iterdir()}
    method, data, how = CASES["BAOA"]
    changed = dict(changed)
    method, data = changed.pop("method", method), changed.pop("data", data)
    how = {**STEPS, **how, **QUIET, **changed}
    if "not there" in what:
        how.pop("batch_size")
    with pytest.raises(FileError, match=rf"is another run \(.*{what}"):
        method().run(data, resume=finished_checkpoints, **how)
    assert before == {file.name: file.read_bytes() for file in finished_checkpoints.iterdir()}


def test_of_hyperparameters_by_site_those_that_differ_are_named(tmp_path):
    how = {**STEPS, **IN_BATCHES, **QUIET}
    method_of(lr={"w": 0.02, "s": 0.01})().run((X, Y), checkpoint=tmp_path, **how)
    other, changed = (
        method_of(lr={"w": 0.03, "s": 0.01})(),
        "hyperparameters['lr']['w'] was 0.02, is",
    )
    with pytest.raises(FileError, match=re.escape(f"({changed} 0.03)")):
        other.run((X, Y), resume=tmp_path, **how)


class Mine:
    """A loader of one's own."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(DataLoader(self.dataset, B))


KINDS = {
    "tensors": ((X, Y), {"batch_size": B}),
    "a data set": (DataLoader(RowByRow(X, Y), B), {}),
    "another one": (DataLoader(Twin(X, Y), B), {}),
    "as they come": (DataLoader(RowByRow(X, Y), batch_sampler=[*torch.arange(N).split(B)]), {}),
    "another loader": (Mine(RowByRow(X, Y)), {}),
}


@pytest.mark.parametrize(
    ("then", "now"),
    long_but(product(KINDS, KINDS), ("tensors", "tensors"), *pairwise([*KINDS, "tensors"])),
)
def test_the_kind_of_data_counts(then, now, tmp_path):
    """Though the first batch is the same, the later ones would be others."""
    how = {**STEPS, **QUIET, "num_samples": 3, "warmup_steps": 0, "thinning": 1}

    def ran(kind, **where):
        data, options = KINDS[kind]
        method_of()().run(data, **options, **how, **where)

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
    run_case("BAOA", checkpoint=tmp_path)
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, mininterval=0, miniters=1))
    run_case("BAOA", num_samples=70, resume=tmp_path, progress=True)
    shown = capfd.readouterr().err
    assert "log joint -" in shown
    assert "131/221 [" in shown
    assert "nan" not in shown


def test_the_version_counts(tmp_path, monkeypatch):
    run_case("BAOA", checkpoint=tmp_path)
    monkeypatch.setattr("pyro_scale.run.resume.version", lambda _: "9.9")
    with pytest.raises(FileError, match=r"version was '.*', is '9.9'"):
        run_case("BAOA", resume=tmp_path)


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
        run_case("BAOA", **options)
    assert not list(tmp_path.iterdir())


def test_a_runs_checkpoints_are_not_written_over(tmp_path):
    run_case("BAOA", checkpoint=tmp_path)
    with pytest.raises(ArgumentError, match=r"holds the checkpoints of a run: pass resume="):
        run_case("BAOA", checkpoint=tmp_path)
    with pytest.raises(ArgumentError, match="leave checkpoint out"):
        run_case("BAOA", checkpoint=tmp_path / "other", resume=tmp_path)
    run_case("BAOA", checkpoint=tmp_path, resume=tmp_path)


@pytest.mark.slow
def test_one_run_at_a_time_writes_into_a_directory(tmp_path):
    run_case("BAOA", {"checkpoint": tmp_path}, num_samples=5)
    other = """
from pyro_scale.storage import files
with files.locked(Path(sys.argv[1])):
    ready()
    sys.stdin.read()
"""
    with launch(other, tmp_path, stdin=subprocess.PIPE) as process:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(FileError, match="another run is writing into"):
            run_case("BAOA", {"resume": tmp_path}, num_samples=8)
        assert sorted(tmp_path.iterdir()) == before
        process.kill()
    run_case("BAOA", {"resume": tmp_path}, num_samples=8)


def test_checkpoints_leave_nothing_behind(tmp_path):
    (tmp_path / ".pyro-scale-0123456789abcdef").write_bytes(b"of a run that was killed")
    own = {"draws-final.nc", "draws-2024.csv", "state-notes.txt", ".pyro-scale-mine"}
    for name in own:
        (tmp_path / name).write_text("the user's own")
    run_case("BAOA", checkpoint=tmp_path, checkpoint_every=0)
    names = {file.name for file in tmp_path.iterdir()} - own
    assert len(list(tmp_path.iterdir())) == len(names) + len(own)
    assert {re.sub("[0-9]+", "", name) for name in names} == {"state-", "draws-"}


@pytest.mark.long
def test_schedules_of_ours_are_compared(tmp_path):
    run_case("cycles", checkpoint=tmp_path)
    method = method_of(ps.SGHMC, lr=ps.schedules.Cyclical(0.03, 50))()
    with pytest.raises(FileError, match=r"is another run .*cycle_steps"):
        method.run((X, Y), resume=tmp_path, **{**STEPS, **IN_BATCHES, **QUIET})


@pytest.mark.long
def test_a_step_that_was_chosen_is_for_its_number_of_steps(tmp_path):
    method = CASES["a chosen step"][0]()
    how = {**STEPS, **IN_BATCHES, **QUIET}
    method.run((X, Y), checkpoint=tmp_path, **how)
    drawn = method.get_samples()["w"]
    with pytest.raises(FileError, match="num_samples was 40, is 80"):
        CASES["a chosen step"][0]().run((X, Y), resume=tmp_path, **{**how, "num_samples": 80})
    with pytest.raises(FileError, match="is another run"):
        method.run((X, Y), resume=tmp_path, **{**how, "seed": 5})
    assert torch.equal(method.get_samples()["w"], drawn)  # a refusal takes nothing away


# ------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def cut_short(float64, tmp_path_factory):
    """(The files of a run that was cut short, by name, the whole run)."""
    directory, move = tmp_path_factory.mktemp("unfinished"), loop.Chains.move

    def interrupted(self, program, batches, block, *others):
        if block.stop > 100:
            raise KeyboardInterrupt
        move(self, program, batches, block, *others)

    whole = run_case("BAOA")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(loop.Chains, "move", interrupted)
        run_case("BAOA", checkpoint=directory, checkpoint_every=0)
    files = (file for file in directory.iterdir() if not file.name.startswith("."))
    return {file.name: file.read_bytes() for file in files}, whole


@pytest.fixture
def unfinished(cut_short, tmp_path):
    """(The names of the files of a run that was cut short, which are there, the whole run)."""
    held, whole = cut_short
    for name, contents in held.items():
        (tmp_path / name).write_bytes(contents)
    return sorted(held), whole


@pytest.mark.slow
@pytest.mark.parametrize("seed", long_but(range(200), *range(20)))  # of 20, every file
def test_damage_is_noticed(seed, unfinished, tmp_path):
    """The draws are those of the whole run, or it is refused; the latest state may be lost."""
    held, whole = unfinished
    name = held[seed % len(held)]
    damage(tmp_path / name, random.Random(seed))
    latest = max((n for n in held if "state" in n), key=lambda n: int(n.partition("-")[2]))
    older = {n for n in held if "state" in n} - {latest}
    if name in older:
        same_runs(run_case("BAOA", resume=tmp_path), whole)
    elif name == latest or name not in parts_of(tmp_path / older.pop()):
        with pytest.warns(UserWarning, match="the one before it is taken"):
            resumed = run_case("BAOA", resume=tmp_path)
        same_runs(resumed, whole)
    else:
        with pytest.raises(FileError, match=rf"holds no intact checkpoint: .*{name}"):
            run_case("BAOA", resume=tmp_path)


@pytest.mark.slow
def test_a_state_that_was_whole_stays_as_the_one_before(unfinished, tmp_path):
    """However often the latest one is damaged, the one that was taken instead is not dropped."""
    _, whole = unfinished
    for _ in range(3):
        states = sorted(tmp_path.glob("state-*"), key=lambda file: int(file.name[6:]))
        assert len(states) == 2
        states[1].write_bytes(states[1].read_bytes()[:-50])
        with pytest.warns(UserWarning, match=f"{states[1].name}.*the one before it is taken"):
            resumed = run_case("BAOA", resume=tmp_path, checkpoint_every=1000)
        same_runs(resumed, whole)
        assert states[0].exists()
        assert not states[1].exists()


def parts_of(state):
    return checkpoint.files.read(state, "checkpoint")["parts"]


def test_a_file_that_is_gone_is_named(unfinished, tmp_path):
    held, _ = unfinished
    first = min((n for n in held if "draws" in n), key=lambda n: int(n.partition("-")[2]))
    (tmp_path / first).unlink()
    with pytest.raises(FileError, match=rf"{first}' cannot be read"):
        run_case("BAOA", resume=tmp_path)


# ------------------------------------------------------------------ kill -9

CHILD = """
torch.set_default_dtype(torch.float64)
import test_checkpoint as t
path, saved, case, draws = Path(sys.argv[1]), *sys.argv[2:]
where = "resume" if list(path.glob("state-*")) else "checkpoint"
ready()
fit = t.run(case, {where: path}, num_samples=int(draws), checkpoint_every=0)
torch.save(fit.get_samples(group_by_chain=True), saved)
"""


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
    directory, saved = tmp_path / "run", tmp_path / "draws.pt"

    def begin():
        return launch(CHILD, directory, saved, case, draws, places=[Path(__file__).parent])

    kill_until_done(begin, directory, saved, kills)
    found = torch.load(saved)
    expected = run_case(case, num_samples=draws).get_samples(group_by_chain=True)
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
