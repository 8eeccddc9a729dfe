"""Plots several methods side by side.  Matplotlib is imported when the plot is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A panel's width, its height without and for each method, in inches.
_WIDTH, _HEIGHT, _OF_METHOD = 5.2, 2.4, 0.28


def plot(table: Any, reference: str) -> Figure:
    """Log predictive densities, where there are any, and distances against seconds.

    Args:
        table: as in `Comparison`.
        reference: the method that distances are from.
    """
    import matplotlib.pyplot as plt

    panels = 1 + ("lpd" in table)
    size = _WIDTH * panels, _HEIGHT + _OF_METHOD * len(table)
    figure, axes = plt.subplots(1, panels, figsize=size, squeeze=False, layout="constrained")
    colors = [plt.get_cmap("tab10")(i % 10) for i in range(len(table))]
    if "lpd" in table:
        _densities(axes[0, 0], table, colors)
    _distances(figure, axes[0, -1], table, reference, colors)
    return figure


def _densities(ax: Axes, table: Any, colors: list[Any]) -> None:
    """A line a method, the first on top."""
    for place, (name, color) in enumerate(zip(table.index, colors, strict=True)):
        row = table.loc[name]
        ax.errorbar(row.lpd, place, xerr=row.lpd_se, fmt="o", color=color, capsize=3)
    ax.set_yticks(range(len(table)), list(table.index))
    ax.invert_yaxis()
    ax.margins(y=0.1)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    ax.locator_params(axis="x", nbins=5)
    ax.set(xlabel="held-out log predictive density (nats a row)")


def _distances(figure: Figure, ax: Axes, table: Any, reference: str, colors: list[Any]) -> None:
    """A method's two distances above each other, at its seconds."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for name, color in zip(table.index, colors, strict=True):
        row = table.loc[name]
        distances = np.array([row.mean_distance, row.sd_distance])
        shown = np.where(np.isfinite(distances) & (distances > 0), distances, np.nan)
        if name == reference:
            ax.axvline(row.seconds, color=color, ls="--", label=f"{name} (reference)")
            continue
        seconds = [row.seconds] * 2
        ax.plot(seconds, shown, color=color, lw=1, alpha=0.6)
        ax.plot(seconds[:1], shown[:1], "o", color=color, label=name)
        ax.plot(seconds[1:], shown[1:], "s", color=color, mfc="white")
    ax.set(xscale="log", yscale="log", xlabel="seconds", ylabel="distance from the reference")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    ax.grid(color="0.9")
    ax.set_axisbelow(True)
    named, names = ax.get_legend_handles_labels()
    figure.legend(named, names, loc="outside right center", frameon=False, fontsize="small")
    shapes = [
        ax.plot([], [], "o", color="black", label="mean, in sds")[0],
        ax.plot([], [], "s", color="black", mfc="white", label="log sd")[0],
    ]
    ax.legend(handles=shapes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
