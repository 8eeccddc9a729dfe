"""Gaussians over a flat vector [D], by the structure of their covariance.

`Diagonal` and `Dense` hold factors of the covariance.  `LowRank` and `Kronecker` are for vectors so
long that a [D, D] matrix does not fit into memory: they multiply vectors by the covariance and by
the precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor


class _Gaussian:
    """Base class of Gaussian distributions of a vector `[D]`. Subclasses store the covariance in
    different ways, and are dataclasses whose fields are tensors.
    """

    mean: Tensor

    @classmethod
    def from_contents(cls, **contents: Any) -> Self:
        """The Gaussian whose fields (such as `mean` and `sd`) have these values: the inverse of
        `contents`.
        """
        return cls(**contents)

    def contents(self) -> dict[str, Any]:
        """The Gaussian's fields as a dict by name (tensors, or lists and tuples of them), to save
        in files.
        """
        return dict(vars(self))

    def double(self) -> Self:
        """The same Gaussian in float64."""
        doubled: Any = {name: value.double() for name, value in vars(self).items()}
        return dataclasses.replace(self, **doubled)  # type: ignore[type-var]

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density at x `[D]`, in nats, 0-d."""
        return self._log_density(self._squared_distance(x - self.mean))

    def log_probs(self, x: Tensor) -> Tensor:
        """Log densities at each of n places x `[n, D]`, in nats, `[n]`."""
        return self._log_density(self._squared_distances(x - self.mean))

    def _log_density(self, squares: Tensor) -> Tensor:
        return -(squares + self.log_det + len(self.mean) * math.log(2 * math.pi)) / 2

    @property
    def log_det(self) -> Tensor:
        """Log determinant of the covariance, 0-d."""
        raise NotImplementedError

    def _squared_distance(self, offset: Tensor) -> Tensor:
        """The squared Mahalanobis distance offset' precision offset, 0-d, of an offset `[D]` from
        the mean."""
        raise NotImplementedError

    def _squared_distances(self, offsets: Tensor) -> Tensor:
        """The same for each of n offsets `[n, D]`, `[n]`."""
        return torch.vmap(self._squared_distance)(offsets)


@dataclass(frozen=True)
class Diagonal(_Gaussian):
    """A Gaussian with independent elements.

    Args:
        mean: mean, `[D]`.
        sd: standard deviations, `[D]`.
    """

    mean: Tensor
    sd: Tensor

    @classmethod
    def from_precision(cls, mean: Tensor, precision: Tensor) -> Diagonal:
        """The Gaussian with a mean `[D]` and the precisions of its elements `[D]`."""
        return cls(mean, precision.rsqrt())

    def temper(self, temperature: float) -> Diagonal:
        """The Gaussian of the same mean with the covariance multiplied by `temperature`: the
        approximation of a posterior at that temperature.
        """
        return Diagonal(self.mean, self.sd * math.sqrt(temperature))

    def sample(self, noise: Tensor) -> Tensor:
        """Draws `[..., D]`, from standard normal numbers `[..., D]`."""
        return self.mean + self.sd * noise

    def covariance_times(self, vector: Tensor) -> Tensor:
        """The covariance times a vector `[D]`."""
        return self.variance * vector

    @property
    def variance(self) -> Tensor:
        """Variances of the elements, `[D]`."""
        return self.sd.square()

    @property
    def precision(self) -> Tensor:
        """The precisions (reciprocal variances) of the elements, `[D]`: the diagonal of the
        precision matrix, which has no other entries.
        """
        return self.sd.square().reciprocal()

    precision_diagonal = precision

    @property
    def log_det(self) -> Tensor:
        return 2 * self.sd.log().sum()

    def _squared_distance(self, offset: Tensor) -> Tensor:
        return (offset / self.sd).square().sum()


@dataclass(frozen=True)
class Dense(_Gaussian):
    """A Gaussian with correlated elements, by a `[D, D]` matrix.

    Args:
        mean: mean, `[D]`.
        scale_tril: Cholesky factor of the covariance, lower triangular, `[D, D]`.
    """

    mean: Tensor
    scale_tril: Tensor

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor) -> Dense:
        """The Gaussian with a mean `[D]` and a covariance matrix `[D, D]`."""
        return cls(mean, torch.linalg.cholesky(covariance))

    @classmethod
    def from_precision(cls, mean: Tensor, precision: Tensor, overwrite: bool = False) -> Dense:
        """The Gaussian with a mean and a precision matrix.

        With rows and columns in reverse order, the precision's Cholesky factor is the transposed
        inverse of the covariance's.  So one factorization and one triangular solve are enough, each
        in place: at most three matrices are in memory, or two with `overwrite`.

        Args:
            mean: mean, `[D]`.
            precision: precision matrix, `[D, D]`.
            overwrite: whether the precision's memory may be reused.

        Raises:
            torch.linalg.LinAlgError: the precision is not positive definite; it is then unchanged.
        """
        backwards = precision.flip(-2, -1).mT  # by column, as LAPACK has it
        torch.linalg.cholesky(backwards, out=backwards)
        inverse = (precision.zero_() if overwrite else torch.zeros_like(precision)).mT
        inverse.diagonal().fill_(1)
        torch.linalg.solve_triangular(backwards, inverse, upper=False, out=inverse)
        del backwards
        return cls(mean, inverse.flip(-2, -1).mT)

    def temper(self, temperature: float) -> Dense:
        """The Gaussian of the same mean with the covariance multiplied by `temperature`: the
        approximation of a posterior at that temperature.
        """
        if temperature == 1:
            return self
        return Dense(self.mean, self.scale_tril * math.sqrt(temperature))

    def sample(self, noise: Tensor) -> Tensor:
        """Draws `[..., D]`, from standard normal numbers `[..., D]`."""
        return self.mean + noise @ self.scale_tril.mT

    def covariance_times(self, vector: Tensor) -> Tensor:
        """The covariance times a vector `[D]`."""
        return self.scale_tril @ (self.scale_tril.mT @ vector)

    @property
    def variance(self) -> Tensor:
        """Diagonal of the covariance, `[D]`."""
        return self.scale_tril.square().sum(-1)

    @property
    def covariance(self) -> Tensor:
        """Covariance matrix, `[D, D]`."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def precision(self) -> Tensor:
        """Precision matrix, `[D, D]`."""
        return torch.cholesky_inverse(self.scale_tril)

    @property
    def precision_diagonal(self) -> Tensor:
        """Diagonal of the precision matrix, `[D]`."""
        return self.precision.diagonal()

    @property
    def log_det(self) -> Tensor:
        return 2 * self.scale_tril.diagonal().log().sum()

    def _squared_distance(self, offset: Tensor) -> Tensor:
        column = offset[:, None]
        return torch.linalg.solve_triangular(self.scale_tril, column, upper=False).square().sum()

    def _squared_distances(self, offsets: Tensor) -> Tensor:
        # vmap would solve with a copy of the matrix for every offset
        columns = offsets.mT
        return torch.linalg.solve_triangular(self.scale_tril, columns, upper=False).square().sum(0)


class _ByProducts(_Gaussian):
    """Base class of Gaussians that store no `[D, D]` matrix, and multiply vectors by their
    covariance and their precision instead.
    """

    def covariance_times(self, vector: Tensor) -> Tensor:
        """The covariance times vectors `[..., D]`."""
        raise NotImplementedError

    def precision_times(self, vector: Tensor) -> Tensor:
        """The precision times vectors `[..., D]`."""
        raise NotImplementedError

    @property
    def covariance(self) -> Tensor:
        """Covariance matrix, `[D, D]`; for small D only."""
        return self.covariance_times(torch.eye(len(self.mean)).to(self.mean))

    @property
    def precision(self) -> Tensor:
        """Precision matrix, `[D, D]`; for small D only."""
        return self.precision_times(torch.eye(len(self.mean)).to(self.mean))

    def _squared_distance(self, offset: Tensor) -> Tensor:
        return torch.dot(offset, self.precision_times(offset))


@dataclass(frozen=True)
class LowRank(_ByProducts):
    """A Gaussian whose precision is diag(scale)^-1 (I + U diag(lengths) U^T) diag(scale)^-1:
    diagonal plus a matrix of rank k.

    Args:
        mean: mean, `[D]`.
        scale: standard deviations where U is 0, `[D]`.
        axes: U, orthonormal columns, `[D, k]`.
        lengths: additional precision along each axis, in units of the scales; at least 0, `[k]`.
    """

    mean: Tensor
    scale: Tensor
    axes: Tensor
    lengths: Tensor

    @classmethod
    def from_precision(cls, mean: Tensor, diagonal: Tensor, factor: Tensor) -> LowRank:
        """The Gaussian with a mean `[D]` and the precision diag(diagonal) + V V^T.

        Args:
            mean: mean, `[D]`.
            diagonal: positive numbers, `[D]`.
            factor: V, `[D, k]`.
        """
        scale = diagonal.rsqrt()
        axes, singular, _ = torch.linalg.svd(scale[:, None] * factor, full_matrices=False)
        return cls(mean, scale, axes, singular.square())

    def temper(self, temperature: float) -> LowRank:
        """The Gaussian of the same mean with the covariance multiplied by `temperature`: the
        approximation of a posterior at that temperature.
        """
        return LowRank(self.mean, self.scale * math.sqrt(temperature), self.axes, self.lengths)

    def sample(self, noise: Tensor) -> Tensor:
        """Draws `[..., D]`, from standard normal numbers `[..., D]`."""
        return self.mean + self.scale * self._stretch(noise, (1 + self.lengths).rsqrt())

    def covariance_times(self, vector: Tensor) -> Tensor:
        return self.scale * self._stretch(self.scale * vector, 1 / (1 + self.lengths))

    def precision_times(self, vector: Tensor) -> Tensor:
        return self._stretch(vector / self.scale, 1 + self.lengths) / self.scale

    @property
    def variance(self) -> Tensor:
        """Diagonal of the covariance, `[D]`."""
        rows = self.axes.square() @ (1 / (1 + self.lengths) - 1)
        return self.scale.square() * (1 + rows)

    @property
    def precision_diagonal(self) -> Tensor:
        """Diagonal of the precision matrix, `[D]`."""
        return (1 + self.axes.square() @ self.lengths) / self.scale.square()

    @property
    def log_det(self) -> Tensor:
        return 2 * self.scale.log().sum() - self.lengths.log1p().sum()

    def _stretch(self, vector: Tensor, by: Tensor) -> Tensor:
        """(I + U diag(by - 1) U^T) v, `[..., D]`: the vectors v with their components along the k
        axes multiplied by the factors `by` `[k]`, and otherwise unchanged.
        """
        return vector + ((vector @ self.axes) * (by - 1)) @ self.axes.mT


class Block(NamedTuple):
    """Elements of a vector that are independent of all others.  Arranged as a matrix `[m, n]`,
    their covariance has the eigenvectors of a Kronecker product, with a variance for each pair of
    the factors' eigenvectors.

    Attributes:
        places: index in the whole vector [D] of each element of the matrix, `[m, n]`.
        left: orthonormal eigenvectors of the left factor, `[m, m]`.
        right: orthonormal eigenvectors of the right factor, `[n, n]`.
        variances: variance for each pair of eigenvectors, `[m, n]`.
    """

    places: Tensor
    left: Tensor
    right: Tensor
    variances: Tensor

    def stretch(self, values: Tensor, by: Tensor) -> Tensor:
        """Matrices `[..., m, n]` of the block's elements, with the component along each pair of
        eigenvectors multiplied by `by` `[m, n]`.

        Args:
            values: matrices of the block's elements, `[..., m, n]`.
            by: factor for each pair of eigenvectors, `[m, n]`.
        """
        return self.left @ (by * (self.left.mT @ values @ self.right)) @ self.right.mT

    def spread(self, noise: Tensor) -> Tensor:
        """Draws `[..., m, n]` with the block's covariance and mean 0, from standard normal numbers
        `[..., m, n]`."""
        return self.left @ (self.variances.sqrt() * noise) @ self.right.mT

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal, arranged as `[m, n]`, of the matrix with the block's eigenvectors and with
        `values` `[m, n]` as eigenvalues: for `variances`, the variances of the block's elements.
        """
        return self.left.square() @ values @ self.right.square().mT


@dataclass(frozen=True)
class Kronecker(_ByProducts):
    """A Gaussian of blocks of elements, each with a Kronecker-factored covariance, and of further
    independent elements.

    Args:
        mean: mean, `[D]`.
        blocks: blocks without common elements.
        others: indices of the elements that are in no block, `[k]`.
        other_variances: variances of these elements, `[k]`.
    """

    mean: Tensor
    blocks: tuple[Block, ...]
    others: Tensor
    other_variances: Tensor

    @classmethod
    def from_contents(cls, **contents: Any) -> Kronecker:
        blocks = tuple(Block(*block) for block in contents["blocks"])
        return cls(**{**contents, "blocks": blocks})

    def contents(self) -> dict[str, Any]:
        return {**vars(self), "blocks": tuple(tuple(block) for block in self.blocks)}

    def temper(self, temperature: float) -> Kronecker:
        """The Gaussian of the same mean with the covariance multiplied by `temperature`: the
        approximation of a posterior at that temperature.
        """
        blocks = tuple(
            block._replace(variances=temperature * block.variances) for block in self.blocks
        )
        return Kronecker(self.mean, blocks, self.others, temperature * self.other_variances)

    def double(self) -> Kronecker:
        blocks = tuple(
            Block(block.places, *(part.double() for part in block[1:])) for block in self.blocks
        )
        return Kronecker(self.mean.double(), blocks, self.others, self.other_variances.double())

    def sample(self, noise: Tensor) -> Tensor:
        """Draws `[..., D]`, from standard normal numbers `[..., D]`."""
        offset = self._map_parts(noise, Block.spread, lambda x, variances: x * variances.sqrt())
        return self.mean + offset

    def covariance_times(self, vector: Tensor) -> Tensor:
        return self._map_parts(
            vector, lambda block, x: block.stretch(x, block.variances), torch.mul
        )

    def precision_times(self, vector: Tensor) -> Tensor:
        return self._map_parts(
            vector, lambda block, x: block.stretch(x, 1 / block.variances), torch.div
        )

    @property
    def variance(self) -> Tensor:
        """Diagonal of the covariance, `[D]`."""
        return self._diagonal(lambda variances: variances)

    @property
    def precision_diagonal(self) -> Tensor:
        """Diagonal of the precision matrix, `[D]`."""
        return self._diagonal(torch.reciprocal)

    @property
    def log_det(self) -> Tensor:
        parts = [self.other_variances, *(block.variances for block in self.blocks)]
        return torch.stack([part.log().sum() for part in parts]).sum()

    def _diagonal(self, eigenvalues: Callable[[Tensor], Tensor]) -> Tensor:
        """The diagonal `[D]` of a function of the covariance matrix, which is applied to the
        covariance's eigenvalues.

        Args:
            eigenvalues: function applied to variances: the identity for the covariance, the
                reciprocal for the precision.
        """
        total = torch.zeros_like(self.mean)
        for block in self.blocks:
            total[block.places] = block.diagonal(eigenvalues(block.variances))
        return total.index_put((self.others,), eigenvalues(self.other_variances))

    def _map_parts(
        self,
        vector: Tensor,
        map_block: Callable[[Block, Tensor], Tensor],
        map_others: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Vectors `[..., D]` in which each block's elements, and the elements of no block, are
        replaced by results of functions.

        Args:
            vector: vectors, `[..., D]`.
            map_block: function of (block, the block's elements `[..., m, n]`).
            map_others: function of (the other elements `[..., k]`, their variances `[k]`).
        """
        result = torch.zeros_like(vector)
        for block in self.blocks:
            result[..., block.places] = map_block(block, vector[..., block.places])
        result[..., self.others] = map_others(vector[..., self.others], self.other_variances)
        return result


#: A Gaussian of any structure.
Gaussian: TypeAlias = Diagonal | Dense | Kronecker | LowRank


def as_structure(gaussian: Gaussian, dense: bool) -> Gaussian:
    """A Gaussian with another structure of the covariance: a `Dense` one with the same covariance
    if `dense`; otherwise a `Diagonal` one with the same variances, without correlations.
    """
    if not dense:
        return Diagonal(gaussian.mean, gaussian.variance.sqrt())
    if isinstance(gaussian, Diagonal):
        return Dense(gaussian.mean, gaussian.sd.diag())
    if isinstance(gaussian, Kronecker | LowRank):
        return Dense.from_covariance(gaussian.mean, gaussian.covariance)
    return gaussian


def matrix_or_diagonal(values: Tensor, dense: bool) -> Tensor:
    """A matrix `[D, D]` if `dense`, otherwise its diagonal `[D]`.

    Args:
        values: matrix `[D, D]`, or the diagonal `[D]` of a diagonal matrix.
        dense: whether to return the matrix.
    """
    return values if (values.dim() == 2) == dense else values.diag()


def semidefinite_root(matrix: Tensor) -> Tensor:
    """Cholesky factors, lower triangular, of positive semi-definite matrices `[..., m, m]`.

    torch's function needs positive definite ones.  Here a pivot may be 0, up to rounding of its
    diagonal element: its column is then 0.
    """
    size = matrix.shape[-1]
    scale = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    inverse = torch.where(scale > 0, 1 / scale, 0)
    left = inverse[..., None] * matrix * inverse[..., None, :]
    least = size * torch.finfo(matrix.dtype).eps
    columns = []
    for place in range(size):
        pivot = left[..., place, place, None]
        column = torch.where(pivot > least, left[..., place] * pivot.clamp(min=least).rsqrt(), 0)
        columns.append(column)
        left = left - column[..., None] * column[..., None, :]
    return scale[..., None] * torch.stack(columns, -1).tril()


def triangular(root: Tensor) -> Tensor:
    """The Cholesky factor of R R^T, lower triangular `[m, m]`, from any root R `[m, m]`, without
    the loss of digits that forming R R^T has."""
    _, triangle = torch.linalg.qr(root.mT)
    return triangle.mT * triangle.diagonal().sign()
