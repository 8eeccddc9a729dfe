"""Whether draws are at every mode that the searches found."""

import dataclasses
import math

import choices
import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import double, normals

import pyro_scale as ps
from pyro_scale.diagnostics.modes import check_modes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore"),
]


def mirrored():
    """Two modes of s, which is positive, at exp(-4) and exp(4); w is beside."""
    s = pyro.sample("s", dist.LogNormal(0.0, 10.0))
    pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.factor("modes", dist.Normal(double(-4.0, 4.0), 0.3).log_prob(s.log()).logsumexp(0))


@pytest.fixture(scope="module")
def mirrored_run(float64):
    # chains that stay in two modes would go on for long
    how = {"num_samples": 100, "seed": 0, "progress": False, "max_rows": 30_000}
    with choices.recorded() as made:
        fit = ps.BAOA(mirrored).run(None, **how)
    return fit.posterior.draws, made[-1].modes


def at(result, centers):
    """The result with every chain's draws at one of two modes."""
    draws = 0.3 * normals(len(centers), 50, 3, seed=1)
    draws[..., :1] += double(*centers)[:, None, None]
    return dataclasses.replace(result, positions=draws)


def with_evidence(modes, *below):
    found_by = (0, 2), (1, 3)
    ranked = [
        mode._replace(log_evidence=-nats, searches=searches)
        for mode, nats, searches in zip(modes.modes, below, found_by, strict=True)
    ]
    return dataclasses.replace(modes, modes=tuple(ranked))


def test_modes_are_told_by_site_and_value(mirrored_run):
    result, modes = mirrored_run
    (finding,) = check_modes(at(result, (-4, 4, -4, 4)), modes)
    assert (finding.site, finding.verdict) == ("s", "yes")
    told = [float(part.strip(",;")) for part in finding.told.split()[3:5]]
    assert sorted(told) == pytest.approx([math.exp(-4), math.exp(4)], rel=1e-2)


@pytest.mark.parametrize(
    ("below", "verdict"),
    [(0.0, "no"), (2.8, "no"), (3.2, "unknown"), (3.6, "unknown"), (3.8, "yes"), (9.0, "yes")],
)
def test_a_mode_without_draws_is_missed_by_what_it_is_worth(mirrored_run, below, verdict):
    """Of 200 draws, exp(-3.7) / (1 + exp(-3.7)) are 5; exp(-2.94) is a share of 5%."""
    result, modes = mirrored_run
    best = float(modes.best.gaussian.mean[0])
    (finding,) = check_modes(at(result, [best] * 4), with_evidence(modes, 0.0, below))
    assert finding.verdict == verdict
    assert ("no draw" in finding.told) == (verdict != "yes")


def test_one_draw_is_enough(mirrored_run):
    """Chains' shares are for R-hat to judge."""
    result, modes = mirrored_run
    draws = at(result, [-4.0] * 4)
    draws.positions[2, 17, 0] = 4.0
    assert check_modes(draws, modes)[0].verdict == "yes"


def test_what_is_not_worth_a_draw_is_no_mode(mirrored_run):
    result, modes = mirrored_run
    assert not check_modes(result, with_evidence(modes, 0.0, 10.5))


def test_a_mode_that_no_chain_started_from_may_be_missed(mirrored_run):
    """Of one chain's 50 draws, a mode that is 6 nats below need not have any; but it may have more
    than its Gaussian says."""
    result, modes = mirrored_run
    best = float(modes.best.gaussian.mean[0])
    (finding,) = check_modes(at(result, [best]), with_evidence(modes, 0.0, 6.0))
    assert finding.verdict == "unknown"
    assert "no chain started from 1 of them" in finding.told
    assert check_modes(at(result, [best] * 2), with_evidence(modes, 0.0, 6.0))[0].verdict == "yes"
