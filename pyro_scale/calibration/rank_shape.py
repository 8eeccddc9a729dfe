"""What ranks that are not uniform look like, in words."""

from __future__ import annotations

import torch
from torch import Tensor

#: Standard errors from which on ranks are said to be shifted, or to be too near the ends.
_CLEAR = 3.0


def describe_ranks(ranks: Tensor, num_draws: int) -> str:
    """Where ranks pile up, and what that says of the draws.

    Ranks have a mean and a variance; the one that is more standard errors from that of uniform
    ranks is named.  Ranks at both ends are those of values that lie
    outside of their draws too often (Talts et al. 2018, section 4.2).

    Args:
        ranks: integers in 0 to `num_draws`, `[S]`.
        num_draws: L, the draws that each rank is among.

    Examples:
        >>> import torch
        >>> describe_ranks(torch.arange(100) % 2 * 9, num_draws=9)
        'ranks pile up at both ends: draws are too narrow'
    """
    cells = torch.arange(num_draws + 1).double() - num_draws / 2
    places = cells[ranks]
    shift = _standard_errors(places, cells)
    spread = _standard_errors((places - places.mean()).square(), cells.square())
    if max(abs(shift), abs(spread)) < _CLEAR:
        return "ranks are uneven, neither shifted nor nearer to the ends or the middle"
    if abs(shift) > abs(spread):
        if shift > 0:
            return "ranks are too high: draws are too low"
        return "ranks are too low: draws are too high"
    if spread > 0:
        return "ranks pile up at both ends: draws are too narrow"
    return "ranks pile up in the middle: draws are too wide"


def _standard_errors(values: Tensor, uniform: Tensor) -> float:
    """The mean of `values` from that of equally likely ones, in its standard errors under them."""
    error = float(uniform.std(correction=0)) / len(values) ** 0.5
    return float(values.mean() - uniform.mean()) / error if error else 0.0
