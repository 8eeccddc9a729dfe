"""Draws by site that are summarized online and not kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout
from pyro_scale.core.online_moments import Moments, OnlineMoments, Totals


@dataclass(frozen=True)
class OnlineSamples:
    """Adds up draws of all sites.

    Attributes:
        online: of all their elements.
        layout: of the sites in those.
    """

    online: OnlineMoments
    layout: Layout

    @classmethod
    def of(cls, samples: Mapping[str, Tensor], num_draws: int) -> OnlineSamples:
        """None yet, of sites like these `[chains, draws, ...]`, with so many draws to come."""
        layout = Layout.from_tensors({name: value[0, 0] for name, value in samples.items()})
        num_chains = len(next(iter(samples.values())))
        return cls(OnlineMoments(num_chains, layout.size, num_draws), layout)

    def add(self, samples: Mapping[str, Tensor]) -> None:
        """Adds the next draws, `[chains, n, ...]`."""
        self.online.add(torch.vmap(torch.vmap(self.layout.flatten))(dict(samples)))


@dataclass(frozen=True)
class SampleTotals:
    """What draws of all sites have come to.

    Attributes:
        totals: of all their elements.
        layout: of the sites in those.
    """

    totals: Totals
    layout: Layout

    def moments(self, levels: Sequence[float]) -> dict[str, Moments]:
        """By site, in double precision."""
        names, double = self.layout.names, (torch.float64,) * len(self.layout.names)
        layout = Layout(names, self.layout.shapes, double)
        parts = [layout.unflatten(part) for part in self.totals.moments(levels)]
        return {name: Moments(*(part[name] for part in parts)) for name in names}
