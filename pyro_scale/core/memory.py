"""Checks that a dense matrix fits into memory before it is allocated."""

from __future__ import annotations

import os

import torch

from pyro_scale.errors import ArgumentError


def check_fits(
    size: int, dtype: torch.dtype, device: torch.device, matrices: int, what: str
) -> None:
    """Raises an error if the memory of a device is too small for square matrices, before they are
    allocated.

    Args:
        size: number of rows of each matrix.
        dtype: dtype of the elements.
        device: device on which the matrices would be.
        matrices: number of matrices that are in memory at once.
        what: name of the method or argument that needs the matrices, for the message.

    Raises:
        ArgumentError: the memory is too small; the message says how much is needed, and which
            structure fits.
    """
    number = torch.finfo(dtype).bits // 8
    needed, available = matrices * size**2 * number, bytes_of(device)
    if needed > available:
        raise ArgumentError(
            f"structure='dense': {what} of {size:,} dimensions needs {in_words(needed)} ("
            + (
                f"{matrices} matrices of {size:,} x {size:,} numbers), and there are "
                f"{in_words(available)} of memory: use structure='diag', which needs "
                f"{in_words(matrices * size * number)}, or sites= for a part of the sites"
            ),
            code="memory",
        )


def bytes_of(device: torch.device) -> int:
    """Total memory of a device, in bytes: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def in_words(count: int) -> str:
    """A number of bytes as text for messages, such as "1.5 GiB"."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(units) - 1, max(0, (max(count, 1).bit_length() - 1) // 10))
    return f"{count / 2 ** (10 * power):.3g} {units[power]}"
