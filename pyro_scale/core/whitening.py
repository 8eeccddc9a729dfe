"""Linear maps to coordinates z in which the posterior is approximately isotropic.

    params = center + S z,    S S' = N times the posterior's covariance

so that the log joint divided by N, the number of rows of the data, has a curvature of about 1 in
every direction of z. A step size then has the same meaning on every posterior.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Gaussian, Kronecker, LowRank

#: Number of elements up to which a matrix product is written as a sum, which Inductor fuses with
#: neighboring operations; larger ones call a library.
_FUSED = 48
#: Orthonormal bases [m, m] and [n, n], for the columns and the rows of matrices [m, n].
Bases: TypeAlias = tuple[Tensor, Tensor]


class Whitening(Protocol):
    """A linear map from whitened coordinates z to unconstrained parameters, params = center + S z,
    with S S' = N times the posterior's covariance and N the number of rows of the data. Vectors are
    `[..., d]`: the leading d elements of a position.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that define the map, in the order in which `with_tensors` takes them. They
        are inputs of compiled steps.
        """
        ...

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The map of the same structure with other tensors, in the order of `tensors`."""
        ...

    def double(self) -> Self:
        """The same map in float64."""
        ...

    def to_params(self, whitened: Tensor) -> Tensor:
        """center + S z: the unconstrained parameters `[..., d]` at whitened coordinates `[...,
        d]`."""
        ...

    def to_whitened(self, params: Tensor) -> Tensor:
        """S^-1 (params - center): the whitened coordinates `[..., d]` of unconstrained parameters
        `[..., d]`."""
        ...

    def pull_back(self, gradient: Tensor) -> Tensor:
        """S' g: the gradient with respect to z, from the gradient g `[..., d]` with respect to
        params."""
        ...

    def push_forward(self, tangent: Tensor) -> Tensor:
        """S v: the change of params, from a change v `[..., d]` of z."""
        ...

    @property
    def variance(self) -> Tensor:
        """The diagonal of S S', `[d]`: the posterior variances times N, the number of rows of the
        data.
        """
        ...


class _OfTensors:
    """Base of linear maps whose fields are all tensors: implements `tensors`, `with_tensors` and
    `double` of `Whitening`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        return type(self)(*tensors)

    def double(self) -> Self:
        doubled = [x.double() if x.is_floating_point() else x for x in self.tensors]
        return self.with_tensors(doubled)


@dataclass(frozen=True)
class DiagonalWhitening(_OfTensors):
    """Whitening by the sds alone: params = center + S z with a diagonal S.

    Attributes:
        center: mean of the params, `[d]`.
        scale: diagonal of S, `[d]`: posterior sds times sqrt(N), N the number of rows of the data.
    """

    center: Tensor
    scale: Tensor

    def to_params(self, whitened: Tensor) -> Tensor:
        return self.center + self.scale * whitened

    def to_whitened(self, params: Tensor) -> Tensor:
        return (params - self.center) / self.scale

    def pull_back(self, gradient: Tensor) -> Tensor:
        return self.scale * gradient

    push_forward = pull_back

    @property
    def variance(self) -> Tensor:
        return self.scale.square()


@dataclass(frozen=True)
class DenseWhitening(_OfTensors):
    """Whitening by the whole covariance: params = center + S z with a lower triangular matrix S.

    Attributes:
        center: mean of the params, `[d]`.
        factor: S, `[d, d]`.
    """

    center: Tensor
    factor: Tensor

    def to_params(self, whitened: Tensor) -> Tensor:
        return self.center + self.push_forward(whitened)

    def to_whitened(self, params: Tensor) -> Tensor:
        away = (params - self.center)[..., None]
        return torch.linalg.solve_triangular(self.factor, away, upper=False)[..., 0]

    def pull_back(self, gradient: Tensor) -> Tensor:
        return _times(self.factor.mT, gradient)

    def push_forward(self, tangent: Tensor) -> Tensor:
        return _times(self.factor, tangent)

    @property
    def variance(self) -> Tensor:
        return self.factor.square().sum(-1)


@dataclass(frozen=True)
class LowRankWhitening(_OfTensors):
    """Whitening by sds and k further directions: params = center + S z with S = diag(scale) (I + U
    diag(stretch - 1) U').

    Attributes:
        center: mean of the params, `[d]`.
        scale: factor on each element, `[d]`: where U is 0, the element's sd times sqrt(N), with N
            the number of rows of the data.
        axes: U, orthonormal columns, `[d, k]`.
        stretch: sd along each axis, in units of the elements' scales, `[k]`.
    """

    center: Tensor
    scale: Tensor
    axes: Tensor
    stretch: Tensor

    def to_params(self, whitened: Tensor) -> Tensor:
        return self.center + self.push_forward(whitened)

    def to_whitened(self, params: Tensor) -> Tensor:
        return self._stretch((params - self.center) / self.scale, 1 / self.stretch)

    def pull_back(self, gradient: Tensor) -> Tensor:
        return self._stretch(self.scale * gradient, self.stretch)

    def push_forward(self, tangent: Tensor) -> Tensor:
        return self.scale * self._stretch(tangent, self.stretch)

    def _stretch(self, vector: Tensor, stretch: Tensor) -> Tensor:
        """(I + U diag(stretch - 1) U') v, `[..., d]`: the vectors v with their components along the
        k axes multiplied by the factors `stretch` `[k]`, and otherwise unchanged.
        """
        along = (vector @ self.axes) * (stretch - 1)
        return vector + along @ self.axes.mT

    @property
    def variance(self) -> Tensor:
        rows = self.axes.square() @ (self.stretch.square() - 1)
        return self.scale.square() * (1 + rows)


@dataclass(frozen=True)
class KroneckerWhitening(_OfTensors):
    """Whitening by Kronecker-factored covariances, for the weight matrices of networks: params =
    center + S z with S = Q diag(scale), Q orthogonal. Elements that form a matrix `[m, n]` are
    rotated by a basis of its rows and one of its columns. Whitened coordinates have the same order
    as the elements.

    Attributes:
        center: mean of the params, `[d]`.
        scale: sd along each pair of basis vectors, or of an element that is in no matrix, times
            sqrt(N), N the number of rows of the data, `[d]`.
        order: indices of the elements of one matrix after another, then of other elements, `[d]`.
        inverse: inverse permutation of `order`, `[d]`.
        bases: (left basis `[m, m]`, right basis `[n, n]`) of each matrix.
    """

    center: Tensor
    scale: Tensor
    order: Tensor
    inverse: Tensor
    bases: tuple[Bases, ...]

    @classmethod
    def from_gaussian(cls, gaussian: Kronecker, units: float, like: Tensor) -> KroneckerWhitening:
        """The map that whitens a Gaussian.

        Args:
            gaussian: Gaussian approximation of the posterior.
            units: factor on the Gaussian's sds: sqrt(N), N the number of rows of the data.
            like: tensor whose dtype and device the map's tensors get.
        """
        variances = torch.empty_like(gaussian.mean)
        for block in gaussian.blocks:
            variances[block.places] = block.variances
        variances[gaussian.others] = gaussian.other_variances
        places = [block.places.flatten() for block in gaussian.blocks]
        order = torch.cat([*places, gaussian.others]).to(like.device)
        bases = tuple((block.left.to(like), block.right.to(like)) for block in gaussian.blocks)
        scale = (variances.sqrt() * units).to(like)
        return cls(gaussian.mean.to(like), scale, order, order.argsort(), bases)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        bases = (basis for pair in self.bases for basis in pair)
        return (self.center, self.scale, self.order, self.inverse, *bases)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        center, scale, order, inverse, *bases = tensors
        pairs = zip(bases[::2], bases[1::2], strict=True)
        return dataclasses.replace(
            self, center=center, scale=scale, order=order, inverse=inverse, bases=tuple(pairs)
        )

    def to_params(self, whitened: Tensor) -> Tensor:
        return self.center + self.push_forward(whitened)

    def to_whitened(self, params: Tensor) -> Tensor:
        return self._rotate(params - self.center, back=True) / self.scale

    def pull_back(self, gradient: Tensor) -> Tensor:
        return self.scale * self._rotate(gradient, back=True)

    def push_forward(self, tangent: Tensor) -> Tensor:
        return self._rotate(self.scale * tangent)

    @property
    def variance(self) -> Tensor:
        squares = tuple((left.square(), right.square()) for left, right in self.bases)
        mixed = dataclasses.replace(self, bases=squares)
        return mixed._rotate(self.scale.square())

    def _rotate(self, vector: Tensor, back: bool = False) -> Tensor:
        """Vectors `[..., d]` multiplied by the orthogonal matrix Q of the whitening, or by its
        transpose Q' if `back`.
        """
        ordered, parts, start = vector[..., self.order], [], 0
        for bases in self.bases:
            left, right = (basis.mT if back else basis for basis in bases)
            size = len(left) * len(right)
            parts.append(_times_both(left, right, ordered[..., start : start + size]))
            start += size
        return torch.cat([*parts, ordered[..., start:]], -1)[..., self.inverse]


def whiten(gaussian: Gaussian, num_data: int, like: Tensor) -> Whitening:
    """The map to coordinates in which a Gaussian is isotropic, with variance 1/N.

    Args:
        gaussian: Gaussian approximation of the posterior, in params.
        num_data: N, the number of rows of data.
        like: tensor whose dtype and device the map's tensors get.
    """
    center, units = gaussian.mean.to(like), num_data**0.5
    if isinstance(gaussian, Dense):
        return DenseWhitening(center, (gaussian.scale_tril * units).to(like))
    if isinstance(gaussian, Kronecker):
        return KroneckerWhitening.from_gaussian(gaussian, units, like)
    if isinstance(gaussian, LowRank):
        stretch = (1 + gaussian.lengths).rsqrt()
        scale, axes = (gaussian.scale * units).to(like), gaussian.axes.to(like)
        return LowRankWhitening(center, scale, axes, stretch.to(like))
    return DiagonalWhitening(center, (gaussian.sd * units).to(like))


def _times_both(left: Tensor, right: Tensor, vector: Tensor) -> Tensor:
    """The products left Z right' for matrices Z `[m, n]`, which are passed (`vector`) and returned
    flattened, `[..., m n]`. A factor `left` or `right` of size [1, 1] is taken for 1.
    """
    if len(left) == 1:
        return _times(right, vector)
    if len(right) == 1:
        return _times(left, vector)
    matrix = vector.unflatten(-1, (len(left), len(right)))
    return (left @ matrix @ right.mT).flatten(-2)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product of a matrix `[d, d]` and vectors `[..., d]`."""
    if vector.shape[-1] <= _FUSED and vector.dim() == 1:
        return (matrix * vector).sum(-1)
    return vector @ matrix.mT
