"""Finds the observations of a site in the site's value and among the model's arguments, and
replaces them by other observations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.model.sites import Site


@dataclass(frozen=True)
class ObservedSite:
    """Converts the observations of a site between three forms: the site's value in the model, a
    table of rows `[rows, ...]`, and the tensor among the model's arguments (a "leaf") that contains
    them.

    Attributes:
        axis: axis of the site's value along which rows of data are counted; None for an observation
            without rows, which the table repeats in each row.
        leaf: index, among the flattened arguments of the model, of the tensor that contains the
            observations; None if there is no such tensor.
        dtype: dtype of that tensor, or of the observations.
        missing: mask of the observations that are missing, NaN; None if none are.
        part: indices of the observations in that tensor, flattened, if it contains other numbers,
            too; otherwise None.
    """

    axis: int | None
    leaf: int | None
    dtype: torch.dtype
    missing: Tensor | None
    part: Tensor | None = None

    @classmethod
    def from_site(cls, site: Site, from_right: int | None, leaves: list[Any]) -> ObservedSite:
        """The converter for one site, after its observations were searched for among the model's
        arguments.

        Args:
            site: observed site, recorded when the model was run on its arguments.
            from_right: axis of the rows of data, counted from the right and negative; None without
                rows.
            leaves: flattened arguments of the model.
        """
        value = site.value
        axis = None if from_right is None else value.dim() + from_right
        equal = [i for i, leaf in enumerate(leaves) if _is_equal(leaf, value)]
        holding = [i for i, leaf in enumerate(leaves) if _is_view(value, leaf)]
        both = [i for i in equal if i in holding]  # a covariate may have equal values
        leaf = next(iter([*reversed(both), *reversed(equal), *holding]), None)
        part = None
        if leaf is not None and leaf not in equal:
            part = _places_of_view(value, leaves[leaf])
        dtype = value.dtype if leaf is None else leaves[leaf].dtype
        missing = torch.isnan(value)
        return cls(axis, leaf, dtype, missing if bool(missing.any()) else None, part)

    def to_table(self, value: Tensor, num_rows: int) -> Tensor:
        """The site's value with rows of data first, `[rows, ...]`, and NaN where observations are
        missing; an observation without rows is repeated for each of the `num_rows` rows."""
        if self.missing is not None:
            value = torch.where(self.missing, torch.nan, value)
        if self.axis is None:
            return value.expand(num_rows, *value.shape)
        return value.movedim(self.axis, 0)

    def to_value(self, table: Tensor) -> Tensor:
        """The site's value as the model has it, from a table in which the rows of data are first,
        `[rows, ...]`; the inverse of `to_table`."""
        return table[0] if self.axis is None else table.movedim(0, self.axis)

    def to_leaf(self, value: Tensor) -> Tensor:
        """The site's value as the model's argument takes it: converted to the argument's dtype, as
        classes and counts may be integers there; unchanged if both are floating-point."""
        both_real = self.dtype.is_floating_point and value.is_floating_point()
        return value if both_real else value.to(self.dtype)

    def fill_leaf(self, leaf: Tensor, table: Tensor) -> Tensor:
        """A copy of the model's argument `leaf`, in which the observations are replaced by those of
        a table `[rows, ...]`."""
        value = self.to_value(table).to(self.dtype)
        if self.part is None:
            return value
        return leaf.flatten().scatter(0, self.part.flatten(), value.flatten()).view(leaf.shape)

    def with_rows_twice(self, leaf: Tensor | None) -> ObservedSite:
        """A copy of the converter for data that have every row twice, one copy of the rows after
        the other.

        Args:
            leaf: the model's argument with the observations before rows were doubled; None if no
                argument contains them.
        """
        part = self.part
        if part is not None and leaf is not None and self.axis is not None:
            part = torch.cat([part, part + leaf.numel()], self.axis)
        return dataclasses.replace(self, missing=None, part=part)


def _is_view(value: Tensor, leaf: Any) -> bool:
    """True if all elements of `value` are in the memory of `leaf`; always False unless `leaf` is a
    contiguous tensor of the same dtype.
    """
    if not isinstance(leaf, Tensor) or not leaf.is_contiguous() or leaf.dtype != value.dtype:
        return False
    if leaf.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return False
    if not leaf.numel() or not value.numel():
        return False
    places = _places_of_view(value, leaf)
    return bool(places.min() >= 0) and bool(places.max() < leaf.numel())


def _places_of_view(view: Tensor, leaf: Tensor) -> Tensor:
    """Indices of a view's elements in the flattened contiguous tensor `leaf`, int64, of the view's
    shape."""
    places = torch.full(view.shape, int(view.storage_offset() - leaf.storage_offset()))
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        along = torch.arange(size) * stride
        places = places + along.view(-1, *[1] * (view.dim() - dim - 1))
    return places


def _is_equal(leaf: Any, value: Tensor) -> bool:
    """True if `leaf` is a tensor with the shape and the numbers of `value`, perhaps of another
    dtype; NaN equals NaN.
    """
    if not isinstance(leaf, Tensor) or leaf.shape != value.shape:
        return False
    return torch.allclose(leaf.to(value), value, rtol=0, atol=0, equal_nan=True)
