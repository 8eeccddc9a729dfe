"""The posterior's precision at a point: the prior's Hessian plus the curvature of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.errors import ModelError
from pyro_scale.fullbatch.chunks import chunks_of
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.model.curvature.ggn import Curvature, RowKind
from pyro_scale.model.curvature.prior_hessian import prior_precision
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Of the rows' sum, or `"hessian"`, that of the whole log joint.
CurvatureKind: TypeAlias = RowKind | Literal["hessian"]


def precision_at(
    density: FullDataDensity,
    position: Tensor,
    sites: Sequence[str],
    kind: CurvatureKind,
    dense: bool,
    seed: int = 0,
    num_rows: int | None = None,
) -> Tensor:
    """Minus the log joint's Hessian, or what stands for it, over some sites: [d, d] or [d].

    It goes through the data once, and holds no more than the sum and a block of rows.  Of a
    density that ranks share out, it is this rank's terms.

    Args:
        density: the log joint of all rows.
        position: where, [D].
        sites: whose elements.
        kind: the curvature of the rows.
        dense: whether it is the matrix or the diagonal.
        seed: of Monte Carlo.
        num_rows: rows at a time.
    """
    log_posterior, layout = density.log_posterior, density.layout
    if kind == "hessian":
        places = density.layout.places(sites)
        if dense:
            return -density.hessian(position)[places][:, places] * log_posterior.num_data
        return -density.hessian_diagonal(position)[places] * log_posterior.num_data
    params = layout.unflatten(position)
    free = {name: params[name] for name in sites}
    held = {name: value for name, value in params.items() if name not in free}
    total, scale = None, log_posterior.num_data / (density.num_rows or log_posterior.num_data)
    chunks, share = chunks_of(log_posterior, density.data, num_rows, density.share), density.share
    if share.rank:  # rank 0 has the first chunk, and counts the prior
        size = len(layout.places(sites))
        total = position.new_zeros((size, size) if dense else size)
    for place, chunk in enumerate(chunks):
        if total is None:
            total = prior_precision(log_posterior, free, chunk.arguments, held, dense) / scale
        own = derived_seed(seed, share.rank + place * share.world, Purpose.CURVATURE)
        curvature = Curvature(log_posterior, kind, seed=own)
        where = (free, chunk.arguments, chunk.indices, held, chunk.keep)
        if dense:
            for block in curvature.blocks(*where):
                block.add_to(total)
        else:
            total += Layout.of(free).flatten(curvature.diagonal(*where))
    assert total is not None  # there is data
    return total.mul_(scale)  # some rows stand for all


def gaussian_at(
    density: FullDataDensity, position: Tensor, sites: Sequence[str], precision: Tensor
) -> Gaussian:
    """The Gaussian over some sites of this precision, [d, d] or [d].

    Raises:
        ModelError: it is not positive definite; it names the site.
    """
    places = density.layout.places(sites)
    mean = position[places]
    if precision.dim() == 1:
        if bool((precision > 0).all()):
            return Diagonal.of_precision(mean, precision)
        raise _indefinite(density, int(places[precision.argmin()]), float(precision.min()))
    try:
        return Dense.of_precision(mean, precision)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(precision)
        worst = int(places[vectors[:, 0].abs().argmax()])
        raise _indefinite(density, worst, float(values[0])) from None


def _indefinite(density: FullDataDensity, place: int, least: float) -> ModelError:
    site = density.layout.site_at(place)
    return ModelError(
        f"site '{site}': the log joint's curvature there is {least:.3g}, so there is no Gaussian. "
        "Either the point is not a mode (give MAP more steps, or leave mode= out), or the data do "
        "not determine the site, or its prior has heavy tails (use curvature='ggn', which is never "
        "negative, or a prior with lighter tails)"
    )
