"""Scores of how well uncertainty ranks rows: out-of-distribution rows above others, and wrong
predictions above right ones."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """The probability that an out-of-distribution row has a higher score than a row from the data's
    distribution.

    This is the area under the receiver operating characteristic, which is the Mann-Whitney
    statistic (Hanley and McNeil 1982): the fraction of pairs of rows in that order, where a tie
    counts half.  It is exact, and depends on the order of the scores only.

    Args:
        inside: scores of rows from the data's distribution, `[rows]`, such as an epistemic
            uncertainty.
        outside: scores of rows from another distribution, `[other rows]`.

    Returns:
        A scalar: 1 if all of `outside` are above all of `inside`, 1/2 for uninformative scores.

    Raises:
        ArgumentError: scores that are not vectors, empty, or NaN.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> ps.metrics.auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
        tensor(0.8750)
    """
    _check_scores(inside=inside, outside=outside)
    dtype = torch.promote_types(inside.dtype, outside.dtype)
    ordered, scores = inside.to(dtype).sort().values, outside.to(dtype)
    below = torch.searchsorted(ordered, scores)
    not_above = torch.searchsorted(ordered, scores, right=True)
    return (below + not_above).sum().to(dtype) / (2 * len(inside) * len(outside))


def selective_accuracy(uncertainty: Tensor, correct: Tensor, coverage: float | Tensor) -> Tensor:
    """The accuracy on the most certain rows, if the others are not predicted (Geifman and El-Yaniv
    2017).

    The result is the mean over random orders of rows with equal uncertainty, so that the order in
    which rows are passed does not matter.

    Args:
        uncertainty: uncertainty of the prediction for each row, `[rows]`; any score that orders
            rows.
        correct: whether the prediction is correct, booleans `[rows]`.
        coverage: fraction of the rows that are predicted, in (0, 1], or a tensor of fractions;
            rounded to a whole number of rows, at least one.

    Returns:
        Accuracies in the shape of `coverage`, a scalar for a number.

    Raises:
        ArgumentError: vectors of different lengths, empty, or NaN; `correct` that is not boolean; a
            coverage out of range.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> uncertainty = torch.tensor([0.3, 0.1, 0.2, 0.4])
        >>> correct = torch.tensor([False, True, True, False])
        >>> ps.metrics.selective_accuracy(uncertainty, correct, torch.tensor([0.5, 1.0]))
        tensor([1.0000, 0.5000])
    """
    accuracies = accuracy_of_most_certain(uncertainty, correct)
    fractions = torch.as_tensor(coverage, dtype=torch.float64, device=uncertainty.device)
    if not ((fractions > 0) & (fractions <= 1)).all():
        raise ArgumentError(f"coverage={coverage}: pass fractions of the rows in (0, 1]")
    rows = (fractions * len(uncertainty)).round().long().clamp(min=1)
    return accuracies[rows - 1]


def accuracy_of_most_certain(uncertainty: Tensor, correct: Tensor) -> Tensor:
    """Accuracies of the most certain row, the two most certain rows, and so on up to all rows,
    `[rows]`; means over random orders of rows with equal uncertainty.

    Args:
        uncertainty: uncertainty of the prediction for each row, `[rows]`.
        correct: whether the prediction is correct, booleans `[rows]`.

    Raises:
        ArgumentError: as `selective_accuracy`.
    """
    _check_scores(uncertainty=uncertainty)
    if not isinstance(correct, Tensor) or correct.dtype != torch.bool:
        raise ArgumentError("correct is not boolean: pass probs.argmax(-1) == labels")
    if correct.shape != uncertainty.shape:
        raise ArgumentError(
            f"correct has shape {checks.shape(correct)}: pass one a row of uncertainty, "
            f"{checks.shape(uncertainty)}"
        )
    _, group, size = uncertainty.unique(return_inverse=True, return_counts=True)
    hits = torch.zeros(len(size), dtype=torch.float64, device=correct.device)
    hits = hits.index_add(0, group, correct.double())
    expected = (hits / size).repeat_interleave(size).cumsum(0)
    rows = torch.arange(1, len(correct) + 1, device=correct.device)
    return (expected / rows).to(uncertainty.dtype)


def _check_scores(**scores: Tensor) -> None:
    """Raises an error unless all arguments are vectors of floats, not empty and without NaN.

    Raises:
        ArgumentError: an argument is something else; the message names it.
    """
    checks.floating(**scores)
    for name, value in scores.items():
        if value.dim() != 1 or len(value) == 0:
            raise ArgumentError(
                f"{name} has shape {checks.shape(value)}: pass one score a row, [rows], of at "
                "least one"
            )
        if value.isnan().any():
            raise ArgumentError(f"{name} has NaN, which has no rank: leave those rows out")
