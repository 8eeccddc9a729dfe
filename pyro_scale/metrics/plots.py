"""Reliability and risk-coverage plots.  Matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_scale.metrics.ranking import accuracy_of_most_certain
from pyro_scale.metrics.reliability import ece, reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Marks the diagonal, which is drawn once for all methods in a figure.
_DIAGONAL = "pyro_scale.calibrated"
#: Area of a point in squared points: of an empty bin, and added for a bin with all rows.
_AREA, _AREA_OF_ALL = 12, 250


def plot_reliability(
    probs: Tensor,
    labels: Tensor,
    bins: int = 15,
    ax: Axes | None = None,
    label: str | None = None,
) -> Axes:
    """Draws a reliability diagram: accuracy against confidence, with a point for each bin.

    The bins are those of `ece`, whose value is in the legend.  The area of a point shows its share
    of the rows, and its bar one binomial standard error up and down, as Wilson's score interval
    (1927), which does not vanish at accuracies of 0 and 1.  Points below the diagonal are of
    overconfident predictions.

    Args:
        probs: posterior predictive probabilities, the mean over draws, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.
        bins: number of bins of equal width.
        ax: axes to draw into, such as those of another method; a new figure by default.
        label: name of the method in the legend.

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
    """Draws a risk-coverage curve: the error rate on the most certain rows (risk) against their
    fraction of all rows (coverage).

    Risk is 1 - `selective_accuracy` (Geifman and El-Yaniv 2017).  The lower the curve, the better
    the uncertainty finds the errors; an uninformative score gives a level line.  The curve begins
    at a hundredth of the rows: on fewer rows it depends on single errors.

    Args:
        uncertainty: uncertainty of the prediction for each row, `[rows]`; any score that orders
            rows.
        correct: whether the prediction is correct, booleans `[rows]`.
        ax: axes to draw into, such as those of another method; a new figure by default.
        label: name of the method in the legend.

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
