"""Gauss-Hermite nodes for local latents, which follow the globals as these move.

The nodes of a member (a row or a group) lie on a Gaussian at the mode of its latents given the
current globals: a Newton step from the mode at an anchor, which is a column of the data.  Where the
members' densities are Gaussian the rule is exact, wherever the anchor is (Liu and Pierce, A note
on Gauss-Hermite quadrature, Biometrika 1994).

The nodes are held fixed when the log of their sum is differentiated.  The gradient is then
Fisher's identity, d log p(y | globals) = E[d log p(y, z | globals) | y], by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

#: Log densities `[n]` of n members at their latents `[n, d]`, unconstrained, in nats.
MemberDensity: TypeAlias = Callable[[Tensor], Tensor]

#: Least pivot of a precision, relative to its diagonal where that is positive.
_LEAST_PIVOT = 0.05
#: Fractions of a Newton step that are compared where the globals may be far from the anchor.
_FRACTIONS = 1.0, 0.25, 0.05
#: Newton steps there.
_FAR_STEPS = 2


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
    gradient = torch.func.grad(lambda z: log_density(z).sum())
    slope, pull = torch.func.vjp(gradient, z)[:2]
    directions = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    columns = [pull(direction.expand_as(z))[0] for direction in directions]
    return slope, torch.stack(columns, -1)


def place(log_joint: MemberDensity, center: Tensor, is_far: bool) -> Gaussians:
    """The Gaussians of the nodes, at the members' modes given the globals and with the curvature
    there.

    Args:
        log_joint: log densities of data and latents given the globals, detached from these.
        center: the modes at the anchor, `[n, d]`.
        is_far: whether the globals may be far from the anchor, as they are with few members: more
            steps are taken, and none that lowers a density.
    """
    if not is_far:
        return newton_step(log_joint, center)
    for _ in range(_FAR_STEPS):
        ahead = newton_step(log_joint, center).center
        center = best_of(log_joint, center, ahead - center)[0]
    return gaussians_at(log_joint, center)


def gaussians_at(log_joint: MemberDensity, z: Tensor) -> Gaussians:
    """The Gaussians at latents `[n, d]` with the curvature there."""
    return Gaussians(z, cholesky(-derivatives(log_joint, z)[1]))


def newton_step(log_joint: MemberDensity, z: Tensor) -> Gaussians:
    """The Gaussians around the end of one Newton step from latents `[n, d]`, with the curvature
    where the step begins."""
    slope, hessian = derivatives(log_joint, z)
    root = cholesky(-hessian)
    return Gaussians(z + solve_transposed(root, solve(root, slope)), root)


def best_of(log_joint: MemberDensity, z: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """(The best of each member's latents on the way from z along a step, `[n, d]`; their log
    densities, `[n]`)."""
    fractions = torch.tensor([*_FRACTIONS, 0.0]).to(z)
    places = z + fractions[:, None, None] * step
    values = torch.vmap(log_joint)(places).nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    best = values.argmax(0)[None]
    chosen = places.gather(0, best[..., None].expand(1, *z.shape))[0]
    return chosen, values.gather(0, best)[0]


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
                # a negative curvature counts as positive: a step as long as the region is wide
                least = torch.maximum(_LEAST_PIVOT * matrix[..., i, i], -matrix[..., i, i])
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
