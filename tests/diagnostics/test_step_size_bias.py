"""The bias of a finite step, measured by a run at half of it, against exact laws and quadrature.

Fixed seeds.  Where many seeds are run, what is said of none at all is a false alarm.
"""

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import prior_only
from linear import location, standardized
from reference import double
from repetitions import long_but
from runs import QUIET
from warned import quiet, quiet_runs, told

import pyro_scale as ps
from pyro_scale.diagnostics import step_size_bias
from pyro_scale.diagnostics.step_size_bias import run_coupled
from pyro_scale.errors import ArgumentError, NotRunError
from pyro_scale.rng.streams import NoiseStream, RefinedNoise

pytestmark = pytest.mark.usefixtures("float64", "compiled_early")

N, B = 1000, 20
Y = standardized(N)
MANY = {"num_samples": 400, "warmup_steps": 200, "thinning": 3, "num_chains": 40}
run = quiet_runs(**MANY, **QUIET)


def normals_of(precision):
    law = dist.Normal(torch.zeros_like(precision), precision**-0.5)
    return prior_only(lambda: law.to_event(1))


def skewed():
    """log density 2 x - exp(x): the log of a Gamma(2, 1)."""
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.factor("density", 2 * x - torch.exp(x))


def variance_of(table, site):
    """(By what the variance is multiplied, its standard error)."""
    sd, error = table.sd_inflation[site], table.sd_inflation_mcse[site]
    return sd**2, 2 * sd * error


# ------------------------------------------------------------------ the noise


@pytest.mark.parametrize("span", [(0, 6), (3, 8), (5, 6), (2000, 2100)])
def test_the_noise_is_split_in_two(span):
    shape = (2, 5)
    noise, half = (
        kind(7, range(3), shape, torch.float64, torch.device("cpu"))
        for kind in (NoiseStream, RefinedNoise)
    )
    found = half.span(*span)
    first, last = span[0] // 2, -(-span[1] // 2)
    whole = half.span(2 * first, 2 * last)
    assert torch.equal(found, whole[:, span[0] - 2 * first : span[1] - 2 * first])
    both = whole.unflatten(1, (-1, 2)).sum(2) / math.sqrt(2)
    torch.testing.assert_close(both, noise.span(first, last))
    out = torch.empty_like(found)
    assert half.span(*span, out=out) is out
    assert torch.equal(out, found)


def test_the_halves_are_independent_standard_normals():
    half = RefinedNoise(0, range(4), (1, 5), torch.float64, torch.device("cpu"))
    found = half.span(0, 20_000).unflatten(1, (-1, 2)).transpose(2, -1).reshape(-1, 2)
    count = len(found)
    covariance = found.T @ found / count
    assert (covariance - torch.eye(2)).abs().max() < 4.4 * (2 / count) ** 0.5
    assert found.mean(0).abs().max() < 4.4 / count**0.5
    fourth = found.pow(4).mean(0)
    assert (fourth - 3).abs().max() < 4.4 * (96 / count) ** 0.5
    other = RefinedNoise(0, range(4), (1, 5), torch.float64, torch.device("cpu")).span(0, 10)
    later = found.unflatten(0, (4, -1))[:, 1:] * found.unflatten(0, (4, -1))[:, :-1]
    assert later.mean().abs() < 4.4 / later.numel() ** 0.5
    assert torch.equal(other, half.span(0, 10))


@pytest.mark.long
def test_the_coupling_lowers_the_error():
    """Of means and variances, several times beside that of two runs on their own."""
    sampler = run(ps.BAOA(skewed, lr=0.3), warmup_steps=100, num_samples=200)
    table, _ = told(sampler.step_size_bias)
    how = {"warmup_steps": 200, "thinning": 6, "num_samples": 200, "seed": 1}
    other = run(ps.BAOA(skewed, lr=0.15), **how)
    x, y = (each.get_samples(group_by_chain=True)["x"] for each in (sampler, other))
    own = (x.mean(1) - y.mean(1)).std() / len(x) ** 0.5 / x.std() * 4 / 3
    squares = (x - x.mean()).square().mean(1) - (y - y.mean()).square().mean(1)
    spread = squares.std() / len(x) ** 0.5 / x.var() * 4 / 3 / 2
    assert table.mean_bias_mcse["x"] < own / 3
    assert table.sd_inflation_mcse["x"] < spread / 3


# ------------------------------------------------------------------ known answers


def sghmc(e, friction=1.0):
    return (4 - 2 * e * friction) / (4 - 2 * e * friction - e * e)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr", "expected"),
    long_but(
        [
            (ps.SGLD, 0.5, 1 / (1 - 0.25)),
            (ps.SGLD, 1.0, 1 / (1 - 0.5)),
            (ps.SGHMC, 0.5, sghmc(0.5)),
            (ps.SGHMC, 1.0, sghmc(1.0)),
            (ps.BAOA, 0.8, 1.0),
        ],
        *[(ps.SGLD, 0.5, 1 / (1 - 0.25)), (ps.BAOA, 0.8, 1.0)],
    ),
)
def test_of_a_step_on_gaussians(method, lr, expected):
    """Of the steepest of three elements; a flat one has the least."""
    sampler = run(method(normals_of(double(0.05, 1.0, 0.2)), lr=lr), num_samples=1000)
    table, said = told(sampler.step_size_bias)
    found, error = variance_of(table, "x")
    assert abs(found - expected) < 4.4 * error + 0.1 * (expected - 1)
    assert error < 0.04
    assert abs(found - expected) < max(0.2 * (expected - 1), 0.03)
    assert bool(said) == (expected > 1.05**2)
    assert abs(table.mean_bias["x"]) < 4.4 * table.mean_bias_mcse["x"] + 1e-12
    if said:
        assert "site 'x'" in said[0]
        assert f"lower lr from {lr:.2g} to about" in said[0]
        assert "batch_size" not in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.05, 0.02])
def test_of_minibatches(lr):
    """The variance is 1 + lr N V / (2 friction B) of the posterior's."""
    sampler = run(
        ps.BAOA(location, lr=lr),
        (Y,),
        batch_size=B,
        sampling="replacement",
        warmup_steps=round(20 / lr),
        thinning=round(1 / lr),
        num_samples=200,
    )
    table, said = told(sampler.step_size_bias)
    found, error = variance_of(table, "mu")
    expected = 1 + lr * N / (2 * B)
    assert found - 1 == pytest.approx(expected - 1, rel=0.2)
    assert abs(found - expected) < 4.4 * error + 0.05 * (expected - 1)
    assert len(said) == 1
    assert "raise batch_size" in said[0]
    assert table.attrs["order"] == {"mu": pytest.approx(1, abs=0.01)}


def shuffled_variance(lr, count, size):
    """That of SGLD's draws over the posterior's, at all places of an epoch on average: batches of
    an epoch sum to nothing, so that the noise of any two is correlated by -1/(count - 1)."""
    noise = torch.full((count, count), -1.0 / (count - 1), dtype=torch.float64).fill_diagonal_(1.0)
    noise *= lr**2 * N / size * (N - size) / (N - 1)

    def of_steps(steps):
        weights = (1 - lr) ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)
        return weights @ noise[:steps, :steps] @ weights + 2 * lr * weights.square().sum()

    at_end = of_steps(count) / (1 - (1 - lr) ** (2 * count))
    places = range(1, count + 1)
    return float(sum((1 - lr) ** (2 * j) * at_end + of_steps(j) for j in places) / count)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "thinning"), long_but([(500, 1), (250, 3), (200, 4)], (250, 3)))
def test_of_few_shuffled_batches(size, thinning):
    sampler = run(
        ps.SGLD(location, lr=0.1),
        (Y,),
        batch_size=size,
        warmup_steps=100,
        thinning=thinning,
        num_samples=1500,
        num_chains=32,
    )
    table, _ = told(sampler.step_size_bias)
    found, error = variance_of(table, "mu")
    assert error < 0.008
    assert abs(found - shuffled_variance(0.1, N // size, size)) < 4.4 * error


@pytest.mark.slow
def test_units_of_the_mass_change_nothing():
    """Mass m at step e and friction f is mass 1 at e / sqrt(m) and f sqrt(m): the same draws."""
    how = {"batch_size": B, "sampling": "replacement", "num_chains": 8, "num_samples": 100}
    light = run(ps.SGHMC(location, lr=0.4, friction=1.0), (Y,), **how)
    heavy = run(ps.SGHMC(location, lr=0.8, friction=0.5, mass=4.0), (Y,), **how)
    assert torch.allclose(light.get_samples()["mu"], heavy.get_samples()["mu"], atol=1e-9)
    one, other = (quiet(each.step_size_bias) for each in (light, heavy))
    assert one.to_numpy() == pytest.approx(other.to_numpy(), rel=1e-6)
    assert one.attrs["order"] == pytest.approx(other.attrs["order"], rel=1e-6)


def quadrature(log_density, low=-15.0, high=8.0):
    """(Mean, standard deviation)."""
    grid = torch.linspace(low, high, 100_001, dtype=torch.float64)
    weight = torch.softmax(log_density(grid), 0)
    mean = (weight * grid).sum()
    return float(mean), float((weight * (grid - mean).square()).sum().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "lr"), [(ps.SGLD, 0.1), (ps.SGHMC, 0.4)])
def test_of_a_skewed_target_by_quadrature(method, lr):
    mean, sd = quadrature(lambda x: 2 * x - torch.exp(x))
    sampler = run(method(skewed, lr=lr), num_samples=1500, thinning=10, num_chains=100)
    table, _ = told(sampler.step_size_bias)
    draws = sampler.get_samples()["x"]
    bias = float(draws.mean() - mean) / sd
    assert bias < -0.02
    assert table.mean_bias["x"] == pytest.approx(bias, rel=0.25)
    assert table.sd_inflation["x"] - 1 == pytest.approx(float(draws.std()) / sd - 1, rel=0.25)
    assert table.mean_bias_mcse["x"] < 0.01


@pytest.mark.slow
def test_by_site_and_element():
    """The steepest element of a site whose step is its own; sites in the model's order."""

    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("a", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("c", dist.Normal(torch.zeros(2), double(1.0, 2.0)).to_event(1))

    lr = {"a": 0.02, "b": 0.6, "c": double(0.1, 0.8)}
    table, said = told(run(ps.SGLD(model, lr=lr), num_samples=1000).step_size_bias)
    assert list(table.index) == ["a", "b", "c"]
    expected = {"a": 1 / 0.99, "b": 1 / 0.7, "c": 1 / 0.9}
    for site, each in expected.items():
        found, error = variance_of(table, site)
        assert abs(found - each) < 4.4 * error + 0.1 * (each - 1), site
    assert len(said) == 1
    assert "site 'b'" in said[0]
    assert "lower lr to 0.2" in said[0]


@pytest.mark.long
def test_of_a_schedule():
    """Draws that count by their step: the bias is that of each step on average."""
    lr = ps.schedules.cosine_decay(0.8, 4200, end=0.2)
    sampler = run(ps.SGLD(normals_of(double(1.0)), lr=lr), warmup_steps=200, thinning=4)
    result = sampler.posterior.draws
    table, _ = told(sampler.step_size_bias)
    step = result.sample_stats["lr"][0]
    expected = float((step / (1 - step / 2)).sum() / step.sum())
    found, error = variance_of(table, "x")
    assert error < 0.02
    assert abs(found - expected) < 4.4 * error + 0.1 * (expected - 1)
    assert expected - 1 > 10 * error


@pytest.mark.long
def test_what_control_variates_leave_is_nothing():
    sampler = ps.BAOA(location, lr=0.3, control_variates=True)
    how = {"batch_size": B, "num_samples": 100, "num_chains": 10}
    table, said = told(run(sampler, (Y,), **how).step_size_bias)
    assert not said
    assert abs(table.sd_inflation["mu"] - 1) < 4.4 * table.sd_inflation_mcse["mu"]
    assert table.sd_inflation_mcse["mu"] < 0.02


@pytest.mark.slow
def test_what_is_left_of_noise_taken_off():
    """More noise than is injected: the variance is lr N V / (2 friction B) of the posterior's."""
    sampler = ps.SGLD(location, lr=0.02, subtract_noise=True)
    run(sampler, (Y,), batch_size=B, warmup_steps=300, thinning=30)
    table, said = told(sampler.step_size_bias)
    assert not said  # 1/2 is taken off
    assert abs(table.sd_inflation["mu"] - 1) < 0.02


@pytest.mark.long
def test_a_chosen_step_is_taken_again():
    sampler = run(ps.BAOA(location, lr="auto", precondition=None), (Y,), batch_size=B)
    table, _ = told(sampler.step_size_bias)
    assert table.sd_inflation["mu"] < 1.1


# ------------------------------------------------------------------ how sure it is


def of_many_runs(method, count, monkeypatch, num_chains=4, **how):
    """What is told of `count` runs of a few chains: those of a large run, which are independent."""
    sampler = run(method, num_chains=count * num_chains, **how)
    pair = run_coupled(
        sampler._last.plan, sampler.posterior.draws, sampler.posterior.draws.positions.shape[1]
    )
    for first in range(0, count * num_chains, num_chains):
        chains = slice(first, first + num_chains)
        few = [dataclasses.replace(each, positions=each.positions[chains]) for each in pair]
        monkeypatch.setattr(step_size_bias, "run_coupled", lambda *_, few=few: few)
        yield told(sampler.step_size_bias)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr", "how"),
    [
        (ps.SGLD, 0.01, {"thinning": 20}),
        pytest.param(ps.BAOA, 0.3, {}, marks=pytest.mark.long),
        (ps.BAOA, 0.3, {"num_chains": 2, "num_samples": 60}),
    ],
)
def test_no_alarm_where_there_is_nothing(method, lr, how, monkeypatch):
    """The chance that something is said is far below that of 3 standard errors."""
    model = normals_of(torch.linspace(0.5, 1.0, 10, dtype=torch.float64))
    how = {"num_samples": 50, "warmup_steps": 20, **how}
    told_of = of_many_runs(method(model, lr=lr), 40, monkeypatch, **how)
    assert sum(bool(said) for _, said in told_of) <= 1


@pytest.mark.slow
def test_errors_are_as_large_as_estimates_scatter(monkeypatch):
    method = ps.SGLD(normals_of(double(1.0)), lr=0.3)
    found = [table.loc["x"] for table, _ in of_many_runs(method, 64, monkeypatch)]
    for name, truth in [("mean_bias", 0.0), ("sd_inflation", (1 / 0.85) ** 0.5)]:
        values, errors = (torch.tensor([row[n] for row in found]) for n in (name, name + "_mcse"))
        z = (values.mean() - truth) / (values.std() / 8)
        assert abs(float(z)) < 4.4
        assert float(errors.mean() / values.std()) == pytest.approx(1.0, rel=0.35)


@pytest.mark.slow
def test_few_draws_say_nothing():
    sampler = run(ps.SGLD(normals_of(double(1.0)), lr=1.5), num_samples=10, num_chains=4)
    table, said = told(sampler.step_size_bias)
    assert table.sd_inflation_mcse.isna().all()
    assert table.mean_bias_mcse.isna().all()
    assert not said


# ------------------------------------------------------------------ how it is run


@pytest.mark.slow
@pytest.mark.long
def test_compiled_equals_eager():
    samplers = (ps.SGHMC(location, lr=0.3, compile=compile) for compile in (True, False))
    fits = [run(sampler, (Y,), batch_size=B, num_chains=3) for sampler in samplers]
    tables = [told(fit.step_size_bias)[0] for fit in fits]
    torch.testing.assert_close(*(torch.tensor(each.to_numpy()) for each in tables))


@pytest.mark.slow
def test_the_same_run_has_the_same_shadow():
    """It is a function of the run, which stays as it is."""
    sampler = run(ps.SGLD(normals_of(double(1.0)), lr=0.4), num_samples=100, num_chains=4)
    before = sampler.get_samples()["x"]
    table, _ = told(sampler.step_size_bias, num_samples=60)
    again, _ = told(sampler.step_size_bias, num_samples=60)
    assert table.equals(again)
    assert torch.equal(before, sampler.get_samples()["x"])
    whole, _ = told(sampler.step_size_bias)
    assert not whole.equals(table)
    assert whole.attrs["seconds"] > 0
    assert whole.attrs["order"] == {"x": 1}
    run(sampler, num_samples=60, num_chains=4)
    assert told(sampler.step_size_bias)[0].equals(table)


@pytest.mark.slow
def test_the_shadow_by_hand():
    """Its draws, step by step from the run's noise and starts."""
    sampler = run(ps.SGLD(skewed, lr=0.2), num_samples=50, warmup_steps=3, num_chains=2)
    noise = RefinedNoise(0, range(2), (1, 1), torch.float64, torch.device("cpu"))
    noise = noise.span(0, 306)[..., 0, 0]
    x = sampler._last.plan.problem.positions[:, 0]
    kept = []
    for step in range(306):
        x = x + 0.1 * (2 - torch.exp(x)) + 0.2**0.5 * noise[:, step]
        if step >= 6 and (step - 5) % 6 == 0:
            kept.append(x)
    half = torch.stack(kept, 1)
    own = sampler.get_samples(group_by_chain=True)["x"]
    table, _ = told(sampler.step_size_bias)
    center = (own.mean() + half.mean()) / 2
    ratio = (own - center).square().mean() / (half - center).square().mean()
    inflation = (1 + 2 * (ratio - 1)).sqrt()
    assert table.sd_inflation["x"] == pytest.approx(float(inflation), rel=1e-9)
    sd = (own - center).square().mean().sqrt() / inflation
    expected = 2 * (own - half).mean() / sd
    assert table.mean_bias["x"] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.long
def test_a_run_that_went_on_has_its_own(tmp_path):
    def sampler():
        return ps.SGHMC(location, lr=0.4)

    how = {"batch_size": B, "num_chains": 2, "num_samples": 60}
    whole = run(sampler(), (Y,), **how)
    run(sampler(), (Y,), **{**how, "num_samples": 25}, checkpoint=tmp_path)
    again = run(sampler(), (Y,), **how, resume=tmp_path)
    assert told(whole.step_size_bias)[0].equals(told(again.step_size_bias)[0])


@pytest.mark.slow
def test_shared_batches_stay_shared():
    how = {"batch_size": 1, "num_chains": 3, "share_batches": True, "num_samples": 100}
    sampler = run(ps.BAOA(location, lr=0.02), (Y,), **how)
    assert not told(sampler.step_size_bias)[0].isna().any().any()


@pytest.mark.long
def test_elements_that_do_not_move_have_no_bias():
    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("l", dist.LKJCholesky(2, 1.0))
        pyro.sample("p", dist.Dirichlet(torch.ones(3)))

    table, _ = told(run(ps.BAOA(model, lr=0.2), num_chains=4, num_samples=200).step_size_bias)
    assert not table.isna().any().any()
    assert (table.sd_inflation - 1).abs().max() < 0.1


# ------------------------------------------------------------------ what has none


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "thinning", "places", "other"),
    long_but(
        [(250, 4, 1, 5), (250, 2, 2, 3), (50, 10, 2, 11), (100, 15, 2, 17)],
        *[(250, 4, 1, 5), (100, 15, 2, 17)],
    ),
)
def test_of_few_places_of_an_epoch(size, thinning, places, other):
    """Shuffled batches heat there by what half the step says nothing of."""
    sampler = ps.SGLD(location, lr=0.1)
    run(sampler, (Y,), batch_size=size, thinning=thinning, num_samples=50)
    of_all = rf"thinning={thinning} .* {places} of the {N // size} places .*thinning={other}$"
    with pytest.raises(ArgumentError, match=of_all):
        sampler.step_size_bias()


@pytest.mark.slow
def test_what_is_refused(tmp_path):
    sampler = ps.BAOA(normals_of(double(1.0)), lr=0.3)
    with pytest.raises(NotRunError, match="call run"):
        sampler.step_size_bias()
    run(sampler, num_samples=10, num_chains=1)
    with pytest.raises(ArgumentError, match="num_samples=11: the run has 10 draws"):
        sampler.step_size_bias(num_samples=11)
    with pytest.raises(ArgumentError, match="num_samples=0"):
        sampler.step_size_bias(num_samples=0)
    sampler.save(tmp_path / "run.ps")
    loaded = ps.BAOA.load(tmp_path / "run.ps", normals_of(double(1.0)))
    with pytest.raises(NotRunError, match="loaded from a file"):
        loaded.step_size_bias()
    sampler.step()
    with pytest.raises(ArgumentError, match=r"step\(\) keeps no data"):
        sampler.step_size_bias()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hyperparameters", "why"),
    [
        ({"lr": ps.schedules.Cyclical(0.3, 20)}, "Cyclical"),
        ({"lr": 0.3, "temperature": 0.0}, "temperature 0"),
    ],
)
def test_what_has_no_bias_of_this_kind(hyperparameters, why):
    sampler = run(ps.BAOA(normals_of(double(1.0)), **hyperparameters), num_samples=10)
    with pytest.raises(ArgumentError, match=why):
        sampler.step_size_bias()


# ------------------------------------------------------------------ the report afterwards


def of_step_size(sampler):
    return {
        finding.site: finding.verdict
        for finding in sampler.report().findings
        if finding.check == "step size"
    }


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "verdict"), [(0.3, "yes"), (1.9, "no")])
def test_a_report_judges_by_the_measured_bias(lr, verdict):
    """The variance of UBU on a normal is off by the square of lr."""
    sampler = run(ps.UBU(prior_only(lambda: dist.Normal(0.0, 1.0)), lr=lr), None)
    assert of_step_size(sampler) == {"": "unknown"}
    before = sampler.report().verdict
    draws = sampler.get_samples()
    sampler.step_size_bias()
    assert of_step_size(sampler) == {"x": verdict}
    assert before != "yes"
    assert sampler.report().verdict == verdict
    assert sampler.get_samples().keys() == draws.keys()
