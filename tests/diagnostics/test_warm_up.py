"""What the report says of a warm-up that did not settle."""

import dataclasses

import pyro.distributions as dist
import pytest
import torch
from densities import prior_only
from reference import double
from runs import QUIET

import pyro_scale as ps
from pyro_scale.diagnostics import verdict
from pyro_scale.diagnostics.warm_up import check_warm_up

pytestmark = pytest.mark.usefixtures("float64")

#: A Gaussian that is a thousand times longer in one direction than in the other.
ROOT = torch.linalg.cholesky(double([1.0, 0.999999], [0.999999, 1.0]))
NARROW = double(1.0, -1.0) / 2**0.5  # sd 0.001
gaussian = prior_only(lambda: dist.MultivariateNormal(torch.zeros(2), scale_tril=ROOT))


@pytest.fixture
def run(monkeypatch):
    """(Draws of a run that tunes itself, its choices)."""
    seen = []

    def keep(*arguments):
        seen.append(arguments)
        return check_warm_up(*arguments)

    monkeypatch.setattr(verdict, "check_warm_up", keep)
    ps.BAOA(gaussian).run(None, **QUIET)
    return seen[-1]


def judged(result, choice, **window):
    choice = dataclasses.replace(choice, window=dataclasses.replace(choice.window, **window))
    return check_warm_up(result, choice)[0]


def test_where_the_geometry_did_not_settle_draws_that_mix_are_enough(run):
    assert judged(*run).verdict == "yes"
    assert "draws" not in judged(*run).told
    unsettled = judged(*run, agrees=False, change=2.0)
    assert unsettled.verdict == "yes"
    assert "R-hat of the draws in this geometry is 1.0" in unsettled.told


@pytest.mark.parametrize("shape", ["mean", "spread"])
def test_chains_apart_in_a_direction_that_no_element_shows_are_not_enough(run, shape):
    """Elements have R-hats of 1: in one chain, sds are 0.001 off, of 1."""
    result, choice = run
    positions = result.positions.clone()
    if shape == "mean":
        positions[0] += 3e-3 * NARROW
    else:
        positions[0] += 4 * (positions[0] @ NARROW)[:, None] * NARROW
    moved = dataclasses.replace(result, positions=positions)
    finding = judged(moved, choice, agrees=False, change=2.0)
    assert finding.verdict == "unknown"
    assert judged(moved, choice).verdict == "yes"  # of a warm-up that settled, draws are not asked


@pytest.mark.parametrize(("away", "verdict"), [(0.85, "yes"), (1.2, "unknown")])
def test_draws_in_the_geometry_agree_below_an_r_hat_of_1_1(run, away, verdict):
    """Where one chain of four is so many sds off, R-hat is about (1 + 3/14 away^2)^0.5, from the
    means of eight half chains: 1.07, and 1.14."""
    result, choice = run
    positions = result.positions.clone()
    positions[0] += 1e-3 * away * NARROW
    moved = dataclasses.replace(result, positions=positions)
    assert judged(moved, choice, agrees=False).verdict == verdict


def test_few_draws_cannot_show_it(run):
    result, choice = run
    few = dataclasses.replace(result, positions=result.positions[:, :3])
    assert judged(few, choice, agrees=False).verdict == "unknown"
