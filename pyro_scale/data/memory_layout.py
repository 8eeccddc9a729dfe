"""Copies of the rows, laid out in memory as they are read.

Reading a random row of a large table waits for every cache line and page that the row lies in.  So
where rows are gathered, all tensors' parts of a row are stored side by side.  Where all rows are
read, tables are stored by column, so that sums over rows fill vector registers.
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

#: Size of a row of all tensors, in bytes, above which processors prefetch by themselves.
_MOST_ROW_BYTES = 256
#: Size of a table's row in bytes, above which a row alone fills vector registers.
_WIDE_BYTES = 1024
#: Largest share of the memory for a copy of the rows.
_SHARE = 1 / 8


def store_by_column(arguments: Arguments) -> Arguments:
    """The model's arguments with narrow matrices (few columns) copied to memory column by column,
    so that sums over rows of data are fast; the same arguments if memory is too small for a copy.
    Shapes and numbers do not change.
    """
    in_bytes = sum(leaf.nbytes for leaf in rows.leaves(arguments))
    if in_bytes > _spare_bytes(rows.device(arguments) or torch.device("cpu")):
        return arguments

    def store(leaf: Tensor) -> Tensor:
        is_narrow = leaf.dim() == 2 and leaf.shape[1] * leaf.itemsize <= _WIDE_BYTES
        return rows.by_column(leaf) if is_narrow else leaf

    return rows.map_rows(store, arguments)


def pack(tables: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of rows, as views of one piece of memory in which the parts of a row of
    data lie side by side, so that gathering random rows is fast.

    Args:
        tables: at least one tensor, all with the same number of rows, `[rows, ...]`.
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
        stride = size // table.itemsize, *table[0].contiguous().stride()
        view = memory.view(table.dtype).as_strided(table.shape, stride, start // table.itemsize)
        packed.append(view.copy_(table.detach()))
    return packed


def _spare_bytes(device: torch.device) -> float:
    """The number of bytes that a copy of the rows may take at most on a device: an eighth of the
    device's total memory.
    """
    return _SHARE * bytes_of(device)


def _memory(num_bytes: int) -> Tensor:
    """An uninitialized uint8 tensor `[num_bytes]`, in huge pages where the system has them: random
    access to many rows is faster there, as a processor caches the addresses of only a few thousand
    pages.
    """
    if sys.platform != "linux":
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
