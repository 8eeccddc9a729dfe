"""Rows of data by group, as units that minibatches can take: whole groups, padded to one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core import rows as rows_module
from pyro_scale.core.rows import Arguments, DataLike, Model
from pyro_scale.data.open import open_data
from pyro_scale.errors import ArgumentError, DataError

#: Padding of groups to the length of the longest, relative to their rows, from which on short
#: groups share a unit.
_MOST_PADDING = 2.0
#: A batch of units, as `GroupedData.units`: the keys.
ROWS, GROUPS, PLACES, USED, SLOTS = "rows", "groups", "places", "used", "slots"


class Grouped:
    """Rows of data by group, for models with a latent of every group: minibatches take whole
    groups.

    In a batch, the group column holds places in the batch, 0, 1, ..., and the plate of the groups
    has as many members, so that the model is written as for all rows.

    Args:
        rows: the model's arguments, a tuple by position or a dict by name, whose tensors are rows.
        by: the column of the groups: a position in the tuple, or a name in the dict.  Its values
            are any labels: integers, words.
        groups: values of groups, a tuple of further arguments or a dict of them by name, each with
            an entry for every group.  Labels are then 0, 1, ..., and index these.

    Raises:
        ArgumentError: there is no such column; `groups` are not as described.
        DataError: labels are not one a row, are NaN, or out of the range of `groups`.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> x, school = torch.arange(5.0), torch.tensor([3, 3, 8, 3, 8])
        >>> ps.Grouped((x, school), by=1)
        <Grouped: 5 rows in 2 groups of 2 to 3>
    """

    def __init__(
        self,
        rows: DataLike,
        by: int | str,
        groups: tuple[Any, ...] | Mapping[str, Any] = (),
    ):
        arguments = _arguments_of(rows)
        labels = _labels_of(arguments, by)
        if isinstance(arguments, tuple) and isinstance(by, int):
            by = range(len(arguments))[by]  # arguments to predict with may end before the last
        self.groups = _groups_of(groups, arguments)
        num_groups = rows_module.count(self.groups)
        if num_groups is None:
            self.labels, index = _unique(labels, by)
        else:
            self.labels, index = np.arange(num_groups), _in_range(labels, num_groups, by)
        self.index = torch.as_tensor(index.reshape(-1), dtype=torch.int64)
        self.rows, self.by = _tensors(with_column(arguments, by, self.index)), by
        rows_module.count(self.rows)  # raises if columns are of different lengths
        self.lengths = torch.bincount(self.index, minlength=len(self.labels))

    @property
    def num_groups(self) -> int:
        """The number of groups, with those that have no rows if `groups` has entries for them."""
        return len(self.labels)

    def __repr__(self) -> str:
        lengths = self.lengths[self.lengths > 0]
        return (
            f"<Grouped: {len(self.index):,} rows in {self.num_groups:,} groups of "
            f"{int(lengths.min())} to {int(lengths.max())}>"
        )

    def with_rows(self, rows: Arguments) -> Grouped:
        """Other values of the same rows, in the same groups."""
        return Grouped(rows, self.by, self.groups)

    def on_rows(self, model: Model) -> Model:
        """The model as a function of the rows alone, with the values of groups filled in."""
        by_name = self.groups if isinstance(self.groups, dict) else {}
        by_place = () if by_name else tuple(self.groups)
        return lambda *args, **kwargs: model(*args, *by_place, **kwargs, **by_name)

    def relabel(self, arguments: Any, by: int | str) -> tuple[np.ndarray, Tensor]:
        """(The labels that some rows have, each once; the place of each row's among them,
        `[rows]`)."""
        labels, index = _unique(_labels_of(arguments, by), by)
        return labels, torch.as_tensor(index.reshape(-1), dtype=torch.int64)

    def values_of(self, groups: Any, labels: np.ndarray) -> Arguments:
        """The values of the groups with some labels, from those of all groups that the user passes;
        from the run's own if none are passed.

        Raises:
            DataError: a label is not among those of the groups.
        """
        values = _tensors(groups) if groups else self.groups
        if (num_groups := rows_module.count(values)) is None:
            return values
        return rows_module.take(values, torch.as_tensor(_in_range(labels, num_groups, self.by)))

    def places_of(self, labels: np.ndarray) -> Tensor:
        """The places of labels among the groups, `[labels]`; -1 for groups that were not seen.

        Raises:
            DataError: the labels are words and the groups' are numbers, or the other way around.
        """
        if (labels.dtype.kind in "biuf") != (self.labels.dtype.kind in "biuf"):
            (first, *_), (of_run, *_) = labels.tolist(), self.labels.tolist()
            raise DataError(
                f"by={self.by!r}: labels are like {first!r}, and those of the run like {of_run!r}"
            )
        places = np.searchsorted(self.labels, labels).clip(max=len(self.labels) - 1)
        return torch.as_tensor(np.where(self.labels[places] == labels, places, -1))

    def to_clean(self) -> str:
        """A phrase for an error message with the first row and its group that is NaN or infinite;
        empty ("") if all numbers are finite."""
        for name, column in rows_module.named_rows(self.rows):
            bad = (~column.isfinite()).nonzero()
            if len(bad):
                row = int(bad[0, 0])
                label = self.labels.tolist()[self.index[row]]
                return (
                    f"argument {name} is NaN or infinite in row {row} of the data, of group "
                    f"{label!r}: leave such rows out, or put numbers there if a mask leaves them "
                    "out"
                )
        return ""

    def units(self) -> tuple[dict[str, Any], Tensor]:
        """(The units, tensors whose first dimension is units; which groups they have, `[units,
        slots]`, -1 where a slot has none).

        A unit has the rows of one or more groups, padded: `rows` and `groups`, the model's
        arguments, `[units, length, ...]` and `[units, slots, ...]`; `places`, the slot of each
        row's group; `used`, which rows are no padding, and `slots`, which slots have a group.
        """
        slots = _pack(self.lengths)
        order = torch.argsort(self.index, stable=True)
        begins = torch.cumsum(self.lengths, 0) - self.lengths
        sizes = torch.where(slots >= 0, self.lengths[slots.clamp(min=0)], 0)
        length, ends = max(1, int(sizes.sum(1).max())), sizes.cumsum(1)
        position = torch.arange(length).expand(len(slots), -1).contiguous()
        places = torch.searchsorted(ends, position, right=True).clamp(max=slots.shape[1] - 1)
        used = position < ends[:, -1:]
        groups = slots.gather(1, places).clamp(min=0)
        within = position - (ends - sizes).gather(1, places)
        picked = order[torch.where(used, begins[groups] + within, 0)]
        # padding repeats a row of its own unit, so that it has possible values
        first = torch.where(used[:, :1], picked[:, :1], 0)
        picked = torch.where(used, picked, first)
        units = {
            ROWS: rows_module.take(self.rows, picked),
            GROUPS: rows_module.take(self.groups, slots.clamp(min=0)),
            PLACES: torch.where(used, places, 0),
            USED: used,
            SLOTS: slots >= 0,
        }
        return units, slots


def _pack(lengths: Tensor) -> Tensor:
    """Which groups share a unit, `[units, slots]`, -1 for slots without one: each group has its own
    if lengths are alike, otherwise short groups fill up units of the longest group's length."""
    most = max(1, int(lengths.max()))
    if most * len(lengths) <= _MOST_PADDING * max(1, int(lengths.sum())):
        return torch.arange(len(lengths))[:, None]
    capacity = np.maximum(lengths.numpy(), 1)  # a group without rows takes a slot
    units, room = list[list[int]](), dict[int, list[int]]()  # units by the rows that are left
    for group in np.argsort(-capacity, kind="stable").tolist():
        size = int(capacity[group])
        left = min((free for free, members in room.items() if free >= size and members), default=0)
        if left:
            unit = room[left].pop()
        else:
            unit, left = len(units), most
            units.append([])
        units[unit].append(group)
        room.setdefault(left - size, []).append(unit)
    slots = torch.full((len(units), max(map(len, units))), -1)
    for unit, members in enumerate(units):
        slots[unit, : len(members)] = torch.tensor(members)
    return slots


# ------------------------------------------------------------------ what users pass


def _arguments_of(data: DataLike) -> dict[Any, Any] | tuple[Any, ...]:
    """The rows that the user passed, as the model's arguments; those of a loader are read."""
    if isinstance(data, tuple | list | Mapping):
        return dict(data) if isinstance(data, Mapping) else tuple(data)
    if not hasattr(data, "dataset"):
        raise ArgumentError(
            f"Grouped: rows is a {type(data).__name__}: pass the model's arguments, a tuple or a "
            "dict of tensors (dict(table) for a table), or a DataLoader of them"
        )
    return rows_module.concatenate(list(open_data(data).in_order()))


def _labels_of(arguments: Any, by: int | str) -> np.ndarray:
    """The label of each row's group, `[rows]`."""
    import pandas

    try:
        column = arguments[by]
    except (LookupError, TypeError):
        names = list(arguments) if isinstance(arguments, dict) else f"0 to {len(arguments) - 1}"
        raise ArgumentError(f"by={by!r}: the rows have no such column; there are {names}") from None
    labels = np.asarray(column)
    if labels.ndim != 1 or not len(labels):
        raise DataError(
            f"by={by!r}: labels of shape {list(labels.shape)}: a group column has one for each "
            "row, and there is at least one row"
        )
    if pandas.isna(labels).any():
        raise DataError(f"by={by!r}: a row has no label: leave it out, or give it a group")
    is_odd = ~np.isfinite(labels) | (labels != labels.round()) if labels.dtype.kind == "f" else []
    if any(is_odd):
        raise DataError(
            f"by={by!r}: labels are no whole numbers, such as {labels[is_odd][0]}: pass the column "
            "of the groups"
        )
    return labels


def _unique(labels: np.ndarray, by: int | str) -> tuple[np.ndarray, np.ndarray]:
    """(The labels, each once and in order; the place of each row's among them, `[rows]`)."""
    try:
        return np.unique(labels, return_inverse=True)
    except TypeError:  # words and numbers have no order
        kinds = sorted({type(label).__name__ for label in labels})
        raise DataError(f"by={by!r}: labels are of types {kinds}: give all of them one") from None


def _groups_of(groups: Any, arguments: Any) -> Arguments:
    """The values of groups that the user passed beside the rows, as tensors.

    Raises:
        ArgumentError: they are no tuple or dict, or do not fit the rows.
    """
    if not isinstance(groups, tuple | list | Mapping):
        raise ArgumentError(
            f"groups= is a {type(groups).__name__}: pass a tuple of tensors that have an entry for "
            "every group, as (u,), or a dict of them"
        )
    if isinstance(arguments, dict):
        if groups and not isinstance(groups, Mapping):
            raise ArgumentError("groups= is a tuple and the rows are a dict: pass dicts for both")
        groups = dict(groups)
        if both := groups.keys() & arguments.keys():
            raise ArgumentError(f"groups= and the rows both have {sorted(both)}")
    return _tensors(groups)


def _in_range(labels: np.ndarray, num_groups: int, by: int | str) -> np.ndarray:
    """The labels as indices of the groups.

    Raises:
        DataError: a label is not among 0, ..., num_groups - 1.
    """
    if labels.dtype.kind not in "iuf" or labels.min() < 0 or labels.max() >= num_groups:
        first, *_, last = sorted(labels.tolist() * 2)
        raise DataError(
            f"by={by!r}: with groups=, labels index the {num_groups:,} values of the groups, from "
            f"0 to {num_groups - 1:,}; they are {first!r} to {last!r}"
        )
    return labels.astype(np.int64)


def with_column(arguments: Any, by: int | str, column: Any) -> Any:
    """The model's arguments, a tuple or a dict, with another column at `by`."""
    if isinstance(arguments, dict):
        return arguments | {by: column}
    place = range(len(arguments))[by]  # type: ignore[index]
    return (*arguments[:place], column, *arguments[place + 1 :])


def _tensors(arguments: Any) -> Arguments:
    is_dict = isinstance(arguments, Mapping)
    return rows_module.tables_as_tensors(dict(arguments) if is_dict else tuple(arguments))
