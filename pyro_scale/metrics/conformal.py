"""Split conformal prediction: the threshold on scores, from held-out rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


class Interval(NamedTuple):
    """Closed intervals, one for each observation, by two tensors of one shape.

    Attributes:
        lower: the lower ends.
        upper: the upper ends.
    """

    lower: Tensor
    upper: Tensor


def conformal(scores: Tensor, alpha: float) -> Tensor:
    """The split-conformal threshold, which a new row's score exceeds with a probability of at most
    `alpha`.

    The threshold is the k-th smallest of n scores, k = ceil((n + 1)(1 - alpha)), and infinite if k
    > n. If the new row is exchangeable with the n calibration rows, its score is at most the
    threshold with a probability of at least 1 - alpha; without ties it is exactly k/(n + 1), which
    is less than 1 - alpha + 1/(n + 1). This holds for any n and any score, if the score does not
    depend on these rows. The probability is over the calibration rows and the new row together.
    Given the calibration rows it varies: for continuous scores its distribution is Beta(k, n + 1 -
    k) (Vovk, Gammerman and Shafer 2005; Lei et al. 2018; Angelopoulos and Bates 2023, section 3.2).

    Args:
        scores: scores of the calibration rows, `[n]`: how badly an observation agrees with its
            prediction, such as the absolute residual divided by the predictive sd.  They may be
            infinite.
        alpha: the probability of a miss, in (0, 1).

    Returns:
        A scalar of the scores' dtype.

    Raises:
        ArgumentError: scores that are not a vector, empty, or NaN; an alpha out of range.

    Examples:
        Nine rows are the fewest for 90%: their largest score is the threshold.

        >>> import torch, pyro_scale as ps
        >>> ps.metrics.conformal(torch.arange(1.0, 10.0), alpha=0.1)
        tensor(9.)
        >>> ps.metrics.conformal(torch.arange(1.0, 9.0), alpha=0.1)
        tensor(inf)
    """
    checks.floating(scores=scores)
    if scores.dim() != 1 or not len(scores):
        raise ArgumentError(
            f"scores has shape {checks.shape(scores)}: pass one score a row, [rows], at least one"
        )
    if scores.isnan().any():
        raise ArgumentError("scores has NaN values: leave their rows out")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1:
        raise ArgumentError(f"alpha={alpha!r}: pass a number in (0, 1), such as 0.1")
    rank = rank_of(len(scores), 1 - alpha)
    if rank > len(scores):
        return scores.new_tensor(math.inf)
    return torch.kthvalue(scores, rank).values


def rank_of(count: int, level: float) -> int:
    """k, the rank from the smallest of the conformal threshold among `count` scores: ceil((count +
    1) level), which is above `count` if there are too few scores.

    Args:
        count: number of calibration rows.
        level: probability that a new score is at most the threshold, 1 - alpha.
    """
    return math.ceil(round((count + 1) * level, 9))  # 10 * (1 - 0.1) is meant to be 9
