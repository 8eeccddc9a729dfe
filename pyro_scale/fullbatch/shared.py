"""The log density of all rows, which ranks share out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyro_scale.distributed.ranks import Ranks
from pyro_scale.distributed.sums import Sums, Terms
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.precision import CurvatureKind, Expansion, expansion_at


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

    def expansion(
        self,
        position: Tensor,
        sites: Sequence[str],
        kind: CurvatureKind,
        dense: bool,
        seed: int,
        num_rows: int | None,
    ) -> Expansion:
        """See `expansion_at`."""
        return Expansion(*self.sums.ask("expansion", position, sites, kind, dense, seed, num_rows))


def sums_of(density: FullDataDensity, ranks: Ranks, device: torch.device) -> Sums:
    """What a density of all rows is on some ranks, each of which adds up its share of them.

    Raises:
        DataError: the data do not hold N rows.
    """
    density.check_rows()
    own = dataclasses.replace(density, share=ranks.share)
    terms: dict[str, Terms] = {"grad": own.grad, "expansion": partial(expansion_at, own)}
    return Sums(ranks, terms, device)
