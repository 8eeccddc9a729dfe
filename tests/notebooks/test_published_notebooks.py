"""What notebooks hold as they are published."""

import json
import tomllib

import pytest
from notebook_results import notebooks
from places import ROOT

pytestmark = pytest.mark.site
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


#: Published before outputs said which version made them; `make notebooks` runs them anew.
UNSIGNED = {
    "approximations",
    "calibration",
    "counts",
    "digits",
    "flights",
    "last_layer",
    "lightning",
    "minibatch_noise",
    "ood",
    "partial_pooling",
    "text_classifier",
    "time_series",
    "trust",
    "untuned",
    "wells",
    "continual",
    "double_well",
    "football",
    "imdb",
    "linear_regression",
    "ood_text",
    "pima",
}


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
    is_signed = f"Pyro Scale {VERSION}" in shown[0][1]
    assert is_signed == (path.stem not in UNSIGNED), "run `make notebooks`, and empty UNSIGNED"
