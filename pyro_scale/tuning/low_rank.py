"""Geometries (whitened coordinates) of many dimensions: a scale for each element, and a few
directions with scales that differ from those of their elements."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.whitening import DiagonalWhitening, LowRankWhitening, Whitening
from pyro_scale.curvature.density import FullDataDensity

#: Directions at most; half of them are at either end of the curvature's spectrum.
MOST_AXES = 48
#: Factor between a direction's sd and that of its elements, within which it is left out.
_PLAIN = 2**0.5
#: Relative accuracy of curvatures along directions, and restarts of Lanczos' method at most.
_LANCZOS_TOLERANCE, _MOST_RESTARTS = 0.05, 20
#: Steps of the power method.
_POWERS = 8


def with_axes(
    whitening: DiagonalWhitening, density: FullDataDensity, temperature: float
) -> LowRankWhitening:
    """Whitened coordinates that have a scale for each element, and also the few directions in which
    the posterior's curvature at the center differs most from what these scales account for.

    Args:
        whitening: scales of the elements, and the center.
        density: log density of all rows, or of rows that represent them.
        temperature: temperature of the posterior.
    """
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
    except ArpackNoConvergence as error:
        lengths, axes = error.eigenvalues, error.eigenvectors
    sds = (torch.from_numpy(lengths).abs().clamp(min=1e-12) / temperature).rsqrt()
    return _with_furthest(center, scale, torch.from_numpy(axes), sds)


def learn(
    old: LowRankWhitening, z: Tensor, count: float, largest: float
) -> tuple[Tensor, LowRankWhitening]:
    """Updates whitened coordinates that consist of scales of elements and a few directions to the
    spread of draws.

    The new directions are the old ones, and those in which the draws vary more than independent
    elements do by chance (above twice Marchenko and Pastur's edge).

    Args:
        old: geometry of the draws.
        z: draws in that geometry, `[draws, d]`; of variance 1 if the geometry is right.
        count: effective number of draws.
        largest: largest factor by which an sd may change.

    Returns:
        (Variances of the draws in the old geometry, of elements and along its directions, in one
        vector; the new geometry, with the old center).
    """
    size, share = z.shape[1], count / (count + 2)
    doubled = old.double()
    z = z - z.mean(0)
    moved = doubled.push_forward(z)
    ratio = moved.square().mean(0) / doubled.variance
    bounded = (share * ratio + 1 - share).clamp(largest**-2, largest**2)
    scale = doubled.scale * bounded.sqrt()
    units = moved / scale  # elements have variance 1, plus that along directions
    _, singular, rows = torch.linalg.svd(units, full_matrices=False)
    edge = (1 + (size / count) ** 0.5) ** 2
    stands_out = singular.square() / len(units) > 2 * edge
    basis, _ = torch.linalg.qr(torch.cat([doubled.axes, rows[stands_out].mT], 1))
    inner = units @ basis
    share = count / (count + basis.shape[1] + 1)
    before = doubled.pull_back((basis / scale[:, None]).mT)
    covariance = share * inner.mT @ inner / len(inner) + (1 - share) * before @ before.mT
    lengths, turned = torch.linalg.eigh(covariance)
    variances = torch.cat([ratio, (z @ doubled.axes).square().mean(0)])
    sds = lengths.clamp(min=1e-12).sqrt()
    return variances, _with_furthest(old.center, scale.to(old.scale), basis @ turned, sds)


def _with_furthest(center: Tensor, scale: Tensor, axes: Tensor, sds: Tensor) -> LowRankWhitening:
    """Whitened coordinates with a scale for each element and those of the directions, at most
    `MOST_AXES`, whose sds differ most from 1.

    Args:
        center: center of the geometry, `[d]`.
        scale: scale of each element, `[d]`.
        axes: directions to choose from, `[d, axes]`.
        sds: sd along each direction relative to its elements, `[axes]`.
    """
    away = sds.log().abs()
    chosen = away.argsort(descending=True)[:MOST_AXES]
    stretch = torch.where(away > math.log(_PLAIN), sds, 1.0)[chosen]
    return LowRankWhitening(
        center, scale, axes[:, chosen].to(scale).contiguous(), stretch.to(scale)
    )


def steepest_by_products(
    density: FullDataDensity, whitening: Whitening | None, position: Tensor
) -> float:
    """The largest curvature at a point of the negative log density divided by N, in whitened
    coordinates if there are any; it limits the step size. An estimate from below, by the power
    method.

    Args:
        density: log density of all rows, or of rows that represent them.
        whitening: the whitened coordinates; None for params.
        position: unconstrained params `[D]`.
    """
    vector, length = torch.ones_like(position), math.nan
    for _ in range(_POWERS):
        vector = vector / vector.norm()
        along = vector if whitening is None else whitening.push_forward(vector)
        moved = -density.hessian_times(position, along)
        if whitening is not None:
            moved = whitening.pull_back(moved)
        length, vector = float(vector @ moved), moved
    return length
