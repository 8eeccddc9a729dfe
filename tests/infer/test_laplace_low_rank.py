"""Laplace approximations of low rank, against dense ones."""

import pyro.distributions as dist
import pytest
import torch
from curvatures import check_gaussian
from models import normal, of_rows
from reference import close, normals
from repetitions import each_once
from runs import QUIET

import pyro_scale as ps
from pyro_scale.core.gaussian import LowRank
from pyro_scale.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("float64", "store")
SCALES = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)


model = of_rows(lambda x, w: dist.Normal(x @ w, 0.5), w=normal(12, sd=SCALES))


#: Of rank 4.
X = normals(30, 4, seed=1) @ normals(4, 12, seed=2)
DATA = X, normals(30, seed=3)
PRECISION = torch.diag(SCALES**-2) + 4 * X.T @ X


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "batch_size"), each_once([4, 6, 11, 12], [None, 7]))
def test_it_is_exact_where_the_data_know_no_more_directions(rank, batch_size):
    fit = ps.Laplace(model, structure="low_rank", rank=rank)
    fit.run(DATA, batch_size=batch_size, **QUIET)
    dense = ps.Laplace(model, structure="dense").run(DATA, **QUIET)
    gaussian = fit.fit.gaussians[0]
    close(gaussian.precision, PRECISION, 1e-7)
    close(gaussian.mean, dense.fit.gaussians[0].mean, 1e-6)
    close(fit.log_marginal_likelihood(), dense.log_marginal_likelihood(), 1e-6)


def test_beyond_its_directions_it_has_the_diagonal():
    """The largest of the curvature in units of the prior, and the rest of its diagonal."""
    gaussian = ps.Laplace(model, structure="low_rank", rank=2).run(DATA, **QUIET).fit.gaussians[0]
    scaled = 4 * SCALES[:, None] * X.T @ X * SCALES
    lengths, axes = torch.linalg.eigh(scaled)
    largest = (axes[:, -2:] * lengths[-2:]) @ axes[:, -2:].T / SCALES / SCALES[:, None]
    rest = PRECISION.diagonal() - largest.diagonal()
    close(gaussian.precision, largest + torch.diag(rest), 1e-7)
    close(gaussian.precision.diagonal(), PRECISION.diagonal(), 1e-7)


def test_the_gaussian_is_its_matrices():
    diagonal, factor = normals(6, seed=4).exp(), normals(6, 2, seed=5)
    precision = torch.diag(diagonal) + factor @ factor.T
    gaussian = LowRank.from_precision(normals(6, seed=6), diagonal, factor)
    check_gaussian(gaussian, precision)


def test_a_fit_is_saved(tmp_path):
    fit = ps.Laplace(model, structure="low_rank", rank=3).run(DATA, **QUIET)
    fit.save(tmp_path / "fit")
    again = ps.Laplace.load(tmp_path / "fit", model)
    close(again.fit.gaussians[0].covariance, fit.fit.gaussians[0].covariance, 1e-12)


@pytest.mark.parametrize(("structure", "rank"), [("auto", 5), ("dense", 20), ("low_rank", 0)])
def test_a_rank_that_means_nothing_is_refused(structure, rank):
    with pytest.raises(ArgumentError, match=f"rank={rank}"):
        ps.Laplace(model, structure=structure, rank=rank)
