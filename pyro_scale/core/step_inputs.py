"""Where the tensors come from that a step reads besides its state."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Fixed(NamedTuple):
    """A tensor that is the same at every step."""

    tensor: Tensor


class PerStep(NamedTuple):
    """A tensor of its own for every step, `[chains, steps, ...]`."""

    tensor: Tensor


class Gathered(NamedTuple):
    """Rows of a table, at indices `[chains, steps, B]`."""

    table: Tensor
    indices: Tensor


#: Where one tensor of a step's batch comes from.
Source = Fixed | PerStep | Gathered
