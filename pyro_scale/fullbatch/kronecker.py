"""The posterior's precision at a point by Kronecker factors: K-FAC's Laplace approximation (Ritter
et al. 2018)."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Block, Kronecker
from pyro_scale.core.layout import Layout
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.fullbatch.chunks import chunks_of
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.precision import curvatures_of, indefinite
from pyro_scale.model.curvature.ggn import RowKind
from pyro_scale.model.curvature.kronecker import Basis, Factors
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
    corrected: bool = False,
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
        corrected: whether blocks have the curvature's own diagonal in their bases (EKFAC), which
            takes a second pass through the rows.

    Raises:
        ArgumentError: no site has factors.
        ModelError: the prior of a weight has several scales or correlates its elements, unless the
            weight is a vector; or a precision is not positive.
    """
    log_posterior, params = density.log_posterior, density.layout.unflatten(position)
    free = {name: params[name] for name in sites}
    held = {name: value for name, value in params.items() if name not in free}
    layout, first = (
        Layout.from_tensors(free),
        next(chunks_of(log_posterior, density.data, num_rows)),
    )
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
    blocks: list[_Block] = []
    correlated = correlated_sites(log_posterior, free, first.arguments, held)
    for name, own in factors.items():
        own_prior = prior[layout.slices()[name]]
        if name in correlated:
            _check_is_vector(name, own)
            others = held | {other: value for other, value in free.items() if other != name}
            site = {name: free[name]}
            own_prior = prior_precision(log_posterior, site, first.arguments, others, dense=True)
        blocks.extend(_block(name, each, own_prior, scale) for each in own)
    if corrected:
        bases = {name: [each.basis for each in blocks if each.site == name] for name in factors}
        parts = density.of_each(_eigenvalues, position, sites, kind, bases, seed, num_rows)
        blocks = [
            each.corrected(scale * torch.stack(of_ranks).sum(0))
            for each, *of_ranks in zip(blocks, *parts, strict=True)
        ]
    for each in blocks:
        if not bool((each.precision > 0).all()):
            place = layout.slices()[each.site].start + int(each.basis.places.flatten()[0])
            place = int(density.layout.places(sites)[place])
            raise indefinite(density, place, float(each.precision.min()))
    mean = position[density.layout.places(sites)]
    found = tuple(each.in_all(layout) for each in blocks)
    return Kronecker(mean, found, alone, 1 / precision[alone])


class _Block(NamedTuple):
    """A block of a site's elements, in a basis in which its precision is diagonal.

    Attributes:
        site: its name.
        basis: with places in the site.
        curvature: the likelihood's part of the precision, [m, n].
        prior: the prior's, which broadcasts.
    """

    site: str
    basis: Basis
    curvature: Tensor
    prior: Tensor

    @property
    def precision(self) -> Tensor:
        """[m, n]."""
        return self.curvature + self.prior

    def corrected(self, curvature: Tensor) -> _Block:
        """With the curvature's own diagonal in the basis."""
        return self._replace(curvature=curvature.to(self.curvature))

    def in_all(self, layout: Layout) -> Block:
        """In a vector of all sites."""
        places, left, right = self.basis
        return Block(layout.slices()[self.site].start + places, left, right, 1 / self.precision)


def _eigenvalues(
    density: FullDataDensity,
    position: Tensor,
    sites: Sequence[str],
    kind: RowKind,
    bases: Mapping[str, Sequence[Basis]],
    seed: int,
    num_rows: int | None,
) -> list[Tensor]:
    """The diagonals of this rank's rows' curvature in some bases, site after site."""
    params = density.layout.unflatten(position)
    free = {name: params.pop(name) for name in sites}
    held = params | {name: value for name, value in free.items() if name not in bases}
    own = {name: free[name] for name in bases}
    total = [each.left.new_zeros(each.places.shape) for of in bases.values() for each in of]
    for curvature, chunk in curvatures_of(density, kind, seed, num_rows):
        where = (own, chunk.arguments, bases, chunk.indices, held, chunk.keep)
        found = curvature.eigenvalues(*where)
        each = [values for name in bases for values in found[name]]
        total = [sums + values for sums, values in zip(total, each, strict=True)]
    return total


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
    layout = Layout.from_tensors(free)
    total = Sums({}, position.new_zeros(layout.size), set(free))
    for curvature, chunk in curvatures_of(density, kind, seed, num_rows):
        where = (free, chunk.arguments, chunk.indices, params, chunk.keep)
        found, others = curvature.kronecker(*where, among)
        diagonal = torch.zeros_like(total.diagonal)
        if others:
            diagonal[layout.places(list(others))] = Layout.from_tensors(others).flatten(others)
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


def _block(name: str, factors: Factors, prior: Tensor, scale: float) -> _Block:
    """One block, with the prior's precision of the site's elements, [d] or [d, d]."""
    inputs, outputs = scale * factors.mean_inputs.to(prior), factors.outputs.to(prior)
    where = factors.places.flatten()
    own = prior[where] if prior.dim() == 1 else prior[where][:, where]
    if prior.dim() == 1 and _is_same(own):
        (a, left), (b, right) = torch.linalg.eigh(inputs), torch.linalg.eigh(outputs)
        curvature = torch.outer(a.clamp(min=0), b.clamp(min=0))
        return _Block(name, Basis(factors.places, left, right), curvature, own.mean())
    if 1 in factors.places.shape:
        return _of_vector(name, factors.places, torch.kron(inputs, outputs), own)
    raise ModelError(
        f"site '{name}': structure='kron' needs one prior scale for all of a weight's elements at "
        f"the mode, and the prior's precision is from {float(own.min()):.3g} to "
        f"{float(own.max()):.3g}: use structure='diag', or give the site a Normal prior of one "
        "scale"
    )


def _is_same(precision: Tensor) -> bool:
    mean = precision.mean()
    return bool(((precision - mean).abs() <= _SAME * mean.abs()).all())


def _of_vector(name: str, places: Tensor, curvature: Tensor, prior: Tensor) -> _Block:
    """A block of elements [1, n] or [m, 1], whose curvature is positive semi-definite but for
    rounding, with any prior."""
    prior = prior.diag() if prior.dim() == 1 else prior
    lengths, axes = torch.linalg.eigh(curvature.double())
    sound = (axes * lengths.clamp(min=0)) @ axes.mT
    _, axes = torch.linalg.eigh(sound + prior.double())
    of_rows, of_prior = (
        ((matrix @ axes) * axes).sum(0).reshape(places.shape).to(prior)
        for matrix in (sound, prior.double())
    )
    one, axes = torch.ones(1, 1).to(prior), axes.to(prior)
    left, right = (one, axes) if len(places) == 1 else (axes, one)
    return _Block(name, Basis(places, left, right), of_rows, of_prior)
