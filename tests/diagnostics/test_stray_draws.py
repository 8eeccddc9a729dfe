"""Draws that the step threw out of the posterior, told from draws of heavy tails."""

import dataclasses
import math
import re

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals

import pyro_scale as ps
from pyro_scale.core.stray import usual_fall
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.stray_draws import check_stray_draws
from pyro_scale.diagnostics.verdict import report
from pyro_scale.run.measurements import Measurements

CHAINS, DRAWS = 4, 1000
Y = normals(3, seed=9)


def posterior_is_prior(sites):
    """A model whose rows tell nothing of its sites, so that draws of the prior are exact."""

    def model(y):
        sites()
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(torch.zeros(()), 1.0), obs=y)

    return model


def one(distribution):
    return posterior_is_prior(lambda: pyro.sample("w", distribution()))


def funnel():
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    pyro.sample("x", dist.Normal(torch.zeros(9), (v / 2).exp()).to_event(1))


def horseshoe():
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(20)).to_event(1))
    pyro.sample("w", dist.Normal(torch.zeros(20), tau * scale).to_event(1))


def two_widths():
    """The wide part has 1/200 of the mass, 46 nats below the narrow one's mode."""
    w = pyro.sample("w", dist.Normal(torch.zeros(10), 1e6).to_event(1))  # flat
    parts = dist.Normal(torch.zeros(2, 10), torch.tensor([[1.0], [100.0]])).to_event(1)
    weights = torch.tensor([0.995, 0.005]).log()
    pyro.factor("widths", (weights + parts.log_prob(w)).logsumexp(-1))


def draws_of_funnel(random):
    v = 3 * random.standard_normal((CHAINS, DRAWS, 1))
    return np.concatenate([v, np.exp(v / 2) * random.standard_normal((CHAINS, DRAWS, 9))], -1)


def draws_of_horseshoe(random):
    scales = np.abs(random.standard_cauchy((CHAINS, DRAWS, 21)))
    w = scales[..., :1] * scales[..., 1:] * random.standard_normal((CHAINS, DRAWS, 20))
    return np.concatenate([np.log(scales), w], -1)


def draws_of_two_widths(random):
    widths = np.where(random.random((CHAINS, DRAWS, 1)) < 0.005, 100.0, 1.0)
    return widths * random.standard_normal((CHAINS, DRAWS, 10))


def wide(distribution, size):
    return lambda: distribution(torch.zeros(size)).to_event(1)


EXACT = {
    "normal": (one(wide(lambda m: dist.Normal(m, 1.0), 1)), 1, "standard_normal"),
    "100 normals": (one(wide(lambda m: dist.Normal(m, 1.0), 100)), 100, "standard_normal"),
    "Student's t": (one(wide(lambda m: dist.StudentT(2.5, m, 1.0), 1)), 1, 2.5),
    "10 Student's t": (one(wide(lambda m: dist.StudentT(2.5, m, 1.0), 10)), 10, 2.5),
    "Cauchy": (one(wide(lambda m: dist.Cauchy(m, 1.0), 1)), 1, "standard_cauchy"),
    "10 Cauchys": (one(wide(lambda m: dist.Cauchy(m, 1.0), 10)), 10, "standard_cauchy"),
    "funnel": (posterior_is_prior(funnel), 10, draws_of_funnel),
    "horseshoe": (posterior_is_prior(horseshoe), 41, draws_of_horseshoe),
}


def exact_draws(how, size, seed):
    random = np.random.default_rng(seed)
    if callable(how):
        return torch.from_numpy(how(random))
    shape = (CHAINS, DRAWS, size)
    values = random.standard_t(how, shape) if how == 2.5 else getattr(random, how)(shape)
    return torch.from_numpy(values)


@pytest.fixture(scope="module", autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run_of(model):
    steps = {"num_samples": 10, "warmup_steps": 0, "thinning": 1, "num_chains": CHAINS}
    sampler = ps.BAOA(model, lr=1e-3, friction=1.0, compile=False)
    return sampler.run(Y, seed=0, progress=False, **steps).posterior.draws


def with_draws(result, positions):
    """The run with other draws `[chains, draws, D]`, and their log joint."""
    density = FullDataDensity(result.log_posterior, result.data, result.layout)
    lp = len(Y) * density.values(positions.flatten(0, 1)).reshape(positions.shape[:2])
    stats = {name: each[:, :1].expand(lp.shape) for name, each in result.sample_stats.items()}
    return dataclasses.replace(result, positions=positions, sample_stats=stats | {"lp": lp})


def meta(y):
    """Centered: the scale's density falls fast where the effects do not follow."""
    tau = pyro.sample("tau", dist.HalfCauchy(0.5))
    with pyro.plate("data", len(y)):
        theta = pyro.sample("theta", dist.Normal(0.0, tau))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


@pytest.fixture(scope="module")
def hierarchy():
    """Draws near the posterior of `meta`: log tau, and three effects."""
    noise = normals(CHAINS, DRAWS, 4, seed=1)
    log_tau = 0.3 * noise[..., :1]
    return with_draws(run_of(meta), torch.cat([log_tau, log_tau.exp() * noise[..., 1:]], -1))


def thrown(result, log_tau, places):
    positions = result.positions.clone()
    for chain, draw in places:
        positions[chain, draw, 0] = log_tau
    return with_draws(result, positions)


@pytest.mark.parametrize("name", EXACT)
def test_no_draw_of_a_heavy_tail_is_stray(name):
    model, size, how = EXACT[name]
    result = run_of(model)
    for seed in range(5):
        assert check_stray_draws(with_draws(result, exact_draws(how, size, seed))) == []


def test_the_limit_is_that_of_exponential_tails():
    """Of scale 7: the quantile is 7 log 20, and 3 scales per log of the number of draws are added;
    of a scale below 1 the limit is that of 1."""
    levels = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for scale in (7.0, 0.1):
        falls = -scale * levels.log()
        base, most = usual_fall(falls)
        assert base == pytest.approx(scale * math.log(20), rel=0.01)
        assert most == pytest.approx(3 * math.log(4000) * max(scale, 1), rel=0.01)


def test_exponential_tails_pass_the_limit_as_often_as_the_formula_says():
    """With a margin of 1, one run of 20 has a draw beyond the limit."""
    random = np.random.default_rng(2)
    passed = 0
    for _ in range(2000):
        falls = torch.from_numpy(random.exponential(5.0, 400)).sort(descending=True).values
        base, most = usual_fall(falls)
        passed += float(falls[0]) > base + most / 3
    assert 0.04 < passed / 2000 < 0.10  # quantiles are estimates: 0.05 and a little more


def test_a_thrown_draw_is_named(hierarchy):
    """Where log tau is 40, the densities of three effects are e^-40 each, and so is the prior's."""
    assert check_stray_draws(hierarchy) == []
    result = thrown(hierarchy, 40.0, [(2, 100)])
    (finding,) = check_stray_draws(result)
    assert (finding.site, finding.verdict) == ("tau", "no")
    assert "1 of 4,000 draws is stray: the lowest, at 2.354e+17," in finding.told  # e^40
    falls = (-result.sample_stats["lp"].flatten()).sort(descending=True).values
    base, most = usual_fall(falls)
    assert f"{float(falls[0]) - base:.0f} nats below that of 95%" in finding.told
    assert finding.severity == pytest.approx((float(falls[0]) - base) / most)


@pytest.mark.parametrize("places", [1, 19])
def test_stray_draws_that_change_no_moment_are_not_known(hierarchy, places):
    """Where tau is e^-8, three effects of about 1 are millions of nats off; but 1 - e^-8 is three
    sds of tau."""
    result = thrown(hierarchy, -8.0, [(2, 100 + each) for each in range(places)])
    (finding,) = check_stray_draws(result)
    assert finding.verdict == "unknown"
    assert f"{places} of 4,000 draws" in finding.told
    assert "wide mode" not in finding.told
    assert finding.severity > 1e4


@pytest.mark.parametrize(("thrown_draws", "told"), [(3, "3 of"), (50, "at least 20 of")])
def test_thrown_draws_are_counted(hierarchy, thrown_draws, told):
    places = [(1, 7 * each) for each in range(thrown_draws)]
    (finding,) = check_stray_draws(thrown(hierarchy, 40.0, places))
    assert finding.told.startswith(f"{told} 4,000 draws are stray:")


@pytest.mark.parametrize(
    ("places", "advice"),
    [
        ([(0, 0), (0, 3), (2, 1)], "more warmup_steps="),  # chains on their way from far starts
        ([(0, 0), (0, 3), (2, 500)], "a smaller lr"),
        ([(0, 1), (0, 3), (2, 1)], "a smaller lr"),
    ],
)
def test_first_draws_ask_for_warm_up(hierarchy, places, advice):
    (finding,) = check_stray_draws(thrown(hierarchy, 40.0, places))
    assert finding.verdict == "no"
    assert finding.advice.startswith(advice)


def test_a_report_calls_it_no_tail(hierarchy):
    result = thrown(hierarchy, 40.0, [(0, 3)])
    made = report(dataclasses.replace(result, measurements=Measurements()), None, DRAWS)
    assert made.verdict == "no"
    assert "tails" not in {finding.check for finding in made.findings}
    assert "stray" in made.headline
    assert "non-centered 'theta'" in made.headline


def test_a_wide_mode_is_not_known():
    """Whose few draws are as low as stray ones, but where the density is flat."""
    result = run_of(posterior_is_prior(two_widths))
    draws = torch.from_numpy(draws_of_two_widths(np.random.default_rng(3)))
    (finding,) = check_stray_draws(with_draws(result, draws))
    assert finding.verdict == "unknown"
    assert "or of a wide mode" in finding.told


def normals_with(draw):
    """Normal draws, one of which is replaced; where log densities have any constant."""
    model, size, how = EXACT["normal"]
    positions = exact_draws(how, size, 0)
    positions[3, 5] = draw
    return with_draws(run_of(model), positions)


@pytest.mark.parametrize(("factor", "is_stray"), [(0.9, False), (1.1, True)])
def test_a_draw_is_stray_beyond_the_limit(factor, is_stray):
    """By the log joint of all rows; these are read only if the recorded one is beyond it too."""
    usual = normals_with(0.0)
    log_joint = usual.sample_stats["lp"]
    falls = (log_joint[3, 5] - log_joint).flatten().sort(descending=True).values
    base, most = usual_fall(falls)
    result = normals_with((2 * (base + factor * most)) ** 0.5)
    assert bool(check_stray_draws(result)) == is_stray
    unread = dataclasses.replace(result, data=TensorData((Y[:2],), len(Y)))
    assert bool(check_stray_draws(unread)) == is_stray
    lp = result.sample_stats["lp"].clone()
    lp[3, 5] -= 1e4
    noisy = dataclasses.replace(result, sample_stats=result.sample_stats | {"lp": lp})
    assert bool(check_stray_draws(noisy)) == is_stray


@pytest.mark.parametrize(("sds", "verdict"), [(18.0, "unknown"), (22.0, "no")])
def test_a_stray_draw_is_a_no_where_it_changes_the_sd(sds, verdict):
    """It adds sds^2 / n to the variance, and half of that to the log sd, of which 5% is much."""
    (finding,) = check_stray_draws(normals_with(sds))
    assert finding.verdict == verdict


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "unknown"), (1.1, "no")])
def test_a_wide_mode_ends_where_the_density_falls_by_the_limit(factor, verdict):
    """Where x is of sd 100, the virial is |x / 100|^2."""
    result = run_of(posterior_is_prior(two_widths))
    positions = exact_draws("standard_normal", 10, 0)
    falls = (positions.square().sum(-1) / 2).flatten().sort(descending=True).values
    _, most = usual_fall(falls)
    positions[3, 5] = 100 * ((10 + factor * most) / 10) ** 0.5
    (finding,) = check_stray_draws(with_draws(result, positions))
    assert finding.verdict == verdict
    assert ("or of a wide mode" in finding.told) == (verdict == "unknown")


def test_all_rows_decide(hierarchy):
    """Where a batch's rows make a draw look stray, it is not."""
    stats = hierarchy.sample_stats
    lp = stats["lp"].clone()
    lp[3, 5] -= 1e4
    noisy = dataclasses.replace(hierarchy, sample_stats=stats | {"lp": lp})
    assert check_stray_draws(noisy) == []


def test_the_data_are_read_only_for_low_draws(hierarchy):
    """Whatever the constant in the log joint."""
    stats = hierarchy.sample_stats
    unread = dataclasses.replace(
        hierarchy,
        data=TensorData((Y[:2],), len(Y)),
        sample_stats=stats | {"lp": stats["lp"] - 1e3},
    )
    assert check_stray_draws(unread) == []


def test_where_rows_cannot_be_read_it_is_not_known():
    model, size, how = EXACT["normal"]
    draws = exact_draws(how, size, 0)
    draws[3, 5] = 30.0
    result = with_draws(run_of(model), draws)
    assert check_stray_draws(result)[0].verdict == "no"
    part = dataclasses.replace(result, data=TensorData((Y[:2],), len(Y)))
    (finding,) = check_stray_draws(part)
    assert (finding.verdict, finding.site) == ("unknown", "")
    assert "1 of 4,000 draws may be stray" in finding.told


@pytest.mark.slow
def test_a_centered_meta_analysis_has_no_heavy_tails():
    """Whose scale was 62,881 in a single draw of 4,000, where at most .6 is right."""
    rng = np.random.default_rng(19)
    se = rng.uniform(0.1, 0.6, 40)
    effect = 0.3 + 0.15 * rng.standard_normal(40) + se * rng.standard_normal(40)
    se, effect = (torch.tensor(each, dtype=torch.float32) for each in (se, effect))

    def trials(se, effect=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfCauchy(0.5))
        with pyro.plate("trials", len(se)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            return pyro.sample("effect", dist.Normal(theta, se), obs=effect)

    torch.set_default_dtype(torch.float32)
    try:
        fit = ps.BAOA(trials).run((se, effect), seed=0, progress=False)
    finally:
        torch.set_default_dtype(torch.float64)
    largest = float(fit.get_samples()["tau"].max())
    headline = fit.report().headline
    assert fit.report().verdict == ("no" if largest > 50 else "unknown")
    assert ("stray" in headline) == (largest > 50)
    assert re.search(r"tails", headline) is None
