"""Geometries of elements and a few directions, on Gaussians whose directions are known."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import density_of_all_rows, prepare_run, prior_only
from reference import close, double, normals

import pyro_scale as ps
from pyro_scale.core.whitening import DiagonalWhitening, LowRankWhitening
from pyro_scale.errors import ArgumentError
from pyro_scale.tuning.low_rank import MOST_AXES, learn, with_axes

pytestmark = pytest.mark.usefixtures("float64")

SIZE = 80
UNITS = torch.eye(SIZE, dtype=torch.float64)
SCALE = torch.logspace(-1, 1, SIZE, dtype=torch.float64)
AXES = torch.linalg.qr(normals(SIZE, 3, seed=1))[0]
STRETCH = double(12.0, 5.0, 0.05)
TRUE = LowRankWhitening(normals(SIZE, seed=2), SCALE, AXES, STRETCH)
ROOT = TRUE.push_forward(UNITS).mT  # S, whose rows are its products with units
COVARIANCE = ROOT @ ROOT.mT
gaussian = prior_only(lambda: dist.MultivariateNormal(TRUE.center, COVARIANCE))


def spread(whitening, true=COVARIANCE):
    """The smallest and the largest sd in whitened coordinates."""
    root = whitening.push_forward(UNITS).mT
    inverse = torch.linalg.inv(root)
    sds = torch.linalg.eigvalsh(inverse @ true @ inverse.mT).sqrt()
    return float(sds.min()), float(sds.max())


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_lanczos_finds_the_directions_that_stand_out(temperature):
    start = DiagonalWhitening(TRUE.center, temperature**0.5 * SCALE)
    assert spread(start, temperature * COVARIANCE) == pytest.approx((0.05, 12.0), rel=1e-6)
    found = with_axes(start, density_of_all_rows(prepare_run(gaussian)), temperature)
    assert found.axes.shape == (SIZE, MOST_AXES)
    close(found.axes.mT @ found.axes, torch.eye(MOST_AXES), 1e-9)
    low, high = spread(found, temperature * COVARIANCE)
    assert 1 / 1.5 < low < high < 1.5
    assert sorted(found.stretch[found.stretch != 1].tolist()) == pytest.approx(
        [0.05, 5.0, 12.0], rel=0.03
    )


def test_draws_of_the_geometry_itself_change_nothing_but_by_chance():
    count = 40_000
    z = normals(count, SIZE, seed=3)
    seen, new = learn(TRUE, z, count, 3.0)
    assert seen.shape == (SIZE + 3,)
    assert float((seen - 1).abs().max()) < 5 * math.sqrt(2 / count)  # 83 of them: 1 in 20,000
    low, high = spread(new)
    assert 0.955 < low < high < 1.045  # the edges of 80 dimensions from 40,000 draws


def test_draws_teach_scales_and_slow_directions():
    """From a geometry that knows of neither.  Stiff directions are Lanczos' to find: draws in fewer
    directions than there are elements say nothing of them."""
    flat = LowRankWhitening(torch.zeros(SIZE), torch.ones(SIZE), UNITS[:, :1], double(1.0))
    new, count = flat, 40_000
    assert spread(flat)[1] > 30
    for seed in range(2):
        draws = normals(count, SIZE, seed=10 + seed) @ ROOT.mT
        _, new = learn(new, new.to_whitened(draws + new.center), count, 3.0)
    assert spread(new)[1] < 1.5


def test_small_problems_have_few_directions():
    def two():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), double([1.0, 0.9], [0.9, 1.0])))

    start = DiagonalWhitening(torch.zeros(2), torch.ones(2))
    found = with_axes(start, density_of_all_rows(prepare_run(two)), 1.0)
    assert found.axes.shape == (2, 1)
    assert float(found.stretch) == 1.0


@pytest.mark.slow
def test_a_posterior_of_many_dimensions_is_right_with_nothing_set():
    """600 of them, correlated in a few directions, which diagonal coordinates crawl along."""
    size = 600
    axes = torch.linalg.qr(normals(size, 2, seed=4))[0]
    true = LowRankWhitening(torch.zeros(size), torch.ones(size), axes, double(30.0, 10.0))
    root = true.push_forward(torch.eye(size)).mT
    precision = torch.linalg.inv(root @ root.mT)

    def wide():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([size]).to_event(1).mask(False))
        pyro.factor("log density", -(x @ precision @ x) / 2)

    mcmc = ps.BAOA(wide).run(None, num_samples=500, seed=0, progress=False)
    draws = mcmc.get_samples()["x"]
    along = draws @ axes / double(30.0, 10.0)
    assert float(along.mean(0).abs().max()) < 0.15
    close(along.std(0), double(1.0, 1.0), 0.1)
    assert "a few directions" in mcmc.report().choices["geometry"]
    assert mcmc.posterior.draws.attrs["thinning"] < 60


def test_what_is_no_geometry_is_refused():
    with pytest.raises(ArgumentError, match="'dense', 'kron', 'low_rank', 'diag'"):
        ps.BAOA(gaussian, precondition="lowrank")
