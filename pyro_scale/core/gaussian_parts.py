"""What Gaussians over a flat vector [D] have in common, whatever they consist of."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import torch
from torch import Tensor


class OfTensors:
    """A dataclass whose fields are tensors."""

    @classmethod
    def of_contents(cls, **contents: Tensor) -> Self:
        """From what `contents` gave."""
        return cls(**contents)

    def contents(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return dict(vars(self))

    def double(self) -> Self:
        """The same in float64."""
        doubled: Any = {name: value.double() for name, value in vars(self).items()}
        return dataclasses.replace(self, **doubled)  # type: ignore[type-var]


class ByProducts:
    """A Gaussian that is known by products with its covariance and its precision."""

    mean: Tensor

    def covariance_times(self, vector: Tensor) -> Tensor:
        """The covariance times vectors [..., D]."""
        raise NotImplementedError

    def precision_times(self, vector: Tensor) -> Tensor:
        """The precision times vectors [..., D]."""
        raise NotImplementedError

    @property
    def log_det(self) -> Tensor:
        """The log determinant of the covariance."""
        raise NotImplementedError

    def log_prob(self, x: Tensor) -> Tensor:
        """The log density at x [D], in nats."""
        away = x - self.mean
        scaled = torch.dot(away, self.precision_times(away))
        return -(scaled + self.log_det + len(self.mean) * math.log(2 * math.pi)) / 2

    @property
    def covariance(self) -> Tensor:
        """[D, D]."""
        return self.covariance_times(torch.eye(len(self.mean)).to(self.mean))

    @property
    def precision(self) -> Tensor:
        """[D, D]."""
        return self.precision_times(torch.eye(len(self.mean)).to(self.mean))
