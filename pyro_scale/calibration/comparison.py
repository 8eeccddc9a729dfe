"""Simulation-based calibration of several methods or settings, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyro_scale.calibration.plots import Panel, choose_labels, plot_ecdf_differences
from pyro_scale.calibration.results import SBC

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Columns of a figure, at most.
_MOST_COLUMNS = 6


class SBCComparison(Mapping[str, SBC]):
    """A mapping from names of methods or settings to their `SBC`.

    Args:
        results: by name; p-values are adjusted within each.
    """

    def __init__(self, results: Mapping[str, SBC]) -> None:
        self._results = dict(results)

    def __getitem__(self, setting: str) -> SBC:
        return self._results[setting]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def summary(self, var_names: Sequence[str] | None = None) -> Any:
        """A DataFrame with the rows of every `SBC.summary`, indexed by (setting, element)."""
        import pandas

        tables = {setting: sbc.summary(var_names) for setting, sbc in self.items()}
        return pandas.concat(tables, names=["setting", "element"])

    def plot(self, var_names: Sequence[str] | None = None, level: float = 0.95) -> Figure:
        """ECDF differences as in `SBC.plot`, with a row for each setting and a column for each
        element.

        Of more than 6 elements, those with the smallest p-values in any setting are shown.
        """
        table = self.summary(var_names)
        least = table.p_value.groupby(level="element", sort=False).min()
        labels, note = choose_labels(least, _MOST_COLUMNS)
        rows: list[list[Panel | None]] = []
        for setting, sbc in self.items():
            rows.append([None] * len(labels))
            for column, label in enumerate(labels):
                if label in sbc.elements:
                    p_value = float(table.p_value[setting, label])
                    title = f"{setting}\n{label}  p = {p_value:.2g}"
                    rows[-1][column] = Panel(title, sbc.elements[label], sbc.num_draws)
        return plot_ecdf_differences(rows, level, note)

    def __str__(self) -> str:
        return "\n".join(f"{setting}: {sbc.headline}" for setting, sbc in self.items())

    def __repr__(self) -> str:
        return f"SBCComparison({list(self)})"
