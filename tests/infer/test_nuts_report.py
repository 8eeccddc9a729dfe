"""How far to trust draws of NUTS, said as it is of samplers' draws."""

import dataclasses
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from linear import linear_data, regression
from reference import double, normals

import pyro_scale as ps
from pyro_scale.diagnostics import modes
from pyro_scale.infer import nuts as nuts_module

pytest.importorskip("nutpie")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore"),
]

HOW = {"seed": 1, "progress": False, "warmup_steps": 300}
DATA = linear_data(60)


@pytest.fixture(scope="module")
def sampled(float64):
    return ps.NUTS(regression(variance=2.0)).run(DATA, num_samples=500, **HOW)


def changed(nuts, **tensors):
    """The same run, with other draws or statistics."""
    return ps.Posterior(dataclasses.replace(nuts.posterior.draws, **tensors)).report()


def checks(report):
    return {finding.check: finding.verdict for finding in report.findings}


def test_what_has_mixed_is_right(sampled):
    report = sampled.report()
    assert report.verdict == "yes"
    assert checks(report) == {"mixing": "yes", "divergences": "yes"}
    assert str(report).startswith("YES: every check puts posterior means within 0.1 sds")
    assert "NUTS, exact on all rows" in str(report)
    assert list(report.to_frame().columns) == ["site", "check", "verdict", "told", "advice"]


@pytest.mark.parametrize(("away", "verdict"), [(0.0, "yes"), (0.4, "unknown"), (1.0, "no")])
def test_chains_that_are_apart(sampled, away, verdict):
    """One of four chains is moved by so many sds: R-hat is about (1 + 3/16 away^2)^0.5."""
    positions = sampled.posterior.draws.positions.clone()
    positions[0] += away * positions.flatten(0, 1).std(0)
    assert checks(changed(sampled, positions=positions))["mixing"] == verdict


def test_a_trajectory_that_diverged_leaves_it_unknown(sampled):
    stats = dict(sampled.posterior.draws.sample_stats)
    stats["diverging"] = stats["diverging"].clone()
    stats["diverging"][1, 7] = True
    report = changed(sampled, sample_stats=stats)
    assert checks(report) == {"mixing": "yes", "divergences": "unknown"}
    assert report.headline.startswith("NOT KNOWN: 1 of 2000 trajectories diverged; try: target_acc")


def test_few_draws_and_one_chain_tell_nothing(sampled):
    result = sampled.posterior.draws
    few = {"positions": result.positions[:, :90]}  # 360 draws cannot be worth 400
    few["sample_stats"] = {name: each[:, :90] for name, each in result.sample_stats.items()}
    assert checks(changed(sampled, **few))["mixing"] == "unknown"
    assert checks(changed(sampled, **few))["length"] == "unknown"  # of 500 that were asked for
    alone = {"positions": result.positions[:1]}
    alone["sample_stats"] = {name: each[:1] for name, each in result.sample_stats.items()}
    assert "a single chain cannot show it" in changed(sampled, **alone).headline


@pytest.mark.parametrize("method", [ps.NUTS, ps.BAOA, ps.Laplace])
def test_a_yes_names_the_temperature_that_was_asked_for(method, tmp_path):
    """Also read from a file. Draws at temperature 1.5 are right for what was asked for, and have
    sds 1.5^0.5 times too large for the posterior."""
    fit = method(regression(variance=2.0), temperature=1.5).run(DATA, seed=1, progress=False)
    fit.save(tmp_path / "run")
    for one in (fit, method.load(tmp_path / "run", fit.model)):
        assert re.fullmatch(
            "YES: .* at temperature 1.5, wider than the posterior; for that: temperature=1",
            one.report().headline,
        )


def test_it_is_kept_in_a_file(sampled, tmp_path):
    sampled.save(tmp_path / "run")
    assert str(ps.NUTS.load(tmp_path / "run", sampled.model).report()) == str(sampled.report())


def test_where_a_funnel_diverges_the_advice_is_how_to_mend_it():
    def funnel(y):
        tau = pyro.sample("tau", dist.HalfCauchy(1.0))
        with pyro.plate("groups", 8):
            effect = pyro.sample("effect", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    nuts = ps.NUTS(funnel).run(0.1 * torch.arange(8.0), num_samples=1000, **HOW)
    assert bool(nuts.posterior.draws.sample_stats["diverging"].any())
    assert "non-centered 'effect', whose prior's scale is 'tau'" in nuts.report().headline


def test_a_stray_draw_is_a_heavy_tail(sampled):
    """Of 10^100, whose fourth power is no number; and a report without it passes."""
    positions = sampled.posterior.draws.positions.clone()
    positions[2, 100] = 1e100
    report = changed(sampled, positions=positions)
    assert checks(report)["tails"] == "unknown"
    assert "num_samples=" in report.headline or "quantiles" in report.headline


def test_few_draws_get_the_number_that_is_enough(sampled):
    result = sampled.posterior.draws
    few = {"positions": result.positions[:, :90]}
    few["sample_stats"] = {name: each[:, :90] for name, each in result.sample_stats.items()}
    (finding,) = (f for f in changed(sampled, **few).findings if f.check == "mixing")
    effective = int(re.search(r"(\d+) effective", finding.told)[1])
    needed, factor = re.fullmatch(
        r"num_samples=(\d+) \((.+) times the steps\)", finding.advice
    ).groups()
    assert 90 * 1.25 * 400 / effective == pytest.approx(int(needed), rel=0.1)
    assert float(factor) == pytest.approx(1.25 * 400 / effective, rel=0.05)


def two_modes(share):
    """Of which the one at 5 has this share of the posterior."""

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 50.0).to_event(1))
        parts = dist.Normal(double(-5.0, 5.0)[:, None], 0.5).log_prob(x).sum(-1)
        pyro.factor("modes", (parts + double(1 - share, share).log()).logsumexp(0))

    return model


def started_at(place, model, **how):
    init = {"x": place + normals(4, 2, seed=3) / 2}
    return ps.NUTS(model, init_strategy=init, **how).run(None, **HOW)


def test_a_mode_without_draws_is_told(tmp_path):
    """Also from a file, which has no data and no compiled density."""
    nuts = started_at(5.0, two_modes(0.5))
    assert nuts.report().headline.startswith("NO: site 'x': 2 modes, at ")
    assert nuts.report().headline.endswith(
        "; the others have 0.0 nats less evidence; there is no draw at 1 of them; try: a model "
        "without the other modes (an order, a sign)"
    )
    nuts.save(tmp_path / "run")
    assert str(ps.NUTS.load(tmp_path / "run", nuts.model).report()) == str(nuts.report())


@pytest.mark.parametrize(("place", "verdict"), [(5.0, "no"), (-5.0, "yes")])
def test_a_mode_without_mass_needs_no_draws(place, verdict):
    """All draws at it are wrong; the advice is BAOA, which is right."""
    report = started_at(place, two_modes(1e-7)).report()
    assert report.verdict == verdict
    if verdict == "no":
        assert report.headline.endswith("try: BAOA(model), whose chains start at all modes")
        baoa = ps.BAOA(two_modes(1e-7)).run(None, seed=0, progress=False)
        assert baoa.report().verdict == "yes"


def test_evidence_of_modes_is_that_at_the_temperature():
    """At temperature 3, the mode of 1e-7 has 1e-7^(1/3) times the density of the other, 0.5%: not
    negligible any more."""
    report = started_at(-5.0, two_modes(1e-7), temperature=3.0).report()
    assert "5.4 nats less evidence" in next(f.told for f in report.findings if f.check == "modes")


def test_a_funnel_has_no_modes_to_miss():
    """The log joint rises without end where v falls, so that there is no mode."""

    def funnel():
        pyro.factor("no data", torch.zeros(()))
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(torch.zeros(9), (v / 2).exp()).to_event(1))

    assert "modes" not in ps.NUTS(funnel).run(None, **HOW).posterior.attrs


def test_errors_of_searches_are_no_errors_of_the_run(monkeypatch):
    def fail(*arguments):
        raise ValueError("the model, far out")

    monkeypatch.setattr(modes, "search_starts", fail)
    assert "modes" not in started_at(5.0, two_modes(0.5)).posterior.attrs


def test_searches_leave_torchs_random_numbers(monkeypatch):
    def state_after():
        torch.manual_seed(7)
        started_at(5.0, two_modes(0.5))
        return torch.get_rng_state()

    with_searches = state_after()
    monkeypatch.setattr(nuts_module, "_modes_of", lambda *arguments: {})
    assert torch.equal(with_searches, state_after())
