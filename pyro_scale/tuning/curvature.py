"""The largest curvature of a log density, without its Hessian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_scale.core.whitening import Whitening
from pyro_scale.fullbatch.density import FullDataDensity

#: Steps of the power method.
_POWERS = 8


def steepest_by_products(
    density: FullDataDensity, whitening: Whitening | None, position: Tensor
) -> float:
    """The largest curvature over N at a position, `[D]`, in whitened coordinates if there are any;
    from below, by the power method on products with the Hessian."""
    vector, length = torch.ones_like(position), math.nan
    for _ in range(_POWERS):
        vector = vector / vector.norm()
        along = vector if whitening is None else whitening.push_forward(vector)
        moved = -density.hessian_times(position, along)
        if whitening is not None:
            moved = whitening.pull_back(moved)
        length, vector = float(vector @ moved), moved
    return length
