"""The posterior's precision at a point: the prior's Hessian plus the curvature of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.errors import ModelError
from pyro_scale.fullbatch.chunks import CHUNK_ROWS, Chunk, chunks_of
from pyro_scale.fullbatch.density import FullDataDensity, no_nats
from pyro_scale.model.curvature.ggn import Curvature, RowKind
from pyro_scale.model.curvature.prior_hessian import precision_of_prior
from pyro_scale.model.derivatives import gradient_of
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Of the rows' sum, or `"hessian"`, that of the whole log joint.
CurvatureKind: TypeAlias = RowKind | Literal["hessian"]


class Expansion(NamedTuple):
    """The log joint of all rows around a point, in the elements of some sites.

    Attributes:
        value: over N, in nats.
        slope: its gradient over N, [d].
        precision: minus its Hessian, or what stands for it, [d, d] or [d].
    """

    value: Tensor
    slope: Tensor
    precision: Tensor


def expansion_at(
    density: FullDataDensity,
    position: Tensor,
    sites: Sequence[str],
    kind: CurvatureKind,
    dense: bool,
    seed: int = 0,
    num_rows: int | None = None,
) -> Expansion:
    """The log joint to second order at a position.

    It goes through the data once, with one run of the model for all that is asked of some rows,
    and holds no more than the sum and a block of rows.  Of a density that ranks share out, it is
    this rank's terms.

    Args:
        density: the log joint of all rows.
        position: where, [D].
        sites: whose elements.
        kind: the curvature of the rows.
        dense: whether it is the matrix or the diagonal.
        seed: of Monte Carlo.
        num_rows: rows at a time.

    Raises:
        DataError: the data do not hold N rows.
    """
    log_posterior, share = density.log_posterior, density.share
    if kind == "hessian":
        return _with_hessian(density, position, density.layout.places(sites), dense)
    params = density.layout.unflatten(position)
    free = {name: params[name] for name in sites}
    held = {name: value for name, value in params.items() if name not in free}
    layout, scale = Layout.from_tensors(free), log_posterior.num_data / density.rows_in_all
    value, slope = no_nats(position), position.new_zeros(layout.size)
    total = position.new_zeros((layout.size, layout.size) if dense else layout.size)
    for place, (chunk, kept) in enumerate(density.pieces(num_rows or CHUNK_ROWS)):
        own = derived_seed(seed, share.rank + place * share.world, Purpose.CURVATURE)
        curvature = Curvature(log_posterior, kind, seed=own)
        run = curvature.observe(free, chunk.arguments, chunk.indices, held)
        with torch.enable_grad():
            size = log_posterior.batch_size(chunk.arguments)
            evaluation = log_posterior.evaluate(run.sites, size)
        part = density.part_of(evaluation, chunk, kept)
        slopes = gradient_of(part, run.leaves)
        value, slope = value + part.detach(), slope + layout.flatten(slopes)
        if not share.rank and not place:  # it counts once
            total += precision_of_prior(log_posterior, evaluation.log_prior, run.leaves, dense)
            total /= scale
        where = (free, chunk.arguments, chunk.indices, held, chunk.keep, run)
        if dense:
            for block in curvature.blocks(*where):
                block.add_to(total)
        else:
            total += layout.flatten(curvature.diagonal(*where))
    return Expansion(value, slope, total.mul_(scale))  # some rows stand for all


def curvatures_of(
    density: FullDataDensity, kind: RowKind, seed: int, num_rows: int | None
) -> Iterator[tuple[Curvature, Chunk]]:
    """Every chunk of the rows, or of this rank's share, with its curvature; arguments as for
    `expansion_at`."""
    share = density.share
    chunks = chunks_of(density.log_posterior, density.data, num_rows, share)
    for place, chunk in enumerate(chunks):
        own = derived_seed(seed, share.rank + place * share.world, Purpose.CURVATURE)
        yield Curvature(density.log_posterior, kind, seed=own), chunk


def _with_hessian(
    density: FullDataDensity, position: Tensor, places: Tensor, dense: bool
) -> Expansion:
    """The same with the Hessian of the whole log joint."""
    num_data = density.log_posterior.num_data
    if dense:
        value, slope, matrix = density.derivatives(position)
        return Expansion(value, slope[places], -matrix[places][:, places] * num_data)
    value, slope = density.grad(position)
    diagonal = density.hessian_diagonal(position)
    return Expansion(value, slope[places], -diagonal[places] * num_data)


def gaussian_at(
    density: FullDataDensity, position: Tensor, sites: Sequence[str], precision: Tensor
) -> Gaussian:
    """The Gaussian over some sites of this precision, [d, d], whose memory it takes, or [d].

    Raises:
        ModelError: it is not positive definite; it names the site.
    """
    places = density.layout.places(sites)
    mean = position[places]
    if precision.dim() == 1:
        if bool((precision > 0).all()):
            return Diagonal.from_precision(mean, precision)
        raise indefinite(density, int(places[precision.argmin()]), float(precision.min()))
    try:
        return Dense.from_precision(mean, precision, overwrite=True)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(precision)
        worst = int(places[vectors[:, 0].abs().argmax()])
        raise indefinite(density, worst, float(values[0])) from None


def indefinite(density: FullDataDensity, place: int, least: float) -> ModelError:
    """What is said where a precision is not positive, at a place of a position."""
    site = density.layout.site_at(place)
    return ModelError(
        f"site '{site}': the log joint's curvature there is {least:.3g}, so there is no Gaussian. "
        "Either the point is not a mode (give MAP more steps, or leave mode= out), or the data do "
        "not determine the site, or its prior has heavy tails (use curvature='ggn', which is never "
        "negative, or a prior with lighter tails)"
    )
