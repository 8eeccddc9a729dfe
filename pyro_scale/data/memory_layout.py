"""Copies of the rows that lie in memory as they are read.

Of a large table, a row at random costs a wait for each cache line that it lies in, and each page:
there, all that belongs to a row lies side by side.  Where all rows are read, columns lie in one
piece, so that sums over rows fill whole vector registers.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.memory import bytes_of
from pyro_scale.core.rows import Arguments

#: Bytes of a row, of all tensors together, above which processors read ahead by themselves.
_MOST_ROW_BYTES = 256
#: Bytes of a table's row, above which it has registers' worth of columns, however they are stored.
_WIDE_BYTES = 1024
#: Of the memory, for a copy of the rows.
_SHARE = 1 / 8


def store_by_column(arguments: Arguments) -> Arguments:
    """The rows, tables that are not wide stored by column; as they are where memory does not hold
    them twice."""
    in_bytes = sum(leaf.nbytes for leaf in rows.leaves(arguments))
    if in_bytes > _spare_bytes(rows.device(arguments) or torch.device("cpu")):
        return arguments

    def stored(leaf: Tensor) -> Tensor:
        is_table = leaf.dim() == 2 and leaf.shape[1] * leaf.itemsize <= _WIDE_BYTES
        return rows.by_column(leaf) if is_table else leaf

    return rows.map_rows(stored, arguments)


def pack(tables: Sequence[Tensor]) -> list[Tensor]:
    """Views, `[rows, ...]` each, of a copy in which the tables' rows lie side by side.

    The tables themselves where that gains nothing: rows that are long, or not in main memory; or
    where memory does not hold them twice.

    Args:
        tables: at least one; the first dimension is rows, as many in each.
    """
    places, size = [], 0
    for table in tables:
        start = -(-size // table.itemsize) * table.itemsize
        places.append(start)
        size = start + table[0].nbytes
    widest = max(table.itemsize for table in tables)
    size = -(-size // widest) * widest
    device, num_rows = tables[0].device, len(tables[0])
    fits = num_rows * size <= _spare_bytes(device)
    if device.type != "cpu" or not 0 < size <= _MOST_ROW_BYTES or not fits:
        return list(tables)
    memory = _memory(num_rows * size)
    packed = []
    for table, start in zip(tables, places, strict=True):
        of_row = table[0].contiguous().stride()
        stride = size // table.itemsize, *of_row
        view = memory.view(table.dtype).as_strided(table.shape, stride, start // table.itemsize)
        packed.append(view.copy_(table.detach()))
    return packed


def _spare_bytes(device: torch.device) -> float:
    """What a copy of the rows may take."""
    return _SHARE * bytes_of(device)


def _memory(num_bytes: int) -> Tensor:
    """Bytes, in pages of megabytes where the system has them: a processor remembers where some
    thousand pages are."""
    if sys.platform != "linux":
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
