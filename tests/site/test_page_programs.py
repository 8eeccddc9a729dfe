"""The programs on the site's pages run as they stand there, each page's in one namespace.

A block that is titled with another package's name needs that package.
"""

import importlib.util
import re
import textwrap
import warnings

import matplotlib.pyplot as plt
import pyro
import pytest
import torch
from places import ROOT

FENCE = re.compile(r"^( *)```python([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
PACKAGES = {
    "posteriors": "posteriors",
    "BlackJAX": "blackjax",
    "NumPyro": "numpyro",
    "laplace-torch": "laplace",
    "ivon": "ivon",
    "TyXe": "tyxe",
    "bayesian-torch": "bayesian_torch",
    "devinterp": "devinterp",
}


def programs_of(page):
    for match in FENCE.finditer(page.read_text()):
        title = re.search(r'title="([^"]*)"', match[2])
        yield title and title[1], textwrap.dedent(match[3])


def pages():
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if FENCE.search(page.read_text()):
            yield page.relative_to(ROOT).as_posix()


@pytest.mark.site
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("page", pages())
def test_every_program_runs(page, monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    names, missing = {"__name__": "page"}, set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, program in programs_of(ROOT / page):
            package = PACKAGES.get(title)
            if package is not None and importlib.util.find_spec(package) is None:
                missing.add(title)
                continue
            try:
                exec(compile(program, page, "exec"), names)
            except NameError as error:
                if not missing:
                    raise
                pytest.skip(f"{error}: a block before it needs {', '.join(sorted(missing))}")
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float32)
    plt.close("all")
