"""Searches for modes, and the Gaussians that they give."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import density_of_all_rows, prepare_run, prior_only
from models import normal, of_rows
from reference import close, double, normals

from pyro_scale.core.gaussian import Dense
from pyro_scale.curvature.modes import lbfgs
from pyro_scale.errors import ArgumentError
from pyro_scale.tuning.diagonal_modes import are_connected, find_diagonal_modes
from pyro_scale.tuning.modes import Mode, SearchLimits, find_modes, merge
from pyro_scale.tuning.no_start import what_to_try

pytestmark = pytest.mark.usefixtures("float64")


def searched(model, data=None, search=find_modes, temperature=1.0, chains=4, **how):
    problem = prepare_run(model, data, chains=chains)
    density = density_of_all_rows(problem)
    more = (0,) if search is find_modes else ()
    return search(density, problem.positions, temperature, *more, **how)


ROOT = double([2.0, 0.0], [1.5, 0.5])
MEAN = double(3.0, -1.0)
gaussian = prior_only(lambda: dist.MultivariateNormal(MEAN, scale_tril=ROOT))


def test_of_a_gaussian_all_is_exact():
    """Mean, covariance at the temperature, evidence, and no distance from the posterior."""
    for temperature in (1.0, 4.0):
        found = searched(gaussian, temperature=temperature)
        (mode,) = found.modes
        assert found.are_modes
        assert sorted(mode.searches) == [0, 1, 2, 3]
        close(mode.gaussian.mean, MEAN, 1e-6)
        close(mode.gaussian.covariance, temperature * ROOT @ ROOT.T)
        assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert searched(gaussian).best.log_evidence == pytest.approx(0.0, abs=1e-9)


def two_peaks(distance, height):
    """A mixture of unit normals, whose shares are 1 to exp(height)."""

    def model():
        x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
        parts = [dist.Normal(at, 0.1).log_prob(x) for at in (-distance, distance)]
        pyro.factor("two", torch.logaddexp(parts[0], parts[1] + height))

    return model


def test_two_modes_have_their_evidence():
    """By how much more mass there is, exactly, as they do not overlap."""
    found = searched(two_peaks(1.0, 3.0))
    best, other = found.modes
    assert best.log_evidence - other.log_evidence == pytest.approx(3.0, abs=1e-6)
    assert float(best.gaussian.mean) == pytest.approx(1.0, abs=1e-6)
    own = [float(g.mean) for g in found.starting_points(4)]
    for search, mean in enumerate(own):  # each chain's own
        assert search in (best if mean > 0 else other).searches


def test_no_chain_starts_at_a_mode_that_has_nothing_of_the_posterior():
    found = searched(two_peaks(1.0, 30.0))
    assert len(found.modes) == 2
    assert all(float(g.mean) > 0 for g in found.starting_points(4))


def test_where_the_mode_is_not_typical_a_gaussian_on_the_way_up_stands_for_it():
    """Of a funnel: its mode is in the neck, 20 sds from the mean of s."""

    def funnel():
        pyro.factor("no data", torch.zeros(()))
        s = pyro.sample("s", dist.Normal(0.0, 2.0))
        pyro.sample("x", dist.Normal(torch.zeros(9), (s / 2).exp()).to_event(1))

    found = searched(funnel)
    assert not found.are_modes
    assert abs(float(found.best.gaussian.mean[0])) < 6
    assert math.isfinite(found.best.log_evidence)


@pytest.mark.slow
@pytest.mark.long
def test_a_flat_direction_is_named():
    def flat():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("fine", dist.Normal(0.0, 1.0))
        pyro.sample("flat", dist.ImproperUniform(dist.constraints.real, (), ()))

    with pytest.raises(ArgumentError, match="hardly curves in a direction of site 'flat'"):
        searched(flat)


def test_elements_by_l_bfgs():
    """Mode and conditional sds of a regression, as least squares have them."""
    x, y = normals(50, 3, seed=0).double(), normals(50, seed=1).double()

    regression = of_rows(lambda x, w: dist.Normal(x @ w, 0.5), w=normal(3, sd=2.0))

    found = searched(regression, (x, y), find_diagonal_modes)
    precision = x.T @ x / 0.25 + torch.eye(3) / 4
    (mode,) = found.modes
    close(mode.gaussian.mean, torch.linalg.solve(precision, x.T @ y / 0.25), 1e-5)
    close(mode.gaussian.sd, precision.diagonal().rsqrt(), 1e-5)


def test_l_bfgs_that_ends_on_a_plateau_begins_nearer_to_zero():
    """A scale that is 0 has no slope in its logarithm, but for the Jacobian's one nat, which is
    less than L-BFGS sees of 5,000 rows in float32.  Newton's method finds the mode."""
    one = torch.tensor(1.0, dtype=torch.float32)
    group = torch.arange(100).repeat_interleave(50)
    effects = 0.7 * normals(100, seed=5)
    y = (effects[group] + normals(5000, seed=6)).float()

    def hierarchy(group, y):
        tau = pyro.sample("tau", dist.HalfNormal(one))
        z = pyro.sample("z", dist.Normal(0 * one, one).expand([100]).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(tau * z[group], one), obs=y)

    density = density_of_all_rows(prepare_run(hierarchy, (group, y)))
    start = torch.cat([-30 * one[None], 0.5 * normals(100, seed=7).float()])
    assert float(lbfgs(density, start, "").position[0]) < -29
    found = find_diagonal_modes(density, start[None], 1.0)
    newton = find_modes(density, 0 * start[None], 1.0, 0)
    assert found.are_modes
    assert newton.are_modes
    close(found.best.gaussian.mean, newton.best.gaussian.mean, 0.05)
    assert found.evaluations > newton.searches * 2 * 200  # of three searches


def test_modes_within_part_of_an_sd_are_one_whatever_their_evidence():
    """That of many dimensions changes by nats on the way to a mode that rounding leaves."""
    sd = torch.eye(2, dtype=torch.float64)

    def modes(away, narrow=1.0):
        one, other = Dense(double(0.0, 0.0), sd), Dense(double(away, 0.0), narrow * sd)
        return merge([Mode(one, 0.0, (0,)), Mode(other, -5.0, (1,))])

    (both,) = modes(0.1)
    assert both.searches == (0, 1)
    assert len(modes(1.0)) == 2
    assert len(modes(0.1, narrow=0.01)) == 2  # a spike in a slab


def test_places_with_no_dip_between_them_are_one_mode():
    """On a ridge they are many conditional sds apart; two modes are not."""

    def ridge():
        pyro.factor("no data", torch.zeros(()))
        covariance = double([1.0, 0.9999], [0.9999, 1.0])
        pyro.sample("x", dist.MultivariateNormal(double(0.0, 0.0), covariance))

    def mode(*mean):
        return Mode(Dense(double(*mean), torch.eye(len(mean), dtype=torch.float64)), 0.0, ())

    like = double(0.0)
    assert are_connected(
        density_of_all_rows(prepare_run(ridge)), 1.0, like, mode(-0.5, -0.5), mode(0.5, 0.5)
    )
    bimodal = density_of_all_rows(prepare_run(two_peaks(1.0, 3.0)))
    assert not are_connected(bimodal, 1.0, like, mode(-1.0), mode(1.0))
    assert are_connected(bimodal, 100.0, like, mode(-1.0), mode(1.0))  # a dip of half a nat
    assert len(searched(two_peaks(1.0, 3.0), search=find_diagonal_modes).modes) == 2


def test_chains_start_from_every_mode_that_counts_if_there_are_as_many():
    found = searched(two_peaks(1.0, 3.0))
    for num_chains, missed in ((1, 1), (2, 0), (5, 0)):
        assert len(found.unvisited(num_chains)) == missed
    assert found.starting_points(1) == [found.best.gaussian]
    assert searched(two_peaks(1.0, 30.0)).unvisited(1) == []


def endless():
    """A log density that rises for ever, ever more slowly."""
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.factor("up", torch.nn.functional.softplus(x).log1p())


def test_searches_end_where_their_time_is_over():
    """After one evaluation each, with the best Gaussian that was seen."""
    found = searched(endless, limits=SearchLimits(is_over=lambda: True))
    assert not found.are_modes
    assert found.evaluations == 2 * found.searches * 2  # of the searches and of their Gaussians
    assert math.isfinite(found.best.log_evidence)
    looks = itertools.count()
    longer = searched(endless, limits=SearchLimits(is_over=lambda: next(looks) >= 10))
    assert longer.evaluations > found.evaluations


@pytest.mark.parametrize(
    ("prior", "says"), [("proper", "start elsewhere"), ("flat", "'w' a proper prior")]
)
def test_priors_are_blamed_only_where_they_are_improper(prior, says):
    def model():
        normal = dist.Normal(0.0, 1.0)
        pyro.sample("w", normal if prior == "proper" else normal.mask(False))
        pyro.factor("data", -(pyro.sample("v", normal) ** 2))

    problem = prepare_run(model)
    told = what_to_try(density_of_all_rows(problem), problem.positions[0])
    assert says in told
    assert ("prior" in told) == (prior == "flat")


@pytest.mark.parametrize("most", [0, 5, 47, 200])
def test_a_search_ends_where_it_has_spent_its_share(most):
    """A hierarchy without data, whose log joint rises as the scale falls, for ever: the Gaussian
    is then one that was seen on the way, and it is the same however often a search may look."""

    def falling():
        s = pyro.sample("s", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("x", dist.Normal(torch.zeros(9), (s / 2).exp()).to_event(1))
        pyro.factor("no data", torch.zeros(()))

    found = searched(falling, limits=SearchLimits(most))
    each_step, at_places = 10, 48 * 10
    assert not found.are_modes
    assert found.evaluations <= 4 * (most + 3 * each_step) + at_places
    assert math.isfinite(found.best.log_evidence)
    few = searched(falling, search=find_diagonal_modes, limits=SearchLimits(most))
    assert few.evaluations <= 4 * max(200, most + 210) + 40
