"""The README's programs run as they stand there, one after the other."""

import re
import warnings

import pyro
import pytest
from places import ROOT

README = ROOT / "README.md"


@pytest.mark.usefixtures("store")
def test_every_program_of_the_readme_runs(capsys):
    pytest.importorskip("sklearn")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert "N = 569 rows, B = 128 a batch, N/B = 4.44531" in said
    assert "w[0]" in said
    probs = names["probs"]
    assert (probs.argmax(-1) == names["digits"][1400:]).float().mean() > 0.85
    pyro.clear_param_store()
