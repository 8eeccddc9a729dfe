"""The README: its program runs as it stands there, it is short, and links lead somewhere."""

import re
import warnings

import pyro
import pytest
from places import ROOT

README = ROOT / "README.md"


@pytest.mark.usefixtures("store")
def test_its_program_runs(capsys, monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
            exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    means = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("w[")]
    assert means == pytest.approx([-4.14, -1.24, -1.527], abs=0.05)
    pyro.clear_param_store()


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= 900


def test_links_lead_somewhere():
    pages = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "code", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
