"""Searches for modes, and the Gaussians that they give."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import close, double, normals

from pyro_scale import kernels
from pyro_scale.data.open import open_data
from pyro_scale.errors import ArgumentError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.run.problem import as_log_posterior, prepare
from pyro_scale.tuning.modes import find_diagonal_modes, find_modes

pytestmark = pytest.mark.usefixtures("float64")


def searched(model, data=None, search=find_modes, temperature=1.0, chains=4, **how):
    opened = open_data(data)
    problem = prepare(
        as_log_posterior(model, opened.num_data), opened, kernels.SGLD(lr=1.0), None, chains, 0
    )
    density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    more = (0,) if search is find_modes else ()
    return search(density, problem.positions, temperature, *more, **how)


ROOT = double([2.0, 0.0], [1.5, 0.5])
MEAN = double(3.0, -1.0)


def gaussian():
    pyro.sample("x", dist.MultivariateNormal(MEAN, scale_tril=ROOT))


def test_of_a_gaussian_all_is_exact():
    """Mean, covariance at the temperature, evidence, and no distance from the posterior."""
    for temperature in (1.0, 4.0):
        found = searched(gaussian, temperature=temperature)
        (mode,) = found.modes
        assert found.found
        assert sorted(mode.searches) == [0, 1, 2, 3]
        close(mode.gaussian.mean, MEAN, 1e-6)
        close(mode.gaussian.covariance, temperature * ROOT @ ROOT.T)
        assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert searched(gaussian).best.log_evidence == pytest.approx(0.0, abs=1e-9)


def two(distance, height):
    """A mixture of unit normals, whose shares are 1 to exp(height)."""

    def model():
        x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
        parts = [dist.Normal(at, 0.1).log_prob(x) for at in (-distance, distance)]
        pyro.factor("two", torch.logaddexp(parts[0], parts[1] + height))

    return model


def test_two_modes_have_their_evidence():
    """By how much more mass there is, exactly, as they do not overlap."""
    found = searched(two(1.0, 3.0))
    best, other = found.modes
    assert best.log_evidence - other.log_evidence == pytest.approx(3.0, abs=1e-6)
    assert float(best.gaussian.mean) == pytest.approx(1.0, abs=1e-6)
    own = [float(g.mean) for g in found.starting_points(4)]
    for search, mean in enumerate(own):  # each chain's own
        assert search in (best if mean > 0 else other).searches


def test_no_chain_starts_at_a_mode_that_has_nothing_of_the_posterior():
    found = searched(two(1.0, 30.0))
    assert len(found.modes) == 2
    assert all(float(g.mean) > 0 for g in found.starting_points(4))


def test_where_the_mode_is_not_typical_a_gaussian_on_the_way_up_stands_for_it():
    """Of a funnel: its mode is in the neck, 20 sds from the mean of s."""

    def funnel():
        s = pyro.sample("s", dist.Normal(0.0, 2.0))
        pyro.sample("x", dist.Normal(torch.zeros(9), (s / 2).exp()).to_event(1))

    found = searched(funnel)
    assert not found.found
    assert abs(float(found.best.gaussian.mean[0])) < 6
    assert math.isfinite(found.best.log_evidence)


def test_a_flat_direction_is_named():
    def flat():
        pyro.sample("fine", dist.Normal(0.0, 1.0))
        pyro.sample("flat", dist.ImproperUniform(dist.constraints.real, (), ()))

    with pytest.raises(ArgumentError, match="hardly changes in a direction of site 'flat'"):
        searched(flat)


def test_elements_by_l_bfgs():
    """Mode and conditional sds of a regression, as least squares have them."""
    x, y = normals(50, 3, seed=0).double(), normals(50, seed=1).double()

    def regression(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    found = searched(regression, (x, y), find_diagonal_modes)
    precision = x.T @ x / 0.25 + torch.eye(3) / 4
    (mode,) = found.modes
    close(mode.gaussian.mean, torch.linalg.solve(precision, x.T @ y / 0.25), 1e-5)
    close(mode.gaussian.sd, precision.diagonal().rsqrt(), 1e-5)


def test_chains_start_from_every_mode_that_counts_if_there_are_as_many():
    found = searched(two(1.0, 3.0))
    for num_chains, missed in ((1, 1), (2, 0), (5, 0)):
        assert len(found.unvisited(num_chains)) == missed
    assert found.starting_points(1) == [found.best.gaussian]
    assert searched(two(1.0, 30.0)).unvisited(1) == []


def endless():
    """A log density that rises for ever, ever more slowly."""
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.factor("up", torch.nn.functional.softplus(x).log1p())


def test_a_search_tells_what_it_takes_and_ends_where_it_is_told_to():
    """Passes are told before each step, and no step is taken beyond."""
    told = []

    def check(passes):
        told.append(passes)
        if passes > 30:
            raise ArgumentError("enough")

    with pytest.raises(ArgumentError, match="enough"):
        searched(endless, check=check)
    assert told == sorted(told)
    assert told[-2] <= 30 < told[-1]
    told.clear()
    found = searched(gaussian, check=told.append)
    assert told == sorted(told)
    assert 0 < max(told) <= found.evaluations
