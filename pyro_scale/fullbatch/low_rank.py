"""The posterior's precision at a point by the directions that the data know most about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.gaussian import LowRank
from pyro_scale.core.layout import Layout
from pyro_scale.errors import ModelError
from pyro_scale.fullbatch.chunks import chunks_of
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.precision import curvatures_of
from pyro_scale.model.curvature.ggn import RowKind
from pyro_scale.model.curvature.prior_hessian import prior_precision


def low_rank_at(
    density: FullDataDensity,
    position: Tensor,
    sites: Sequence[str],
    kind: RowKind,
    rank: int,
    seed: int = 0,
    num_rows: int | None = None,
) -> LowRank:
    """The Gaussian over some sites at a point: its precision is the prior's diagonal, the largest
    part of the likelihood's curvature of that rank in units of the prior's sds (Spantini et al.
    2015), and what the curvature's diagonal has beyond that.

    The directions are found by Lanczos' method (ARPACK's, through SciPy) on products with the
    curvature, a few passes through the data for each.

    Args:
        density: the log joint of all rows.
        position: where, [D].
        sites: whose elements.
        kind: the curvature of the rows.
        rank: how many directions.
        seed: of Monte Carlo.
        num_rows: rows at a time.

    Raises:
        ModelError: the prior has no positive curvature at some element.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh  # slow to import

    log_posterior, params = density.log_posterior, density.layout.unflatten(position)
    free = {name: params[name] for name in sites}
    held = {name: value for name, value in params.items() if name not in free}
    layout, num_data = Layout.from_tensors(free), log_posterior.num_data
    rows = num_data / density.rows_in_all
    first = next(chunks_of(log_posterior, density.data, num_rows))
    prior = prior_precision(log_posterior, free, first.arguments, held, dense=False)
    if not bool((prior > 0).all()):
        site = density.layout.site_at(int(density.layout.places(sites)[prior.argmin()]))
        raise ModelError(
            f"site '{site}': structure='low_rank' takes its units from the prior, whose curvature "
            f"is {float(prior.min()):.3g} there: use structure='dense' or 'diag', or a Normal prior"
        )
    how = position, sites, kind, seed, num_rows
    total, scale = rows * density.add_up(_curvature, None, *how), prior.rsqrt()

    def product(vector: np.ndarray) -> np.ndarray:
        along = scale * torch.from_numpy(vector.reshape(-1)).to(scale)
        return (scale * rows * density.add_up(_curvature, along, *how)).double().cpu().numpy()

    size = layout.size
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    if not bool((total > 0).any()):  # the data say nothing
        lengths, axes = np.zeros(1), np.eye(size, 1)
    elif rank < size - 1:
        lengths, axes = eigsh(operator, k=rank, which="LA", v0=start.numpy())
    else:
        lengths, axes = np.linalg.eigh(operator @ np.eye(size))
    weights = torch.from_numpy(lengths).clamp(min=0).sqrt()
    factor = (torch.from_numpy(axes) * weights).to(scale) / scale[:, None]
    rest = (total - factor.square().sum(1)).clamp(min=0)
    mean = position[density.layout.places(sites)]
    return LowRank.from_precision(mean, prior + rest, factor)


def _curvature(
    density: FullDataDensity,
    vector: Tensor | None,
    position: Tensor,
    sites: Sequence[str],
    kind: RowKind,
    seed: int,
    num_rows: int | None,
) -> Tensor:
    """The rows' curvature times a vector, [d], or its diagonal."""
    params = density.layout.unflatten(position)
    free = {name: params.pop(name) for name in sites}
    layout = Layout.from_tensors(free)
    total = position.new_zeros(layout.size)
    for curvature, chunk in curvatures_of(density, kind, seed, num_rows):
        where = (chunk.indices, params, chunk.keep)
        if vector is None:
            found = curvature.diagonal(free, chunk.arguments, *where)
        else:
            found = curvature.product(free, chunk.arguments, layout.unflatten(vector), *where)
        total += layout.flatten(found)
    return total
