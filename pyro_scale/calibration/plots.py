"""Plots the differences between the empirical distribution function (ECDF) of ranks and the uniform
distribution's. Matplotlib is imported when the first plot is drawn.

ArviZ's `plot_ecdf_pit` draws the same differences, but simulates its band, for continuous values.
This band is exact for ranks, and agrees with the p-values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.metrics.uniformity import ecdf_band, ecdf_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Width and height of a panel in inches.
_PANEL_WIDTH, _PANEL_HEIGHT = 2.6, 2.1
#: Okabe and Ito's (2008) blue and vermilion, which color-blind people can tell apart, and gray.
_INSIDE, _OUTSIDE, _BAND = "#0072B2", "#D55E00", "0.85"


class Panel(NamedTuple):
    """One panel of a figure: its title, the ranks `[S]` of one element over S simulations, and the
    number of draws that each rank is among."""

    title: str
    ranks: Tensor
    num_draws: int


def choose_labels(p_values: Any, most: int) -> tuple[list[str], str]:
    """(Labels of the `most` elements with the smallest p-values, in the order of `p_values`; a note
    for the figure, which is empty if no elements are left out).

    Args:
        p_values: p-values, a pandas Series indexed by label.
        most: largest number of labels.
    """
    labels = list(p_values.index)
    if len(labels) <= most:
        return labels, ""
    smallest = set(p_values.sort_values(kind="stable").index[:most])
    note = f"{most} of {len(labels)} elements: those with the smallest p-values"
    return [label for label in labels if label in smallest], note


def plot_ecdf_differences(
    rows: Sequence[Sequence[Panel | None]], level: float, note: str = ""
) -> Figure:
    """A figure with a panel for each element: the ECDF of its ranks minus the uniform one, with a
    simultaneous band.

    Args:
        rows: panels by row of the figure, all rows of the same length; None leaves that part of the
            figure empty.
        level: probability that the whole ECDF of uniform ranks is inside of the band.
        note: a line below the panels; none if empty.
    """
    import matplotlib.pyplot as plt

    size = _PANEL_WIDTH * max(2, len(rows[0])), _PANEL_HEIGHT * len(rows) + 0.9
    figure, axes = plt.subplots(
        len(rows),
        len(rows[0]),
        figsize=size,
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    bands: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for row, panels in zip(axes, rows, strict=True):
        for ax, panel in zip(row, panels, strict=True):
            if panel is None:
                ax.set_visible(False)
                continue
            shape = len(panel.ranks), panel.num_draws
            if shape not in bands:
                bands[shape] = ecdf_band(*shape, level)
            _draw(ax, panel, *bands[shape])
    for column in axes.T:  # the lowest panel of each column has tick labels
        shown = [ax for ax in column if ax.get_visible()]
        if shown:
            shown[-1].tick_params(labelbottom=True)
    figure.supylabel("ECDF - uniform", fontsize="medium")
    text = f"rank / (draws + 1)\nband: simultaneous, {level:.0%} a panel"
    figure.supxlabel("\n".join(filter(None, [text, note])), fontsize="medium")
    return figure


def _draw(ax: Axes, panel: Panel, lower: Tensor, upper: Tensor) -> None:
    """Draws the ECDF difference of a panel's ranks on `ax`, with the band between `lower` and
    `upper`, ECDFs at the ranks 1 to L, `[L]`."""
    size, num_draws = len(panel.ranks), panel.num_draws
    z = torch.arange(num_draws + 2).double() / (num_draws + 1)
    ecdf = ecdf_counts(panel.ranks, num_draws).double() / size
    rounding = 0.5 / size
    is_inside = bool(((ecdf > lower - rounding) & (ecdf < upper + rounding)).all())
    below, above, line = (_with_ends(line) - z for line in (lower, upper, ecdf))
    ax.fill_between(z.numpy(), below.numpy(), above.numpy(), color=_BAND, lw=0)
    ax.axhline(0, color="0.5", lw=0.8)
    ax.plot(z.numpy(), line.numpy(), color=_INSIDE if is_inside else _OUTSIDE, lw=1.4)
    ax.set_title(panel.title, fontsize="medium")
    ax.set(xlim=(0, 1), xticks=[0, 0.5, 1])
    ax.set_xticklabels(["0", "0.5", "1"])
    ax.spines[["top", "right"]].set_visible(False)


def _with_ends(fractions: Tensor) -> Tensor:
    """The values of an ECDF with a 0 before and a 1 after them, `[L + 2]`, to plot it from 0 to 1.

    Args:
        fractions: values of the ECDF at ranks 1 to L, `[L]`.
    """
    return torch.cat([fractions.new_zeros(1), fractions, fractions.new_ones(1)])
