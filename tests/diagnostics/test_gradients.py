"""Gradients that are not those of the log density, told from kinks, tails and narrow places."""

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals

import pyro_scale as ps
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.diagnostics.gradients import check_gradients, gap_between
from pyro_scale.diagnostics.policy import GRADIENTS

W, Y = normals(200, 8, seed=1), normals(200, seed=2)
QUIET = {"seed": 0, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def of(log_density, size):
    """A model with this log density of `size` latents."""

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(size), 1.0).mask(False).to_event(1))
        pyro.factor("density", log_density(w))

    return model


def run_of(model, data=None, num_samples=10):
    sampler = ps.BAOA(model, lr=1e-3, compile=False)
    steps = {"num_samples": num_samples, "warmup_steps": 0, "thinning": 1}
    return sampler.run(data, **steps, **QUIET).posterior.draws


def density_of(model, data=None):
    result = run_of(model, data)
    return FullDataDensity(result.log_posterior, result.data, result.layout)


def cauchy(*shape):
    return torch.randn(shape) / torch.randn(shape)


def horseshoe(w):
    scale = w[:10].exp()
    prior = dist.HalfCauchy(1.0).log_prob(scale).sum() + w[:10].sum()
    return prior + dist.Normal(0.0, scale).log_prob(w[10:]).sum()


def draws_of_horseshoe(count):
    scale = cauchy(count, 10).abs()
    return torch.cat([scale.log(), scale * torch.randn(count, 10)], 1)


def draws_of_funnel(count):
    v = 3 * torch.randn(count, 1)
    return torch.cat([v, (v / 2).exp() * torch.randn(count, 9)], 1)


def widths(*values):
    return lambda count: (
        torch.randn(count, 2) * torch.tensor(values)[torch.randint(len(values), (count, 1))]
    )


SMOOTH = {
    "Laplace": (lambda w: -w.abs().sum(), 10, lambda n: dist.Laplace(0.0, 1.0).sample((n, 10))),
    "Cauchy": (lambda w: -(1 + w.square()).log().sum(), 10, lambda n: cauchy(n, 10)),
    "horseshoe": (horseshoe, 20, draws_of_horseshoe),
    "funnel": (
        lambda w: -(w[0] ** 2) / 18 - 4.5 * w[0] - w[1:].square().sum() * (-w[0]).exp() / 2,
        10,
        draws_of_funnel,
    ),
    "hinges": (
        lambda w: -(torch.relu(W @ w) - Y).square().sum() / 20 - w.square().sum() / 2,
        8,
        lambda n: 0.5 * torch.randn(n, 8),
    ),
    "a ramp": (
        lambda w: (1000 * w.clamp(max=0) - w.square() / 2).sum(),
        1,
        lambda n: torch.where(torch.rand(n, 1) < 0.05, -1e-3, 1.0) * torch.randn(n, 1).abs(),
    ),
    "a spike in a slab": (
        lambda w: torch.logaddexp(
            -w.square().sum() / 2, -w.square().sum() / 2 / 0.02**2 - 2 * math.log(0.02)
        ),
        2,
        widths(1.0, 0.02),
    ),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_kinks_tails_and_narrow_places_raise_no_alarm(name):
    log_density, size, draw = SMOOTH[name]
    density = density_of(of(log_density, size))
    torch.manual_seed(0)
    for _ in range(20):
        gap, error = gap_between(density, draw(10), draw(10))
        assert gap <= GRADIENTS.gap + GRADIENTS.errors * error


def test_a_jump_is_the_gap():
    """Wherever it is on a line: log 2 on seven lines of ten that cross it."""

    def log_density(w):
        return torch.where(w[0] > 0.3, math.log(2), 0.0) - w.square().sum() / 2

    begin, end = torch.randn(10, 3), torch.randn(10, 3)
    begin[:, 0], end[:7, 0], end[7:, 0] = -torch.rand(10), 0.3 + torch.rand(7), -torch.rand(3)
    gap, error = gap_between(density_of(of(log_density, 3)), begin, end)
    assert gap == pytest.approx(math.log(2) * 0.7**0.5, rel=1e-9)
    assert error < 1e-9


def half_cut(y):
    w = pyro.sample("w", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w + w.detach(), 1.0), obs=y)


def test_what_is_cut_off_is_the_gap():
    """Half of the difference of log likelihoods."""
    begin, end = torch.randn(10, 1), torch.randn(10, 1)
    first, last = (-(Y - 2 * w).square().sum(1) / 2 for w in (begin, end))
    gap, error = gap_between(density_of(half_cut, Y), begin, end)
    assert gap == pytest.approx(float(((last - first) / 2).square().mean().sqrt()), rel=1e-9)
    assert error < 1e-9


def test_lines_that_leave_the_support_are_left_out():
    def log_density(w):
        return torch.where(w[0].abs() > 1, -w.square().sum() / 2, -torch.inf)

    density = density_of(of(lambda w: log_density(w + 3), 1))
    same = torch.linspace(-1.5, 1, 8)[:, None], torch.linspace(1, -1.5, 8)[:, None]
    gap, _ = gap_between(density, *same)
    assert gap < 1e-9
    assert math.isnan(gap_between(density, same[0], same[1] - 6)[0])


THREE_QUARTERS = math.log(3)  # of the mass above 0


def stair(w, height=THREE_QUARTERS):
    return torch.where(w > 0, height, 0.0).sum() - w.square().sum() / 2


def crossing(num_draws):
    """Draws `[4, num_draws, 1]` of which every pair has 0 between: its ends are of other chains."""
    sides = torch.tensor([-1.0, -1.0, 1.0, 1.0])[:, None, None]
    return sides * torch.randn(4, num_draws, 1).abs()


def test_a_run_takes_only_a_fraction_of_its_gradients_for_the_check():
    """A short one none; the number of lines grows with the draws. Four lines of 16 gradients are a
    tenth of 160 draws of four chains."""
    long = run_of(of(stair, 1), num_samples=170)
    positions = crossing(170)
    (finding,) = check_gradients(dataclasses.replace(long, positions=positions))
    assert (finding.check, finding.verdict, finding.site) == ("gradients", "no", "")
    short = dataclasses.replace(long, positions=positions[:, :150])
    assert check_gradients(short) == []


@pytest.mark.parametrize(("height", "is_told"), [(0.19, False), (0.21, True)])
def test_a_gap_of_a_fifth_of_a_nat_is_tolerated(height, is_told):
    result = run_of(of(lambda w: stair(w, height), 1))
    result = dataclasses.replace(result, positions=crossing(500))
    assert bool(check_gradients(result)) == is_told


@pytest.mark.slow
def test_a_run_through_a_jump_is_a_no_and_ghmc_is_right():
    """A normal with three quarters of its mass above 0: its mean is half of E |w|."""
    run = ps.BAOA(of(stair, 1)).run(None, **QUIET)
    assert run.report().verdict == "no"
    assert "gradients are not those of the log density" in run.report().headline
    right = ps.GHMC(of(stair, 1)).run(None, **QUIET)
    assert not [f for f in right.report().findings if f.check == "gradients"]
    w = right.get_samples()["w"]
    ess = float(right.diagnostics()["ess_bulk"].min())
    mean = (2 / math.pi) ** 0.5 / 2
    assert float(w.mean()) == pytest.approx(mean, abs=4.5 * float(w.std()) / ess**0.5)
    assert abs(float(run.get_samples()["w"].mean()) - mean) > 0.2


@pytest.mark.slow
def test_a_right_run_is_checked_without_a_finding():
    run = ps.BAOA(of(lambda w: -w.abs().sum() - w.square().sum() / 2, 3)).run(None, **QUIET)
    assert "gradients" not in run.report().to_frame()["check"].tolist()


def test_of_rows_that_are_not_all_nothing_is_said():
    """As where the data do not say how many rows there are, and the user does."""

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    sampler = ps.BAOA(model, lr=1e-3, num_data=10**6, compile=False)
    steps = {"num_samples": 10, "warmup_steps": 0, "thinning": 1}
    result = sampler.run((Y,), **steps, **QUIET).posterior.draws
    many = dataclasses.replace(result, positions=torch.randn(4, 20_000, 1))
    assert check_gradients(many) == []
