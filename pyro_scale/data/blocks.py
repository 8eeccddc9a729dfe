"""Batches in the data's order, many at a time."""

from __future__ import annotations

from collections.abc import Iterator

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.data.sources import Data, TensorData


def blocks_in_order(data: Data, batch_size: int | None, most: int) -> Iterator[Arguments]:
    """All rows once, in the data's order: at most so many batches at a time, which are alike, as
    arguments whose rows are `[batches, B, ...]`.  Tensors in memory are not copied."""
    if isinstance(data, TensorData):
        yield from _views(data.arguments, batch_size, most)
        return
    alike: list[Arguments] = []
    for batch in data.in_order(batch_size):
        if len(alike) == most or (alike and not rows.are_alike(batch, alike[0])):
            yield rows.stack(alike)
            alike = []
        alike.append(batch)
    if alike:
        yield rows.stack(alike)


def _views(arguments: Arguments, batch_size: int | None, most: int) -> Iterator[Arguments]:
    total = rows.count(arguments) or 0
    size = min(batch_size or total, total)
    whole = total // size * size
    for start in range(0, whole, most * size):
        part = rows.take(arguments, slice(start, min(start + most * size, whole)))
        yield rows.map_rows(lambda leaf: leaf.unflatten(0, (-1, size)), part)
    if whole < total:
        yield rows.map_rows(lambda leaf: leaf[None, whole:], arguments)
