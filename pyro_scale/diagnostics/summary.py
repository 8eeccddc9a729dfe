"""The table of `summary()`: moments, intervals and mixing of every element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pyro_scale.core.mixing import (
    mixing_of,
    sort,
    standard_error_of_mean,
    standard_error_of_sd,
)
from pyro_scale.core.online_moments import Moments
from pyro_scale.diagnostics.convergence import select_elements
from pyro_scale.diagnostics.report import Report
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import in_proportion

if TYPE_CHECKING:
    import pandas

#: A site with more elements has a single row, unless it is in `var_names`.
_LISTED_ELEMENTS = 100
#: Levels of the quantiles of draws that were not kept.
_LEVELS = 0.05, 0.5, 0.95


def summary(result: PosteriorDraws, var_names: list[str] | None) -> pandas.DataFrame:
    """The DataFrame that `summary()` returns, with a row for each element: ArviZ 0.23's columns, or
    moments and quantiles if draws were not kept; and, if tuning chose settings of the run, the
    report's verdict on the site.

    A large site has one row, with its worst R-hat and ESS.  If draws have weights, means and sds
    are weighted, and other columns use draws that are repeated or left out in proportion.
    """
    import pandas

    if result.tables is not None:
        table = result.tables["summary"]
        names = var_names or result.shapes
        return table[[_site_of(row) in names for row in table.index]].copy()
    moments = None if result.online is None else result.online.moments(_LEVELS)
    tables = []
    for name in var_names or result.shapes:
        shape = result.shapes[name]
        is_listed = var_names is not None or shape.numel() <= _LISTED_ELEMENTS
        if moments is not None:
            columns = _of_moments(moments[name])
        else:
            draws = result.samples[name] if is_listed else select_elements(result, name)
            columns = _of_draws(draws[..., None].flatten(2), result.weights)
        tables.append(_table(name, shape, columns, is_listed))
    table = pandas.concat(tables)
    if "report" in result.attrs:
        report = Report.from_json(result.attrs["report"])
        if report.choices:
            table["verdict"] = [report.of_site(_site_of(row)) for row in table.index]
    return table


def _site_of(row: object) -> str:
    """The name of the site in the label of a table's row: "w" for "w[0, 1]"."""
    return str(row).partition("[")[0].strip()


def _table(
    name: str, shape: Sequence[int], columns: Mapping[str, Tensor], is_listed: bool
) -> pandas.DataFrame:
    """The rows of one site in the summary, rounded as in ArviZ.

    Args:
        name: name of the site.
        shape: shape of one draw of the site.
        columns: values of each column by its label, `[elements]` each.
        is_listed: whether each element has a row; otherwise the only row has the site's worst R-hat
            and ESS, and NaN in all other columns.
    """
    import pandas

    table = pandas.DataFrame({label: values.numpy() for label, values in columns.items()})
    counts = [label for label in columns if label.startswith("ess")]
    if is_listed:
        places = [f"[{', '.join(map(str, place))}]" for place in np.ndindex(*shape)]
        table.index = pandas.Index([name + place for place in places] if shape else [name])
    else:
        worst = {**{label: table[label].min() for label in counts}, "r_hat": table["r_hat"].max()}
        label = f"{name} [{'x'.join(map(str, shape))}], worst"
        table = pandas.DataFrame(worst, [label], list(columns))
    return table.round({**dict.fromkeys(columns, 3), **dict.fromkeys(counts, 0), "r_hat": 2})


def _of_draws(draws: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
    """ArviZ's columns by label, `[elements]` each, of draws that were kept. R-hat and ESS of
    constant elements are NaN; ArviZ counts all draws of a constant as effective.

    Args:
        draws: draws of a site, `[chains, draws, elements]`.
        weights: weights of the draws, `[chains, draws]`, in any scale and the same for all chains;
            None if all are equal.
    """
    if weights is not None:
        mean, sd = weighted_moments(draws, weights)
        chosen = draws[:, in_proportion(weights[0], weights.shape[1])]
        return {**_of_draws(chosen, None), "mean": mean, "sd": sd}
    draws = draws.detach().cpu().double()
    ordered, _ = sort(draws.flatten(0, 1).T)
    mean, count = draws.mean((0, 1)), ordered.shape[1]
    low, high = _shortest_interval(ordered)
    r_hat, bulk, tail = mixing_of(draws)
    return {
        "mean": mean,
        "sd": ((draws - mean).square().sum((0, 1)) / (count - 1)).sqrt(),
        "hdi_3%": low,
        "hdi_97%": high,
        "mcse_mean": standard_error_of_mean(draws),
        "mcse_sd": standard_error_of_sd(draws),
        "ess_bulk": bulk,
        "ess_tail": tail,
        "r_hat": r_hat,
    }


def _shortest_interval(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """(Lower end, upper end) of the shortest interval with 94% of the draws of each element,
    `[elements]`; of several such intervals, the lowest.

    Args:
        ordered: sorted draws of each element, `[elements, draws]`.
    """
    count = ordered.shape[1]
    inside = math.floor(0.94 * count)  # ArviZ's share
    first = (ordered[:, inside:] - ordered[:, : count - inside]).argmin(1, keepdim=True)
    return ordered.gather(1, first)[:, 0], ordered.gather(1, first + inside)[:, 0]


def _of_moments(moments: Moments) -> dict[str, Tensor]:
    """The columns by label, `[elements]` each, for draws that were not kept: moments and quantiles
    computed during the run."""
    quantiles = {f"q{100 * p:.0f}": q for p, q in zip(_LEVELS, moments.quantiles, strict=True)}
    columns = {"mean": moments.mean, "sd": moments.sd, **quantiles}
    columns |= {"ess": moments.ess, "r_hat": moments.r_hat}
    return {label: values.flatten() for label, values in columns.items()}


def weighted_moments(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Means and sds of each element of weighted draws, `[elements]` each.

    Args:
        samples: draws, `[chains, draws, ...]`.
        weights: weight of each draw, `[chains, draws]`, in any scale.
    """
    flat = samples.flatten(0, 1).double().reshape(weights.numel(), -1)
    shares = weights.reshape(-1, 1) / weights.sum()
    mean = (shares * flat).sum(0)
    return mean, (shares * (flat - mean).square()).sum(0).sqrt()
