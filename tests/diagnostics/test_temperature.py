"""The temperature of draws, against closed forms and the variance that it stands for."""

import dataclasses
import functools

import choices
import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import linear_regression, prior_only
from models import normal, of_rows
from reference import normals
from repetitions import each_once, long_but
from runs import QUIET
from torch.utils.data import DataLoader, TensorDataset
from warned import quiet, quiet_runs, told

import pyro_scale as ps
from pyro_scale.core.mixing import autocorrelation_time
from pyro_scale.data.batches import Batch
from pyro_scale.diagnostics.temperature import GradientWork, virial
from pyro_scale.diagnostics.verdict import report as verdict_on
from pyro_scale.engine.step import Engine
from pyro_scale.errors import NonFiniteError

pytestmark = pytest.mark.usefixtures("float64")

N, B = 1000, 32
Y = normals(N)
LONG = {"num_samples": 2000, "warmup_steps": 2000, "thinning": 10, "num_chains": 4}
run = quiet_runs((Y,), **LONG, **QUIET)


#: The posterior's precision is N + 1/100.
mean_of_normal = of_rows(lambda mu: dist.Normal(mu, 1.0), mu=lambda: dist.Normal(0.0, 10.0))


mean_and_scale = of_rows(
    lambda a, b: dist.Normal(a.sum(), b), a=normal(3), b=lambda: dist.LogNormal(0.0, 1.0)
)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_on_a_gaussian_it_is_the_variance_over_the_posteriors(temperature):
    """Of any draws: of 240 after a short warm-up, too."""
    sampler = ps.SGLD(mean_of_normal, lr=0.5, temperature=temperature)
    fit = run(sampler, num_samples=80, warmup_steps=50, thinning=1, num_chains=3)
    spread = fit.get_samples()["mu"].var(correction=0) * (N + 0.01)
    table, _ = told(fit.diagnostics)
    assert table.temperature["mu"] == pytest.approx(float(spread) / temperature, rel=1e-9)


@pytest.mark.slow
def test_by_hand_on_another_model():
    fit = run(
        ps.BAOA(mean_and_scale, lr=0.1), num_samples=50, warmup_steps=100, thinning=1, num_chains=2
    )
    w = fit.posterior.draws.positions.flatten(0, 1).clone().requires_grad_()
    a, log_b = w[:, :3], w[:, 3:]
    prior = dist.Normal(0.0, 1.0)
    likelihood = dist.Normal(a.sum(1, keepdim=True), log_b.exp()).log_prob(Y)
    log_joint = prior.log_prob(a).sum() + prior.log_prob(log_b).sum() + likelihood.sum()
    (gradient,) = torch.autograd.grad(log_joint, w)
    parts = -((w - w.mean(0)) * gradient).detach()
    expected = torch.stack([parts[:, :3].mean(1), parts[:, 3]], 1).unflatten(0, (2, 50))
    whole, steepest = fit.posterior.draws.measurements.virial.parts.unbind(-1)
    assert torch.allclose(whole, expected, rtol=1e-9, atol=1e-9)
    own = steepest.flatten(0, 1)
    assert any(torch.allclose(own[:, 0], parts[:, i], rtol=1e-9, atol=1e-9) for i in range(3))
    assert torch.allclose(own[:, 1], parts[:, 3], rtol=1e-9, atol=1e-9)


ROOT = torch.tensor([[1.0, 0.0, 0.0], [0.999, 0.02, 0.0], [-3.0, 0.1, 0.2]]).double()
correlated = prior_only(lambda: dist.MultivariateNormal(torch.zeros(3), scale_tril=ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("precondition", ["dense", "diag"])
def test_elements_of_whitened_chains_are_measured_along_their_covariance(precondition):
    """By the explicit matrix.  Of a Gaussian that is known, the error is that of a sample variance,
    which -(w - c) g has not where elements are correlated."""
    sampler = ps.BAOA(correlated, precondition=precondition)
    fit = quiet(sampler.run, None, num_samples=60, **QUIET)
    whitening, draws = (
        fit._last.plan.problem.engine.whitening,
        fit.posterior.draws.positions.flatten(0, 1),
    )
    root = torch.stack([whitening.push_forward(each) for each in torch.eye(3).double()], 1)
    covariance, away = root @ root.T, draws - draws.mean(0)
    gradient = -away @ torch.linalg.inv(ROOT @ ROOT.T) - draws.mean(0) @ torch.linalg.inv(
        ROOT @ ROOT.T
    )
    parts = -away * (gradient @ covariance) / covariance.diagonal()
    means, errors = fit.posterior.draws.measurements.virial.elements
    assert torch.allclose(means, parts.mean(0), rtol=1e-8)
    of_draws = (parts.var(0, correction=0).clamp(min=2) / 240).sqrt()
    assert torch.allclose(errors, of_draws, rtol=1e-6)
    if precondition == "dense":
        assert float(errors.max()) < 1.2 * (2 / 240) ** 0.5
    else:
        assert float(errors.max()) > 10 * (2 / 240) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr", "how", "hot"),
    [
        pytest.param(ps.SGLD, 0.02, {}, False, marks=pytest.mark.long),
        (ps.SGLD, 0.5, {}, True),  # the variance is 1 / (1 - 0.5 / 2) of the posterior's
        (ps.BAOA, 0.5, {}, False),  # exact
        (ps.BAOA, 0.05, {"batch_size": B, "sampling": "replacement"}, True),
        pytest.param(
            *(ps.BAOA, 0.004, {"batch_size": B, "sampling": "replacement", "thinning": 50}, False),
            marks=pytest.mark.long,
        ),
    ],
)
def test_too_large_a_step_is_said_and_a_right_one_is_not(method, lr, how, hot):
    fit = run(method(mean_of_normal, lr=lr), **how)
    table, said = told(fit.diagnostics)
    assert table.temperature_mcse["mu"] < 0.15
    assert any("site 'mu' is hotter" in each for each in said) == hot
    assert not any("colder" in each for each in said)
    if hot:
        assert len(said) == 1
        assert f"lower lr from {lr:.2g} to about" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "lr"), each_once(["replacement", "shuffle"], [0.05, 0.2]))
def test_what_minibatches_heat_is_measured(lr, sampling):
    """Within a fifth, of shuffled ones too, which theory overestimates."""
    fit = run(ps.BAOA(mean_of_normal, lr=lr), batch_size=B, sampling=sampling, num_chains=16)
    truth = float(fit.get_samples()["mu"].var()) * (N + 0.01)
    assert truth > 1.1
    assert told(fit.diagnostics)[0].temperature["mu"] == pytest.approx(truth, rel=0.2)


STEEP = torch.full((30,), 0.1).double()
STEEP[4] = 1.0
COLUMNS = normals(N, 30, seed=3) * STEEP
OUTCOMES = COLUMNS @ normals(30, seed=4) + normals(N, seed=5)
regression = linear_regression()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "how"),
    [
        (ps.BAOA(regression, lr=0.1), {"batch_size": B, "sampling": "replacement"}),
        (ps.BAOA(regression, lr=0.1, friction=0.5), {"batch_size": B}),
        pytest.param(ps.SGLD(regression, lr=0.8), {}, marks=pytest.mark.long),
    ],
    ids=["minibatches", "shuffled", "a long step"],
)
def test_one_element_that_is_too_wide_among_many_is_seen(method, how):
    """The mean over all of them is right to a tenth."""
    fit = run(method, (COLUMNS, OUTCOMES), thinning=20, **how)
    precision = COLUMNS.T @ COLUMNS + torch.eye(30).double()
    truth = fit.get_samples()["w"].var(0) / precision.inverse().diagonal()
    assert truth[4] > 1.4
    table, said = told(fit.diagnostics)
    assert table.temperature["w"] < 1.15
    assert table.max_gradient_temperature["w"] == pytest.approx(float(truth[4]), rel=0.15)
    (one,) = (each for each in said if "hotter" in each)
    assert "site 'w' is hotter than it should be: its element of the largest gradient has" in one
    exact = ps.Laplace(regression).run((COLUMNS, OUTCOMES), **QUIET)
    assert ps.compare({"hot": fit, "exact": exact}).reference == "exact"


@pytest.mark.long
def test_the_steepest_of_many_alike_is_no_false_alarm():
    """Of 200 runs, whose threshold chance goes beyond in 3 of 1,000, none or one or two."""
    alarms = 0
    for seed in range(200):
        fit = run(ps.BAOA(mean_and_scale, lr=0.1), num_samples=200, num_chains=4, seed=seed)
        alarms += any("hotter" in each for each in told(fit.diagnostics)[1])
    assert alarms <= 3


@pytest.mark.slow
@pytest.mark.long
def test_batches_of_a_loader_are_those_after_the_run():
    loader = DataLoader(TensorDataset(Y), batch_size=B)
    fit = run(ps.BAOA(mean_of_normal, lr=0.2, num_data=N), list(loader), num_samples=300)
    truth = float(fit.get_samples()["mu"].var()) * (N + 0.01)
    table, _ = told(fit.diagnostics)
    gap = abs(table.temperature["mu"] - truth)
    assert gap < 4 * table.temperature_mcse["mu"] + 0.1 * truth


@pytest.mark.slow
def test_too_cold_is_said():
    fit = run(ps.SGNHT(mean_of_normal, lr=0.2), batch_size=B, sampling="shuffle")
    _, said = told(fit.diagnostics)
    assert any("site 'mu' is colder than it should be" in each for each in said)


@pytest.mark.slow
def test_another_temperature_than_asked_for_is_said():
    fit = run(ps.BAOA(mean_of_normal, lr=0.3, temperature=1.5))
    assert not told(fit.diagnostics)[1]
    fit.posterior.draws.sample_stats["temperature"] = torch.ones(4, 2000)
    assert any("hotter" in each for each in told(fit.diagnostics)[1])


@pytest.mark.slow
@pytest.mark.long
def test_optimizers_have_none():
    fit = run(ps.BAOA(mean_of_normal, lr=0.1, temperature=0.0), num_samples=5)
    assert "temperature" not in told(fit.diagnostics)[0]


@pytest.mark.slow
@pytest.mark.long
def test_few_draws_say_nothing():
    fit = run(ps.SGLD(mean_of_normal, lr=1.0), num_samples=5)
    table, said = told(fit.diagnostics)
    assert table.temperature_mcse.isna().all()
    assert not any("hotter" in each or "colder" in each for each in said)


def test_chains_that_stopped_do_not_count():
    def cliff(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.factor("cliff", mu * torch.where(mu > 1.5, torch.nan, 0.0))

    sampler = ps.SGLD(cliff, lr=100.0, init_strategy={"mu": torch.zeros(8)})
    with pytest.raises(NonFiniteError):
        run(sampler, num_samples=30, warmup_steps=5, thinning=1, num_chains=8)
    left = sampler.get_samples(group_by_chain=True)["mu"]
    assert 0 < len(left) < 8
    spread = left.flatten().var(correction=0)
    assert told(sampler.diagnostics)[0].temperature["mu"] == pytest.approx(float(spread), rel=1e-9)


@pytest.mark.slow
def test_it_comes_back_from_a_file(tmp_path):
    fit = run(ps.SGLD(mean_of_normal, lr=0.5), num_samples=100, warmup_steps=50, thinning=1)
    fit.save(tmp_path / "run.ps")
    again = ps.SGLD.load(tmp_path / "run.ps", mean_of_normal)
    assert torch.equal(
        again.posterior.draws.measurements.virial.parts,
        fit.posterior.draws.measurements.virial.parts,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "verdict"), long_but([(0.13, "yes"), (0.15, "unknown")], (0.15, "unknown"))
)
def test_a_bar_that_is_much_wider_than_a_normals_tells_nothing(error, verdict):
    """Of 400 independent draws, a normal's is 0.07: twice that is inconclusive."""
    draws = 1000
    with choices.recorded() as made:
        fit = quiet(ps.BAOA(mean_of_normal, compile=False).run, (Y,), num_samples=draws, **QUIET)
    assert fit.report().of_site("mu") == "yes"
    temperatures = torch.tensor([[1.0], [error]]).double()
    measurements = fit.posterior.draws.measurements
    virial = dataclasses.replace(measurements.virial, elements=temperatures)
    measurements = dataclasses.replace(measurements, virial=virial)
    result = dataclasses.replace(fit.posterior.draws, measurements=measurements)
    assert verdict_on(result, made[-1], draws).of_site("mu") == verdict


def recorded(monkeypatch):
    """The positions and rows of every gradient that a temperature is made of, and how often the log
    posterior is differentiated for them."""
    gradients, calls = [], []
    gradient, grad = Engine.gradient, ps.LogPosterior.grad

    def count(engine, positions, batch):
        rows = batch.tensors[0].shape[-2]
        calls.clear()
        found = gradient(engine, positions, batch)
        gradients.append((len(positions), rows, len(calls)))
        return found

    def call(*args, **kwargs):
        calls.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(Engine, "gradient", count)
    monkeypatch.setattr(ps.LogPosterior, "grad", call)
    return gradients


def virial_of(fit, **work):
    problem, draws = fit._last.plan.problem, fit.posterior.draws
    batches = problem.batches(len(draws.positions), "shuffle")
    return virial(problem, draws.positions, [*range(4)], batches, 10_000, work=GradientWork(**work))


@functools.cache
def with_anchor():
    anchor = {"w": torch.zeros(30).double()}
    sampler = ps.BAOA(regression, lr=0.1, control_variates=anchor, compile=False)
    return run(sampler, (COLUMNS, OUTCOMES), batch_size=B, **SHORT)


SHORT = {"num_samples": 200, "warmup_steps": 100, "thinning": 1}


def test_on_all_rows_control_variates_are_left_out(monkeypatch):
    """They cancel there: temperatures are those of the plain gradient, which is taken once."""
    fit = with_anchor()
    problem = fit._last.plan.problem
    assert problem.engine.density is not problem.log_posterior
    rows = recorded(monkeypatch)
    found = virial_of(fit)
    assert found.is_exact
    assert sum(draws for draws, _, _ in rows) == 800 + 4  # one of each chain, to see its memory
    assert {(size, calls) for _, size, calls in rows} == {(N, 1)}
    draws = fit.posterior.draws.positions.flatten(0, 1)
    gradient = (OUTCOMES - draws @ COLUMNS.T) @ COLUMNS - draws
    parts = -(draws - draws.mean(0)) * gradient
    assert torch.allclose(found.of_elements, parts.mean(0), rtol=1e-9)
    assert torch.allclose(found.parts.flatten(0, 1)[:, 0, 0], parts.mean(1), rtol=1e-8, atol=1e-8)
    batch = Batch(problem.data.arguments, per_chain=False)
    theirs = problem.engine.gradient(draws[:8], batch) * N  # with the control variates
    assert torch.allclose(theirs, gradient[:8], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("work", "draws", "size"),
    [(256 * N * 62, 256, N), (400 * N * 62, 400, N), (100 * N * 62, 800, B)],
    ids=["least", "affordable", "batches"],
)
def test_its_gradients_are_bounded(monkeypatch, work, draws, size):
    """By draws x rows x (D + 32); all rows only if they can be read 256 times."""
    fit = with_anchor()
    rows = recorded(monkeypatch)
    found = virial_of(fit, most=work)
    assert sum(n for n, _, _ in rows) == draws + 4  # one of each chain, to see its memory
    assert {each for _, each, _ in rows} == {size}
    assert found.is_exact == (size == N)
    assert found.parts.shape[:2] == (4, 200)  # those without gradients are predicted


@pytest.mark.parametrize(("lr", "affordable"), [(0.3, 256), (0.9, 70)])
def test_a_part_of_the_draws_tells_the_variance_of_all(lr, affordable):
    """On a Gaussian, an element's part is its squared distance: 256 gradients have the error of
    4,000 draws, without which it would be four times as large.  Fewer are
    not taken, however little work is allowed."""
    fit = run(ps.SGLD(mean_of_normal, lr=lr), num_samples=1000)
    found = virial_of(fit, most=affordable * N * 33)
    draws = fit.posterior.draws.positions
    spread = float(draws.var(correction=0)) * (N + 0.01)
    assert found.parts.shape[:2] == (4, 1000)
    assert float(found.of_elements) == pytest.approx(spread, rel=0.01)
    assert float(found.parts[..., 0].mean()) == pytest.approx(float(found.of_elements), rel=1e-9)
    own = draws[:, :: 1000 // 64].var(correction=0)
    assert abs(float(own) * (N + 0.01) - spread) > 0.01
    time = float(autocorrelation_time((draws - draws.mean((0, 1))).square()))
    expected = (2 * time / 4000) ** 0.5 * max(1, spread)
    assert float(found.errors) == pytest.approx(expected, rel=0.25)  # 124 batch means: 7%
    assert found.num_draws == pytest.approx(4000 / time, rel=0.25)


@pytest.mark.slow
def test_draws_without_gradients_are_predicted_with_their_error():
    """On a posterior that is no Gaussian, with gradients at a tenth of the draws: the temperature
    is that of all gradients within the error of a difference estimator, and so is its scatter."""
    sampler = ps.BAOA(mean_and_scale, lr=0.3, compile=False)
    how = {**LONG, "num_samples": 1000, "thinning": 2, "warmup_steps": 100}
    fit = quiet(sampler.run, (Y[:8],), **how, **QUIET)
    found = virial_of(fit, most=400 * 8 * (4 + 32))
    everything = virial_of(fit, enough=4000)
    assert found.num_draws < everything.num_draws
    draws, count = fit.posterior.draws.positions.flatten(0, 1), 4000
    distance = (draws - draws.mean(0))[:, 3].square()
    parts = everything.parts[..., 1, 0].flatten()
    covariance = torch.stack([distance, parts]).cov(correction=0)
    explained = covariance[0, 1] ** 2 / covariance[0, 0]
    left = covariance[1, 1] - explained
    assert 0.02 < float(left / covariance[1, 1]) < 0.98  # else nothing is tested
    gap = float(found.of_elements[3] - everything.of_elements[3])
    assert abs(gap) < 4.4 * float(left / 400) ** 0.5
    assert abs(gap) > 1e-6
    predicted = found.parts[..., 1, 0].flatten()
    assert float(predicted.mean()) == pytest.approx(float(found.of_elements[3]), rel=1e-9)
    error = float(explained / count + left / 400)
    assert float(predicted.var()) / count == pytest.approx(error, rel=0.5)
    time = float(autocorrelation_time(distance.unflatten(0, (4, 1000))[..., None]))
    assert float(found.errors[3]) == pytest.approx((error * time) ** 0.5, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(("correlation", "temperature"), [(0.0, 0.01), (0.9, 1.0)])
def test_its_errors_are_those_of_repetitions(correlation, temperature):
    """Of draws that are right, independent or not: the z-scores' variance is that of chi-squared
    over its degrees of freedom, to 4 of its standard errors; batch means may be 10% too large."""
    fit = run(ps.SGLD(mean_of_normal, lr=0.1), num_samples=1, warmup_steps=0)
    problem, repetitions = fit._last.plan.problem, 40
    batches = problem.batches(4, "shuffle")
    center, sd = float(Y.sum()) / (N + 0.01), (temperature / (N + 0.01)) ** 0.5
    noise = normals(repetitions, 4, 600, 1, seed=11).double()
    z = []
    for steps in noise:
        path = [steps[:, 0]]
        for step in steps.unbind(1)[1:]:
            path.append(correlation * path[-1] + (1 - correlation**2) ** 0.5 * step)
        draws = center + sd * torch.stack(path, 1)[:, 100:]
        found = virial(problem, draws, [*range(4)], batches, 10_000, temperature=temperature)
        z.append(float((found.of_elements - temperature) / found.errors))
    variance = sum(score**2 for score in z) / repetitions
    slack = 4 * (2 / repetitions) ** 0.5
    assert 0.7 - slack / 2 < variance < 1 + slack


def test_chains_that_stand_still_apart_are_worth_a_draw():
    """Their squared distances from the mean are all the same, but for rounding."""
    problem = with_anchor()._last.plan.problem
    places = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None]
    draws = places * 0.1 + 1e-9 * normals(4, 300, 30, seed=3).double()
    batches = problem.batches(4, "shuffle")
    found = virial(problem, draws, [*range(4)], batches, 10_000)
    assert found.num_draws >= 1
    assert found.errors.isfinite().all()


def test_a_single_chain_has_no_r_hat_in_its_report():
    how = {"num_chains": 1, "num_samples": 100, "warmup_steps": 50}
    fit = quiet(ps.BAOA(mean_of_normal, lr=0.5).run, (Y,), **how, **QUIET)
    text = str(verdict_on(fit.posterior.draws, None, 1000).to_json())
    assert "nan" not in text.lower()
    assert "effective draws" in text
