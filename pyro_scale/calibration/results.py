"""The result of simulation-based calibration: ranks, and whether they are uniform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from pyro_scale.calibration.plots import Panel, choose_labels, plot_ecdf_differences
from pyro_scale.calibration.ranks import describe_ranks, scores
from pyro_scale.errors import ArgumentError
from pyro_scale.metrics.uniformity import holm, uniformity_p_values
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.export import attributes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

#: Ranks are not uniform if their p-value, by Holm's method over all elements, is at most this.
SIGNIFICANT = 0.05
#: Fraction of simulations that may fail or be slow without a change of the verdict.
MOST_DOUBTFUL = 0.01
#: Panels of an SBC's figure at most, and its columns; columns of a comparison's at most.
_MOST_PANELS, _COLUMNS, _MOST_COLUMNS = 20, 4, 6
#: Elements and simulations that a report names, at most.
_MOST_NAMED = 10


@dataclass(frozen=True, eq=False, repr=False)
class SBC:
    """Simulation-based calibration of a method: ranks of true values among posterior draws.

    Each simulation draws parameters from the prior, data from the model, and then draws from the
    posterior of these data.  If the posterior draws are exact, the true value's rank among them is
    uniform, for every quantity of parameters and data (Talts et al. 2018; Modrak et al. 2023).

    `print(sbc)` describes the ranks, `summary()` is the table, `plot()` the figure.
    The test is that of Saeilynoja, Buerkner and Vehtari (2022), without simulation.

    Attributes:
        ranks: number of draws below the true value, by name of the quantity, int64 `[S, *shape]`
            for S simulations.
        num_draws: L, the number of draws of each simulation; ranks are 0 to L.
        true: values that the data were simulated from, by quantity, `[S, *shape]`.
        mean: means of the draws, by quantity, `[S, *shape]`.
        sd: standard deviations of the draws, by quantity, `[S, *shape]`.
        ess: the least effective sample size of each simulation, before draws were thinned to L,
            `[S]`.
        failed: reasons of failure, by the simulation's number.  Ranks among the draws of failed
            simulations count.
        slow: numbers of simulations with too few effective draws.
        seeds: seed of each simulation, `[S]`.
        attrs: method, settings, seconds.
        of_data: names of quantities that depend on the data, such as the log likelihood; they have
            no prior variance.
        data_of: function from a simulation's number to its data, as the model's arguments; None if
            the data cannot be drawn again.

    Examples:
        `mu ~ N(0, 1)` and one observation `y ~ N(mu, 1)`, so that the posterior is N(y / 2, 1 / 2);
        and draws whose sd is half of that:

        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> mu, noise = torch.randn(2, 500, generator=generator)
        >>> y = mu + noise
        >>> draws = y / 2 + 0.5 * 0.5**0.5 * torch.randn(99, 500, generator=generator)
        >>> sbc = SBC(
        ...     ranks={"mu": (draws < mu).sum(0)}, num_draws=99, true={"mu": mu},
        ...     mean={"mu": draws.mean(0)}, sd={"mu": draws.std(0)}, ess=torch.full((500,), 99.0),
        ...     failed={}, slow=[], seeds=range(500))
        >>> sbc.verdict
        'miscalibrated'
        >>> print(str(sbc).splitlines()[1].partition(" (")[0])
        mu: ranks pile up at both ends: draws are too narrow
        >>> sbc.summary()[["z_score_sd", "contraction", "coverage_95"]].round(2).loc["mu"].tolist()
        [2.02, 0.88, 0.69]
    """

    ranks: Mapping[str, Tensor]
    num_draws: int
    true: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    sd: Mapping[str, Tensor]
    ess: Tensor
    failed: Mapping[int, str]
    slow: Sequence[int]
    seeds: Sequence[int] | Tensor
    attrs: Mapping[str, Any] = field(default_factory=dict)
    of_data: Sequence[str] = ()
    data_of: Callable[[int], Any] | None = None

    @property
    def num_simulations(self) -> int:
        """S, the number of simulations."""
        return len(self.ess)

    @cached_property
    def elements(self) -> dict[str, Tensor]:
        """A dict from the label of each scalar element, such as `w[0, 1]`, to its ranks over
        simulations, `[S]`."""
        return dict(zip(self._of_label, self._flat(self.ranks).unbind(1), strict=True))

    def data(self, number: int) -> Any:
        """The data of one simulation, as the model's arguments or `Grouped`, to fit them again.

        A method whose settings are all numbers gives the draws that were ranked, if it is run with
        `seed=sbc.seeds[number]` and one chain; except with local latents summed out, where the
        nodes may be fewer.

        Args:
            number: number of the simulation, from 0.

        Raises:
            ArgumentError: there is no such simulation, or this is not the result of `ps.sbc`.
        """
        if self.data_of is None:
            raise ArgumentError("data: only what ps.sbc returns can draw its data again")
        if not 0 <= number < self.num_simulations:
            raise ArgumentError(f"number={number}: there are {self.num_simulations} simulations")
        return self.data_of(number)

    def summary(self, var_names: Sequence[str] | None = None) -> pandas.DataFrame:
        """A DataFrame of statistics of ranks and draws, with a row for each scalar element of a
        quantity.

        | column | what | of exact draws |
        |---|---|---|
        | `ecdf_deviation` | largest distance of the ranks' ECDF from the uniform one | near 0 |
        | `p_value` | exact probability of an ECDF as unlikely as this one, if uniform | |
        | `p_holm` | the same, adjusted for all elements of all quantities | above 0.05 |
        | `z_score` | mean of (posterior mean - true) / posterior sd | 0 +- 1/sqrt(S) |
        | `z_score_sd` | its standard deviation over simulations | near 1 |
        | `contraction` | median of 1 - posterior variance / prior variance | |
        | `coverage_50`, `_80`, `_95` | how often central intervals hold the true value | 0.5, ... |

        The prior variance is the variance of the true values over simulations.  Quantities that
        depend on the data have none; their contraction is NaN.  For z-scores and contraction see
        Schad, Betancourt and Vasishth (2021); both leave out simulations whose mean or sd is not
        finite.  All ranks count.

        Args:
            var_names: quantities to show; all by default.

        Raises:
            ArgumentError: an unknown quantity.
        """
        names = self._names(var_names)
        return self._table[[self._of_label[label] in names for label in self._table.index]].copy()

    @cached_property
    def verdict(self) -> Literal["calibrated", "miscalibrated", "unknown"]:
        """Whether ranks are uniform ("calibrated") or not ("miscalibrated"), at a level of 5% by
        Holm's method over all elements of all quantities.

        If more than 1% of the simulations failed or were slow, the verdict is "miscalibrated" if
        it does not depend on the ranks of these simulations, and "unknown" otherwise.
        """
        if len(self._doubtful) <= MOST_DOUBTFUL * self.num_simulations:
            is_significant = bool((self._table.p_holm <= SIGNIFICANT).any())
            return "miscalibrated" if is_significant else "calibrated"
        is_doubtful = torch.zeros(self.num_simulations, dtype=torch.bool)
        is_doubtful[self._doubtful] = True
        p_values = uniformity_p_values(self._flat(self.ranks), self.num_draws, is_doubtful)
        return "miscalibrated" if bool((holm(p_values) <= SIGNIFICANT).any()) else "unknown"

    def plot(self, var_names: Sequence[str] | None = None, level: float = 0.95) -> Figure:
        """A figure of the ranks' ECDFs minus the uniform one, with a panel for each element, and
        the simultaneous band in which uniform ranks lie.

        A line that leaves its band is drawn in another color.  If a line is above 0 on the left and
        below 0 on the right, ranks pile up at both ends: draws are too narrow.  Of more than 20
        elements, those with the smallest p-values are shown.

        Args:
            var_names: quantities to show; all by default.
            level: probability of the band of each panel.

        Raises:
            ArgumentError: an unknown quantity, or a level out of (0, 1).
        """
        p_values = self.summary(var_names).p_value
        labels, note = choose_labels(p_values, _MOST_PANELS)
        panels: list[Panel | None] = [
            Panel(
                f"{label}  p = {float(p_values[label]):.2g}", self.elements[label], self.num_draws
            )
            for label in labels
        ]
        columns = min(_COLUMNS, len(panels))
        panels += [None] * (-len(panels) % columns)
        rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
        return plot_ecdf_differences(rows, level, note)

    def to_datatree(self) -> Any:
        """The ranks as ArviZ's DataTree (InferenceData before ArviZ 1), in the group `prior_sbc`.

        As in simuk, the dimensions of a variable are one chain, a draw for each simulation, and the
        variable's shape.  Values are PITs, (rank + 1/2) / (L + 1), in (0, 1):
        `arviz_plots.plot_ecdf_pit` plots them unchanged, but would divide ranks by the largest one.
        `num_draws` is an attribute.

        Examples:
            With ArviZ 1: `arviz_plots.plot_ecdf_pit(sbc.to_datatree())`.
        """
        import xarray

        variables = {}
        for name, ranks in self.ranks.items():
            dims = ["chain", "draw", *(f"{name}_dim_{i}" for i in range(ranks.dim() - 1))]
            values = ((ranks.cpu().double() + 0.5) / (self.num_draws + 1)).numpy()[None]
            coords = {dim: np.arange(size) for dim, size in zip(dims, values.shape, strict=True)}
            variables[name] = xarray.DataArray(values, dims=dims, coords=coords)
        attrs = attributes({**self.attrs, "num_draws": self.num_draws})
        return arviz_api.tree_of({"prior_sbc": xarray.Dataset(variables, attrs=attrs)}, attrs)

    def __str__(self) -> str:
        lines = [self.headline, *self._shapes(), *self._troubles()]
        return "\n".join([*lines, "Each simulation is one chain."])

    def __repr__(self) -> str:
        return f"<SBC: {self.headline}>"

    def _repr_html_(self) -> str:
        import html

        text = html.escape(str(self)).replace("\n", "<br>")
        return f"<p>{text}</p>{self._table.to_html(float_format='{:.3g}'.format)}"

    @property
    def headline(self) -> str:
        """One line with the verdict, the number of elements and simulations, and the least
        p-value."""
        table = self._table
        simulations = f"{self.num_simulations:,} simulations of {self.num_draws:,} draws"
        least = f"least p-value {float(table.p_holm.min()):.2g} by Holm's method"
        elements = _count_elements(len(table))
        if self.verdict == "calibrated":
            return f"CALIBRATED: {elements} have uniform ranks in {simulations}; {least}"
        if self.verdict == "unknown":
            return (
                f"NOT KNOWN: {len(self._doubtful):,} of {simulations} failed or were slow, and it "
                "depends on them; try: longer runs, or settings with which none breaks"
            )
        count = int((table.p_holm <= SIGNIFICANT).sum())
        return f"MISCALIBRATED: {count:,} of {elements} in {simulations}; {least}"

    def _shapes(self) -> list[str]:
        """Lines of the report on elements whose ranks are not uniform, which say where each
        element's ranks pile up and what that means for the draws; an empty list if all ranks are
        uniform."""
        off = self._table[self._table.p_holm <= SIGNIFICANT].sort_values("p_holm", kind="stable")
        lines = []
        for label, row in off[:_MOST_NAMED].iterrows():
            shape = describe_ranks(self.elements[str(label)], self.num_draws)
            lines.append(
                f"{label}: {shape} (ECDF off by {row.ecdf_deviation:.2g}, p = {row.p_holm:.2g})"
            )
        more = len(off) - len(lines)
        return [*lines, f"and {_count_elements(more)} more"] if more else lines

    def _troubles(self) -> list[str]:
        """Lines of the report on simulations that failed or had too few effective draws; empty if
        there are none."""
        lines, total = [], f"of {self.num_simulations:,} simulations"
        if self.failed:
            by_reason: dict[str, list[str]] = {}
            for number, why in sorted(self.failed.items()):
                by_reason.setdefault(why, []).append(str(number))
            failed = [f"{_join(numbers)} ({why})" for why, numbers in by_reason.items()]
            lines.append(f"Failed, {len(self.failed):,} {total}: {_join(failed)}")
        if self.slow:
            slow = [f"{number} (ESS {float(self.ess[number]):.3g})" for number in sorted(self.slow)]
            lines.append(f"Too few effective draws, {len(self.slow):,} {total}: {_join(slow)}")
        return lines

    @property
    def _doubtful(self) -> list[int]:
        """Numbers, ascending, of the simulations whose ranks cannot be relied on: those that failed
        or had too few effective draws."""
        return sorted({*self.failed, *self.slow})

    @cached_property
    def _table(self) -> pandas.DataFrame:
        """The pandas DataFrame from which `summary` picks rows: statistics of ranks and draws, with
        a row for each scalar element of all quantities."""
        import pandas

        true, mean, sd = (self._flat(x).double() for x in (self.true, self.mean, self.sd))
        is_of_data = torch.tensor([name in self.of_data for name in self._of_label.values()])
        columns = scores(self._flat(self.ranks), self.num_draws, true, mean, sd, is_of_data)
        return pandas.DataFrame(
            {name: column.numpy() for name, column in columns.items()},
            index=pandas.Index(list(self._of_label), name="element"),
        )

    @cached_property
    def _of_label(self) -> dict[str, str]:
        """A dict from the label of each scalar element, such as `w[0, 1]`, to the name of its
        quantity, in the order of `_flat`."""
        names = {}
        for name, ranks in self.ranks.items():
            for index in np.ndindex(*ranks.shape[1:]):
                names[f"{name}[{', '.join(map(str, index))}]" if index else name] = name
        return names

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """The numbers of all scalar elements side by side, `[S, elements]`, from a dict by quantity
        of tensors `[S, *shape]`."""
        parts = [values[name].cpu().reshape(self.num_simulations, -1) for name in self.ranks]
        return torch.cat(parts, 1)

    def _names(self, var_names: Sequence[str] | None) -> Sequence[str]:
        """Names of the quantities to show: `var_names`, or all for None.

        Raises:
            ArgumentError: `var_names` is a string, or names an unknown quantity.
        """
        names = list(self.ranks) if var_names is None else var_names
        if isinstance(names, str):
            raise ArgumentError(f"var_names={var_names!r}: pass a list, [{var_names!r}]")
        for name in names:
            if name not in self.ranks:
                raise ArgumentError(f"var_names: no quantity '{name}': use {list(self.ranks)}")
        return names


class SBCComparison(Mapping[str, SBC]):
    """A mapping from names of methods or settings to their `SBC`.

    Args:
        results: results by name; p-values are adjusted within each result.
    """

    def __init__(self, results: Mapping[str, SBC]) -> None:
        self._results = dict(results)

    def __getitem__(self, setting: str) -> SBC:
        return self._results[setting]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def summary(self, var_names: Sequence[str] | None = None) -> pandas.DataFrame:
        """A DataFrame with the rows of every result's `SBC.summary`, indexed by (setting, element).

        Args:
            var_names: quantities to show; None for all.

        Raises:
            ArgumentError: an unknown quantity.
        """
        import pandas

        tables = {setting: sbc.summary(var_names) for setting, sbc in self.items()}
        return pandas.concat(tables, names=["setting", "element"])

    def plot(self, var_names: Sequence[str] | None = None, level: float = 0.95) -> Figure:
        """A figure of ECDF differences as in `SBC.plot`, with a row of panels for each setting and
        a column for each element.

        Of more than 6 elements, those with the smallest p-values in any setting are shown.

        Args:
            var_names: quantities to show; None for all.
            level: probability of the band of each panel.
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


def _count_elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count:,} elements"


def _join(words: Sequence[str]) -> str:
    shown = ", ".join(words[:_MOST_NAMED])
    return shown if len(words) <= _MOST_NAMED else f"{shown} and {len(words) - _MOST_NAMED:,} more"
