"""Gauss-Hermite nodes for local latents, which follow the prior as the globals move.

The nodes of a member (a row or a group) are those of a Gaussian: the product of the Gaussian
expansion of the member's likelihood at an anchor, which is data, and of its prior at the current
values of the globals.  Every rule is the integral up to quadrature error, wherever the nodes lie,
so that values and gradients are those of one density.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

#: Log densities `[n]` of n members at their latents `[n, d]`, unconstrained, in nats.
MemberDensity: TypeAlias = Callable[[Tensor], Tensor]

#: Newton steps to the nodes' center where the prior is not Gaussian.
_NEWTON_STEPS = 3
#: Least pivot of a precision, relative to its diagonal: where a prior is not log-concave.
_LEAST_PIVOT = 0.05


class Expansion(NamedTuple):
    """Second-order expansion of the members' log likelihoods as functions of their latents.

    Attributes:
        center: the latents at which they are expanded, `[n, d]`, unconstrained.
        slope: gradient of each log likelihood there, `[n, d]`.
        precision: minus its Hessian there, `[n, d, d]`.
    """

    center: Tensor
    slope: Tensor
    precision: Tensor


class Gaussians(NamedTuple):
    """A Gaussian for the latents of every member.

    Attributes:
        center: means, `[n, d]`.
        root: lower Cholesky factors of the precisions, `[n, d, d]`.
    """

    center: Tensor
    root: Tensor

    def points(self, x: Tensor) -> Tensor:
        """The latents `[..., n, d]` at standardized points x, `[..., n, d]` or broadcast to it."""
        return self.center + solve_transposed(self.root, x)

    @property
    def log_volume(self) -> Tensor:
        """log |d z / d x| of every member, `[n]`."""
        return -torch.diagonal(self.root, dim1=-2, dim2=-1).log().sum(-1)


def gauss_hermite(count: int, dims: int) -> tuple[Tensor, Tensor]:
    """(Nodes x `[count**dims, dims]`, log weights w `[count**dims]`) in float64, with which the
    integral of f is sum_k w_k f(x_k): the weight exp(-x^2 / 2) is divided out."""
    x, w = (torch.tensor(values) for values in hermegauss(count))
    nodes = torch.cartesian_prod(*[x] * dims).reshape(-1, dims)
    log_weights = torch.cartesian_prod(*[w.log()] * dims).reshape(-1, dims).sum(-1)
    return nodes, log_weights + nodes.square().sum(-1) / 2


def derivatives(log_density: MemberDensity, z: Tensor) -> tuple[Tensor, Tensor]:
    """(Gradients `[n, d]`, Hessians `[n, d, d]`) of the members' log densities at latents `[n, d]`,
    of which each depends on its member's alone."""

    def slope(z: Tensor) -> Tensor:
        return torch.func.grad(lambda z: log_density(z).sum())(z)

    columns = [torch.func.grad(lambda z, j=j: slope(z)[:, j].sum())(z) for j in range(z.shape[1])]
    return slope(z), torch.stack(columns, -1)


def place(prior: MemberDensity, likelihood: Expansion, is_gaussian: bool) -> Gaussians:
    """The Gaussians of the nodes: at the mode of the prior times the likelihood's expansion, with
    the curvature there.

    The last Newton step is differentiable, so that the gradient with respect to the globals has the
    nodes' motion in it.

    Args:
        prior: log densities of the latents given the globals.
        likelihood: expansion of the log likelihoods at the anchor.
        is_gaussian: whether the prior is Gaussian in unconstrained space: one step is exact.
    """
    z = likelihood.center
    for _ in range(0 if is_gaussian else _NEWTON_STEPS):
        z = _newton(prior, likelihood, z).center.detach()
    result = _newton(prior, likelihood, z)
    if is_gaussian:
        return result
    _, hessian = derivatives(prior, result.center)
    return Gaussians(result.center, cholesky(likelihood.precision - hessian))


def _newton(prior: MemberDensity, likelihood: Expansion, z: Tensor) -> Gaussians:
    slope, hessian = derivatives(prior, z)
    away = (likelihood.precision @ (z - likelihood.center)[..., None])[..., 0]
    root = cholesky(likelihood.precision - hessian)
    step = solve_transposed(root, solve(root, likelihood.slope - away + slope))
    return Gaussians(z + step, root)


# ------------------------------------------------------------------ small matrices, elementwise


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factors of matrices `[..., d, d]`, d at most 3, by elementwise operations,
    which compile into the loop over rows.  Pivots that are not positive are replaced."""
    dims = matrix.shape[-1]
    factor = [[torch.zeros_like(matrix[..., 0, 0]) for _ in range(dims)] for _ in range(dims)]
    for i in range(dims):
        for j in range(i + 1):
            rest = matrix[..., i, j] - sum(factor[i][k] * factor[j][k] for k in range(j))
            if i == j:
                least = _LEAST_PIVOT * matrix[..., i, i].abs()
                tiny = torch.finfo(matrix.dtype).tiny ** 0.5
                factor[i][i] = torch.maximum(rest, least.detach()).clamp(min=tiny).sqrt()
            else:
                factor[i][j] = rest / factor[j][j]
    return torch.stack([torch.stack(row, -1) for row in factor], -2)


def solve(root: Tensor, b: Tensor) -> Tensor:
    """The solution x `[..., d]` of root x = b, for lower triangular matrices `[..., d, d]`."""
    x: list[Tensor] = []
    for i in range(root.shape[-1]):
        x.append((b[..., i] - sum(root[..., i, k] * x[k] for k in range(i))) / root[..., i, i])
    return torch.stack(x, -1)


def solve_transposed(root: Tensor, b: Tensor) -> Tensor:
    """The solution x `[..., d]` of root' x = b, for lower triangular matrices `[..., d, d]`."""
    dims, x = root.shape[-1], dict[int, Tensor]()
    for i in reversed(range(dims)):
        above = sum(root[..., k, i] * x[k] for k in range(i + 1, dims))
        x[i] = (b[..., i] - above) / root[..., i, i]
    return torch.stack([x[i] for i in range(dims)], -1)
