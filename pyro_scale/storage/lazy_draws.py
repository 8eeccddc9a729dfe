"""Draws that are on disk, read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout
from pyro_scale.core.validation import evenly
from pyro_scale.storage.zarr_store import POSTERIOR, UNCONSTRAINED, DrawStore

#: Bytes that are read at once.
_READ_BYTES = 2**23
#: Files of a site and chain that are read to see some draws of a run.
_FILES = 16


@dataclass(frozen=True)
class StoredPositions:
    """Unconstrained draws in a store, `[chains, draws, D]`, in place of a tensor.

    A site whose value is its unconstrained one is in the posterior alone.

    Attributes:
        store: where they are.
        layout: of a position.
        chains: the chains' places in the store, `[chains]`.
        count: draws of each chain.
    """

    store: DrawStore
    layout: Layout
    chains: Tensor
    count: int

    @property
    def shape(self) -> torch.Size:
        """As a tensor's."""
        return torch.Size((len(self.chains), self.count, self.layout.size))

    @property
    def samples(self) -> StoredSamples:
        """Constrained values by site."""
        return StoredSamples(self)

    def __getitem__(self, places: tuple[int | Tensor, int | Tensor]) -> Tensor:
        """The draws at (chains, draws), numbers or tensors that are broadcast, `[..., D]`."""
        return _at_places(self._read, self.shape, *places)

    def blocks(self) -> Iterator[Tensor]:
        """All draws, chain by chain, some at a time, `[n, D]`."""
        width = self.layout.size * torch.finfo(self.layout.dtype).bits // 8
        each = max(1, _READ_BYTES // width)
        for chain in range(len(self.chains)):
            for places in torch.arange(self.count).split(each):
                yield self._read(torch.tensor([chain]), places)[0]

    def _read(self, chains: Tensor, draws: Tensor) -> Tensor:
        """`[len(chains), len(draws), D]`."""
        own, other = self.chains[chains], self.store.sites(UNCONSTRAINED)
        parts = [
            self.store.read(f"{UNCONSTRAINED if n in other else POSTERIOR}/{n}", own, draws)
            for n in self.layout.names
        ]
        lead = len(chains), len(draws)
        sizes = [shape.numel() for shape in self.layout.shapes]
        flat = [part.reshape(*lead, size) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat([part.to(self.layout.dtype) for part in flat], 2)


@dataclass(frozen=True)
class StoredSamples(Mapping[str, Tensor]):
    """Constrained draws by site, `[chains, draws, ...]`, each read when it is asked for."""

    positions: StoredPositions

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        indices = torch.arange(len(self.positions.chains)), torch.arange(self.positions.count)
        return self._read(name, *indices)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of one draw of every site."""
        store = self.positions.store
        return {n: store.shape_of(f"{POSTERIOR}/{n}") for n in store.sites(POSTERIOR)}

    def at(self, chains: Tensor, draws: Tensor) -> dict[str, Tensor]:
        """Those at (chains, draws), which are broadcast, `[..., *shape]`."""
        shape = self.positions.shape

        def read(name: str) -> Tensor:
            return _at_places(lambda c, d: self._read(name, c, d), shape, chains, draws)

        return {name: read(name) for name in self}

    def elements(self, name: str, places: Tensor) -> Tensor:
        """All draws of some elements of a site, by their places in the flattened one."""
        chains, draws = torch.arange(len(self.positions.chains)), torch.arange(self.positions.count)
        return self._read(name, chains, draws, places)

    def dataset(self) -> Any:
        """All of them as xarray's dataset, of which nothing is read before it is needed."""
        dataset = self.positions.store.dataset(POSTERIOR)[list(self)].drop_attrs(deep=False)
        kept = {"chain": self.positions.chains.numpy(), "draw": slice(self.positions.count)}
        return dataset.isel(kept)

    def _read(
        self, name: str, chains: Tensor, draws: Tensor, elements: Tensor | None = None
    ) -> Tensor:
        own = self.positions.chains[chains]
        return self.positions.store.read(f"{POSTERIOR}/{name}", own, draws, elements)


#: Unconstrained draws, `[chains, draws, D]`, in memory or not.
Positions = Tensor | StoredPositions


def spread(positions: Positions, most: int) -> Tensor:
    """At most so many draws' places, evenly over a run; in a store they are of a few files."""
    draws = torch.arange(positions.shape[1])
    if isinstance(positions, StoredPositions):
        file = draws // positions.store.chunk
        files = file.unique()
        draws = draws[torch.isin(file, files[evenly(len(files), _FILES)])]
    return draws[evenly(len(draws), most)]


def _at_places(
    read: Callable[[Tensor, Tensor], Tensor],
    shape: torch.Size,
    chains: int | Tensor,
    draws: int | Tensor,
) -> Tensor:
    """What indexing a tensor gives, by something that reads (chains, draws) in blocks."""
    chain, draw = torch.broadcast_tensors(torch.as_tensor(chains), torch.as_tensor(draws))
    places = torch.stack([chain.flatten() % shape[0], draw.flatten() % shape[1]])
    parts, order = [], []
    for own in places[0].unique():
        here = torch.nonzero(places[0] == own)[:, 0]
        parts.append(read(own[None], places[1, here])[0])
        order.append(here)
    values = torch.cat(parts)[torch.cat(order).argsort()]
    return values.reshape(*chain.shape, *values.shape[1:])
