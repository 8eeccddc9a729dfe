"""The kernel Stein discrepancy of draws from a density whose gradients are known."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks

#: Number of pairs of draws in memory at once.
_PAIRS = 2**22


def ksd(draws: Tensor, scores: Tensor) -> Tensor:
    """The squared kernel Stein discrepancy between draws and the density with these scores.

    With the inverse multiquadric kernel k(x, y) = (1 + |x - y|^2)^(-1/2) (Gorham and Mackey 2017,
    c = 1, beta = -1/2), it is the mean over all pairs of draws, a draw with itself included, of

        s(x).s(y) k + s(x).grad_y k + s(y).grad_x k + trace(grad_x grad_y k)

    This V-statistic is never negative.  For n exact draws its mean is (E|s|^2 + d) / n, which is
    2 d / n for N(0, I); values well above that are not noise.  Distances are in the units of the
    draws: if scales differ, whiten first, `ksd(draws / sd, scores * sd)`.  Modes without a draw are
    not detected.  The computation takes time n^2 d, and memory for blocks of the pairs.

    Args:
        draws: draws, `[n, d]`.
        scores: gradient of the log density of all rows (not divided by N, the number of rows) at
            each draw, `[n, d]`.

    Returns:
        A scalar.

    Raises:
        ArgumentError: different shapes, no draws, NaN or infinite values.

    Examples:
        500 draws from N(0, I) in two dimensions, where 2 d / n = 0.008, with the scores of N(0, I),
        and with those of N(1, I):

        >>> import torch, pyro_scale as ps
        >>> draws = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
        >>> round(float(ps.metrics.ksd(draws, -draws)), 3)
        0.007
        >>> round(float(ps.metrics.ksd(draws, 1 - draws)), 3)
        1.042
    """
    checks.floating(draws=draws, scores=scores)
    if draws.dim() != 2 or draws.shape != scores.shape:
        raise ArgumentError(
            f"draws has shape {checks.shape(draws)} and scores {checks.shape(scores)}: pass "
            "[n, d] for both, draws[:, None] of one dimension"
        )
    checks.finite(draws=draws, scores=scores)
    x = draws.double() - draws.double().mean(0)  # distances are differences of squares
    s = scores.to(x)
    squares, products = x.square().sum(1), (s * x).sum(1)
    total, size = x.new_zeros(()), max(1, _PAIRS // len(x))
    for block in torch.arange(len(x), device=x.device).split(size):
        apart = (squares[block, None] + squares - 2 * x[block] @ x.T).clamp(min=0)
        apart[torch.arange(len(block)), block] = 0  # but for rounding
        k = (1 + apart).rsqrt()
        crossed = products[block, None] + products - s[block] @ x.T - x[block] @ s.T
        steins = s[block] @ s.T * k + (crossed + x.shape[1]) * k**3 - 3 * apart * k**5
        total += steins.sum()
    return (total / len(x) ** 2).clamp(min=0).to(draws.dtype)
