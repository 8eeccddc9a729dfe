"""What notebooks hold as they are published."""

import json
import tomllib

import pytest
from notebook_results import notebooks
from places import ROOT

pytestmark = pytest.mark.site
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def outputs(cell):
    for output in cell["outputs"]:
        yield output, "".join(output.get("text", "")).splitlines()


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_was_run_from_start_to_end_by_this_version(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [each for cell in code for each in outputs(cell)]
    assert not [output for output, _ in shown if output["output_type"] == "error"]
    assert f"Pyro Scale {VERSION}" in shown[0][1], "run `make notebooks`"
