"""Batches of chains that have a data set each; rows that all data sets share are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, Fixed, Gathered, Source
from pyro_scale.data.batches import Batch, ByStep
from pyro_scale.data.row_sampler import RowIndices


@dataclass(frozen=True)
class StackedBatches(ByStep):
    """Minibatches of chains that have a data set each, for many models that are run together; rows
    that all data sets share are stored once.

    A batch's arguments are `(constants, shared, own)`: tensors of the chain, such as its
    coordinates; rows that all data sets share; rows of the chain's data set. The number of the
    chain's data set is an index, like those of its rows, so that one compiled loop serves all
    chains. Constants are `[1, ...]`, and so is `own` if every step has all rows.

    Attributes:
        shared: rows that all data sets share, `[N, ...]` each.
        own: rows of each data set, `[chains, N, ...]` each.
        num_rows: N, number of rows of each data set.
        constants: tensors of each chain, `[chains, ...]`.
        indices: row indices of each step; None if every step has all rows.
    """

    shared: Arguments
    own: Arguments
    num_rows: int
    constants: Sequence[Tensor] = ()
    indices: RowIndices | None = None
    _flat: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flat = rows.map_rows(lambda table: table.flatten(0, 1), self.own)
        object.__setattr__(self, "_flat", flat)

    @property
    def fixed(self) -> Any:
        """The rows that all data sets share. They are inputs of the compiled program, so that it
        serves other data sets of the same shape, too.
        """
        return self.shared

    @property
    def num_chains(self) -> int:
        """The number of chains, each of which has a data set of its own."""
        return len(rows.leaves((*self.constants, self.own))[0])

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        device = rows.device((*self.constants, self.own))
        number = torch.arange(self.num_chains, device=device)[:, None, None]
        number = number.expand(-1, stop - start, 1)
        if self.indices is None:
            return [number]
        places, flat = (None, None) if out is None else out[1:]
        places = self.indices.span(start, stop, places)
        return [number, places, torch.add(places, number * self.num_rows, out=flat)]

    def batch(self, fixed: Any, changing: Any) -> Batch:
        number = changing[0]
        constants = tuple(table[number] for table in self.constants)
        if self.indices is None:
            shared = rows.map_rows(lambda table: table.expand(len(number), *table.shape), fixed)
            return Batch((constants, shared, rows.take(self.own, number)), per_chain=True)
        shared, own = rows.take(fixed, changing[1]), rows.take(self._flat, changing[2])
        return Batch((constants, shared, own), per_chain=True)

    def sources(self, changing: Any) -> list[Source]:
        shared, number = rows.leaves(self.shared), changing[0]
        constants: list[Source] = [Gathered(table, number) for table in self.constants]
        if self.indices is None:
            own = [Gathered(table, number) for table in rows.leaves(self.own)]
            return [*constants, *(Fixed(table[None]) for table in shared), *own]
        own = [Gathered(table, changing[2]) for table in rows.leaves(self._flat)]
        return [*constants, *(Gathered(table, changing[1]) for table in shared), *own]

    def of_rows(self, part: slice) -> StackedBatches:
        raise NotImplementedError("chains with data of their own are moved by one process")
