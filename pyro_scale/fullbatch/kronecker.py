"""The posterior's precision at a point by Kronecker factors: K-FAC's Laplace approximation (Ritter
et al. 2018)."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.kronecker import Block, Kronecker
from pyro_scale.core.layout import Layout
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.fullbatch.chunks import chunks_of
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.precision import curvatures_of, indefinite
from pyro_scale.model.curvature.ggn import RowKind
from pyro_scale.model.curvature.kronecker import Factors
from pyro_scale.model.curvature.prior_hessian import correlated_sites, prior_precision

#: By how much of itself a prior's precision may differ within a block.
_SAME = 1e-5


class Sums(NamedTuple):
    """Sums over rows.

    Attributes:
        factors: by site, of parts that have no element in common.
        diagonal: of the curvature, of the elements of all other sites, [d].
        everywhere: the sites with factors in every chunk.
    """

    factors: dict[str, list[Factors]]
    diagonal: Tensor
    everywhere: set[str]

    def plus(self, others: Sums) -> Sums:
        """These and those of other rows."""
        factors = {name: list(own) for name, own in self.factors.items()}
        for name, own in others.factors.items():
            for part in own:
                part.add_to_each(factors.setdefault(name, []))
        return Sums(factors, self.diagonal + others.diagonal, self.everywhere & others.everywhere)


def kronecker_at(
    density: FullDataDensity,
    position: Tensor,
    sites: Sequence[str],
    kind: RowKind,
    seed: int = 0,
    num_rows: int | None = None,
) -> Kronecker:
    """The Gaussian over some sites at a point.

    Weights of products, convolutions and projections, and biases, have a block each, whose
    likelihood's precision is the Kronecker product of its factors; all other elements are
    independent.  Factors are means and sums over all rows, however they come in chunks.

    Args:
        density: the log joint of all rows.
        position: where, [D].
        sites: whose elements.
        kind: the curvature of the rows.
        seed: of Monte Carlo.
        num_rows: rows at a time.

    Raises:
        ArgumentError: no site has factors.
        ModelError: the prior of a weight has several scales or correlates its elements, unless the
            weight is a vector; or a precision is not positive.
    """
    log_posterior, params = density.log_posterior, density.layout.unflatten(position)
    free = {name: params[name] for name in sites}
    held = {name: value for name, value in params.items() if name not in free}
    layout, first = Layout.of(free), next(chunks_of(log_posterior, density.data, num_rows))
    prior = prior_precision(log_posterior, free, first.arguments, held, dense=False)

    def sums(among: Collection[str]) -> Sums:
        how = position, sites, kind, set(among), seed, num_rows
        first, *others = density.of_each(_sums, *how)
        for each in others:
            first = first.plus(each)
        return first

    factors, total, everywhere = sums(sites)
    if everywhere < set(factors):  # what looks like a row's in some chunks is not in others
        factors, total, everywhere = sums(everywhere)
    if not factors:
        raise ArgumentError(
            "structure='kron': no site is the weight of a matrix product, a convolution or a "
            f"projection, or a bias, among {list(sites)}: use structure='diag' or 'dense'"
        )
    scale = log_posterior.num_data / density.rows_in_all
    alone = layout.places([name for name in free if name not in factors])
    precision = scale * total + prior
    least = torch.where(total > 0, precision, prior)
    if not bool((least > 0).all()):
        places = density.layout.places(sites)
        raise indefinite(density, int(places[least.argmin()]), float(least.min()))
    blocks = []
    correlated = correlated_sites(log_posterior, free, first.arguments, held)
    for name, own in factors.items():
        own_prior = prior[layout.slices()[name]]
        if name in correlated:
            _check_is_vector(name, own)
            others = held | {other: value for other, value in free.items() if other != name}
            site = {name: free[name]}
            own_prior = prior_precision(log_posterior, site, first.arguments, others, dense=True)
        for each in own:
            block = _block(name, each, own_prior, scale, layout)
            if not bool((block.variances > 0).all()):
                place = density.layout.places(sites)[block.places.flatten()[0]]
                raise indefinite(density, int(place), float(1 / block.variances.min()))
            blocks.append(block)
    mean = position[density.layout.places(sites)]
    return Kronecker(mean, tuple(blocks), alone, 1 / precision[alone])


def _sums(
    density: FullDataDensity,
    position: Tensor,
    sites: Sequence[str],
    kind: RowKind,
    among: Container[str],
    seed: int,
    num_rows: int | None,
) -> Sums:
    """This rank's; factors of those sites that are among some."""
    params = density.layout.unflatten(position)
    free = {name: params.pop(name) for name in sites}
    layout = Layout.of(free)
    total = Sums({}, position.new_zeros(layout.size), set(free))
    for curvature, chunk in curvatures_of(density, kind, seed, num_rows):
        where = (free, chunk.arguments, chunk.indices, params, chunk.keep)
        found, others = curvature.kronecker(*where, among)
        diagonal = torch.zeros_like(total.diagonal)
        if others:
            diagonal[layout.places(list(others))] = Layout.of(others).flatten(others)
        total = total.plus(Sums(found, diagonal, set(found)))
    return total


def _check_is_vector(name: str, factors: Sequence[Factors]) -> None:
    """Refuses a prior of correlated elements where it does not fit into a block."""
    if len(factors) > 1 or 1 not in factors[0].places.shape:
        raise ModelError(
            f"site '{name}': structure='kron' needs a prior of independent elements for a weight, "
            "and this one correlates them: use structure='dense' or 'diag', or give the site a "
            "Normal prior of one scale"
        )


def _block(name: str, factors: Factors, prior: Tensor, scale: float, layout: Layout) -> Block:
    """One block, with the prior's precision of the site's elements, [d] or [d, d]."""
    inputs, outputs = scale * factors.mean_inputs.to(prior), factors.outputs.to(prior)
    where, places = factors.places.flatten(), layout.slices()[name].start + factors.places
    if prior.dim() == 2:
        return Block.of_vector(places, torch.kron(inputs, outputs), prior[where][:, where])
    own, isotropic = prior[where], prior[where].mean()
    if bool(((own - isotropic).abs() <= _SAME * isotropic.abs()).all()):
        return Block.of_precision(places, inputs, outputs, isotropic)
    if 1 in places.shape:
        return Block.of_vector(places, torch.kron(inputs, outputs), own.diag())
    raise ModelError(
        f"site '{name}': structure='kron' needs one prior scale for all of a weight's elements at "
        f"the mode, and the prior's precision is from {float(own.min()):.3g} to "
        f"{float(own.max()):.3g}: use structure='diag', or give the site a Normal prior of one "
        "scale"
    )
