"""Data of whole groups, from which minibatches are drawn: units of `Grouped` rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_scale.core.rows import DataLike
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.errors import ArgumentError
from pyro_scale.marginal.grouped import Grouped


@dataclass
class GroupedData(TensorData):
    """Units of whole groups, as data.

    Attributes:
        grouped: the rows by group.
        slots: the groups of each unit, `[units, slots]`, -1 where a slot has none.
    """

    grouped: Grouped = field(kw_only=True)
    slots: Tensor = field(kw_only=True)

    @property
    def members(self) -> Tensor:
        """Where the groups are among the members of all units, `[groups]`."""
        flat = self.slots.flatten()
        places = torch.empty(self.grouped.num_groups, dtype=torch.int64)
        used = (flat >= 0).nonzero()[:, 0]
        places[flat[used]] = used
        return places

    def units_of(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """(The units with some groups, `[units]`; where these groups are among the members of those
        units, `[groups]`)."""
        slots = self.slots.shape[1]
        members = self.members[groups]
        units, places = torch.unique(members // slots, return_inverse=True)
        return units, places * slots + members % slots


def open_grouped(grouped: Grouped, batch_size: int | None) -> GroupedData:
    """Rows by group as a source of minibatches of about `batch_size` whole groups; None for all."""
    units, slots = grouped.units()
    if batch_size is not None:
        batch_size = max(1, round(batch_size * len(slots) / max(1, grouped.num_groups)))
        batch_size = None if batch_size >= len(slots) else batch_size
    return GroupedData((units,), len(slots), batch_size, grouped=grouped, slots=slots)


def open_rows(
    data: DataLike | Grouped,
    batch_size: int | None = None,
    num_data: int | None = None,
    device: torch.device | None = None,
) -> Data:
    """The data that a user passes, as `open_data` opens it; of `Grouped`, units of whole groups.

    Raises:
        ArgumentError: `num_data` is passed with `Grouped`; and what `open_data` raises.
    """
    if not isinstance(data, Grouped):
        return open_data(data, batch_size, num_data, device)
    if num_data is not None:
        raise ArgumentError("num_data: Grouped counts its groups: leave it out")
    return open_grouped(data, batch_size)
