"""Runs with nothing set, on posteriors of applied statisticians whose moments are stored."""

import sys

import pytest
import torch
from places import ROOT

sys.path.append(str(ROOT / "benchmarks" / "accuracy"))
from jobs import JOBS
from judge import stored_truth
from untuned import run

pytestmark = pytest.mark.usefixtures("float64")

#: The cheapest, of all kinds.
CHEAP = (
    "meta_analysis",
    "weibull",
    "icar",
    "zero_inflated",
    "regimes",
    "counties",
    "cure",
    "frailty",
    "robust",
    "factors",
)
BY_NAME = {job.name: job for job in JOBS}
TRUTH = stored_truth()
#: Largest standard errors, in sds, of references that are too short.
SHORT = {"jobs/surface": 0.027, "jobs/crossed": 0.021}
#: Of the others, references are still to be made.
READY = [name for name in BY_NAME if name in TRUTH]


@pytest.mark.parametrize("name", BY_NAME)
def test_data_are_the_same_at_every_call(name):
    job = BY_NAME[name]
    for one, other in zip(job.load(), job.load(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", READY)
def test_every_site_has_a_reference_with_small_errors(name):
    elements = TRUTH[name]["elements"]
    assert {element.partition("[")[0] for element in elements} == set(BY_NAME[name].sites)
    most = SHORT.get(name, 0.02)
    assert all(each["mcse"] < most * each["sd"] for each in elements.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_right_and_known_to_be(name):
    job, truth = BY_NAME[f"jobs/{name}"], TRUTH[f"jobs/{name}"]["elements"]
    outcome = run(job, truth, seed=0, in_batches=False)
    assert outcome.is_right, outcome
    assert outcome.verdict == "yes", outcome
