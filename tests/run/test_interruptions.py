"""Runs that are cut short anywhere, in any way, again and again: no draw is lost, none comes twice.

One machine for where draws go x what happens x when it does x how often files are written.  It
drives the stages that a sampler drives, on a model that is prepared once.
"""

import contextlib
import functools
import itertools
import math
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stored import X, Y, near, regression
from stores import buffering

import pyro_scale as ps
from pyro_scale.core import online_moments, tdigest
from pyro_scale.data.open import open_data
from pyro_scale.engine import chains, checkpoint, loop, observers
from pyro_scale.engine import draws as drive_draws
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import FileError
from pyro_scale.posterior import draws as posterior_draws
from pyro_scale.posterior import moment_sink, sinks
from pyro_scale.run.budget import Budget
from pyro_scale.run.execute import execute
from pyro_scale.run.problem import as_log_posterior, prepare
from pyro_scale.run.resume import Journal
from pyro_scale.run.run import RunPlan
from pyro_scale.storage import zarr_store

pytest.importorskip("zarr")

#: Draws of the longest run: of two chains under 64, so that quantiles are exact.
MOST = 31
KERNELS = {
    "constant": ps.kernels.BAOA(lr=0.05),
    "cycles": ps.kernels.SGHMC(lr=ps.schedules.Cyclical(0.05, 20)),
}
FULL = FileError("No space left on device")


@functools.cache
def planned(lr, num_samples):
    data = open_data((X, Y), 5)
    problem = prepare(as_log_posterior(regression, len(X)), data, KERNELS[lr], None, 2, 3)
    kernel = KERNELS[lr]
    steps = Steps(num_samples, keeps=getattr(kernel.lr, "keeps", None))
    columns = kernel.columns(steps.total)
    return RunPlan(problem, columns, steps, "shuffle", False, False, False, Earlier())


def go(plan, store=None, directory=None, every=0):
    """(The draws of the steps, the sink where they are), from where the directory says."""
    where = {"resume": directory, "checkpoint": None}
    if directory is None or not directory.exists() or not list(directory.glob("state-*")):
        where = {"resume": None, "checkpoint": directory}
        if isinstance(store, Path):
            shutil.rmtree(store, ignore_errors=True)  # cut short before its first checkpoint
    journal, count = Journal.open(every=every, **where), plan.steps.num_samples
    with sinks.sink_for(store, plan.problem, count, journal.last is not None) as sink:
        budget = Budget.from_arguments(None, count, None)
        return execute(plan, "BAOA", False, budget, journal, {"seed": 3}, sink).draws, sink


@functools.cache
def whole_run(lr, is_added_up=False):
    """The draws of the longest run, in memory; or the sink with their moments."""
    draws, sink = go(planned(lr, MOST), False if is_added_up else None)
    return sink.totals if is_added_up else draws


def numbers(totals):
    """Moments of all sites, whose rounding is that of blocks as they came."""
    return {
        f"{name} {part}": value
        for name, moments in totals.moments([0.25, 0.5]).items()
        for part, value in moments._asdict().items()
    }


class Cut:
    """Calls a function at the n-th line that is run of what moves chains and takes draws."""

    MOVERS = (
        *(chains, loop, observers, drive_draws, sinks, moment_sink),
        *(checkpoint, zarr_store, online_moments, tdigest, posterior_draws),
    )
    FILES = frozenset(each.__file__ for each in MOVERS)

    def __init__(self, at_line, act):
        self.left, self.act = at_line, act

    def __call__(self, frame, event, argument):
        return self.line if frame.f_code.co_filename in self.FILES else None

    def line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.act()
                raise KeyboardInterrupt
        return self.line

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *_):
        sys.settrace(self.before)


@functools.cache
def lines(lr, kind):
    """How many lines a run has in which it can be cut short."""
    cut, where = Cut(10**9, None), Path(tempfile.mkdtemp())
    store = {"memory": None, "nowhere": False, "store": where / "draws.zarr"}[kind]
    with cut:
        go(planned(lr, MOST), store, where / "run")
    shutil.rmtree(where)
    return 10**9 - cut.left


def full():
    raise FULL


@contextlib.contextmanager
def at_call(number, owner, name, before=None, after=None):
    """A block in which something happens before, or after, a call of a method."""
    method, calls = getattr(owner, name), itertools.count()

    def watched(self, *args):
        is_it = next(calls) == number
        if is_it and before is not None:
            before()
        method(self, *args)
        if is_it and after is not None:
            after()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, watched)
        yield


class Interruptions(RuleBasedStateMachine):
    """A run with a directory of checkpoints, and its draws in memory, in a store or nowhere."""

    @initialize(
        lr=some.sampled_from([*KERNELS]),
        kind=some.sampled_from(["memory", "store", "nowhere"]),
        every=some.sampled_from([0, 1e9]),
        file_draws=some.sampled_from([1, 7, 1000]),
        wait=some.sampled_from([0.0, math.inf]),
    )
    def begin(self, lr, kind, every, file_draws, wait):
        self.lr, self.kind, self.every = lr, kind, every
        self.place = Path(tempfile.mkdtemp())
        self.where = self.place / "now"
        self.where.mkdir()
        self.store = {"memory": None, "nowhere": False, "store": self.where / "draws.zarr"}[kind]
        self.buffering = buffering(file_draws=file_draws, wait_seconds=wait, wait_times=0)
        self.num_samples = MOST if kind == "nowhere" else 17

    def take_steps(self):
        with self.buffering:
            return go(
                planned(self.lr, self.num_samples), self.store, self.where / "run", self.every
            )

    @rule(part=some.floats(0.0, 1.0))
    def interrupt(self, part):
        at_line = 1 + int(part * lines(self.lr, self.kind))
        with contextlib.suppress(KeyboardInterrupt), Cut(at_line, lambda: None):
            self.take_steps()

    @rule(part=some.floats(0.0, 1.0))
    def kill(self, part):
        """All that happens after a line is undone."""
        at_line = 1 + int(part * lines(self.lr, self.kind))
        with contextlib.suppress(KeyboardInterrupt), Cut(at_line, self.copy):
            self.take_steps()
        self.undo()

    @rule(call=some.integers(0, 3))
    def kill_after_a_checkpoint(self, call):
        with at_call(call, checkpoint.Checkpoints, "write", after=self.copy):
            self.take_steps()
        self.undo()

    def copy(self):
        shutil.copytree(self.where, self.place / "then")

    def undo(self):
        if (self.place / "then").exists():
            shutil.rmtree(self.where)
            (self.place / "then").rename(self.where)

    @rule(call=some.integers(0, 3))
    def fill_the_disk_by_checkpoints(self, call):
        with at_call(call, checkpoint.Checkpoints, "write", before=full):
            draws, _ = self.take_steps()
        assert draws.error in (None, FULL)
        self.check_prefix(draws)

    @precondition(lambda self: self.kind == "store")
    @rule(call=some.integers(0, 3))
    def fill_the_disk_by_draws(self, call):
        with at_call(call, zarr_store.DrawStore, "write", before=full):
            draws, _ = self.take_steps()
        assert draws.error in (None, FULL)
        self.check_prefix(draws)

    @precondition(lambda self: self.kind != "nowhere")
    @rule(more=some.integers(1, 12))
    def extend(self, more):
        self.num_samples = min(MOST, self.num_samples + more)
        self.finish()

    @rule()
    def finish(self):
        draws, sink = self.take_steps()
        assert draws.error is None
        assert draws.log_joint.shape[1] == self.num_samples
        self.check_prefix(draws)
        if self.kind == "store":
            assert zarr_store.DrawStore.open(self.store).count == self.num_samples
        if self.kind == "nowhere":
            near(numbers(sink.totals), numbers(whole_run(self.lr, is_added_up=True)))

    def check_prefix(self, draws):
        whole, count = whole_run(self.lr), draws.log_joint.shape[1]
        assert torch.equal(draws.log_joint, whole.log_joint[:, :count])
        if self.kind == "memory":
            assert torch.equal(draws.positions, whole.positions[:, :count])

    @invariant()
    def readers_see_whole_draws(self):
        if getattr(self, "kind", None) == "store" and (self.store / ".zmetadata").exists():
            held = zarr_store.DrawStore.open(self.store)
            if held.count:
                found = held.read("posterior/w", torch.arange(2), torch.arange(held.count))
                expected = whole_run(self.lr).positions[:, : held.count, :2]
                assert torch.equal(found, expected)

    def teardown(self):
        if hasattr(self, "place"):
            self.finish()
            shutil.rmtree(self.place)


SETTINGS = settings(
    max_examples=10,
    stateful_step_count=6,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],  # shrinking takes minutes
)


class TestInterruptions(Interruptions.TestCase):
    pytestmark = pytest.mark.slow
    settings = SETTINGS


class TestMoreInterruptions(Interruptions.TestCase):
    pytestmark = pytest.mark.long
    settings = settings(SETTINGS, max_examples=300)
