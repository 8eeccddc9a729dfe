"""Geometries of many dimensions: elements on scales of their own, and the few directions in which
that is not enough."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.whitening import DiagonalWhitening, LowRankWhitening, Whitening
from pyro_scale.curvature.density import FullDataDensity

#: Directions, half of them at either end of the curvature's spectrum.
MOST_AXES = 48
#: Sds of a direction, over those of its elements, within which it needs none of its own.
_PLAIN = 2**0.5
#: Accuracy of the curvature along a direction, and restarts of Lanczos' method at most.
_LANCZOS_TOLERANCE, _MOST_RESTARTS = 0.05, 20


def with_axes(
    whitening: DiagonalWhitening, density: FullDataDensity, temperature: float
) -> LowRankWhitening:
    """The geometry with the directions in which the curvature at its center is furthest from the
    temperature, by Lanczos' method on products with the Hessian (ARPACK's, through SciPy)."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # slow to import

    center, scale = whitening.center, whitening.scale
    size = len(center)

    def product(vector: np.ndarray) -> np.ndarray:
        tangent = torch.from_numpy(np.array(vector.reshape(-1))).to(scale)
        curvature = -density.hessian_times(center, whitening.push_forward(tangent))
        return whitening.pull_back(curvature).double().cpu().numpy()

    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if size < 3:
        return LowRankWhitening(
            center, scale, torch.eye(size, 1).to(scale), torch.ones(1).to(scale)
        )
    how = {"k": min(MOST_AXES, size - 1), "which": "BE", "v0": start.numpy()}
    try:
        lengths, axes = eigsh(operator, tol=_LANCZOS_TOLERANCE, maxiter=_MOST_RESTARTS, **how)
    except ArpackNoConvergence as found:
        lengths, axes = found.eigenvalues, found.eigenvectors
    sds = (torch.from_numpy(lengths).abs().clamp(min=1e-12) / temperature).rsqrt()
    return _of_axes(center, scale, torch.from_numpy(axes), sds)


def learn(
    old: LowRankWhitening, z: Tensor, count: float, largest: float
) -> tuple[Tensor, LowRankWhitening]:
    """(The variances of draws in the old geometry, of elements and along its axes; the new geometry
    about the old center).

    Elements take the scales that draws show.  Directions are the old ones and those in which draws
    vary more than chance, by Marchenko and Pastur's edge, makes of independent elements.

    Args:
        old: the geometry of the draws.
        z: draws in that, `[draws, d]`, of variance 1 where it is right.
        count: how many independent ones they are worth.
        largest: the factor by which an sd may change.
    """
    size, share = z.shape[1], count / (count + 2)
    doubled = old.double()
    z = z - z.mean(0)
    moved = doubled.push_forward(z)
    ratio = moved.square().mean(0) / doubled.variance
    bounded = (share * ratio + 1 - share).clamp(largest**-2, largest**2)
    scale = doubled.scale * bounded.sqrt()
    units = moved / scale  # of variance 1 + what the axes add, element by element
    _, singular, rows = torch.linalg.svd(units, full_matrices=False)
    edge = (1 + (size / count) ** 0.5) ** 2
    stands_out = singular.square() / len(units) > 2 * edge
    basis, _ = torch.linalg.qr(torch.cat([doubled.axes, rows[stands_out].mT], 1))
    inner = units @ basis
    share = count / (count + basis.shape[1] + 1)
    before = doubled.pull_back((basis / scale[:, None]).mT)
    covariance = share * inner.mT @ inner / len(inner) + (1 - share) * before @ before.mT
    lengths, turned = torch.linalg.eigh(covariance)
    seen = torch.cat([ratio, (z @ doubled.axes).square().mean(0)])
    sds = lengths.clamp(min=1e-12).sqrt()
    return seen, _of_axes(old.center, scale.to(old.scale), basis @ turned, sds)


def _of_axes(center: Tensor, scale: Tensor, axes: Tensor, sds: Tensor) -> LowRankWhitening:
    """Of so many directions at most, the furthest from what elements say; as many from one window
    to the next, so that the program stays the same."""
    away = sds.log().abs()
    chosen = away.argsort(descending=True)[:MOST_AXES]
    stretch = torch.where(away > math.log(_PLAIN), sds, 1.0)[chosen]
    return LowRankWhitening(
        center, scale, axes[:, chosen].to(scale).contiguous(), stretch.to(scale)
    )


#: Steps of the power method.
_POWERS = 8


def steepest_by_products(
    density: FullDataDensity, whitening: Whitening | None, position: Tensor
) -> float:
    """The largest curvature over N at a position, `[D]`, in whitened coordinates if there are any;
    from below, by the power method on products with the Hessian."""
    vector, length = torch.ones_like(position), math.nan
    for _ in range(_POWERS):
        vector = vector / vector.norm()
        along = vector if whitening is None else whitening.push_forward(vector)
        moved = -density.hessian_times(position, along)
        if whitening is not None:
            moved = whitening.pull_back(moved)
        length, vector = float(vector @ moved), moved
    return length
