"""Converts between a dict of tensors by site and one flat vector [D], by the sites' names, shapes
and offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a dict, such as latents by site, is found in one flat vector `[D]`;
    converts one to the other.

    Args:
        names: names of the entries, in the vector's order.
        shapes: shape of each entry.
        dtypes: dtype of each entry; the vector has the widest of them, at least float32.

    Examples:
        >>> layout = Layout.from_tensors({"w": torch.zeros(2, 3), "b": torch.ones(2)})
        >>> layout.size
        8
        >>> layout.flatten({"w": torch.zeros(2, 3), "b": torch.ones(2)})
        tensor([0., 0., 0., 0., 0., 0., 1., 1.])
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def from_tensors(cls, values: Mapping[str, Tensor]) -> Layout:
        """The layout that corresponds to a dict of tensors: its names, shapes and dtypes, in the
        dict's order.
        """
        return cls(
            tuple(values),
            tuple(value.shape for value in values.values()),
            tuple(value.dtype for value in values.values()),
        )

    @property
    def size(self) -> int:
        """D, the length of the vector."""
        return sum(shape.numel() for shape in self.shapes)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the vector: the one to which all entries promote, at least float32, as in half
        precision a sampler's step would be lost to rounding."""
        return functools.reduce(torch.promote_types, self.dtypes, torch.float32)

    def slices(self) -> dict[str, slice]:
        """A dict from the name of every entry to its slice of the vector."""
        places, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            places[name] = slice(start, start + shape.numel())
            start += shape.numel()
        return places

    def places(self, names: Iterable[str]) -> Tensor:
        """Indices, in the flat vector, of all elements of the entries with these names, one entry
        after another: int64 `[d]`.
        """
        slices = self.slices()
        parts = [torch.arange(slices[n].start, slices[n].stop) for n in names]
        return torch.cat(parts) if parts else torch.arange(0)

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """The vector `[D]` of a dict of tensors with the layout's shapes."""
        return torch.cat([values[name].reshape(-1).to(self.dtype) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A dict of tensors `[..., *shape]` by name, in the entries' dtypes, from vectors `[...,
        D]`."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = vector.split(sizes, dim=-1)
        return {
            name: part.reshape(vector.shape[:-1] + shape).to(dtype)
            for name, part, shape, dtype in zip(
                self.names, parts, self.shapes, self.dtypes, strict=True
            )
        }

    def site_at(self, index: int) -> str:
        """The name of the entry to which element `index` of the vector belongs."""
        return next(name for name, place in self.slices().items() if index < place.stop)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")
