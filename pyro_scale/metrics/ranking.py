"""Whether uncertainty ranks rows well: out-of-distribution rows, and wrong predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """The probability that a row from elsewhere has a higher score than a row like the data.

    The area under the receiver operating characteristic, which is the Mann-Whitney statistic
    (Hanley and McNeil 1982): over all pairs of rows, a tie counts half.  It is counted by ranks,
    exactly, and only the scores' order matters.

    Args:
        inside: scores of rows from the data's distribution, `[rows]`; for example an epistemic
            uncertainty.
        outside: scores of rows from another, `[other rows]`.

    Returns:
        A scalar: 1 if all of `outside` lies above all of `inside`, 1/2 if scores tell nothing.

    Raises:
        ArgumentError: scores that are no vectors, empty, or NaN.

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
    """The accuracy on the most certain rows, where the others are left to someone else.

    Geifman and El-Yaniv (2017).  Rows of equal uncertainty come in random order: what is returned
    is the mean over these orders, so that the rows' own order does not matter.

    Args:
        uncertainty: of each row's prediction, `[rows]`; any score that orders them.
        correct: whether the prediction is right, booleans `[rows]`.
        coverage: the fraction of rows that are predicted, in (0, 1], or a tensor of them; of rows
            that is the nearest whole number, and at least one.

    Returns:
        Accuracies in the shape of `coverage`, a scalar for a number.

    Raises:
        ArgumentError: vectors of different lengths, empty, or NaN; `correct` not boolean; a
            coverage out of its range.

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
    """Of the one, two, ... most certain rows, `[rows]`, a mean over the order of equal ones."""
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
    checks.floating(**scores)
    for name, value in scores.items():
        if value.dim() != 1 or len(value) == 0:
            raise ArgumentError(
                f"{name} has shape {checks.shape(value)}: pass one score a row, [rows], of at "
                "least one"
            )
        if value.isnan().any():
            raise ArgumentError(f"{name} has NaN, which has no rank: leave those rows out")
