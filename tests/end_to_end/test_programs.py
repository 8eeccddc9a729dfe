"""Programs as others write them: understood and run, or refused in the right words."""

import re
import sys

import pytest
import torch
from places import ROOT
from runs import EVERY_STEP, QUIET

import pyro_scale as ps
from pyro_scale.errors import PyroScaleError

sys.path.insert(0, str(ROOT / "benchmarks" / "programs"))
from program import Program, names

pytestmark = [
    pytest.mark.usefixtures("store"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


def first_steps(program):
    """The preflight, and two eager steps."""
    ps.explain(program.model, program.data)
    mcmc = ps.BAOA(program.model, lr=1e-6, compile=False)
    return mcmc.run(program.data, num_samples=2, num_chains=1, **EVERY_STEP, **QUIET)


@pytest.mark.parametrize("name", names())
def test_understood_or_refused(name):
    program = Program.load(name)
    if program.refused:
        with pytest.raises(PyroScaleError, match=re.escape(program.refused)):
            first_steps(program)
    else:
        draws = first_steps(program).get_samples()
        assert all(torch.isfinite(draws[site]).all() for site in program.right)
