"""Gaussians whose covariance is made of Kronecker products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian_parts import ByProducts


class Block(NamedTuple):
    """Elements that are independent of all others: as a matrix [m, n], their covariance is the
    Kronecker product of two bases, with a variance for each pair of their vectors.

    Attributes:
        places: where they are in the whole vector, [m, n].
        left: orthonormal, [m, m].
        right: orthonormal, [n, n].
        variances: [m, n].
    """

    places: Tensor
    left: Tensor
    right: Tensor
    variances: Tensor

    def stretch(self, values: Tensor, by: Tensor) -> Tensor:
        """Values `[..., m, n]` along the bases' vectors, times numbers [m, n], as they were."""
        return self.left @ (by * (self.left.mT @ values @ self.right)) @ self.right.mT

    def spread(self, noise: Tensor) -> Tensor:
        """Standard normals `[..., m, n]` with the covariance."""
        return self.left @ (self.variances.sqrt() * noise) @ self.right.mT

    def diagonal(self, values: Tensor) -> Tensor:
        """Of the matrix that has these values, [m, n], for its eigenvalues: [m, n]."""
        return self.left.square() @ values @ self.right.square().mT


@dataclass(frozen=True)
class Kronecker(ByProducts):
    """Blocks of elements, and elements by themselves.

    Args:
        mean: [D].
        blocks: which have no element in common.
        others: places of the elements that are in none, [k].
        other_variances: theirs, [k].
    """

    mean: Tensor
    blocks: tuple[Block, ...]
    others: Tensor
    other_variances: Tensor

    @classmethod
    def of_contents(
        cls,
        mean: Tensor,
        blocks: Sequence[Sequence[Tensor]],
        others: Tensor,
        other_variances: Tensor,
    ) -> Kronecker:
        """From what `contents` gave."""
        return cls(mean, tuple(Block(*block) for block in blocks), others, other_variances)

    def contents(self) -> dict[str, Any]:
        """Its tensors, in plain tuples."""
        return {**vars(self), "blocks": tuple(tuple(block) for block in self.blocks)}

    def temper(self, temperature: float) -> Kronecker:
        """The covariance times the temperature."""
        blocks = tuple(
            each._replace(variances=temperature * each.variances) for each in self.blocks
        )
        return Kronecker(self.mean, blocks, self.others, temperature * self.other_variances)

    def double(self) -> Kronecker:
        """The same in float64."""
        blocks = tuple(
            Block(each.places, *(part.double() for part in each[1:])) for each in self.blocks
        )
        return Kronecker(self.mean.double(), blocks, self.others, self.other_variances.double())

    def sample(self, noise: Tensor) -> Tensor:
        """Draws from standard normals, [..., D]."""
        away = self._by_part(noise, Block.spread, lambda x, variances: x * variances.sqrt())
        return self.mean + away

    def covariance_times(self, vector: Tensor) -> Tensor:
        return self._by_part(vector, lambda block, x: block.stretch(x, block.variances), torch.mul)

    def precision_times(self, vector: Tensor) -> Tensor:
        return self._by_part(
            vector, lambda block, x: block.stretch(x, 1 / block.variances), torch.div
        )

    @property
    def variance(self) -> Tensor:
        """[D]."""
        return self._diagonal(lambda variances: variances)

    @property
    def precision_diagonal(self) -> Tensor:
        """[D]."""
        return self._diagonal(torch.reciprocal)

    @property
    def log_det(self) -> Tensor:
        parts = [self.other_variances, *(block.variances for block in self.blocks)]
        return torch.stack([part.log().sum() for part in parts]).sum()

    def _diagonal(self, of_variances: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the matrix whose eigenvalues are a function of the variances, [D]."""
        total = torch.zeros_like(self.mean)
        for block in self.blocks:
            total[block.places] = block.diagonal(of_variances(block.variances))
        return total.index_put((self.others,), of_variances(self.other_variances))

    def _by_part(
        self,
        vector: Tensor,
        of_block: Callable[[Block, Tensor], Tensor],
        of_others: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Parts of a vector [..., D], each changed by itself."""
        result = torch.zeros_like(vector)
        for block in self.blocks:
            result[..., block.places] = of_block(block, vector[..., block.places])
        result[..., self.others] = of_others(vector[..., self.others], self.other_variances)
        return result
