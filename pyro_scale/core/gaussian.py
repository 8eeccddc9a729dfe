"""Diagonal and dense Gaussians over a flat vector [D]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.gaussian_parts import OfTensors
from pyro_scale.core.kronecker import Kronecker
from pyro_scale.core.low_rank import LowRank


@dataclass(frozen=True)
class Diagonal(OfTensors):
    """Independent elements.

    Args:
        mean: [D].
        sd: [D].
    """

    mean: Tensor
    sd: Tensor

    @classmethod
    def of_precision(cls, mean: Tensor, precision: Tensor) -> Diagonal:
        """From each element's precision, [D]."""
        return cls(mean, precision.rsqrt())

    def temper(self, temperature: float) -> Diagonal:
        """The covariance times the temperature."""
        return Diagonal(self.mean, self.sd * math.sqrt(temperature))

    def sample(self, noise: Tensor) -> Tensor:
        """Draws from standard normals, [..., D]."""
        return self.mean + self.sd * noise

    def covariance_times(self, vector: Tensor) -> Tensor:
        """The covariance times a vector [D]."""
        return self.variance * vector

    def log_prob(self, x: Tensor) -> Tensor:
        """The log density at x [D], in nats."""
        scaled = ((x - self.mean) / self.sd).square().sum()
        return -(scaled + self.log_det + len(self.mean) * math.log(2 * math.pi)) / 2

    @property
    def variance(self) -> Tensor:
        """[D]."""
        return self.sd.square()

    @property
    def precision(self) -> Tensor:
        """[D]."""
        return self.sd.square().reciprocal()

    precision_diagonal = precision

    @property
    def log_det(self) -> Tensor:
        """The log determinant of the covariance."""
        return 2 * self.sd.log().sum()


@dataclass(frozen=True)
class Dense(OfTensors):
    """Correlated elements.

    Args:
        mean: [D].
        scale_tril: lower triangular, [D, D]; times its transpose it is the covariance.
    """

    mean: Tensor
    scale_tril: Tensor

    @classmethod
    def of_covariance(cls, mean: Tensor, covariance: Tensor) -> Dense:
        """From a covariance matrix, [D, D]."""
        return cls(mean, torch.linalg.cholesky(covariance))

    @classmethod
    def of_precision(cls, mean: Tensor, precision: Tensor, overwrite: bool = False) -> Dense:
        """From a precision matrix, [D, D].

        Backwards in both directions, a Cholesky factor of the precision is the transpose of one of
        the covariance's inverse: no more than one factor and one triangular solve, each in its own
        memory, so that there are three matrices at once with the one that is given; two where its
        memory may be taken.

        Args:
            mean: [D].
            precision: [D, D].
            overwrite: whether the precision is not needed any more.

        Raises:
            torch.linalg.LinAlgError: it is not positive definite; then it is as it was.
        """
        backwards = precision.flip(-2, -1).mT  # by column, as LAPACK has it
        torch.linalg.cholesky(backwards, out=backwards)
        inverse = (precision.zero_() if overwrite else torch.zeros_like(precision)).mT
        inverse.diagonal().fill_(1)
        torch.linalg.solve_triangular(backwards, inverse, upper=False, out=inverse)
        del backwards
        return cls(mean, inverse.flip(-2, -1).mT)

    def temper(self, temperature: float) -> Dense:
        """The covariance times the temperature."""
        if temperature == 1:
            return self
        return Dense(self.mean, self.scale_tril * math.sqrt(temperature))

    def sample(self, noise: Tensor) -> Tensor:
        """Draws from standard normals, [..., D]."""
        return self.mean + noise @ self.scale_tril.mT

    def covariance_times(self, vector: Tensor) -> Tensor:
        """The covariance times a vector [D]."""
        return self.scale_tril @ (self.scale_tril.mT @ vector)

    def log_prob(self, x: Tensor) -> Tensor:
        """The log density at x [D], in nats."""
        away = (x - self.mean)[:, None]
        scaled = torch.linalg.solve_triangular(self.scale_tril, away, upper=False).square().sum()
        return -(scaled + self.log_det + len(self.mean) * math.log(2 * math.pi)) / 2

    @property
    def variance(self) -> Tensor:
        """[D]."""
        return self.scale_tril.square().sum(-1)

    @property
    def covariance(self) -> Tensor:
        """[D, D]."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def precision(self) -> Tensor:
        """[D, D]."""
        return torch.cholesky_inverse(self.scale_tril)

    @property
    def precision_diagonal(self) -> Tensor:
        """[D]."""
        return self.precision.diagonal()

    @property
    def log_det(self) -> Tensor:
        """The log determinant of the covariance."""
        return 2 * self.scale_tril.diagonal().log().sum()


#: Of any structure.
Gaussian: TypeAlias = Diagonal | Dense | Kronecker | LowRank


def as_structure(gaussian: Gaussian, dense: bool) -> Gaussian:
    """The Gaussian, as a dense one, or without its correlations."""
    if not dense:
        return Diagonal(gaussian.mean, gaussian.variance.sqrt())
    if isinstance(gaussian, Diagonal):
        return Dense(gaussian.mean, gaussian.sd.diag())
    if isinstance(gaussian, Kronecker | LowRank):
        return Dense.of_covariance(gaussian.mean, gaussian.covariance)
    return gaussian


def matrix_or_diagonal(values: Tensor, dense: bool) -> Tensor:
    """A matrix [D, D], or a diagonal [D], as the matrix, or its diagonal."""
    return values if (values.dim() == 2) == dense else values.diag()
