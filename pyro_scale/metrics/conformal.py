"""Split conformal prediction: the threshold that held-out scores give."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


class Interval(NamedTuple):
    """An interval for each observation, both ends in it, tensors of one shape.

    Attributes:
        lower: the lower end.
        upper: the upper end.
    """

    lower: Tensor
    upper: Tensor


def conformal(scores: Tensor, alpha: float) -> Tensor:
    """The split-conformal threshold: a new row's score is above it with a probability of at most
    `alpha`.

    It is the k-th smallest of n scores, k = ceil((n + 1)(1 - alpha)), and infinite where k > n.
    If the new row is exchangeable with the n calibration rows, its score is at most the threshold
    with a probability of at least 1 - alpha, and without ties of exactly k/(n + 1), which is less
    than 1 - alpha + 1/(n + 1).  That holds for any n and for any score, if the score is a function
    that has not seen these rows; the probability is over the calibration rows and the new one
    together.  Given the calibration rows it varies: of continuous scores it is Beta(k, n + 1 - k)
    (Vovk, Gammerman and Shafer 2005; Lei et al. 2018; Angelopoulos and Bates 2023, section 3.2).

    Args:
        scores: of the calibration rows, `[n]`: how badly each observation agrees with what was
            predicted, such as the residual's size over the predictive sd.  They may be infinite.
        alpha: the probability to miss, in (0, 1).

    Returns:
        A scalar, of the scores' type.

    Raises:
        ArgumentError: scores that are no vector of at least one, or NaN; an alpha out of range.

    Examples:
        Nine rows are the fewest that tell 90%: their largest score is the threshold.

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
    """Which of so many scores, from the smallest, is the threshold of a level: above `count` where
    none is."""
    return math.ceil(round((count + 1) * level, 9))  # 10 * (1 - 0.1) is meant to be 9
