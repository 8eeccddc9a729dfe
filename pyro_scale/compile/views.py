"""Tensors in memory, as generated C++ names them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class NotALoop(Exception):
    """A step that does more than call kernels and matrix products; the statement that does."""


@dataclass(frozen=True)
class View:
    """A tensor in memory: a named C++ pointer, an offset in elements, and its geometry."""

    root: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def address(self) -> str:
        """Its first element's, in C++."""
        return f"({self.root} + {self.offset * self.dtype.itemsize})"

    @property
    def num_bytes(self) -> int:
        """From its first element to its last."""
        if 0 in self.size:
            return 0
        pairs = zip(self.size, self.stride, strict=True)
        return (1 + sum((n - 1) * step for n, step in pairs)) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after another."""
        return torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()
