"""A report's verdict, and the order of its findings."""

import math
from statistics import NormalDist

import pytest
import torch

from pyro_scale.diagnostics.bias import judge_bias
from pyro_scale.diagnostics.report import Finding, Report
from pyro_scale.tuning.pilot import Bias, _mean_and_error
from pyro_scale.tuning.policy import PILOTS


def finding(site, verdict, severity, check="mixing"):
    return Finding(site, check, verdict, f"what {check} of {site} is", f"mend {site}", severity)


FINDINGS = [
    finding("a", "yes", 0.3),
    finding("b", "no", 2.0),
    finding("c", "unknown", 50.0),
    finding("d", "no", 9.0, "temperature"),
    finding("e", "yes", 0.9),
    finding("f", "no", 0.0, "explosion"),
]


def test_the_headline_is_about_the_worst_finding():
    """Not about the first, nor about one of a milder verdict that is further off its limit."""
    report = Report.from_findings(FINDINGS, {})
    assert report.headline == "NO: site 'd': what temperature of d is; try: mend d"
    assert [each.site for each in report.findings] == ["d", "b", "f", "c", "a", "e"]


@pytest.mark.parametrize("severity", [math.inf, math.nan])
def test_what_cannot_be_measured_is_the_worst(severity):
    report = Report.from_findings([*FINDINGS, finding("g", "no", severity)], {})
    assert report.findings[0].site == "g"


@pytest.mark.parametrize("verdict", ["yes", "unknown", "no", "ensemble"])
def test_the_verdict_is_that_of_the_worst_finding(verdict):
    verdicts = ["yes", "unknown", "no", "ensemble"]
    milder = verdicts[: 1 + verdicts.index(verdict)]
    report = Report.from_findings([finding("a", each, 1.0) for each in milder], {})
    assert report.verdict == report.of_site("a") == verdict
    assert report.of_site("b") == "yes"


@pytest.mark.parametrize(
    ("temperatures", "of"),
    [
        ((1.0, 1.0), "the posterior's"),
        ((1.0, 1.00001), "the posterior's"),  # a schedule that has cooled
        ((1.5, 1.5), "those at temperature 1.5, wider than the posterior; for that: temperature=1"),
        ((0.5, 0.5), "those at temperature 0.5, narrower than"),
        ((0.5, 1.5), "those at temperatures of 0.5 to 1.5; for the posterior: temperature=1"),
    ],
)
def test_a_yes_names_the_temperature(temperatures, of):
    """Draws at another temperature than 1 are not the posterior's, however good they are."""
    report = Report.from_findings([finding("a", "yes", 0.3)], {}, temperatures)
    assert report.verdict == "yes"
    assert f"within 5% of {of}" in report.headline


def test_it_comes_back_from_text():
    """In the order that it had; the severity, by which it was found, is not kept."""
    report = Report.from_findings(FINDINGS, {"lr": "0.1, as it was set"}, (0.5, 1.5))
    again = Report.from_json(report.to_json())
    assert again == report
    assert str(again) == str(report)
    assert list(again.to_frame().columns) == ["site", "check", "verdict", "told", "advice"]


@pytest.mark.parametrize(
    ("mean", "log_sd", "mcse", "verdict"),
    [
        (0.0, 0.0, 0.001, "yes"),
        (0.09, 0.0, 0.001, "yes"),
        (0.0, 0.045, 0.001, "yes"),
        (0.11, 0.0, 0.001, "no"),
        (0.0, -0.055, 0.001, "no"),
        (0.14, 0.0, 0.015, "unknown"),
        (0.09, 0.0, 0.0037, "yes"),
        (0.09, 0.0, 0.004, "unknown"),
        (0.0, 0.0, 0.026, "unknown"),
        (0.0, 0.0, math.nan, "unknown"),
    ],
)
def test_a_bias_is_judged_by_its_bounds(mean, log_sd, mcse, verdict):
    """ "no" from about 3.5 standard errors beyond the tolerance of one of ten elements, "yes" 2.6
    within it; the second element is right."""
    bias = Bias(*torch.tensor([[mean, 0.0], [mcse, 1e-4], [log_sd, 0.0], [mcse, 1e-4]]))
    assert judge_bias("w", bias, 10, "").verdict == verdict


@pytest.mark.parametrize(("errors", "verdict"), [(0.97, "unknown"), (1.03, "no")])
def test_a_no_of_a_right_run_has_a_probability_of_half_a_percent(errors, verdict):
    """Of a mean's or an sd's bias at the tolerance, if it is one of ten elements."""
    away = errors * NormalDist().inv_cdf(1 - 0.005 / 10) * 0.02
    zero, mcse = torch.tensor([0.0]), torch.tensor([0.02])
    of_mean = Bias(zero - 0.1 - away, mcse, zero, mcse)
    of_sd = Bias(zero, mcse, zero + 0.05 + away, mcse)
    assert [judge_bias("w", bias, 10, "").verdict for bias in (of_mean, of_sd)] == [verdict] * 2


def test_a_bias_at_the_tolerance_has_a_yes_in_one_run_of_a_hundred():
    """With the standard errors of a pilot's 16 parts, at one element; others have to pass as well,
    which makes a yes no more likely. The interval has 4 standard errors of 20,000 runs."""
    generator = torch.Generator().manual_seed(0)
    runs = 20_000
    off = 0.1 + 0.02 * torch.randn(4, 4, runs, generator=generator, dtype=torch.float64)
    mean, mcse = _mean_and_error(off)
    zero = torch.zeros(runs, dtype=torch.float64)
    passed = Bias(mean, mcse, zero, zero).is_within(PILOTS.errors_of_yes)
    assert float(passed.double().mean()) == pytest.approx(0.01, abs=0.003)
