"""Calibration of the most probable class: reliability bins and the calibration error."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


class Reliability(NamedTuple):
    """Accuracy and confidence of a classifier's predictions, in bins of equal width by the
    probability of the most probable class.

    Attributes:
        confidence: mean of that probability over the rows of a bin, `[bins]`; NaN for an empty bin.
        accuracy: fraction of the rows of a bin whose label is that class, `[bins]`; NaN for an
            empty bin.
        rows: number of rows in each bin, `[bins]`.
    """

    confidence: Tensor
    accuracy: Tensor
    rows: Tensor


def reliability(probs: Tensor, labels: Tensor, bins: int) -> Reliability:
    """Accuracy and mean confidence (probability of the most probable class) of the rows in bins of
    confidence, ((b - 1)/bins, b/bins] for b = 1, ..., bins.

    Args:
        probs: posterior predictive probabilities, the mean over draws, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.
        bins: number of bins of equal width.

    Raises:
        ArgumentError: as `accuracy`; or no bins.
    """
    labels = checks.classes(probs, labels)
    if type(bins) is not int or bins < 1:
        raise ArgumentError(f"bins={bins!r}: pass an int >= 1")
    confidence, predicted = probs.max(-1)
    inner_edges = torch.arange(1, bins, dtype=probs.dtype, device=probs.device) / bins
    place = torch.bucketize(confidence, inner_edges)

    def total(values: Tensor) -> Tensor:
        # in float64, because in float32 a million values of 0.999 add up to a million
        zeros = torch.zeros(bins, dtype=torch.float64, device=probs.device)
        return zeros.index_add(0, place, values.double())

    rows = total(torch.ones_like(confidence))
    parts = total(confidence) / rows, total(predicted == labels) / rows, rows
    return Reliability(*(part.to(probs.dtype) for part in parts))


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """The expected calibration error of the most probable class.

        sum over bins of (rows in the bin / rows) |accuracy - mean confidence|

    as in Naeini et al. (2015) and Guo et al. (2017).  Confidence is the probability of the most
    probable class; bins have equal width and are closed on the right.  The error is biased upwards:
    for calibrated predictions it is about the sum over bins b of
    sqrt(2 rows_b a_b (1 - a_b) / pi) / rows, with a_b their accuracy.  So compare methods on the
    same rows.

    Args:
        probs: posterior predictive probabilities, the mean over draws, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.
        bins: number of bins of equal width; 15 as in Guo et al.

    Returns:
        A scalar in [0, 1].

    Raises:
        ArgumentError: as `accuracy`; or no bins.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
        >>> ps.metrics.ece(probs, torch.tensor([0, 0, 1, 0]))
        tensor(0.1000)
    """
    binned = reliability(probs, labels, bins)
    return (binned.rows * (binned.accuracy - binned.confidence).abs()).nansum() / len(probs)
