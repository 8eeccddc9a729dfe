"""Linear maps between a position and coordinates in which the posterior is about isotropic.

    params = center + S z,    S S' = N times the posterior's covariance

so that over N the log joint of z has a curvature of about 1 in every direction.  A step size then
means the same on every posterior.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

#: Elements up to which a product with a matrix is written as a sum, which compiled code fuses with
#: what is around it; beyond, it is a call of a library.
_FUSED = 48


class Whitening(Protocol):
    """A map params = center + S z of leading elements `[..., d]`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it consists of, which compiled steps take as inputs."""
        ...

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The map of other such tensors."""
        ...

    def to_params(self, whitened: Tensor) -> Tensor:
        """center + S z."""
        ...

    def to_whitened(self, params: Tensor) -> Tensor:
        """S^-1 (params - center)."""
        ...

    def pull_back(self, gradient: Tensor) -> Tensor:
        """S' g: the gradient with respect to z."""
        ...

    def push_forward(self, tangent: Tensor) -> Tensor:
        """S v: the change of params with z."""
        ...

    @property
    def variance(self) -> Tensor:
        """The diagonal of S S', [d]."""
        ...


class _OfTensors:
    """A map whose fields are tensors."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        return type(self)(*tensors)


@dataclass(frozen=True)
class DiagonalWhitening(_OfTensors):
    """S is diagonal.

    Attributes:
        center: [d].
        scale: the diagonal, [d].
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
    """S is a lower triangular matrix.

    Attributes:
        center: [d].
        factor: S, [d, d].
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
    """S = diag(scale) (I + U diag(stretch - 1) U').

    Attributes:
        center: [d].
        scale: of each element, [d].
        axes: U, orthonormal columns, [d, k].
        stretch: the sd along each axis, in units of the elements' scales, [k].
    """

    center: Tensor
    scale: Tensor
    axes: Tensor
    stretch: Tensor

    def to_params(self, whitened: Tensor) -> Tensor:
        return self.center + self.push_forward(whitened)

    def to_whitened(self, params: Tensor) -> Tensor:
        return self._stretched((params - self.center) / self.scale, 1 / self.stretch)

    def pull_back(self, gradient: Tensor) -> Tensor:
        return self._stretched(self.scale * gradient, self.stretch)

    def push_forward(self, tangent: Tensor) -> Tensor:
        return self.scale * self._stretched(tangent, self.stretch)

    def _stretched(self, vector: Tensor, stretch: Tensor) -> Tensor:
        """(I + U diag(stretch - 1) U') v."""
        along = (vector @ self.axes) * (stretch - 1)
        return vector + along @ self.axes.mT

    @property
    def variance(self) -> Tensor:
        rows = self.axes.square() @ (self.stretch.square() - 1)
        return self.scale.square() * (1 + rows)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """A matrix [d, d] times vectors `[..., d]`."""
    if vector.shape[-1] <= _FUSED and vector.dim() == 1:
        return (matrix * vector).sum(-1)
    return vector @ matrix.mT
