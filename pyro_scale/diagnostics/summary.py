"""The table of `summary()`: moments, quantiles and mixing of every element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.online_moments import Moments
from pyro_scale.diagnostics.convergence import mixing, select_elements
from pyro_scale.diagnostics.report import Report
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.export import to_inference_data
from pyro_scale.posterior.predictive import in_proportion

if TYPE_CHECKING:
    import pandas

#: A site with more elements has a single row, unless it is in `var_names`.
_LISTED_ELEMENTS = 100
#: Levels of the quantiles of draws that were not kept.
_LEVELS = 0.05, 0.5, 0.95


def summary(result: PosteriorDraws, var_names: list[str] | None) -> pandas.DataFrame:
    """The DataFrame that `summary()` returns, with a row for each element: mean, sd, quantiles,
    R-hat, ESS as by ArviZ; and, if tuning chose settings of the run, the report's verdict on the
    site.

    A large site has one row, with its worst R-hat and ESS.  If draws have weights, means and sds
    are weighted, and other columns use draws that are repeated or left out in proportion.
    """
    import pandas

    if result.tables is not None:
        table = result.tables["summary"]
        names = var_names or result.shapes
        return table[[_site_of(row) in names for row in table.index]].copy()
    if result.online is not None:
        return _summary_of_moments(result.online.moments(_LEVELS), var_names)
    weights = result.weights
    # the weights of all chains are the same
    chosen = slice(None) if weights is None else in_proportion(weights[0], weights.shape[1])
    shapes, tables = result.shapes, []
    for name in var_names or shapes:
        if var_names is None and shapes[name].numel() > _LISTED_ELEMENTS:
            elements = select_elements(result, name)[:, chosen]
            columns = _summary_of_draws(result, name, elements[..., 0]).columns
            worst = mixing({name: elements}).round({"r_hat": 2, "ess_bulk": 0, "ess_tail": 0})
            tables.append(
                worst.set_axis([_worst_label(name, shapes[name])]).reindex(columns=columns)
            )
            continue
        values = result.samples[name]
        table = _summary_of_draws(result, name, values[:, chosen])
        if weights is not None:
            moments = weighted_moments(values, weights)
            table["mean"], table["sd"] = (moment.round(decimals=3).tolist() for moment in moments)
        tables.append(table)
    table = pandas.concat(tables)[table.columns]
    if "report" in result.attrs:
        report = Report.from_json(result.attrs["report"])
        if report.choices:
            table["verdict"] = [report.of_site(_site_of(row)) for row in table.index]
    return table


def _site_of(row: object) -> str:
    """The name of the site in the label of a table's row: "w" for "w[0, 1]"."""
    return str(row).partition("[")[0].strip()


def _summary_of_draws(result: PosteriorDraws, name: str, values: Tensor) -> pandas.DataFrame:
    """ArviZ's summary of one site as a DataFrame with a row for each element; R-hat and ESS of
    constant elements are NaN.

    Args:
        result: draws of the run.
        name: name of the site.
        values: draws of the site, `[chains, draws, ...]`.
    """
    values = values.byte() if values.dtype == torch.bool else values  # which have quantiles
    data = to_inference_data(result, {"posterior": {name: values}})
    table, flat = arviz_api.summary(data), values.reshape(values.shape[:2].numel(), -1)
    constant = (flat == flat[0]).all(0)
    if bool(constant.any()):  # ArviZ counts all draws of a constant as effective
        for column in _mixing_columns(table):
            table[column] = table[column].astype(float).mask(constant.cpu().numpy())
    return table


def _summary_of_moments(
    moments: Mapping[str, Moments], var_names: list[str] | None
) -> pandas.DataFrame:
    """The summary as a DataFrame with a row for each element, from moments and quantiles that were
    computed during the run, for draws that were not kept.

    Args:
        moments: moments of the draws, by site.
        var_names: names of the sites; None for all.
    """
    import pandas

    tables, columns = [], ["mean", "sd", *(f"q{100 * p:.0f}" for p in _LEVELS), "ess", "r_hat"]
    for name in var_names or moments:
        of_site = moments[name]
        shape = of_site.mean.shape
        places = [f"{name}[{', '.join(map(str, place))}]" for place in np.ndindex(*shape)]
        numbers = [of_site.mean, of_site.sd, *of_site.quantiles, of_site.ess, of_site.r_hat]
        values = torch.stack(numbers, -1).reshape(-1, len(columns)).numpy()
        table = pandas.DataFrame(values, index=places if shape else [name], columns=columns)
        if var_names is None and len(table) > _LISTED_ELEMENTS:
            worst = {"ess": [table["ess"].min()], "r_hat": [table["r_hat"].max()]}
            table = pandas.DataFrame(worst, [_worst_label(name, shape)], columns)
        tables.append(table)
    return pandas.concat(tables)[columns].round(3)


def _mixing_columns(table: pandas.DataFrame) -> list[str]:
    """The names of those columns of a summary table that hold R-hat or an ESS."""
    return [column for column in table.columns if column.startswith(("ess", "r_hat"))]


def _worst_label(name: str, shape: Sequence[int]) -> str:
    """The label of the one row of a large site, which has the site's worst R-hat and ESS."""
    return f"{name} [{'x'.join(map(str, shape))}], worst"


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
