import math

import pytest
import torch
from torch.distributions import Gamma, MultivariateNormal, Normal, StudentT

from pyro_scale.marginal.nodes import (
    Expansion,
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


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_place_multiplies_gaussians(dims):
    """Of a Gaussian prior and likelihood, the nodes' Gaussian is the posterior, wherever the
    likelihood was expanded; so is its derivative with respect to the prior."""
    likelihood, at, prior = spd(5, dims), vectors(5, dims), spd(5, dims, seed=3)
    z, mean = vectors(5, dims, seed=4), vectors(5, dims, seed=5)
    slope = (likelihood @ (at - z)[..., None])[..., 0]
    expansion = Expansion(z, slope, likelihood)

    def of(scale, shift):
        def log_prior(z):
            away = z - mean - shift
            return -torch.einsum("ni,nij,nj->n", away, scale * prior, away) / 2

        return place(log_prior, expansion, True)

    def truth(scale, shift):
        precision = likelihood + scale * prior
        total = likelihood @ at[..., None] + scale * prior @ (mean + shift)[..., None]
        return torch.linalg.solve(precision, total)[..., 0], torch.linalg.cholesky(precision)

    args = torch.tensor(1.7), torch.tensor(0.4)
    for own, true in zip(of(*args), truth(*args), strict=True):
        torch.testing.assert_close(own, true)
    for i in range(2):
        for argnum in range(2):
            own = torch.func.jacrev(lambda *a, i=i: of(*a)[i], argnum)(*args)
            true = torch.func.jacrev(lambda *a, i=i: truth(*a)[i], argnum)(*args)
            torch.testing.assert_close(own, true)


def log_gamma(z):
    """log density of log x for x ~ Gamma(3, 2)."""
    return Gamma(3.0, 2.0).log_prob(z.exp()).sum(-1) + z.sum(-1)


def test_place_finds_the_mode_of_another_prior():
    """Gradient zero at the center; the precision is minus the Hessian there."""
    center = torch.tensor([[0.5], [1.5], [-0.3]])
    expansion = Expansion(center, torch.tensor([[0.3], [-1.0], [2.0]]), torch.full((3, 1, 1), 1.4))
    around = place(log_gamma, expansion, False)

    def log_product(z):
        away = z - center
        return log_gamma(z) + (expansion.slope * away - 1.4 * away**2 / 2).sum(-1)

    slope, hessian = derivatives(log_product, around.center)
    assert slope.abs().max() < 1e-6
    torch.testing.assert_close(around.root @ around.root.mT, -hessian)


def test_the_center_moves_with_another_prior_as_the_mode_does():
    """Newton's steps end near enough, so that the last one has the mode's derivative."""
    center = torch.tensor([[0.5], [0.9]])
    expansion = Expansion(center, torch.tensor([[0.3], [-1.0]]), torch.full((2, 1, 1), 1.4))

    def of(rate):
        def log_prior(z):
            return (Gamma(3.0, rate).log_prob(z.exp()) + z).sum(-1)

        return place(log_prior, expansion, False)

    rate, h = torch.tensor(2.0), 1e-4
    for i in range(2):
        own = torch.func.jacrev(lambda rate, i=i: of(rate)[i])(rate)
        true = (of(rate + h)[i] - of(rate - h)[i]) / (2 * h)
        torch.testing.assert_close(own, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.25, 0.4, 2.0])
def test_the_center_moves_as_the_mode_does_in_heavy_tails(scale):
    """Whole Newton steps run to and fro where the prior's curvature changes its sign."""
    center = torch.linspace(-1, 1, 9)[:, None]
    expansion = Expansion(center, -0.5 * center, torch.full((9, 1, 1), 1.8))

    def of(scale):
        return place(lambda z: StudentT(4.0, 0.0, scale).log_prob(z).sum(-1), expansion, False)

    scale, h = torch.tensor(scale), 1e-5
    for i in range(2):
        own = torch.func.jacrev(lambda scale, i=i: of(scale)[i])(scale)
        true = (of(scale + h)[i] - of(scale - h)[i]) / (2 * h)
        torch.testing.assert_close(own, true, rtol=1e-3, atol=1e-3)


def test_place_of_a_prior_that_is_not_log_concave_is_finite():
    """In the tails of a t distribution the curvature has the other sign."""
    flat = torch.zeros(1, 1, 1)
    for at in (0.0, 3.0, 30.0):
        z = torch.full((1, 1), at)
        around = place(
            lambda z: StudentT(3.0).log_prob(z).sum(-1), Expansion(z, 0 * z, flat), False
        )
        assert all(part.isfinite().all() for part in around)


def test_place_of_a_member_without_data_is_the_prior():
    z = torch.zeros(4, 1)
    expansion = Expansion(z, z, torch.zeros(4, 1, 1))
    around = place(lambda z: Normal(1.5, 0.2).log_prob(z).sum(-1), expansion, True)
    torch.testing.assert_close(around.center, torch.full((4, 1), 1.5))
    torch.testing.assert_close(around.root, torch.full((4, 1, 1), 5.0))
