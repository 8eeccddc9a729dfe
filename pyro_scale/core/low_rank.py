"""Gaussians whose precision is a diagonal and a matrix of low rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.gaussian_parts import ByProducts, OfTensors


@dataclass(frozen=True)
class LowRank(OfTensors, ByProducts):
    """The precision diag(scale)^-1 (I + U diag(lengths) U^T) diag(scale)^-1.

    Args:
        mean: [D].
        scale: sds but for the directions, [D].
        axes: U, orthonormal columns, [D, k].
        lengths: at least 0, [k].
    """

    mean: Tensor
    scale: Tensor
    axes: Tensor
    lengths: Tensor

    @classmethod
    def of_precision(cls, mean: Tensor, diagonal: Tensor, factor: Tensor) -> LowRank:
        """Of the precision diag(diagonal) + V V^T, with V [D, k]."""
        scale = diagonal.rsqrt()
        axes, singular, _ = torch.linalg.svd(scale[:, None] * factor, full_matrices=False)
        return cls(mean, scale, axes, singular.square())

    def temper(self, temperature: float) -> LowRank:
        """The covariance times the temperature."""
        return LowRank(self.mean, self.scale * math.sqrt(temperature), self.axes, self.lengths)

    def sample(self, noise: Tensor) -> Tensor:
        """Draws from standard normals, [..., D]."""
        return self.mean + self.scale * self._stretched(noise, (1 + self.lengths).rsqrt())

    def covariance_times(self, vector: Tensor) -> Tensor:
        return self.scale * self._stretched(self.scale * vector, 1 / (1 + self.lengths))

    def precision_times(self, vector: Tensor) -> Tensor:
        return self._stretched(vector / self.scale, 1 + self.lengths) / self.scale

    @property
    def variance(self) -> Tensor:
        """[D]."""
        rows = self.axes.square() @ (1 / (1 + self.lengths) - 1)
        return self.scale.square() * (1 + rows)

    @property
    def precision_diagonal(self) -> Tensor:
        """[D]."""
        return (1 + self.axes.square() @ self.lengths) / self.scale.square()

    @property
    def log_det(self) -> Tensor:
        return 2 * self.scale.log().sum() - self.lengths.log1p().sum()

    def _stretched(self, vector: Tensor, by: Tensor) -> Tensor:
        """(I + U diag(by - 1) U^T) v."""
        return vector + ((vector @ self.axes) * (by - 1)) @ self.axes.mT
