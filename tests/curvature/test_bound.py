"""The optimum of the evidence lower bound by regression, on Gaussian posteriors: exact."""

import pytest
import torch
from densities import density_of_all_rows, prepare_run
from reference import double, normals

import pyro_scale as ps
from pyro_scale.core.gaussian import Dense, Diagonal
from pyro_scale.curvature.bound import Bound

pytestmark = pytest.mark.usefixtures("float64")

SIZE, NUM_DATA, TEMPERATURE = 6, 50, 0.5
SCALES = torch.logspace(-3, 3, SIZE, dtype=torch.float64)


def bound_of(log_joint):
    target = ps.LogPosterior.from_function(
        lambda params, batch: log_joint(params["w"]) / NUM_DATA,
        {"w": torch.zeros(SIZE)},
        num_data=NUM_DATA,
    )
    return Bound(
        density_of_all_rows(prepare_run(target)), torch.zeros(SIZE), torch.arange(SIZE), TEMPERATURE
    )


def problem():
    """(Mean, precision) with correlations up to .99 and scales from 1e-3 to 1e3."""
    correlations = torch.full((SIZE, SIZE), 0.99).fill_diagonal_(1.0)
    covariance = SCALES[:, None] * correlations * SCALES
    return SCALES * normals(SIZE, seed=1), torch.linalg.inv(covariance)


@pytest.mark.parametrize("structure", ["dense", "diag"])
def test_a_gaussian_posteriors_optimum_is_exact(structure):
    mean, precision = problem()
    bound = bound_of(lambda w: -(w - mean) @ precision @ (w - mean) / 2)
    start, eps = torch.ones(SIZE), normals(2, 40, SIZE, seed=2)
    if structure == "dense":
        found = bound.improved(Dense(start, torch.eye(SIZE) / 10), eps[0])
        expected = (TEMPERATURE * torch.linalg.inv(precision)).diagonal()
    else:
        found = bound.improved(Diagonal(start, torch.full((SIZE,), 0.1)), eps[0])
        expected = TEMPERATURE / precision.diagonal()
    sds = expected.sqrt()
    assert (found.variance.sqrt() / sds - 1).abs().max() < 1e-3
    assert ((found.mean - mean) / sds).abs().max() < 1e-2
    assert bound.offset(found, eps[1]).is_small


@pytest.mark.parametrize(("wide", "moved"), [(1.05, 0.0), (0.95, 0.0), (1.0, 0.15)])
def test_an_offset_is_that_of_the_gaussian(wide, moved):
    precision = double(4.0, 1.0, 0.25, 1.0, 1.0, 9.0).diag()
    bound = bound_of(lambda w: -w @ precision @ w / 2)
    sds = (TEMPERATURE / precision.diagonal()).sqrt()
    offset = bound.offset(Diagonal(moved * sds, wide * sds), normals(40, SIZE, seed=3))
    assert offset.sd == pytest.approx(abs(wide - 1), abs=1e-9)
    assert offset.mean == pytest.approx(moved, abs=1e-9)
    assert not offset.is_small


def test_a_log_joint_that_curves_upwards_is_not_at_an_optimum():
    offset = bound_of(lambda w: w @ w / 2).offset(
        Diagonal(torch.zeros(SIZE), torch.ones(SIZE)), normals(40, SIZE, seed=3)
    )
    assert not offset.is_small
