"""Draws stay what they are while the code is rebuilt: `tests/support/reference_runs.py` says how
they are stored, and anew where they change on purpose."""

import functools
import json
import os
import subprocess
import sys

import pytest
import reference_runs
from torch import distributed

STORED = reference_runs.stored()
run = functools.cache(reference_runs.run)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", reference_runs.RUNS)
def test_draws_are_those_that_are_stored(name):
    """Bit for bit on processors that they are stored for, on others to rounding."""
    tensors = run(name)
    numbers, expected = reference_runs.numbers(tensors), STORED[name]
    assert numbers.keys() == expected["numbers"].keys()
    for site, values in numbers.items():
        assert values == pytest.approx(expected["numbers"][site], rel=1e-6, abs=1e-8), site
    if (machine := reference_runs.machine()) in expected["digests"]:
        assert reference_runs.digest(tensors) == expected["digests"][machine]


@pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(),
    reason="torch has no gloo",
)
def test_two_processes_have_the_draws_of_one():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, reference_runs.__file__],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout.splitlines()[-1])
    for name in reference_runs.SHARED:
        alone = reference_runs.numbers(run(name))
        for site, values in together[name].items():
            assert values == pytest.approx(alone[site], rel=1e-14, abs=1e-14), (name, site)
