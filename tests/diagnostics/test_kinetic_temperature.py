"""The temperature of momenta, against exact laws in discrete time."""

import dataclasses
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import prior_only
from gaussian import bound, stationary
from linear import location, standardized
from reference import double
from repetitions import each_once, long_but
from runs import QUIET
from warned import quiet_runs, told

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.diagnostics import post_run
from pyro_scale.diagnostics.temperature import GradientWork, virial
from pyro_scale.engine import loop
from pyro_scale.engine.draws import Steps
from pyro_scale.run.measurements import Kinetic, Measurements

pytestmark = pytest.mark.usefixtures("float64", "compiled_early")

N, B = 1000, 20
Y = standardized(N)
MANY = {"num_samples": 256, "warmup_steps": 300, "thinning": 5, "num_chains": 60}
run = quiet_runs(**MANY, **QUIET)
#: The temperature of draws by gradients of further batches.
on_batches = functools.partial(virial, work=GradientWork(enough=10**9))


def normal_of(covariance):
    return prior_only(lambda: dist.MultivariateNormal(torch.zeros(len(covariance)), covariance))


def three_sites():
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("a", dist.Normal(torch.zeros(3), double(0.5, 1.0, 2.0)).to_event(1))
    pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.sample("c", dist.Normal(torch.zeros(2, 2), 0.7).to_event(2))


def z_of(table, site, expected):
    found = table.kinetic_temperature[site]
    return abs(found - expected) / table.kinetic_temperature_mcse[site]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr", "expected"),
    [
        pytest.param(ps.SGHMC, 0.1, 4 / (4 - 0.2 - 0.01), marks=pytest.mark.long),
        pytest.param(ps.SGHMC, 0.5, 4 / (4 - 1.0 - 0.25), marks=pytest.mark.long),
        pytest.param(ps.BAOA, 0.1, 1.0, marks=pytest.mark.long),
        (ps.BAOA, 0.9, 1.0),
        pytest.param(ps.SGNHT, 0.2, 1.0, marks=pytest.mark.long),
        pytest.param(ps.UBU, 0.1, None, marks=pytest.mark.long),
    ],
)
def test_on_a_gaussian(method, lr, expected):
    sampler = run(method(normal_of(torch.eye(1)), lr=lr), num_chains=200)
    if expected is None:
        kernel = bound(sampler.kernel)
        expected = float(stationary(kernel, torch.eye(1).double())[1, 1])
    table, said = told(sampler.diagnostics)
    assert table.kinetic_temperature_mcse["x"] < 0.03
    assert z_of(table, "x", expected) < 4.4
    assert table.kinetic_temperature_expected["x"] == pytest.approx(expected, rel=1e-4)
    assert not said


@pytest.mark.slow
@pytest.mark.parametrize("temperature", long_but([1.0, 0.3], 0.3))
def test_of_several_sites_and_masses(temperature):
    mass = {"a": double(0.5, 1.0, 2.0), "b": 3.0}
    hypers = {"lr": {"a": 0.3, "b": 0.6, "c": 0.2}, "friction": 0.5, "mass": mass}
    sampler = run(ps.SGHMC(three_sites, temperature=temperature, **hypers))
    table, _ = told(sampler.diagnostics)
    e, f = double(0.3, 0.3, 0.3, 0.6, 0.2), 0.5
    precision, m = double(4.0, 1.0, 0.25, 1.0, 1 / 0.49), double(0.5, 1.0, 2.0, 3.0, 1.0)
    exact = 4 / (4 - 2 * e * f - e * e * precision / m)
    for site, expected in {"a": exact[:3].mean(), "b": exact[3], "c": exact[4]}.items():
        assert z_of(table, site, float(expected)) < 4.4
        found = table.kinetic_temperature_expected[site]
        assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.slow
def test_what_is_expected_of_correlated_elements():
    """From the precisions' diagonal, against the whole law."""
    factor = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    covariance = factor @ factor.T / 4 + 0.3 * torch.eye(4)
    sampler = run(ps.SGHMC(normal_of(covariance), lr=0.2))
    law = stationary(bound(kernels.SGHMC(lr=0.2)), covariance.inverse())
    exact = float(law.diagonal()[4:].mean())
    table, _ = told(sampler.diagnostics)
    assert z_of(table, "x", exact) < 4.4
    found = table.kinetic_temperature_expected["x"]
    assert found - 1 == pytest.approx(exact - 1, rel=0.05)
    assert exact > 1.12


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["all", "some"])
def test_of_minibatches(batches, monkeypatch):
    """They multiply it by 1 + lr N V / (2 friction B); what is expected does not know of them,
    whether gradients are of all rows or of further batches, whose noise is taken off."""
    if batches == "some":
        monkeypatch.setattr(post_run, "virial", on_batches)
    lr = 0.02
    sampler = run(ps.SGHMC(location, lr=lr), (Y,), batch_size=B, sampling="replacement")
    table, said = told(sampler.diagnostics)
    step = 4 / (4 - 2 * lr - lr * lr)
    assert z_of(table, "mu", step * (1 + lr * N / (2 * B))) < 4.4
    assert table.kinetic_temperature_expected["mu"] == pytest.approx(step, abs=1e-3)
    assert not [line for line in said if "momenta" in line]


@pytest.mark.slow
def test_heat_that_nobody_else_sees_is_said():
    sampler = run(ps.BAOA(location, lr=0.02), (Y,), batch_size=B, sampling="replacement")
    result = sampler.posterior.draws
    measured = Measurements(kinetic=result.measurements.kinetic)
    posterior = ps.Posterior(dataclasses.replace(result, measurements=measured))
    (said,) = [line for line in told(posterior.diagnostics)[1] if "hotter" in line]
    assert "the momenta of site 'mu' are hotter" in said
    assert "lower lr from 0.02 to about 0.00" in said
    unknown = Kinetic.of(measured.kinetic.measured, double(torch.nan))
    measured = Measurements(kinetic=unknown)
    posterior = ps.Posterior(dataclasses.replace(result, measurements=measured))
    assert not [line for line in told(posterior.diagnostics)[1] if "hotter" in line]


@pytest.mark.slow
def test_where_precisions_are_unknown_so_is_what_is_expected(monkeypatch):
    monkeypatch.setattr(post_run, "virial", on_batches)
    monkeypatch.setattr(post_run, "gradient_noise", lambda *_: None)
    sampler = run(ps.BAOA(location, lr=0.01), (Y,), batch_size=B, num_chains=4)
    table, _ = told(sampler.diagnostics)
    assert table.kinetic_temperature_expected.isna().all()
    assert table.kinetic_temperature.notna().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ps.SGLD(location, lr=0.1),
        ps.pSGLD(location, lr=0.1),
        ps.BAOA(location, lr=0.1, temperature=0.0),
    ],
)
def test_without_momenta_or_noise_there_is_none(method):
    table, _ = told(run(method, (Y,), num_samples=20, num_chains=2).diagnostics)
    assert "kinetic_temperature" not in table


def test_single_steps_have_none():
    sampler = ps.BAOA(location, lr=0.1, num_data=N)
    sampler.step(Y)
    assert sampler.posterior.draws.measurements.kinetic is None


# ------------------------------------------------------------------ moments


@pytest.mark.parametrize("count", [1, 5, 64, 65, 128, 129, 1000])
def test_moments_are_even_and_those_of_longer_runs_among_them(count):
    steps = Steps(count, 7, 3)
    assert min(count, 16) <= len(steps.looks) <= 32
    assert len(set(steps.looks.diff().tolist())) <= 1
    assert set(steps.looks.tolist()) <= set(steps.kept.tolist())
    longer = Steps(3 * count, 7, 3).looks
    assert set(longer[longer <= steps.kept[-1]].tolist()) <= set(steps.looks.tolist())


@pytest.mark.slow
@pytest.mark.parametrize(("compile", "num_samples"), each_once([False, True], [20, 150]))
def test_they_are_of_the_states_at_those_steps(compile, num_samples):
    """Against a run of single draws, whose state it leaves."""
    how = {"batch_size": B, "num_chains": 3, "warmup_steps": 0, "thinning": 1}
    sampler = run(ps.BAOA(location, lr=0.1, compile=compile), (Y,), num_samples=num_samples, **how)
    every = Steps(num_samples).look_every
    measured = sampler.posterior.draws.measurements.kinetic.measured[..., 0]
    assert measured.shape == (3, num_samples // every)
    for look in (0, 3, num_samples // every - 1):
        states = []
        move = loop.Chains.move

        def kept(self, *args, move=move, states=states):
            move(self, *args)
            states.append(self.state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.Chains, "move", kept)
            count = every * (look + 1)
            run(ps.BAOA(location, lr=0.1, compile=False), (Y,), num_samples=count, **how)
        expected = N * states[-1].momentum[:, 0].square()
        torch.testing.assert_close(measured[:, look], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("first", long_but([10, 40, 64, 100, 170], 170))
def test_a_run_that_went_on_has_the_same(first, tmp_path):
    def sampler():
        return ps.SGHMC(location, lr=0.1, compile=False)

    how = {"batch_size": B, "num_chains": 2, "warmup_steps": 5, "thinning": 2}
    whole = run(sampler(), (Y,), num_samples=170, **how)
    run(sampler(), (Y,), num_samples=first, **how, checkpoint=tmp_path)
    again = run(sampler(), (Y,), num_samples=170, **how, resume=tmp_path)
    assert torch.equal(
        again.posterior.draws.measurements.kinetic.measured,
        whole.posterior.draws.measurements.kinetic.measured,
    )
    assert torch.equal(
        again.posterior.draws.measurements.kinetic.expected,
        whole.posterior.draws.measurements.kinetic.expected,
    )


@pytest.mark.slow
def test_an_interrupted_run_has_those_until_then(cut):
    whole = run(ps.BAOA(location, lr=0.1), (Y,), num_samples=100, num_chains=2)
    cut(500)
    part = run(ps.BAOA(location, lr=0.1), (Y,), num_samples=100, num_chains=2)
    found, every = (
        part.posterior.draws.measurements.kinetic.measured,
        whole.posterior.draws.measurements.kinetic.measured,
    )
    assert found.shape[1] == 10
    assert torch.equal(found, every[:, :10])


@pytest.mark.slow
def test_it_comes_back_from_a_file(tmp_path):
    fit = run(ps.SGHMC(three_sites, lr=0.1), num_samples=60, num_chains=2)
    fit.save(tmp_path / "run.ps")
    again = ps.SGHMC.load(tmp_path / "run.ps", three_sites)
    for name in ("measured", "expected"):
        kept = getattr(fit.posterior.draws.measurements.kinetic, name)
        assert torch.equal(getattr(again.posterior.draws.measurements.kinetic, name), kept)
    assert told(again.diagnostics)[0].equals(told(fit.diagnostics)[0])


@pytest.mark.long
def test_points_have_no_part_in_it():
    def with_point(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        shift = pyro.param("shift", torch.tensor(0.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu + shift, 1.0), obs=y)

    sampler = run(ps.BAOA(with_point, lr=0.3), (Y,), num_chains=20)
    table, _ = told(sampler.diagnostics)
    assert list(table.index) == ["mu"]
    assert z_of(table, "mu", 1.0) < 4.4
    assert table.kinetic_temperature_expected["mu"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
def test_cycles_are_seen_where_they_are_kept():
    lr = ps.schedules.Cyclical(0.2, cycle_steps=50, exploration=0.5, settling=0.2)
    table, _ = told(run(ps.BAOA(location, lr=lr), (Y,), num_chains=4, thinning=1).diagnostics)
    assert table.notna().all().all()
