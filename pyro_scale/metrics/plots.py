"""Reliability and risk-coverage plots.  Matplotlib is imported when the first is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_scale.metrics.ranking import accuracy_of_most_certain
from pyro_scale.metrics.reliability import ece, reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Marks the diagonal, which several methods in one picture share.
_DIAGONAL = "pyro_scale.calibrated"
#: A point's area in squared points: of a bin without rows, and what all rows add.
_AREA, _AREA_OF_ALL = 12, 250


def plot_reliability(
    probs: Tensor,
    labels: Tensor,
    bins: int = 15,
    ax: Axes | None = None,
    label: str | None = None,
) -> Axes:
    """A reliability diagram: accuracy against confidence, a point a bin that has rows.

    The bins are those of `ece`, which the legend has.  A point's area is its share of the rows, and
    its bar one binomial standard error up and down, as Wilson's score interval (1927), which does
    not vanish at accuracies of 0 and 1.  Points below the diagonal are of overconfident
    predictions.

    Args:
        probs: posterior predictive probabilities, the mean over draws, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.
        bins: how many bins of equal width; 15 as in `ece`.
        ax: where to draw; a new figure by default.  Draw several methods into one.
        label: the method's name in the legend.

    Returns:
        The axes, for titles and for saving: `ax.figure.savefig(...)`.

    Raises:
        ArgumentError: as `ece`.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
        >>> ax = ps.metrics.plot_reliability(probs, torch.tensor([0, 0, 1, 0]), label="MAP")
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['calibrated', 'MAP, ECE 0.100']
    """
    error = ece(probs, labels, bins).item()
    binned = reliability(probs, labels, bins)
    confidence, accuracy, rows = (part[binned.rows > 0].double() for part in binned)
    spread = ((accuracy * (1 - accuracy) + 1 / (4 * rows)) / rows).sqrt() / (1 + 1 / rows)
    center = (accuracy + 1 / (2 * rows)) / (1 + 1 / rows)
    bars = torch.stack([accuracy - center + spread, center + spread - accuracy]).clamp(min=0)

    ax = ax or _axes()
    if not any(line.get_gid() == _DIAGONAL for line in ax.get_lines()):
        ax.plot([0, 1], [0, 1], "--", color="0.6", lw=1, gid=_DIAGONAL, label="calibrated")
    name = f"ECE {error:.3f}" if label is None else f"{label}, ECE {error:.3f}"
    x, y = confidence.tolist(), accuracy.tolist()
    (line,) = ax.plot(x, y, lw=1, label=name)
    color = line.get_color()
    ax.errorbar(x, y, yerr=bars.tolist(), fmt="none", color=color, elinewidth=1)
    areas = (_AREA + _AREA_OF_ALL * rows / rows.sum()).tolist()
    ax.scatter(x, y, s=areas, color=color, linewidths=0, zorder=line.get_zorder() + 1)
    limits = (-0.03, 1.03)  # room for the points at 0 and 1
    ax.set(xlim=limits, ylim=limits, aspect="equal", xlabel="confidence", ylabel="accuracy")
    ax.legend(frameon=False)
    return ax


def plot_risk_coverage(
    uncertainty: Tensor,
    correct: Tensor,
    ax: Axes | None = None,
    label: str | None = None,
) -> Axes:
    """Risk, the rate of errors on the most certain rows, against the fraction of them: coverage.

    It is 1 - `selective_accuracy` for every number of rows (Geifman and El-Yaniv 2017).  The lower
    the curve, the better uncertainty finds the errors; a score that tells nothing gives a level
    line.  It begins at a hundredth of the rows, before which one error more or less is all of it.

    Args:
        uncertainty: of each row's prediction, `[rows]`; any score that orders them.
        correct: whether the prediction is right, booleans `[rows]`.
        ax: where to draw; a new figure by default.  Draw several methods into one.
        label: the method's name in the legend.

    Returns:
        The axes, for titles and for saving: `ax.figure.savefig(...)`.

    Raises:
        ArgumentError: as `selective_accuracy`.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> uncertainty, correct = torch.tensor([0.1, 0.2]), torch.tensor([True, False])
        >>> ax = ps.metrics.plot_risk_coverage(uncertainty, correct)
        >>> ax.get_lines()[0].get_xydata().tolist()
        [[0.5, 0.0], [1.0, 0.5]]
    """
    risk = 1 - accuracy_of_most_certain(uncertainty, correct)
    rows = torch.arange(1, len(risk) + 1)
    first = len(risk) // 100
    ax = ax or _axes()
    ax.plot((rows / len(risk))[first:].tolist(), risk[first:].tolist(), lw=1.5, label=label)
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel="risk (error rate)")
    ax.set_ylim(bottom=0, auto=True)  # further curves may be higher
    if label is not None:
        ax.legend(frameon=False)
    return ax


def _axes() -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(4, 4), layout="constrained")[1]
