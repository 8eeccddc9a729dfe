"""A model on units of data: rows, or padded groups of rows, each with its own local latents."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Model
from pyro_scale.marginal.grouped import GROUPS, PLACES, ROWS, SLOTS, USED, with_column
from pyro_scale.model.sites import is_subsample, plate_scale


@dataclass(frozen=True)
class Members:
    """The members (rows or groups) of a batch of units, which have local latents.

    Attributes:
        units: number of units in the batch, B.
        count: number of members, n.
        of_rows: the member of each row, `[rows]`; None if rows are the members.
        used: which rows are no padding, `[rows]`; None for all.
    """

    units: int
    count: int
    of_rows: Tensor | None = None
    used: Tensor | None = None

    @property
    def rows_of_unit(self) -> int:
        """The number of rows of a unit, padding included."""
        return 1 if self.of_rows is None else len(self.of_rows) // self.units

    def add_up(self, of_rows: Tensor) -> Tensor:
        """Sums over the rows of each member, `[n]`, of values of rows, `[rows]`."""
        if self.of_rows is None or self.used is None:
            return of_rows
        kept = torch.where(self.used, of_rows, 0)
        if self.count == self.units:  # one member a unit
            return kept.reshape(self.units, -1).sum(1)
        return kept.new_zeros(self.count).index_add(0, self.of_rows, kept)


class UnitModel:
    """A Pyro model of batches of units, in which plates count once: no site is scaled.

    Called with the arguments of a batch of units: those of the user's model where rows are units,
    or `(units,)` with the groups that `Grouped.units` makes.

    Args:
        model: the user's model.
        by: the group column, a position or a name; None where rows are units.
        plate: name of the plate of the groups; None if its size is not to be changed.
    """

    def __init__(self, model: Model, by: int | str | None = None, plate: str | None = None):
        self.model, self.by, self.plate = model, by, plate
        if by is None:  # the arguments are those of the user's model
            self.__signature__ = inspect.signature(getattr(model, "forward", model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's model on a batch of units; returns what it returns."""
        with _Unscaled(self.members(kwargs or args), self.plate):
            if self.by is None:
                return self.model(*args, **kwargs)
            return self._call_grouped(*args)

    def members(self, arguments: Any) -> Members:
        """The members of a batch of units, passed as the arguments of this model."""
        if self.by is None:
            count = rows.count(arguments) or 1
            return Members(count, count)
        units = arguments[0]
        num_units, slots = units[SLOTS].shape
        first = slots * torch.arange(num_units, device=units[PLACES].device)
        of_rows = (first[:, None] + units[PLACES]).reshape(-1)
        return Members(num_units, num_units * slots, of_rows, units[USED].reshape(-1))

    def used_slots(self, arguments: Any) -> Tensor | None:
        """Which slots of the units have a group, `[units, slots]`; None where rows are units."""
        return None if self.by is None else arguments[0][SLOTS]

    def _call_grouped(self, units: Mapping[str, Any]) -> Any:
        assert self.by is not None
        args, groups = (_flatten(units[part]) for part in (ROWS, GROUPS))
        args = with_column(args, self.by, self.members((units,)).of_rows)
        if isinstance(args, dict):
            return self.model(**args, **groups)
        if isinstance(groups, dict):
            return self.model(*args, **groups)
        return self.model(*args, *groups)


def _flatten(arguments: Any) -> Any:
    """The arguments with units and their rows, or slots, in one dimension."""
    return rows.map_rows(lambda column: column.flatten(0, 1), arguments)


class _Unscaled(Messenger):
    """Pyro handler under which a subsampled plate is a whole one of the subsample's size, the plate
    of the groups has a batch's members, padded rows are masked out, and members' latents never are.

    Args:
        members: the members of the batch.
        plate: name of the plate of the groups; None if there is none to change.
    """

    def __init__(self, members: Members, plate: str | None):
        super().__init__()
        self._members, self._plate = members, plate

    def _pyro_sample(self, msg: Any) -> None:
        if is_subsample(msg["fn"]):
            if msg["name"] == self._plate:
                msg["value"] = torch.arange(self._members.count, device=msg["fn"].device)
            return
        frames = msg["cond_indep_stack"]
        msg["scale"] = msg["scale"] / plate_scale(frames)
        msg["cond_indep_stack"] = tuple(frame._replace(full_size=frame.size) for frame in frames)
        used, shape = self._members.used, msg["fn"].batch_shape
        if not msg["is_observed"] and self._members.count in shape:
            msg["mask"] = None  # what a mask leaves out has its prior, which adds nothing
        if used is None or not msg["is_observed"] or self._plate in [f.name for f in frames]:
            return
        dims = [i - len(shape) for i, size in enumerate(shape) if size == len(used)]
        if dims:
            mask = used.reshape(len(used), *(1,) * (-dims[-1] - 1))
            msg["mask"] = mask if msg["mask"] is None else mask & msg["mask"]
