"""What type checkers and editors make of users' programs."""

import inspect
import subprocess
import sys

import pytest
from methods import TABLE, by_name

#: Each line after the marks has the mistake that the mark names, or none.
PROGRAM = """
import pyro_scale as ps

def model() -> None: ...

ps.BAOA(model, lr="auto", friction={"w": 1.0}, mass=lambda step: 1.0, compile=False)
ps.BAOA(model, friction="auto", precondition=None, control_variates="auto")
ps.BAOA(model, mass="auto")  # arg-type
ps.BAOA(model, lr=0.1, fricton=1.0)  # call-arg
ps.SGLD(model, lr="0.1")  # arg-type
ps.SGLD(model)
ps.pSGLD(model, lr=0.1, compil=True)  # call-arg
ps.SGNHT(model, lr=0.1, friction={"w": 1.0})  # arg-type
ps.UBU(model, lr={"w": 0.1}, init_strategy=None, temperature=0.5)
"""


@pytest.mark.long
def test_mistakes_are_errors(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent"]
    done = subprocess.run([*command, str(tmp_path / "program.py")], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "program.py" in line and "error:" in line]
    found = {int(line.split(":")[1]): line.rpartition("[")[2].rstrip("]") for line in lines}
    wrong = enumerate(PROGRAM.splitlines(), start=1)
    assert found == {n: line.partition("#")[2].strip() for n, line in wrong if "#" in line}


@pytest.mark.parametrize("row", TABLE, ids=by_name)
def test_a_sampler_has_its_kernels_hyperparameters(row):
    """By the same names, in the signature that editors show, with the same defaults, but for
    those that can be chosen."""
    own = inspect.signature(row.sampler).parameters
    of_kernel = inspect.signature(row.kernel).parameters
    assert own.keys() - {"model", "options"} == of_kernel.keys()
    for name, each in of_kernel.items():
        chosen = name in ("lr", "friction")
        assert own[name].default == ("auto" if chosen else each.default)
