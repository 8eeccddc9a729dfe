"""What type checkers and editors make of users' programs."""

import inspect
import pydoc
import subprocess
import sys

import pytest
from methods import TABLE, by_name

import pyro_scale as ps
from pyro_scale.infer.method import Method

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


OF_ALL = [
    *("init_strategy", "num_data", "compile"),
    *("precondition", "control_variates", "subtract_noise"),
]
PUBLIC = [getattr(ps, name) for name in ps.__all__]
METHODS = [each for each in PUBLIC if inspect.isclass(each) and issubclass(each, Method)]


@pytest.mark.parametrize("row", TABLE, ids=by_name)
def test_a_sampler_has_its_kernels_hyperparameters(row):
    """By the same names, in the signature that editors show, with the same defaults, but for
    those that can be chosen."""
    own = inspect.signature(row.sampler).parameters
    of_kernel = inspect.signature(row.kernel).parameters
    assert own.keys() - {"model", *OF_ALL} == of_kernel.keys()
    for name, each in of_kernel.items():
        chosen = name in ("lr", "friction")
        assert own[name].default == ("auto" if chosen else each.default)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_every_option_is_shown_with_its_default(method):
    """By `help`, by Jupyter, which read `inspect.signature`; of a constructor and of `run`."""
    of_sampler = inspect.signature(ps.Sampler).parameters
    for function in (method, getattr(method, "run", None)):
        signature = inspect.signature(function)
        _, *options = signature.parameters.values()
        if function is method and issubclass(method, ps.Sampler):
            if method is ps.Sampler:  # whose hyperparameters are any kernel's
                assert options.pop().name == "hyperparameters"
            assert [each.name for each in options][-len(OF_ALL) :] == OF_ALL
            for each in options[-len(OF_ALL) :]:
                assert each.default == of_sampler[each.name].default
        for each in options:
            assert each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD), each
            assert each.name == "data" or each.default is not each.empty, each
    text = pydoc.render_doc(method, renderer=pydoc.plaintext)
    assert "Unpack" not in text
