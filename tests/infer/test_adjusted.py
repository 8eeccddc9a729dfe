"""ps.GHMC: with nothing set, against closed forms; compiled, resumed; and what it refuses."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from reference import double, normals
from repetitions import long_but
from runs import QUIET
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ArgumentError
from pyro_scale.tuning.adjust import first_lr, next_lr

pytestmark = pytest.mark.usefixtures("float64")

BY_HAND = {"num_samples": 50, "warmup_steps": 20, "thinning": 2, "num_chains": 3, **QUIET}
X = torch.stack([torch.ones(200, dtype=torch.float64), 20 + normals(200, seed=0)], 1)
Y = X @ double(1.0, 2.0) + normals(200, seed=1)


line = of_rows(lambda x, beta: dist.Normal(x @ beta, 1.0), beta=normal(2, sd=10.0))


def exact_line():
    """(Mean, covariance) of beta."""
    precision = X.T @ X + torch.eye(2) / 100
    return torch.linalg.solve(precision, X.T @ Y), precision.inverse()


def check_moments(run, temperature=1.0):
    """Means and sds, within 4.5 standard errors, which chance exceeds once in 10^5."""
    mean, covariance = exact_line()
    sd = (temperature * covariance.diagonal()).sqrt()
    draws, ess = run.get_samples()["beta"], float(run.diagnostics()["ess_bulk"].min())
    z = (draws.mean(0) - mean) / sd * ess**0.5
    log_sd = (draws.std(0) / sd).log() * (2 * ess) ** 0.5
    assert float(z.abs().max()) < 4.5
    assert float(log_sd.abs().max()) < 4.5
    assert ess > 1500


@pytest.mark.slow
@pytest.mark.parametrize("temperature", long_but([1.0, 3.0], 3.0))
def test_it_is_right_with_nothing_set(temperature):
    run = ps.GHMC(line, temperature=temperature).run((X, Y), **QUIET)
    check_moments(run, temperature)
    report = run.report()
    assert report.verdict == "yes", str(report)
    rate = run.diagnostics().attrs["acceptance_rate"]
    assert 0.8 < rate < 0.97
    (finding,) = (each for each in report.findings if each.check == "step size")
    told = f"no step size biases the draws: {rate:.0%} of proposals were accepted"
    assert (finding.verdict, finding.told) == ("yes", told)
    assert "of proposals were accepted (target: about 90%)" in report.choices["step size"]
    assert run.posterior.attrs["friction"] == 0.5


@pytest.mark.slow
def test_a_number_is_never_changed():
    run = ps.GHMC(line, lr=0.9, friction=0.3, precondition="dense").run((X, Y), **QUIET)
    assert (run.posterior.attrs["lr"], run.posterior.attrs["friction"]) == (0.9, 0.3)
    check_moments(run)


@pytest.mark.slow
def test_large_data_are_taken_whole():
    """Where others take minibatches."""
    y = 3 + normals(30_000, seed=0)

    mean = of_rows(lambda mu: dist.Normal(mu, 1.0), mu=normal(sd=10.0))

    run = ps.GHMC(mean).run(y, num_samples=100, **QUIET)
    assert run.diagnostics().attrs["batch_size"] == 30_000
    draws = run.get_samples()["mu"]
    assert abs(float(draws.mean() - y.mean())) < 5 * (30_000 * 100) ** -0.5
    assert float(draws.std()) == pytest.approx(30_000**-0.5, rel=0.25)


@pytest.mark.slow
def test_compiled_is_eager():
    def run(compile):
        sampler = ps.GHMC(line, lr=0.05, mass={"beta": double(1.0, 400.0)}, compile=compile)
        return sampler.run((X, Y), **BY_HAND)

    fast, slow = run(True), run(False)
    assert "compiled" in fast.diagnostics().attrs["program"]
    torch.testing.assert_close(
        fast.get_samples()["beta"], slow.get_samples()["beta"], rtol=1e-9, atol=1e-9
    )
    rates = [each.diagnostics().attrs["acceptance_rate"] for each in (fast, slow)]
    assert rates[0] == rates[1]
    assert 0 < rates[0] < 1  # so that there are rejections among the steps


@pytest.mark.slow
@pytest.mark.parametrize("compile", long_but([True, False], False))
def test_resumed_is_uninterrupted(tmp_path, compile):
    """Bit for bit, with what is compared and counted."""

    def run(num_samples, **where):
        sampler = ps.GHMC(line, lr=0.05, mass={"beta": double(1.0, 400.0)}, compile=compile)
        return sampler.run((X, Y), **{**BY_HAND, "num_samples": num_samples}, **where)

    run(20, checkpoint=tmp_path)
    resumed, whole = run(50, resume=tmp_path), run(50)
    assert torch.equal(resumed.get_samples()["beta"], whole.get_samples()["beta"])
    for name in ("lp", "step"):
        assert torch.equal(
            resumed.posterior.draws.sample_stats[name], whole.posterior.draws.sample_stats[name]
        )
    rates = [each.diagnostics().attrs["acceptance_rate"] for each in (resumed, whole)]
    assert rates[0] == rates[1]


@pytest.mark.slow
def test_lp_is_that_of_the_draw():
    run = ps.GHMC(line, lr=0.05, compile=False).run((X, Y), **BY_HAND)
    density, result = run.posterior.draws.log_posterior, run.posterior.draws
    for place in (0, 17, 49):
        params = result.layout.unflatten(result.positions[1, place])
        expected = density(params, {"x": X, "y": Y}).log_joint
        torch.testing.assert_close(result.sample_stats["lp"][1, place], expected)


def test_a_step_size_for_an_acceptance():
    """On a standard normal of many dimensions, by the law that the rules start from."""
    assert first_lr(1) == pytest.approx(1.0, abs=0.01)
    assert first_lr(64) == pytest.approx(0.5, abs=0.01)
    assert next_lr(0.3, 0.9) == 0.3
    assert 0.3 / 4 <= next_lr(0.3, 0.0) < 0.3 / 3
    assert next_lr(0.3, 1.0) == 0.6
    lrs = [next_lr(0.3, rate / 20) for rate in range(21)]
    assert lrs == sorted(lrs)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("data", "how"),
    [
        ((X, Y), {"batch_size": 20}),
        (DataLoader(TensorDataset(X, Y), batch_size=50), {}),
    ],
    ids=["batch_size", "loader"],
)
@pytest.mark.parametrize("lr", ["auto", 0.1])
def test_minibatches_are_refused(data, how, lr):
    with pytest.raises(ArgumentError, match=r"GHMC accepts.*of 200.*batch_size=None, or use BAOA"):
        ps.GHMC(line, lr=lr).run(data, **how, **QUIET)


@pytest.mark.slow
def test_a_batch_of_all_rows_is_none():
    runs = [
        ps.GHMC(line, lr=0.05, compile=False).run((X, Y), batch_size=size, **BY_HAND)
        for size in (200, None, "auto")
    ]
    draws = [run.get_samples()["beta"] for run in runs]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temperature": 0}, r"temperature=0: pass a number > 0"),
        ({"control_variates": True}, r"control_variates: GHMC takes all rows.*or use BAOA"),
        ({"subtract_noise": True, "lr": 0.1}, r"subtract_noise: GHMC takes all rows"),
        ({"precondition": None}, r"lr='auto': GHMC chooses it in whitened coordinates"),
        ({"mass": 2.0}, r"lr='auto': GHMC chooses it in whitened coordinates.*number for lr"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ArgumentError, match=match):
        ps.GHMC(line, **arguments)


@pytest.mark.slow
def test_what_has_no_meaning_is_refused():
    with pytest.raises(ArgumentError, match=r"step\(\) sees one batch at a time, but GHMC"):
        ps.GHMC(line, lr=0.1, num_data=200).step(X, Y)
    with pytest.raises(ArgumentError, match=r"at temperature 0 is not SGD: use BAOA"):
        ps.GHMC.from_sgd(line, lr=0.1)
    run = ps.GHMC(line, lr=0.05, compile=False).run((X, Y), **BY_HAND)
    with pytest.raises(ArgumentError, match=r"step_size_bias: GHMC accepts or rejects"):
        run.step_size_bias()


def test_params_are_refused(store):
    def with_param(y):
        sd = pyro.param("sd", double(1.0)[0], constraint=dist.constraints.positive)
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mu, sd), obs=y)

    with pytest.raises(ArgumentError, match=r"GHMC has no steps for param 'sd'.*or use BAOA"):
        ps.GHMC(with_param, lr=0.1).run(Y, **QUIET)
