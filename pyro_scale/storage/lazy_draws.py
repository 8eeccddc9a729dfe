"""Draws in a store on disk, read when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout
from pyro_scale.core.validation import evenly
from pyro_scale.storage.zarr_store import POSTERIOR, UNCONSTRAINED, DrawStore

#: Bytes that are read into memory at a time.
_READ_BYTES = 2**23
#: Files of each site and chain that are read for an evenly spaced sample of draws.
_MAX_FILES = 16


@dataclass(frozen=True)
class StoredPositions:
    """Unconstrained draws in a store on disk, `[chains, draws, D]`, indexed like a tensor and read
    when they are used.

    Attributes:
        store: the store that has the draws.
        layout: indices of each site's elements among all D unconstrained parameters of a draw.
        chains: indices of the chains in the store, `[chains]`.
        count: number of draws of each chain.
    """

    store: DrawStore
    layout: Layout
    chains: Tensor
    count: int

    @property
    def shape(self) -> torch.Size:
        """The shape `[chains, draws, D]` of all draws, as of a tensor."""
        return torch.Size((len(self.chains), self.count, self.layout.size))

    @property
    def samples(self) -> StoredSamples:
        """The constrained values of the same draws: a mapping from site to a tensor `[chains,
        draws, ...]`, read from disk when it is used.
        """
        return StoredSamples(self)

    def __getitem__(self, places: tuple[int | Tensor, int | Tensor]) -> Tensor:
        """The unconstrained draws `[..., D]` at `places`: (indices of chains, indices of draws),
        which are broadcast together to the shape `[...]`. Read from disk now.
        """
        return _at_places(self._read, self.shape, *places)

    def blocks(self) -> Iterator[Tensor]:
        """Yields all draws, chain by chain, in blocks `[n, D]` of at most 8 MiB."""
        width = self.layout.size * torch.finfo(self.layout.dtype).bits // 8
        block_size = max(1, _READ_BYTES // width)
        for chain in range(len(self.chains)):
            for places in torch.arange(self.count).split(block_size):
                yield self._read(torch.tensor([chain]), places)[0]

    def _read(self, chains: Tensor, draws: Tensor) -> Tensor:
        """Unconstrained draws `[len(chains), len(draws), D]`, read from disk: every one of the
        draws `draws` of every one of the chains `chains` (indices).
        """
        transformed, parts = self.store.sites(UNCONSTRAINED), []
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            group = UNCONSTRAINED if name in transformed else POSTERIOR
            part = self.store.read(f"{group}/{name}", self.chains[chains], draws)
            flat = part.reshape(len(chains), len(draws), shape.numel())
            parts.append(flat.to(self.layout.dtype))
        return torch.cat(parts, 2)


@dataclass(frozen=True)
class StoredSamples(Mapping[str, Tensor]):
    """Constrained draws in a store on disk, a mapping from sites to tensors `[chains, draws, ...]`,
    which are read when they are used.

    Attributes:
        positions: the unconstrained draws in the store.
    """

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
        """The shape of one constrained draw (without chains and draws) of every site, by the site's
        name.
        """
        store = self.positions.store
        return {n: store.shape_of(f"{POSTERIOR}/{n}") for n in store.sites(POSTERIOR)}

    def at(self, chains: Tensor, draws: Tensor) -> dict[str, Tensor]:
        """The constrained draws at pairs of (chain, draw): a dict from site to a tensor `[...,
        *shape]`, read from disk now.

        Args:
            chains: indices of chains.
            draws: indices of draws, broadcast together with `chains` to the shape `[...]`.
        """
        shape = self.positions.shape

        def read(name: str) -> Tensor:
            return _at_places(lambda c, d: self._read(name, c, d), shape, chains, draws)

        return {name: read(name) for name in self}

    def elements(self, name: str, places: Tensor) -> Tensor:
        """All draws of some elements of one site, `[chains, draws, len(places)]`, read from disk
        without the site's other elements.

        Args:
            name: name of the site.
            places: indices into the site's flattened value.
        """
        chains, draws = torch.arange(len(self.positions.chains)), torch.arange(self.positions.count)
        return self._read(name, chains, draws, places)

    def dataset(self) -> Any:
        """All draws as an `xarray.Dataset` with dims chain and draw, which reads draws when they
        are used."""
        dataset = self.positions.store.dataset(POSTERIOR)[list(self)].drop_attrs(deep=False)
        kept = {"chain": self.positions.chains.numpy(), "draw": slice(self.positions.count)}
        return dataset.isel(kept)

    def _read(
        self, name: str, chains: Tensor, draws: Tensor, elements: Tensor | None = None
    ) -> Tensor:
        chains = self.positions.chains[chains]
        return self.positions.store.read(f"{POSTERIOR}/{name}", chains, draws, elements)


#: Unconstrained draws, `[chains, draws, D]`, in memory or in a store.
Positions = Tensor | StoredPositions


def spread(positions: Positions, most: int) -> Tensor:
    """Indices of at most `most` draws, evenly spaced over a run, in ascending order; for draws in a
    store, from 16 files of each chain at most.

    Args:
        positions: unconstrained draws, `[chains, draws, D]`.
        most: largest number of indices.
    """
    draws = torch.arange(positions.shape[1])
    if isinstance(positions, StoredPositions):
        file = draws // positions.store.chunk
        files = file.unique()
        draws = draws[torch.isin(file, files[evenly(len(files), _MAX_FILES)])]
    return draws[evenly(len(draws), most)]


def some_draws(positions: Positions, most: int) -> Tensor:
    """At most `most` unconstrained draws of every chain, evenly spaced over a run, `[chains, n,
    D]`; those that `spread` picks.

    Args:
        positions: unconstrained draws, `[chains, draws, D]`.
        most: largest number of draws of a chain.
    """
    return positions[torch.arange(positions.shape[0])[:, None], spread(positions, most)]


def _at_places(
    read: Callable[[Tensor, Tensor], Tensor],
    shape: torch.Size,
    chains: int | Tensor,
    draws: int | Tensor,
) -> Tensor:
    """The values at pairs of (chain, draw), `[..., *shape]`, from a function that reads all
    combinations of some chains and some draws.

    Args:
        read: function from indices `[n]` of chains and `[m]` of draws to values `[n, m, ...]`.
        shape: the shape `[chains, draws, ...]`, for negative indices.
        chains: indices of chains.
        draws: indices of draws, broadcast together with `chains`.
    """
    chain, draw = torch.broadcast_tensors(torch.as_tensor(chains), torch.as_tensor(draws))
    places = torch.stack([chain.flatten() % shape[0], draw.flatten() % shape[1]])
    parts, order = [], []
    for number in places[0].unique():
        in_chain = torch.nonzero(places[0] == number)[:, 0]
        parts.append(read(number[None], places[1, in_chain])[0])
        order.append(in_chain)
    values = torch.cat(parts)[torch.cat(order).argsort()]
    return values.reshape(*chain.shape, *values.shape[1:])
