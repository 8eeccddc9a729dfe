import itertools
import logging
from functools import partial
from tempfile import mkdtemp

import pyro
import pytest
import torch
from dtypes import default_dtype
from stores import small_files

from pyro_scale.diagnostics import crash_dump
from pyro_scale.engine import compile_step, loop

# pytest's handlers would make Inductor write a trace of every compilation for nobody
logging.getLogger("torch.__trace").addHandler = lambda handler: None

_passed = itertools.count()


def pytest_report_teststatus(report):
    """A dot for four tests that passed, so that each line of dots says a few percent more."""
    passed = report.when == "call" and report.passed and not hasattr(report, "wasxfail")
    return ("passed", "", "PASSED") if passed and next(_passed) % 4 else None


def pytest_collection_finish():
    """A file that sets torch's default dtype as it is imported would change all others' tests."""
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture(scope="module")
def float64():
    """Literals in models are float64; for a module, since hypothesis refuses narrower fixtures."""
    with default_dtype(torch.float64):
        yield


@pytest.fixture(scope="module")
def compiled_early():
    """Runs of 300 steps are compiled, too: a model of many tests is compiled for all of them, and
    300 steps that are not take as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_step, "_COMPILING", 0)
        patch.setattr(compile_step, "_PYTHON", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_crash_dumps_left_behind(tmp_path_factory):
    """What chains that break leave among temporary files is among the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        own = partial(mkdtemp, dir=tmp_path_factory.mktemp("crash-dumps"))
        patch.setattr(crash_dump, "mkdtemp", own)
        yield


@pytest.fixture
def small_store_files():
    """Files of stores hold seven draws."""
    with small_files():
        yield


@pytest.fixture
def store():
    """A param store of the test's own."""
    with pyro.get_param_store().scope():
        yield


@pytest.fixture
def cut(monkeypatch):
    """A function that lets runs end after so many steps; `monkeypatch.undo` ends its work."""
    move = loop.Chains.move

    def after(step, error=KeyboardInterrupt):
        def interrupted(self, program, batches, block, *others):
            if block.stop > step:
                raise error
            move(self, program, batches, block, *others)

        monkeypatch.setattr(loop.Chains, "move", interrupted)

    return after
