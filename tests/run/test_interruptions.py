"""Runs that are cut short anywhere: no draw is lost, none comes twice, wherever draws go."""

import functools
import itertools
import random
import sys

import pytest
import torch
from repetitions import long_but
from stored import draws_of, ended_by, fitted, held_of, same, same_outcome
from stores import buffering, opened

import pyro_scale as ps
from pyro_scale.core import online_moments, tdigest
from pyro_scale.engine import chains, checkpoint, loop, observers
from pyro_scale.engine import draws as engine_draws
from pyro_scale.errors import FileError
from pyro_scale.posterior import draws as posterior_draws
from pyro_scale.posterior import moment_sink, sinks
from pyro_scale.storage import zarr_store

pytest.importorskip("zarr")
pytestmark = [
    pytest.mark.usefixtures("small_store_files"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: Few draws of two chains: quantiles of under 64 numbers are exact.
STEPS = {
    "constant": {"num_chains": 2, "num_samples": 31},
    "cycles": {
        "method": ps.SGHMC,
        "lr": ps.schedules.Cyclical(0.05, 20),
        "num_chains": 2,
        "num_samples": 20,
    },
}
FULL = "No space left on device"


def kept_at(kept, path):
    return {"store": {"memory": None, "store": path / "draws.zarr", "nowhere": False}[kept]}


class Interrupter:
    """Raises at the n-th line that is run of what moves chains and takes draws."""

    MOVERS = chains, loop, observers, sinks, moment_sink, zarr_store, online_moments, tdigest
    FILES = frozenset(m.__file__ for m in (*MOVERS, posterior_draws, engine_draws))

    def __init__(self, at_line):
        self.left, self.is_on = at_line, False

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in self.FILES:
            return None
        if frame.f_code.co_name == "move":
            self.is_on = True
        return self.line if self.is_on else None

    def line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def interrupt(at_line, **how):
    """The number of lines that were run."""
    tracer, before = Interrupter(at_line), sys.gettrace()
    sys.settrace(tracer)
    try:
        fitted(**how)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return at_line - tracer.left


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By how draws are kept and steps are: (the number of lines of a run, the run)."""

    @functools.cache
    def run(kept, steps):
        path = tmp_path_factory.mktemp("uninterrupted")
        lines = interrupt(10**9, **STEPS[steps], **kept_at(kept, path / "counted"))
        return lines, fitted(**STEPS[steps], **kept_at(kept, path / "whole"))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "steps", "seed"),
    long_but(
        itertools.product(["memory", "store", "nowhere"], STEPS, range(40)),
        *[("memory", "constant", 1), ("store", "cycles", 1), ("nowhere", "constant", 1)],
    ),
)
def test_interrupted_at_any_line_it_goes_on(kept, steps, seed, tmp_path, uninterrupted):
    lines, whole = uninterrupted(kept, steps)
    assert lines > 100
    source = random.Random(1000 * seed + len(kept) + len(steps))
    how = {**STEPS[steps], **kept_at(kept, tmp_path), "checkpoint_every": source.choice([0, 1e9])}
    interrupt(source.randrange(1, lines), checkpoint=tmp_path / "run", **how)
    same_outcome(fitted(resume=tmp_path / "run", **how), whole)


@pytest.mark.parametrize(
    ("kept", "part"), [("store", sinks.PartToDisk), ("nowhere", moment_sink.PartToMoments)]
)
def test_an_interrupt_while_a_sink_is_asked_for_its_state_loses_no_draw(
    kept, part, tmp_path, monkeypatch
):
    """The chains have taken the block's steps then, and the sink has its draws."""
    state, calls = part.state, itertools.count()

    def interrupted(self):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return state(self)

    how = {**STEPS["constant"], **kept_at(kept, tmp_path), "checkpoint": tmp_path / "run"}
    with monkeypatch.context() as patch:
        patch.setattr(part, "state", interrupted)
        fitted(checkpoint_every=1e9, **how)
    assert next(calls) > 5
    resumed = fitted(**{**how, "resume": how.pop("checkpoint")})
    same_outcome(resumed, fitted(**STEPS["constant"], **kept_at(kept, tmp_path / "whole")))


@pytest.mark.slow
@pytest.mark.parametrize("draws", long_but([3, 7, 10], 7))
def test_an_interrupt_before_a_file_is_full_leaves_the_draws_until_then(draws, tmp_path, cut):
    whole = fitted(num_samples=300)
    cut(draws)
    with buffering(file_draws=10**6):
        fit = fitted(num_samples=300, **kept_at("store", tmp_path))
    assert held_of(fit, whole) <= draws


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "steps"), long_but(itertools.product(range(3), STEPS), (2, "cycles"))
)
def test_a_write_that_fails_loses_no_draw(write, steps, tmp_path, monkeypatch):
    """The disk is full at one of the files, and then is not."""
    whole, append, calls = fitted(**STEPS[steps]), zarr_store.DrawStore.write, itertools.count()

    def fail(self, *values):
        if next(calls) == write:
            raise FileError(FULL)
        append(self, *values)

    monkeypatch.setattr(zarr_store.DrawStore, "write", fail)
    how = {**STEPS[steps], **kept_at("store", tmp_path)}
    with pytest.raises(FileError, match=FULL):
        fitted(checkpoint=tmp_path / "run", checkpoint_every=0, **how)
    same_outcome(fitted(resume=tmp_path / "run", **how), whole)


@pytest.mark.slow
@pytest.mark.parametrize("written", long_but([1, 4], 4))
def test_a_store_may_be_ahead_of_the_checkpoint(written, tmp_path, monkeypatch):
    """As where a run was killed before it wrote the next one: its later draws come again."""
    write, calls = checkpoint.Checkpoints.write, itertools.count()

    def write_first(self, *args):
        if next(calls) < written:
            write(self, *args)

    how = {"num_samples": 100, **kept_at("store", tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "write", write_first)
        fitted(checkpoint=tmp_path / "run", checkpoint_every=0, **how)
    assert checkpoint.read(tmp_path / "run").run_state.step < 100
    resumed = fitted(resume=tmp_path / "run", **how)
    same_outcome(resumed, fitted(num_samples=100))
    posterior = opened(how["store"]).posterior
    assert posterior.sizes["draw"] == 100
    assert torch.equal(torch.as_tensor(posterior.w.values), draws_of(resumed)["w"])


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_leaves_the_draws_and_the_last_one(
    tmp_path, monkeypatch
):
    whole, write = fitted(num_samples=100), checkpoint.files.write

    def fail(path, contents, kind="results"):
        if contents.get("step", 0) > 60:
            raise FileError(f"'{path}' cannot be written ({FULL})")
        write(path, contents, kind)

    how = {"num_samples": 100, "checkpoint": tmp_path, "checkpoint_every": 0}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.files, "write", fail)
        sampler, _ = ended_by(FileError, FULL, **how)
    held = draws_of(sampler)
    same(held, {name: value[:, : held["w"].shape[1]] for name, value in draws_of(whole).items()})
    same_outcome(fitted(num_samples=100, resume=tmp_path), whole)
