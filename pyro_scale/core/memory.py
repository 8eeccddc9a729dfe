"""Whether memory holds a dense matrix, checked before it is allocated."""

from __future__ import annotations

import os

import torch

from pyro_scale.errors import ArgumentError


def check_fits(
    size: int, dtype: torch.dtype, device: torch.device, matrices: int, what: str
) -> None:
    """Refuses square matrices of so many rows where memory does not hold them.

    Args:
        size: their rows.
        dtype: of their numbers.
        device: where they are to be.
        matrices: how many at once.
        what: whose they are, in words.

    Raises:
        ArgumentError: how much they need, how much there is, and which structure fits.
    """
    number = torch.finfo(dtype).bits // 8
    needed, there = matrices * size**2 * number, bytes_of(device)
    if needed > there:
        raise ArgumentError(
            f"structure='dense': {what} of {size:,} dimensions needs {in_words(needed)} ("
            + (
                f"{matrices} matrices of {size:,} x {size:,} numbers), and there are "
                f"{in_words(there)} of memory: use structure='diag', which needs "
                f"{in_words(matrices * size * number)}, or sites= for a part of the sites"
            ),
            code="memory",
        )


def bytes_of(device: torch.device) -> int:
    """The memory of a device, all of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def in_words(count: int) -> str:
    """Bytes with their unit."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(units) - 1, max(0, (max(count, 1).bit_length() - 1) // 10))
    return f"{count / 2 ** (10 * power):.3g} {units[power]}"
