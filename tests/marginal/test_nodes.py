import math

import pytest
import torch
from torch.distributions import Gamma, MultivariateNormal, StudentT

from pyro_scale.marginal.nodes import (
    Gaussians,
    cholesky,
    derivatives,
    gauss_hermite,
    place,
    solve,
    solve_transposed,
)

pytestmark = pytest.mark.usefixtures("float64")


def spd(n, dims, seed=0):
    """Random positive definite matrices `[n, dims, dims]`."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, dims, dims, generator=generator)
    return a @ a.mT + 0.5 * torch.eye(dims)


def vectors(n, dims, seed=1):
    return torch.randn(n, dims, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ gauss_hermite


@pytest.mark.parametrize(("count", "dims"), [(5, 1), (9, 1), (5, 2), (4, 3)])
def test_nodes_integrate_polynomials_times_a_gaussian_exactly(count, dims):
    """E x^m of a standard normal is (m - 1)!! for m up to 2K - 1, in every dimension by itself."""
    nodes, log_weights = gauss_hermite(count, dims)
    assert nodes.shape == (count**dims, dims)
    assert log_weights.shape == (count**dims,)
    density = torch.exp(log_weights - nodes.square().sum(-1) / 2) / (2 * math.pi) ** (dims / 2)
    for axis in range(dims):
        for m in range(2 * count):
            truth = 0.0 if m % 2 else float(math.prod(range(m - 1, 0, -2)))
            torch.testing.assert_close(
                (density * nodes[:, axis] ** m).sum(), torch.tensor(truth), rtol=1e-9, atol=1e-9
            )
    if dims > 1:
        moment = (density * nodes[:, 0] ** 2 * nodes[:, 1] ** 4).sum()
        torch.testing.assert_close(moment, torch.tensor(3.0))


def test_weights_are_those_of_a_plain_integral():
    """The integral of any function, not of one times a Gaussian."""
    nodes, log_weights = gauss_hermite(61, 1)
    logistic = torch.exp(-nodes[:, 0]) / (1 + torch.exp(-nodes[:, 0])) ** 2  # integrates to 1
    assert float((log_weights.exp() * logistic).sum()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_points_of_gaussians_integrate_them(dims):
    """One node rule at N(center, P^-1) integrates that density to 1, and its moments."""
    precision, center = spd(4, dims), vectors(4, dims)
    around = Gaussians(center, torch.linalg.cholesky(precision))
    nodes, log_weights = gauss_hermite(5, dims)
    z = around.points(nodes[:, None])
    assert z.shape == (5**dims, 4, dims)
    log_density = MultivariateNormal(center, precision_matrix=precision).log_prob(z)
    mass = torch.exp(log_density + log_weights[:, None] + around.log_volume)
    torch.testing.assert_close(mass.sum(0), torch.ones(4))
    torch.testing.assert_close((mass[..., None] * z).sum(0), center)
    away = z - center
    covariance = (mass[..., None, None] * away[..., :, None] * away[..., None, :]).sum(0)
    torch.testing.assert_close(covariance, torch.linalg.inv(precision))


# ------------------------------------------------------------------ derivatives


def test_derivatives_are_those_of_each_member():
    precision, center = spd(5, 3), vectors(5, 3)
    z = vectors(5, 3, seed=2)

    def log_density(z):
        away = z - center
        return -torch.einsum("ni,nij,nj->n", away, precision, away) / 2 + (z[:, 0] ** 3) * z[:, 1]

    slope, hessian = derivatives(log_density, z)
    for i in range(5):
        own = z[i]

        def of_one(one, i=i):
            return log_density(z.clone().index_put((torch.tensor(i),), one))[i]

        torch.testing.assert_close(slope[i], torch.func.grad(of_one)(own))
        torch.testing.assert_close(hessian[i], torch.func.hessian(of_one)(own))


def test_derivatives_by_finite_differences():
    z, h = vectors(4, 2), 1e-4

    def log_density(z):
        return torch.sin(z[:, 0]) * z[:, 1].exp()

    slope, hessian = derivatives(log_density, z)
    for j in range(2):
        step = h * torch.eye(2)[j]
        torch.testing.assert_close(
            slope[:, j], (log_density(z + step) - log_density(z - step)) / (2 * h)
        )
        column = (derivatives(log_density, z + step)[0] - derivatives(log_density, z - step)[0]) / (
            2 * h
        )
        torch.testing.assert_close(hessian[..., j], column, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------ small matrices


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_cholesky_and_solves_are_torchs(dims):
    matrix, b = spd(6, dims), vectors(6, dims)
    root = cholesky(matrix)
    torch.testing.assert_close(root, torch.linalg.cholesky(matrix))
    expected = torch.linalg.solve(root, b[..., None])[..., 0]
    torch.testing.assert_close(solve(root, b), expected)
    expected = torch.linalg.solve(root.mT, b[..., None])[..., 0]
    torch.testing.assert_close(solve_transposed(root, b), expected)
    twice = solve_transposed(root, solve(root, b))
    torch.testing.assert_close((matrix @ twice[..., None])[..., 0], b)


def test_cholesky_has_gradients_of_torchs():
    matrix = spd(3, 3)

    def own(matrix):
        return torch.sin(cholesky(matrix)).sum()

    def torchs(matrix):
        return torch.sin(torch.linalg.cholesky(matrix)).sum()

    grads = [torch.func.grad(f)(matrix) for f in (own, torchs)]
    symmetric = [grad + grad.mT for grad in grads]
    torch.testing.assert_close(*symmetric)


@pytest.mark.parametrize(
    "matrix",
    [
        [[0.0, 0.0], [0.0, 0.0]],
        [[-1.0, 0.3], [0.3, 2.0]],
        [[1.0, 2.0], [2.0, 1.0]],
        [[1.0, 1.0], [1.0, 1.0]],
    ],
)
def test_cholesky_of_what_is_not_positive_is_finite(matrix):
    """A rule on any Gaussian is right; one on NaN is not."""
    root = cholesky(torch.tensor(matrix)[None])
    assert root.isfinite().all()
    assert (torch.diagonal(root, dim1=-2, dim2=-1) > 0).all()


def test_pivots_are_a_part_of_the_diagonal():
    """So that nodes are not spread over thousands of sds."""
    root = cholesky(torch.tensor([[[4.0, 4.0], [4.0, 4.0]]]))
    torch.testing.assert_close(root, torch.tensor([[[2.0, 0.0], [2.0, 0.2**0.5]]]))


# ------------------------------------------------------------------ place


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_place_is_exact_for_gaussians(dims, is_far):
    """From anywhere."""
    precision, mode = spd(5, dims), vectors(5, dims)

    def log_joint(z):
        away = z - mode
        return -torch.einsum("ni,nij,nj->n", away, precision, away) / 2

    around = place(log_joint, 10 * vectors(5, dims, seed=4), is_far)
    torch.testing.assert_close(around.center, mode)
    torch.testing.assert_close(around.root, torch.linalg.cholesky(precision))


@pytest.mark.parametrize("start", [-2.0, 0.0, 1.0])
def test_place_comes_near_the_mode_from_far(start):
    """Of log x for x ~ Gamma(3, 2): log 1.5, where the curvature is -3."""

    def log_gamma(z):
        return Gamma(3.0, 2.0).log_prob(z.exp()).sum(-1) + z.sum(-1)

    mode = math.log(1.5)
    around = place(log_gamma, torch.full((1, 1), start), True)
    assert log_gamma(around.center) > log_gamma(torch.full((1, 1), start))
    assert abs(float(around.center) - mode) < 0.5 * abs(start - mode)
    near = place(log_gamma, torch.full((1, 1), mode + 0.01), True)
    torch.testing.assert_close(near.center, torch.full((1, 1), mode))
    torch.testing.assert_close(near.root, torch.full((1, 1, 1), 3**0.5))


def test_place_where_a_density_is_not_log_concave_is_finite():
    """In the tails of a t distribution the curvature has the other sign."""
    for at in (0.0, 3.0, 30.0):
        z = torch.full((1, 1), at)
        around = place(lambda z: StudentT(3.0).log_prob(z).sum(-1), z, True)
        assert all(part.isfinite().all() for part in around)
        assert float(around.center.abs()) <= at
