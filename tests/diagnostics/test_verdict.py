"""The rules of a report's checks: on which side of its threshold each verdict falls."""

import dataclasses
import math
import re
from statistics import NormalDist

import arviz
import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from reference import normals

import pyro_scale as ps
from pyro_scale.diagnostics import verdict as verdict_module
from pyro_scale.diagnostics.verdict import report, report_on_exact
from pyro_scale.engine.draws import Steps
from pyro_scale.run.measurements import GradientNoise, Measurements, VirialTemperature
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.pilot import Bias, Pilot

CHAINS, DRAWS = 4, 500
Y = normals(3, seed=9)
#: Four elements: three of a, one of b.
two_sites = of_rows(
    lambda a, b: dist.Normal(a.sum() + b, 1.0), a=normal(3), b=lambda: dist.Normal(0.0, 1.0)
)


@pytest.fixture(scope="module", autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def run(float64):
    steps = {"num_samples": 10, "warmup_steps": 0, "thinning": 1, "num_chains": CHAINS}
    sampler = ps.BAOA(two_sites, lr=1e-3, friction=1.0, compile=False)
    result = sampler.run(Y, seed=0, progress=False, **steps).posterior.draws
    return with_draws(result, normals(CHAINS, DRAWS, 4, seed=1))


def with_draws(result, positions, **measurements):
    """The run with other draws `[chains, draws, 4]`, and these measurements only."""
    stats = result.sample_stats
    stats = {name: each[:1, :1].expand(positions.shape[:2]) for name, each in stats.items()}
    measurements = Measurements(**measurements)
    return dataclasses.replace(
        result, positions=positions, sample_stats=stats, measurements=measurements
    )


def with_attrs(result, **attrs):
    return dataclasses.replace(result, attrs=result.attrs | attrs)


def choice_of(**measurements):
    return Choice(
        problem=None,
        steps=Steps(DRAWS),
        passes={},
        reasons={},
        chooses_lr=True,
        warmup_steps=None,
        **measurements,
    )


def findings(result, check, choice=None, num_samples=None):
    """The report's findings of one check, by site."""
    made = report(result, choice, num_samples or result.positions.shape[1])
    return {each.site: each for each in made.findings if each.check == check}


# ------------------------------------------------------------------ mixing


def mixing_with(r_hat, chance):
    """A `mixing_and_chance` by which the last element of each site has this R-hat and chance."""

    def mixing(values):
        size = values.shape[-1]
        r_hats, chances = torch.ones(size), torch.ones(size)
        r_hats[-1], chances[-1] = r_hat, chance
        return r_hats, torch.full((size,), 1e3), torch.full((size,), 1e3), chances

    return mixing


@pytest.mark.parametrize(
    ("r_hat", "chance", "verdict"),
    [
        (1.009, 1e-9, "yes"),
        (1.011, 1e-9, "unknown"),
        (1.049, 1e-9, "unknown"),
        (1.051, 1e-9, "no"),
        (1.2, 0.9 * 0.01 / 4, "no"),
        (1.2, 1.1 * 0.01 / 4, "yes"),
        (1.011, math.nan, "unknown"),
        (1.29, math.nan, "unknown"),
        (1.31, math.nan, "no"),
    ],
)
def test_chains_disagree_where_chance_does_not_explain_r_hat(
    run, monkeypatch, r_hat, chance, verdict
):
    """In 1% of right runs, chance passes a hundredth over the four elements at some of them."""

    monkeypatch.setattr(verdict_module, "mixing_and_chance", mixing_with(r_hat, chance))
    walks = with_draws(run, normals(CHAINS, DRAWS, 4, seed=2).cumsum(1))  # no chain in one mode
    assert {each.verdict for each in findings(walks, "mixing").values()} == {verdict}


@pytest.mark.parametrize(("in_one_mode", "verdict"), [(True, "no"), (False, "unknown")])
def test_few_draws_show_chains_in_different_modes(run, monkeypatch, in_one_mode, verdict):
    """Where R-hat is large, and that of each chain is not."""
    monkeypatch.setattr(verdict_module, "mixing_and_chance", mixing_with(1.4, math.nan))
    noise = normals(CHAINS, 90, 4, seed=2)
    few = with_draws(run, noise if in_one_mode else noise.cumsum(1))
    assert {each.verdict for each in findings(few, "mixing").values()} == {verdict}


@pytest.mark.parametrize(("draws", "verdict"), [(75, "unknown"), (150, "yes")])
def test_400_effective_draws_are_enough(run, draws, verdict):
    """Independent draws of four chains are as many effective ones, to a tenth."""
    mixing = findings(with_draws(run, normals(CHAINS, draws, 4, seed=3)), "mixing")
    assert {each.verdict for each in mixing.values()} == {verdict}


@pytest.mark.parametrize("slow", ["bulk", "tail"])
def test_effective_draws_are_the_fewer_of_bulk_and_tails(run, slow):
    """As ArviZ has them. Signs are independent of slow distances from 0, and every fifth draw, far
    out, is of slow ones."""
    noise, path = normals(4, CHAINS, DRAWS, seed=4), torch.zeros(CHAINS)
    steps = [path := 0.9 * path + 0.19**0.5 * each for each in noise[0].unbind(1)]
    path = torch.stack(steps, 1)
    if slow == "tail":
        values = path.abs() * noise[1].sign()
    else:
        values = torch.where(noise[1].abs() > 1.3, 100 * noise[2], path)
    positions = normals(CHAINS, DRAWS, 4, seed=5)
    positions[..., 3] = values
    bulk, tail = (float(arviz.ess(values.numpy(), method=kind)) for kind in ("bulk", "tail"))
    assert (bulk < 0.7 * tail) if slow == "bulk" else (tail < 0.7 * bulk)
    told = findings(with_draws(run, positions), "mixing")["b"].told
    ess, error = re.search(r"(\d+) effective draws of 2000: .* up to (\S+) sds", told).groups()
    assert int(ess) == round(min(bulk, tail))
    assert float(error) == pytest.approx(bulk**-0.5, rel=0.05)


def test_few_draws_and_single_chains_are_not_known(run):
    few = with_draws(run, normals(CHAINS, 7, 4))
    assert [each.verdict for each in findings(few, "mixing").values()] == ["unknown"]
    alone = with_draws(run, normals(1, 2000, 4))
    assert {each.verdict for each in findings(alone, "mixing").values()} == {"unknown"}


def test_a_run_that_ended_early_is_not_known(run):
    assert findings(run, "length") == {}
    ended = findings(run, "length", num_samples=2 * DRAWS)[""]
    assert (ended.verdict, ended.severity) == ("unknown", 2.0)


@pytest.mark.parametrize(
    ("kurtosis", "draws", "is_heavy"),
    [(13.5, 250, True), (8.0, 100, False), (13.5, 1500, False), (19.0, 100, True)],
)
def test_tails_are_heavy_where_an_sd_has_a_large_error(run, kurtosis, draws, is_heavy):
    """Of draws 1 and a, with either sign, in random order: of n draws, the sd has the relative
    error ((kurtosis - 1) / 4n)^0.5, of which 5% is tolerated; but not if the kurtosis is below
    9."""
    count = CHAINS * draws
    rare = round(count / (2 * kurtosis))  # at which the kurtosis is largest for distant a
    share = rare / count
    # share a^4 + 1 - share = kurtosis (share a^2 + 1 - share)^2 in a^2
    a = torch.tensor(share * (1 - kurtosis * share))
    half_b, c = kurtosis * share * (1 - share), (1 - share) * (1 - kurtosis * (1 - share))
    far = (half_b + (half_b**2 - float(a) * c) ** 0.5) / float(a)
    values = torch.ones(count)
    values[:rare] = far**0.5
    values[::2] *= -1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    positions = normals(CHAINS, draws, 4, seed=6)
    positions[..., 3] = values[order].view(CHAINS, draws)
    tails = findings(with_draws(run, positions), "tails")
    assert list(tails) == (["b"] if is_heavy else [])
    if is_heavy:
        error = ((kurtosis - 1) / 4 / count) ** 0.5
        assert tails["b"].verdict == "unknown"
        assert tails["b"].severity == pytest.approx(error / 0.05, rel=0.15)


def exact_report(run, diverged=0):
    """The report as of NUTS, with so many divergences."""
    stats = run.sample_stats | {"diverging": torch.zeros(CHAINS, DRAWS, dtype=torch.bool)}
    stats["diverging"][1, :diverged] = True
    exact = dataclasses.replace(run, sample_stats=stats)
    return report_on_exact(with_attrs(exact, method="NUTS", temperature=1.0), DRAWS)


@pytest.mark.parametrize(("diverged", "verdict"), [(0, "yes"), (1, "unknown")])
def test_one_divergence_leaves_it_unknown(run, diverged, verdict):
    made = exact_report(run, diverged)
    assert made.verdict == verdict
    (told,) = (each.told for each in made.findings if each.check == "divergences")
    assert told == f"{diverged} of 2000 trajectories diverged"


def test_an_element_that_does_not_move_is_a_no(run):
    positions = run.positions.clone()
    positions[2, :, 1] = 0.3
    frozen = dataclasses.replace(run, positions=positions)
    for made in (report(frozen, None, DRAWS), exact_report(frozen)):
        found = {(each.site, each.check): each.verdict for each in made.findings}
        assert found["a", "resolution"] == "no"


# ------------------------------------------------------------------ steps and minibatches


def biased(run, **parts):
    """The finding on a site whose last element has this bias, by a pilot."""
    values = {name: torch.zeros(4) for name in Bias._fields}
    for name, value in parts.items():
        values[name][3] = value
    pilot = Pilot(number=1, length=1, steps=1, time=1.0, biases=[Bias(**values)])
    of_sites = findings(run, "step size", choice_of(pilot=pilot))
    assert of_sites["a"].verdict == "yes"
    return of_sites["b"].verdict


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_bias_is_that_of_the_site(run, sign):
    assert biased(run, mean=sign * 0.09) == "yes"
    assert biased(run, mean=sign * 0.11) == "no"
    assert biased(run, log_sd=sign * 0.045) == "yes"
    assert biased(run, log_sd=sign * 0.055) == "no"


def test_a_bias_that_was_not_measured_is_not_known(run):
    assert findings(run, "step size")[""].verdict == "unknown"
    assert findings(run, "step size", choice_of())[""].verdict == "unknown"
    broken = choice_of(pilot=Pilot(number=1, length=1, steps=1, time=1.0))
    assert findings(run, "step size", broken)[""].verdict == "unknown"


def heated(run, temperature, error, num_draws=400, requested=1.0):
    """The verdict on a site whose last element has this temperature."""
    elements = torch.tensor([[requested] * 4, [1e-3] * 4])
    elements[:, 3] = torch.tensor([temperature, error])
    virial = VirialTemperature(torch.ones(CHAINS, DRAWS, 2, 2), num_draws, elements)
    stats = run.sample_stats | {"temperature": torch.full((CHAINS, DRAWS), requested)}
    measured = dataclasses.replace(
        run, sample_stats=stats, measurements=Measurements(virial=virial)
    )
    of_sites = findings(measured, "temperature")
    assert of_sites["a"].verdict == "yes"
    return of_sites["b"].verdict


@pytest.mark.parametrize("requested", [1.0, 1.5])
def test_a_temperature_is_off_by_its_bounds(run, requested):
    """A NO is beyond sds of 5% at a probability of .5% over the elements, on either side."""
    errors = NormalDist().inv_cdf(1 - 0.005 / 4)
    for limit, outwards in ((1.05**2, 1.0), (0.95**2, -1.0)):
        for factor, verdict in ((0.95, "yes"), (1.05, "no")):
            temperature = requested * (limit + outwards * factor * errors * 0.05)
            assert heated(run, temperature, requested * 0.05, 400, requested) == verdict


@pytest.mark.parametrize(("num_draws", "counted"), [(100, 100), (400, 400), (4000, 400)])
def test_a_temperature_of_large_error_is_not_known(run, num_draws, counted):
    """Twice that of independent normal draws, which is (2 / n)^0.5; from 400 on, that of 400."""
    usual = (2 / counted) ** 0.5
    assert heated(run, 1.0, 1.9 * usual, num_draws) == "yes"
    assert heated(run, 1.0, 2.1 * usual, num_draws) == "unknown"


def test_temperatures_that_were_not_measured_are_no_finding(run):
    assert findings(run, "temperature") == {}


@pytest.mark.parametrize(
    ("inflation", "verdict"),
    [(1.09, "yes"), (1.11, "unknown"), (1.24, "unknown"), (1.26, "no")],
)
def test_the_heat_of_minibatches_is_judged_by_site(run, inflation, verdict):
    """Estimated from some batches; above 1.1 it is not known, above 1.25 surely too much."""
    factors = torch.ones(4)
    factors[3] = inflation
    noise = GradientNoise(factors, torch.ones(4))
    batches = with_attrs(run, batch_size=1, num_data=3)
    batches = dataclasses.replace(batches, measurements=Measurements(gradient_noise=noise))
    heat = findings(batches, "minibatch heat")
    assert {site: each.verdict for site, each in heat.items()} == {"a": "yes", "b": verdict}
    assert findings(run, "minibatch heat") == {}


def test_the_heat_of_minibatches_on_all_rows_decides(run):
    batches = with_attrs(run, batch_size=1, num_data=3)
    for heat, verdict in ((0.09, "yes"), (0.11, "no")):
        found = findings(batches, "minibatch heat", choice_of(heat=heat))
        assert found[""].verdict == verdict
    assert findings(batches, "minibatch heat")[""].verdict == "unknown"


# ------------------------------------------------------------------ networks


@pytest.mark.parametrize(("away", "verdict"), [(0.53, "yes"), (0.88, "ensemble")])
def test_predictions_of_a_network_agree_below_an_r_hat_of_1_05(run, away, verdict):
    """Where one chain of four is so many sds off, R-hat is about (1 + 3/14 away^2)^0.5, from the
    means of eight half chains: 1.03, and 1.08. Elements that cancel in predictions do not count."""
    positions = run.positions.clone()
    positions[0, :, 0] += away * 2.0  # the sd of the sum of four
    positions[1, :, 1] += 50
    positions[1, :, 2] -= 50
    apart = dataclasses.replace(run, positions=positions)
    found = findings(apart, "predictions", choice_of(trained=100))
    assert found[""].verdict == verdict
    assert findings(apart, "mixing", choice_of(trained=100)) == {}
    alone = with_draws(run, positions[:1])
    assert findings(alone, "predictions", choice_of(trained=100))[""].verdict == "ensemble"
