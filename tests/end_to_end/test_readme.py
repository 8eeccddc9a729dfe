"""The programs of the README and of the guide run as they stand there, one after the other."""

import re
import warnings

import pyro
import pytest
from places import ROOT


def blocks_of(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.usefixtures("store")
def test_every_program_runs(capsys, monkeypatch, tmp_path):
    """Those of a page go on where the README's have ended."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    own = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks_of(ROOT / "README.md"):
            exec(compile(block, "README.md", "exec"), own)
        printed = capsys.readouterr().out
        for page in sorted((ROOT / "docs/guide").glob("*.md")):
            names = dict(own)
            for block in blocks_of(page):
                exec(compile(block, page.name, "exec"), names)
            if page.name == "networks.md":
                accuracy = (names["probs"].argmax(-1) == names["digits"][1400:]).float().mean()
                assert accuracy > 0.85
    means = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("w[")]
    assert means == pytest.approx([-4.14, -1.24, -1.527], abs=0.05)
    pyro.clear_param_store()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
