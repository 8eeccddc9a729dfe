"""Every notebook in its small setting (`PYRO_SCALE_SMALL=1`), beside the results in
`notebooks/small`: `make notebooks-small`.

A failure names cell, table column and row, or printed line, with the tolerance.  If the library has
been changed on purpose, `python tests/support/notebook_results.py NAME` stores the results anew.
"""

import os

import pytest
from notebook_results import differences, notebooks, stored
from places import ROOT

DATA = os.environ.get("PYRO_SCALE_DATA", ROOT.parent / "shared" / "data")


def reads_data(path):
    """Whether the numbers of a notebook, or of the script beside it, are of a data set."""
    sources = [each for each in (path, path.with_suffix(".py")) if each.exists()]
    names = "data_folder", "PYRO_SCALE_DATA"
    return any(name in each.read_text(encoding="utf-8") for each in sources for name in names)


@pytest.mark.site
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_shows_the_stored_results(path):
    if reads_data(path) and not os.path.exists(DATA):
        pytest.skip(f"no data sets in {DATA}: PYRO_SCALE_DATA names their folder")
    if not stored(path).exists():
        command = f"python tests/support/notebook_results.py {path.stem}"
        pytest.skip(f"no stored results: {command} makes them")
    told = differences(path)
    assert not told, f"{stored(path)} has other results:\n" + "\n".join(told)
