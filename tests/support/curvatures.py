"""Curvatures written out by hand, and the rows and models that they are of."""

import mpmath
import pyro
import pyro.distributions as dist
import torch
from models import normal, of_rows
from reference import close, double, normals

import pyro_scale as ps
from pyro_scale.core.gaussian import Block
from pyro_scale.core.layout import Layout

TIGHT = 1e-10
KINDS = ["ggn", "empirical_fisher", "monte_carlo"]
#: Rows of the batch and of the whole data.
B, N = 7, 40
X = normals(B, 2, seed=1)
EYE = torch.eye(2, dtype=torch.float64)


def flat_jacobian(function, params):
    """The Jacobian [*shape, D] of a function of a dict, in the dict's order."""
    found = torch.func.jacrev(function)(dict(params))
    rank = function(params).dim()
    return torch.cat([found[n].reshape(*found[n].shape[:rank], -1) for n in params], -1)


def flat_hessian(function, params):
    """The Hessian [D, D] of a scalar function of a dict."""
    layout = Layout.from_tensors(params)
    return torch.func.hessian(lambda vector: function(layout.unflatten(vector)))(
        layout.flatten(params)
    )


def gauss_newton(outputs, information, params):
    """The sum over rows of J'FJ.

    Args:
        outputs: params -> `[B, K]`.
        information: outputs `[B, K]` -> `[B, K, K]`.
        params: by site.
    """
    jacobian = flat_jacobian(outputs, params)
    inner = information(outputs(params))
    return torch.einsum("bki,bkl,blj->ij", jacobian, inner, jacobian)


def outer(log_lik, params):
    """The sum of the outer products of the rows' gradients; log_lik: params -> `[B]`."""
    jacobian = flat_jacobian(log_lik, params)
    return jacobian.T @ jacobian


def diagonals(*parts):
    return torch.diag_embed(torch.stack(parts, -1))


def trigamma(values):
    return double(*(float(mpmath.psi(1, float(v))) for v in values))


def check(found, params, batch, expected, tolerance=TIGHT, held=None, indices=None):
    """That the three ways to a curvature are the same expected matrix."""
    layout = Layout.from_tensors(params)
    where = {"indices": indices, "held": held}
    dense = found.dense(params, batch, **where)
    assert float(expected.abs().max()) > 1e-2  # something is there to be wrong
    close(dense, expected, tolerance)
    close(layout.flatten(found.diagonal(params, batch, **where)), expected.diagonal(), tolerance)
    assert {n: p.shape for n, p in found.diagonal(params, batch).items()} == {
        n: p.shape for n, p in params.items()
    }
    for seed in range(2):
        vector = normals(layout.size, seed=seed).to(expected)
        product = found.product(params, batch, layout.unflatten(vector), **where)
        close(layout.flatten(product), expected @ vector, tolerance)


def of(model, kind="ggn", num_data=N, **kwargs):
    return ps.Curvature(ps.LogPosterior(model, num_data=num_data), kind, **kwargs)


def weights(*shape, name="w"):
    return pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))


W, V = double(0.3, -0.4), double(-0.2, 0.5)
PARAMS = {"w": W, "v": V}


# ------------------------------------------------------------------ rows

COUNTS = torch.arange(B).double()
POSITIVE = normals(B, seed=5).exp()
REAL = normals(B, seed=6)
CLASSES = torch.arange(B) % 3
M = normals(2, 3, seed=8)  # weights of three outputs
Z = normals(B, 3, seed=9)
NOISE = double(0.5, 0.8, 1.3)
ROWS = double(0.3, 1.7, 2.0, 0.4, 0.1, 1.0, 0.8)
CELLS = normals(B, 3, seed=10).abs()


# ------------------------------------------------------------------ models, and what they are


def observed(make):
    """A model of w and v whose observations' distribution is make(x, w, v)."""
    return of_rows(lambda x, w, v: make(x, w, v), w=normal(2), v=normal(2))


poisson = of_rows(lambda x, w: dist.Poisson((x @ w).exp()), w=normal(2))


def poisson_by_hand(w, x):
    return (x.T * (x @ w).exp()) @ x


def squared(function):
    return of_rows(lambda x, w: dist.Normal(function(x, w), 0.5), w=normal(2))


def logits_of(x, w, v):
    """Three classes' logits."""
    return torch.stack([x @ w, x @ v, (x**2) @ (w - v)], -1)


def of_classes(logits):
    p = logits.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


def gamma(x, w, v):
    return dist.Gamma((x @ v).exp(), (x @ w).exp())


def gamma_outputs(x, w, v):
    return torch.stack([(x @ v).exp(), (x @ w).exp()], -1)


def of_gamma(outputs):
    shape, rate = outputs.unbind(-1)
    cross = -1 / rate
    rows = [torch.stack([trigamma(shape), cross], -1), torch.stack([cross, shape / rate**2], -1)]
    return torch.stack(rows, -2)


def of_cells(cells):
    """Of M, with these weights of rows and outputs."""
    return torch.einsum("bi,bj,bk,kl->ikjl", X, X, cells / NOISE**2, torch.eye(3)).reshape(6, 6)


def kronecker_block(places, left, right, isotropic):
    """A block of the precision `left x right + isotropic I`."""
    (a, left), (b, right) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    return Block(places, left, right, 1 / (torch.outer(a, b) + isotropic))


def check_gaussian(gaussian, precision):
    """That a Gaussian of some structure is the one of this dense precision."""
    covariance, size = torch.linalg.inv(precision), len(precision)
    close(gaussian.precision, precision, 1e-12)
    close(gaussian.covariance, covariance, 1e-12)
    close(gaussian.variance, covariance.diagonal(), 1e-12)
    close(gaussian.precision_diagonal, precision.diagonal(), 1e-12)
    close(gaussian.log_det, torch.logdet(covariance), 1e-12)
    root = gaussian.sample(torch.eye(size)) - gaussian.mean
    close(root.T @ root, covariance, 1e-12)
    x = normals(6, size, seed=4)
    reference = torch.distributions.MultivariateNormal(gaussian.mean, precision_matrix=precision)
    close(torch.vmap(gaussian.log_prob)(x), reference.log_prob(x), 1e-12)
    close(gaussian.temper(0.3).covariance, 0.3 * covariance, 1e-12)
