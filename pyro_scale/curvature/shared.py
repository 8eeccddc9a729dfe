"""The log density of all rows, which ranks share out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.distributed.ranks import Ranks
from pyro_scale.distributed.sums import Sums

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SharedDensity(FullDataDensity):
    """The log joint of all rows on rank 0, which asks the others for their terms.

    Attributes:
        sums: over ranks.
    """

    sums: Sums

    @classmethod
    def of(cls, density: FullDataDensity, sums: Sums) -> SharedDensity:
        """The same density, by those sums."""
        return cls(density.log_posterior, density.data, density.layout, sums=sums)

    def grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint over N, its gradient over N, [D])."""
        value, gradient = self.sums.ask("grad", position.detach())
        return value, gradient

    def add_up(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function comes to on all ranks, added up."""
        return self.sums.ask("function", function, *arguments)

    def of_each(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """What the function comes to on each rank."""
        return self.sums.ask_each("function", function, *arguments)


def sums_of(density: FullDataDensity, ranks: Ranks, device: torch.device) -> Sums:
    """What a density of all rows is on some ranks, each of which adds up its share of them.

    Raises:
        DataError: the data do not hold N rows.
    """
    density.check_rows()
    own = dataclasses.replace(density, share=ranks.share)

    def value(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(own, *arguments)

    return Sums(ranks, {"grad": own.grad, "function": value}, device)
