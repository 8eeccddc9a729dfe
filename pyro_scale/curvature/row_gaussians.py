"""Gaussians at a point, from sums over rows and without the matrix: by Kronecker factors (K-FAC's
Laplace approximation; Ritter et al. 2018), and by a few directions of large curvature."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.gaussian import Block, Kronecker, LowRank
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.chunks import chunks_of
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.kronecker_factors import Basis, Factors
from pyro_scale.curvature.precision import CurvatureSpec, indefinite
from pyro_scale.curvature.prior_hessian import correlated_sites, prior_precision
from pyro_scale.errors import ArgumentError, ModelError

#: Largest relative difference between a block's prior precisions that counts as none.
_SAME_SCALE = 1e-5


class RowSums(NamedTuple):
    """Sums over rows of data from which a Gaussian by Kronecker factors is built.

    Attributes:
        factors: a dict from site to the Kronecker factors of its blocks.
        diagonal: the diagonal of the likelihood's curvature, [d]; 0 for sites with factors.
        everywhere: names of the sites that had factors in every chunk of rows.
    """

    factors: dict[str, list[Factors]]
    diagonal: Tensor
    everywhere: set[str]

    def plus(self, others: RowSums) -> RowSums:
        """The sums over the rows of both together; `everywhere` has the sites that had factors in
        both.
        """
        factors = {name: list(parts) for name, parts in self.factors.items()}
        for name, parts in others.factors.items():
            for part in parts:
                part.add_to_each(factors.setdefault(name, []))
        return RowSums(
            factors, self.diagonal + others.diagonal, self.everywhere & others.everywhere
        )


def kronecker_at(
    density: FullDataDensity, spec: CurvatureSpec, corrected: bool = False
) -> Kronecker:
    """The Laplace approximation of the posterior at the spec's position, in the elements of the
    spec's sites: a Gaussian with a Kronecker-factored block for each weight of a network.

    Weights of products, convolutions and projections, and biases, have blocks, in which the
    likelihood's precision is the Kronecker product of two factors.  All other elements are
    independent.  Factors are means and sums over all rows, however the rows come in chunks.

    Args:
        density: the log joint of all rows.
        spec: the point, the sites and the kind of curvature.
        corrected: whether blocks have the curvature's own diagonal in their bases (EKFAC), which
            takes a second pass through the rows.

    Raises:
        ArgumentError: no site has factors.
        ModelError: the prior of a weight has several scales or correlates its elements (a weight
            that is a vector may have such a prior), or a precision is not positive.
    """
    log_posterior, (free, held) = density.log_posterior, spec.split(density.layout)
    layout, slices = Layout.from_tensors(free), Layout.from_tensors(free).slices()
    batch = next(chunks_of(log_posterior, density.data, spec.num_rows)).arguments
    prior = prior_precision(log_posterior, free, batch, held, dense=False)
    sums = _add_up(density, spec, spec.sites)
    if sums.everywhere < set(sums.factors):  # a product in some chunks, and not in others
        sums = _add_up(density, spec, sums.everywhere)
    if not sums.factors:
        raise ArgumentError(
            "structure='kron': no site is the weight of a matrix product, a convolution or a "
            f"projection, or a bias, among {list(spec.sites)}: use structure='diag' or 'dense'"
        )
    places = density.layout.places(spec.sites)
    scale = log_posterior.num_data / density.rows_in_all
    precision = scale * sums.diagonal + prior
    least = torch.where(sums.diagonal > 0, precision, prior)
    if not bool((least > 0).all()):
        raise indefinite(density, int(places[least.argmin()]), float(least.min()))
    blocks = _blocks(density, spec, sums.factors, prior, batch)
    if corrected:
        bases = {
            name: [block.basis for block in blocks if block.site == name] for name in sums.factors
        }
        by_share = density.of_each(_eigenvalues, spec, bases)
        blocks = [
            block._replace(curvature=(scale * torch.stack(parts).sum(0)).to(block.curvature))
            for block, *parts in zip(blocks, *by_share, strict=True)
        ]
    for block in blocks:
        if not bool((block.precision > 0).all()):
            place = int(places[slices[block.site].start + int(block.basis.places.flatten()[0])])
            raise indefinite(density, place, float(block.precision.min()))
    alone = layout.places([name for name in free if name not in sums.factors])
    shifted = tuple(block.shifted(slices[block.site].start) for block in blocks)
    return Kronecker(spec.position[places], shifted, alone, 1 / precision[alone])


def _blocks(
    density: FullDataDensity,
    spec: CurvatureSpec,
    factors: Mapping[str, Sequence[Factors]],
    prior: Tensor,
    batch: Arguments,
) -> list[_Block]:
    """The blocks of all sites that have Kronecker factors, each with the prior's precision.

    Args:
        density: the log joint density of all rows.
        spec: the point and the sites.
        factors: Kronecker factors summed over all rows, by site.
        prior: the diagonal of the prior's precision, [d].
        batch: arguments of any batch, to evaluate the prior.
    """
    log_posterior, (free, held) = density.log_posterior, spec.split(density.layout)
    scale, slices = log_posterior.num_data / density.rows_in_all, Layout.from_tensors(free).slices()
    correlated, blocks = correlated_sites(log_posterior, free, batch, held), list[_Block]()
    for name, parts in factors.items():
        of_site = prior[slices[name]]
        if name in correlated:
            _check_is_vector(name, parts)
            others = held | {other: value for other, value in free.items() if other != name}
            of_site = prior_precision(log_posterior, {name: free[name]}, batch, others, dense=True)
        blocks.extend(_block(name, part, of_site, scale) for part in parts)
    return blocks


class _Block(NamedTuple):
    """A block of a site's elements, in a basis in which its precision is diagonal.

    Attributes:
        site: the site's name.
        basis: the basis, with indices of the block's elements within the site.
        curvature: the likelihood's part of the precision's diagonal in the basis, [m, n].
        prior: the prior's part, which broadcasts to [m, n].
    """

    site: str
    basis: Basis
    curvature: Tensor
    prior: Tensor

    @property
    def precision(self) -> Tensor:
        """The block's precision, likelihood plus prior, which is diagonal in the basis: its
        eigenvalues, [m, n]."""
        return self.curvature + self.prior

    def shifted(self, start: int) -> Block:
        """The same block as a `Block` of a Gaussian over several sites: with variances in place of
        precisions, and with indices into a vector in which this site's elements begin at index
        `start`.
        """
        places, left, right = self.basis
        return Block(start + places, left, right, 1 / self.precision)


def _add_up(
    density: FullDataDensity, spec: CurvatureSpec, among: Sequence[str] | set[str]
) -> RowSums:
    """A `RowSums` with the Kronecker factors and the diagonal of the likelihood's curvature, summed
    over all rows of the data, those of other processes included. Only the sites in `among` may have
    factors.
    """
    total, *others = density.of_each(_row_sums, spec, set(among))
    for sums in others:
        total = total.plus(sums)
    return total


def _row_sums(density: FullDataDensity, spec: CurvatureSpec, among: Container[str]) -> RowSums:
    """A `RowSums` with the Kronecker factors and the diagonal of the likelihood's curvature, summed
    over those rows of the data that `density` sums over. Only the sites in `among` may have
    factors.
    """
    free, held = spec.split(density.layout)
    layout = Layout.from_tensors(free)
    total = RowSums({}, spec.position.new_zeros(layout.size), set(free))
    for curvature, chunk in spec.by_chunk(density):
        factors, others = curvature.kronecker(
            free, chunk.arguments, chunk.indices, held, chunk.keep, among
        )
        diagonal = torch.zeros_like(total.diagonal)
        if others:
            diagonal[layout.places(list(others))] = Layout.from_tensors(others).flatten(others)
        total = total.plus(RowSums(factors, diagonal, set(factors)))
    return total


def _eigenvalues(
    density: FullDataDensity, spec: CurvatureSpec, bases: Mapping[str, Sequence[Basis]]
) -> list[Tensor]:
    """The diagonal of the likelihood's curvature in each of the bases, summed over those rows of
    the data that `density` sums over: a list of tensors `[m, n]`, one for each basis, site after
    site.
    """
    free, held = spec.split(density.layout)
    held |= {name: value for name, value in free.items() if name not in bases}
    free = {name: free[name] for name in bases}
    total = [
        basis.left.new_zeros(basis.places.shape) for of_site in bases.values() for basis in of_site
    ]
    for curvature, chunk in spec.by_chunk(density):
        eigenvalues = curvature.eigenvalues(
            free, chunk.arguments, bases, chunk.indices, held, chunk.keep
        )
        parts = [part for name in bases for part in eigenvalues[name]]
        total = [sums + part for sums, part in zip(total, parts, strict=True)]
    return total


def _check_is_vector(name: str, factors: Sequence[Factors]) -> None:
    """Raises a `ModelError` unless a site whose prior correlates its elements is a vector (one
    block of Kronecker factors): correlated elements of matrices are not supported.
    """
    if len(factors) > 1 or 1 not in factors[0].places.shape:
        raise ModelError(
            f"site '{name}': structure='kron' needs a prior of independent elements for a weight, "
            "and this one correlates them: use structure='dense' or 'diag', or give the site a "
            "Normal prior of one scale"
        )


def _block(name: str, factors: Factors, prior: Tensor, scale: float) -> _Block:
    """The block of a Gaussian's precision from the Kronecker factors of some of a site's elements.

    Args:
        name: the site's name.
        factors: the Kronecker factors.
        prior: the prior's precision of all the site's elements: a diagonal [d] or a matrix [d, d].
        scale: N divided by the number of rows that the factors were summed over.

    Raises:
        ModelError: the prior's precision differs among the elements of a matrix.
    """
    inputs, outputs = scale * factors.mean_inputs.to(prior), factors.outputs.to(prior)
    where = factors.places.flatten()
    of_block = prior[where] if prior.dim() == 1 else prior[where][:, where]
    if prior.dim() == 1:
        mean = of_block.mean()
        if bool(((of_block - mean).abs() <= _SAME_SCALE * mean.abs()).all()):
            (a, left), (b, right) = torch.linalg.eigh(inputs), torch.linalg.eigh(outputs)
            curvature = torch.outer(a.clamp(min=0), b.clamp(min=0))
            return _Block(name, Basis(factors.places, left, right), curvature, mean)
    if 1 in factors.places.shape:
        return _block_of_vector(name, factors.places, torch.kron(inputs, outputs), of_block)
    raise ModelError(
        f"site '{name}': structure='kron' needs one prior scale for all of a weight's elements at "
        f"the mode, and the prior's precision is from {float(of_block.min()):.3g} to "
        f"{float(of_block.max()):.3g}: use structure='diag', or give the site a Normal prior of "
        "one scale"
    )


def _block_of_vector(name: str, places: Tensor, curvature: Tensor, prior: Tensor) -> _Block:
    """The block of a site's elements that form a vector, [1, n] or [m, 1], with any prior.

    Args:
        name: the site's name.
        places: indices of the elements in the flattened site, [1, n] or [m, 1].
        curvature: the likelihood's curvature of these elements, positive semi-definite but for
            rounding.
        prior: the prior's precision of these elements, a diagonal or a matrix.
    """
    prior = prior.diag() if prior.dim() == 1 else prior
    eigenvalues, axes = torch.linalg.eigh(curvature.double())
    sound = (axes * eigenvalues.clamp(min=0)) @ axes.mT
    _, axes = torch.linalg.eigh(sound + prior.double())
    of_rows, of_prior = (
        ((matrix @ axes) * axes).sum(0).reshape(places.shape).to(prior)
        for matrix in (sound, prior.double())
    )
    one, axes = torch.ones(1, 1).to(prior), axes.to(prior)
    left, right = (one, axes) if len(places) == 1 else (axes, one)
    return _Block(name, Basis(places, left, right), of_rows, of_prior)


def low_rank_at(density: FullDataDensity, spec: CurvatureSpec, rank: int) -> LowRank:
    """The Laplace approximation of the posterior at the spec's position, in the elements of the
    spec's sites: a Gaussian with correlations along `rank` directions of large curvature.

    Its precision is the sum of three terms: the prior's diagonal; the largest part of that rank of
    the likelihood's curvature, in units of the prior's sds (Spantini et al. 2015); and the rest of
    the curvature's diagonal.  Lanczos' method (ARPACK, through SciPy) finds the directions by
    products with the curvature, a few passes through the data for each direction.

    Args:
        density: the log joint of all rows.
        spec: the point, the sites and the kind of curvature.
        rank: the number of directions.

    Raises:
        ModelError: the prior has no positive curvature at some element.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh  # slow to import

    log_posterior, (free, held) = density.log_posterior, spec.split(density.layout)
    size, scale = Layout.from_tensors(free).size, log_posterior.num_data / density.rows_in_all
    places = density.layout.places(spec.sites)
    batch = next(chunks_of(log_posterior, density.data, spec.num_rows)).arguments
    prior = prior_precision(log_posterior, free, batch, held, dense=False)
    if not bool((prior > 0).all()):
        site = density.layout.site_at(int(places[prior.argmin()]))
        raise ModelError(
            f"site '{site}': structure='low_rank' takes its units from the prior, whose curvature "
            f"is {float(prior.min()):.3g} there: use structure='dense' or 'diag', or a Normal prior"
        )
    total, sds = scale * density.add_up(_diagonal_or_product, spec, None), prior.rsqrt()

    def product(vector: np.ndarray) -> np.ndarray:
        along = sds * torch.from_numpy(vector.reshape(-1)).to(sds)
        moved = sds * scale * density.add_up(_diagonal_or_product, spec, along)
        return moved.double().cpu().numpy()

    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    if not bool((total > 0).any()):  # the data say nothing
        eigenvalues, axes = np.zeros(1), np.eye(size, 1)
    elif rank < size - 1:
        eigenvalues, axes = eigsh(operator, k=rank, which="LA", v0=start.numpy())
    else:
        eigenvalues, axes = np.linalg.eigh(operator @ np.eye(size))
    weights = torch.from_numpy(eigenvalues).clamp(min=0).sqrt()
    factor = (torch.from_numpy(axes) * weights).to(sds) / sds[:, None]
    beyond = (total - factor.square().sum(1)).clamp(min=0)
    return LowRank.from_precision(spec.position[places], prior + beyond, factor)


def _diagonal_or_product(
    density: FullDataDensity, spec: CurvatureSpec, vector: Tensor | None
) -> Tensor:
    """The likelihood's curvature, over this density's rows, times a vector [d]: a vector [d]. Its
    diagonal [d] if `vector` is None."""
    free, held = spec.split(density.layout)
    layout = Layout.from_tensors(free)
    total = spec.position.new_zeros(layout.size)
    for curvature, chunk in spec.by_chunk(density):
        batch, where = chunk.arguments, (chunk.indices, held, chunk.keep)
        if vector is None:
            by_site = curvature.diagonal(free, batch, *where)
        else:
            by_site = curvature.product(free, batch, layout.unflatten(vector), *where)
        total += layout.flatten(by_site)
    return total
