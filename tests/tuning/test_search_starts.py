"""Where searches for modes begin."""

import dataclasses

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import density_of_all_rows, prepare_run
from reference import double, normals
from runs import QUIET

import pyro_scale as ps
from pyro_scale.tuning.search_starts import search_starts

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]


def starts_of(model, data=None, chains=4, seed=0):
    problem = prepare_run(model, data, chains=chains, seed=seed)
    density = density_of_all_rows(problem)
    return problem, density, search_starts(problem, density)


def far_prior():
    """A prior that is far from zero, in narrow peaks of two elements."""
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("x", dist.Normal(double(300.0, -500.0), 0.1).to_event(1))


def improper():
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.factor("there", dist.Normal(20.0, 1.0).log_prob(x))


@pytest.mark.parametrize(("chains", "searches"), [(1, 4), (4, 4), (6, 6), (8, 8), (20, 8)])
def test_half_are_near_zero_and_half_where_the_prior_is(chains, searches):
    _, _, starts = starts_of(far_prior, chains=chains)
    near = starts.abs().amax(1) <= 2
    away = (starts - double(300.0, -500.0)).abs().amax(1) < 0.5
    assert len(starts) == searches
    assert int(near.sum()) == int(away.sum()) == searches // 2
    assert torch.equal(starts[1], -starts[0])


def test_elsewhere_does_not_depend_on_where_chains_start():
    problem, density, starts = starts_of(far_prior)
    moved = dataclasses.replace(problem, positions=problem.positions + 7)
    assert torch.equal(search_starts(moved, density, elsewhere=True), starts)


def test_places_further_out_stand_for_a_prior_that_there_is_none_of():
    _, density, starts = starts_of(improper)
    assert int(((starts - 20).abs() < 6).sum()) == 2
    values = density.values(starts)
    assert values[2] >= values[3] > values[:2].max()


def test_they_are_a_function_of_the_seed():
    every = [starts_of(far_prior, seed=seed)[2] for seed in (0, 0, 1)]
    assert torch.equal(every[0], every[1])
    assert not torch.equal(every[0], every[2])


def test_places_where_the_log_joint_is_not_finite_are_left_out():
    def walls():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("walls", torch.where(x.abs() < 2, 0.0, torch.nan))

    _, density, starts = starts_of(walls)
    assert bool(density.values(starts).isfinite().all())


@pytest.mark.slow
def test_a_frequency_far_from_zero_is_found():
    """Near zero there are modes of their own, hundreds of nats below."""
    x = 6 * (normals(300, seed=1) / 2**0.5).erf().abs()
    y = torch.sin(7 * x) + normals(300, seed=2) / 2

    def wave(x, y):
        f = pyro.sample("f", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(torch.sin(f * x), 0.5), obs=y)

    grid = torch.linspace(6.5, 7.5, 20_001)
    log_lik = dist.Normal(torch.sin(grid[:, None] * x), 0.5).log_prob(y).sum(1)
    weights = (log_lik + dist.Normal(0.0, 10.0).log_prob(grid)).softmax(0)
    mean = (weights * grid).sum()
    sd = (weights * (grid - mean).square()).sum().sqrt()
    for seed in range(4):
        fit = ps.BAOA(wave).run((x, y), num_samples=500, **QUIET | {"seed": seed})
        f = fit.get_samples()["f"]
        assert abs(f.mean() - mean) < 0.2 * sd  # of 500 effective draws: 4.5 standard errors
        assert fit.report().verdict == "yes"
