"""The posterior's precision at a point: the prior's Hessian plus the curvature of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.curvature.chunks import CHUNK_ROWS, Chunk
from pyro_scale.curvature.density import FullDataDensity, zero_nats
from pyro_scale.curvature.ggn import Curvature, RowKind
from pyro_scale.curvature.prior_hessian import precision_of_prior
from pyro_scale.errors import ModelError
from pyro_scale.model.derivatives import gradient_of
from pyro_scale.rng.seeds import Purpose, derived_seed

#: A curvature that is a sum over rows, or `"hessian"`, that of the whole log joint.
CurvatureKind: TypeAlias = RowKind | Literal["hessian"]


@dataclass(frozen=True)
class CurvatureSpec:
    """The settings by which the curvature of the log joint is computed at a point.

    Attributes:
        position: the point, a vector [D] of all unconstrained params.
        sites: names of the sites whose curvature is computed; their elements are d in all.
        kind: the kind of curvature, such as "ggn" or "hessian".
        seed: seed of drawn observations, for curvature by Monte Carlo.
        num_rows: number of rows that the model is run on at a time; None for `CHUNK_ROWS`.
    """

    position: Tensor
    sites: Sequence[str]
    kind: CurvatureKind
    seed: int = 0
    num_rows: int | None = None

    def split(self, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The point's values as two dicts of tensors by site: (those of `sites`, those of all other
        sites).
        """
        held = layout.unflatten(self.position)
        return {name: held.pop(name) for name in self.sites}, held

    def by_chunk(self, density: FullDataDensity) -> Iterator[tuple[Curvature, Chunk]]:
        """Yields for each chunk of the density's rows (an object that computes the likelihood's
        curvature, with the chunk's own seed; the chunk). Not for the kind "hessian".

        Raises:
            DataError: the data do not hold N rows.
        """
        assert self.kind != "hessian"
        for place, chunk in enumerate(density.chunks(self.num_rows or CHUNK_ROWS)):
            seed = derived_seed(self.seed, density.share.number(place), Purpose.CURVATURE)
            yield Curvature(density.log_posterior, self.kind, seed=seed), chunk


class Expansion(NamedTuple):
    """The log joint of all rows to second order around a point, in the elements of some sites.

    Attributes:
        value: the log joint divided by N, in nats.
        slope: the gradient of the log joint divided by N, [d].
        precision: minus the Hessian of the log joint, or an approximation of that, in nats and not
            divided by N: [d, d], or the diagonal [d].
    """

    value: Tensor
    slope: Tensor
    precision: Tensor


def expand(density: FullDataDensity, spec: CurvatureSpec, dense: bool) -> Expansion:
    """An `Expansion`: the log joint of all rows, its gradient and its curvature at the spec's
    position, in the elements of the spec's sites.

    The data are read once, and the model runs once on each chunk of rows.  If the density sums over
    a share of the chunks only (as several processes divide them), the results are that share's
    terms, which have to be added to those of the other shares.

    Args:
        density: the log joint density of all rows.
        spec: the point, the sites, and the kind of curvature.
        dense: whether the precision is a matrix [d, d]; otherwise it is the diagonal [d].

    Raises:
        DataError: the data do not hold N rows.
    """
    if spec.kind == "hessian":
        return _expand_by_hessian(density, spec, dense)
    log_posterior = density.log_posterior
    free, held = spec.split(density.layout)
    layout, scale = Layout.from_tensors(free), log_posterior.num_data / density.rows_in_all
    value, slope = zero_nats(spec.position), spec.position.new_zeros(layout.size)
    total = spec.position.new_zeros((layout.size, layout.size) if dense else layout.size)
    for place, (curvature, chunk) in enumerate(spec.by_chunk(density)):
        run = curvature.observe(free, chunk.arguments, chunk.indices, held, chunk.keep)
        with torch.enable_grad():
            size = log_posterior.batch_size(chunk.arguments)
            evaluation = log_posterior.evaluate(run.sites, size)
        part = density.part_of(evaluation, chunk)
        slopes = gradient_of(part, run.leaves)
        value, slope = value + part.detach(), slope + layout.flatten(slopes)
        if not density.share.number(place):  # the prior counts once
            total += precision_of_prior(log_posterior, evaluation.log_prior, run.leaves, dense)
            total /= scale
        if dense:
            for block in run.blocks():
                block.add_to(total)
        else:
            total += layout.flatten(curvature.diagonal_of(run))
    return Expansion(value, slope, total.mul_(scale))  # a sample of the rows stands for all


def _expand_by_hessian(density: FullDataDensity, spec: CurvatureSpec, dense: bool) -> Expansion:
    """The log joint, its gradient and its curvature at the spec's position, where the precision is
    minus the exact Hessian of the log joint.

    Args:
        density: the log joint density of all rows.
        spec: the point and the sites.
        dense: whether the precision is a matrix [d, d]; otherwise it is the diagonal [d].
    """
    num_data, places = density.log_posterior.num_data, density.layout.places(spec.sites)
    if dense:
        value, slope, matrix = density.derivatives(spec.position)
        return Expansion(value, slope[places], matrix[places[:, None], places].mul_(-num_data))
    value, slope = density.grad(spec.position)
    diagonal = density.hessian_diagonal(spec.position)
    return Expansion(value, slope[places], -diagonal[places] * num_data)


def gaussian_at(density: FullDataDensity, spec: CurvatureSpec, precision: Tensor) -> Gaussian:
    """The Laplace approximation of the posterior in the elements of the spec's sites: the Gaussian
    with the spec's position as its mean and this precision.

    Args:
        density: the density that is approximated, for the order of params.
        spec: the point and the sites.
        precision: the Gaussian's precision, a diagonal [d] or a matrix [d, d]; a matrix is
            overwritten, to save memory.

    Raises:
        ModelError: the precision is not positive definite; the message names the site.
    """
    places = density.layout.places(spec.sites)
    mean = spec.position[places]
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
    """The error for a Gaussian whose precision is not positive definite, with a message that names
    the site; returned, for the caller to raise.

    Args:
        density: the density that is approximated, for the names of sites.
        place: index, in a position [D], of the element that is to blame.
        least: the precision there, or the smallest eigenvalue, for the message.
    """
    site = density.layout.site_at(place)
    return ModelError(
        f"site '{site}': the log joint's curvature there is {least:.3g}, so there is no Gaussian. "
        "Either the point is not a mode (give MAP more steps, or leave mode= out), or the data do "
        "not determine the site, or its prior has heavy tails (use curvature='ggn', which is never "
        "negative, or a prior with lighter tails)"
    )
