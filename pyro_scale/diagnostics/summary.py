"""Posterior summaries as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.online_moments import Moments
from pyro_scale.diagnostics.convergence import some_elements
from pyro_scale.diagnostics.run_report import Report
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.export import to_inference_data
from pyro_scale.posterior.predictive import in_proportion

#: A site of more elements is one row, unless it is named.
_LISTED_ELEMENTS = 100
#: Of the quantiles that are shown of draws that were not kept.
_LEVELS = 0.05, 0.5, 0.95


def summary(result: PosteriorDraws, var_names: list[str] | None) -> Any:
    """ArviZ's table; a large site is one row, with its worst R-hat and least ESS.

    A run that chose something has its verdict in the last column.  Where draws have weights, means
    and sds are weighted, and the rest is of draws that are repeated or left out in proportion.
    """
    import pandas

    if result.tables is not None:
        table = result.tables["summary"]
        names = var_names or result.shapes
        return table[[str(row).partition("[")[0].strip() in names for row in table.index]].copy()
    if result.online is not None:
        return _of_moments(result.online.moments(_LEVELS), var_names)
    weights = result.weights
    chosen = slice(None) if weights is None else in_proportion(weights[0], weights.shape[1])
    shapes, tables = result.shapes, []
    for name in var_names or shapes:
        if var_names is None and shapes[name].numel() > _LISTED_ELEMENTS:
            table = _as_arviz_has_it(result, name, some_elements(result, name)[:, chosen])
            tables.append(_worst(table, name, shapes[name]))
            continue
        values = result.samples[name]
        table = _as_arviz_has_it(result, name, values[:, chosen])  # the same for all chains
        if weights is not None:
            moments = weighted_moments(values, weights)
            table["mean"], table["sd"] = (moment.round(decimals=3).tolist() for moment in moments)
        tables.append(table)
    table = pandas.concat(tables)[table.columns]
    if "report" in result.attrs:
        told = Report.from_json(result.attrs["report"])
        if told.choices:
            sites = [str(row).partition("[")[0].strip() for row in table.index]
            table["verdict"] = [told.of_site(site) for site in sites]
    return table


def _as_arviz_has_it(result: PosteriorDraws, name: str, values: Tensor) -> Any:
    values = values.byte() if values.dtype == torch.bool else values  # for their quantiles
    data = to_inference_data(result, {"posterior": {name: values}})
    table, flat = arviz_api.summary(data), values.reshape(values.shape[:2].numel(), -1)
    still = (flat == flat[0]).all(0)
    if bool(still.any()):  # ArviZ has all draws of a constant effective
        for column in (each for each in table.columns if each.startswith(("ess", "r_hat"))):
            table[column] = table[column].astype(float).mask(still.cpu().numpy())
    return table


def _of_moments(moments: Mapping[str, Moments], var_names: list[str] | None) -> Any:
    """The table of draws that were not kept."""
    import pandas

    tables, columns = [], ["mean", "sd", *(f"q{100 * p:.0f}" for p in _LEVELS), "ess", "r_hat"]
    for name in var_names or moments:
        found = moments[name]
        shape = found.mean.shape
        places = [f"{name}[{', '.join(map(str, place))}]" for place in np.ndindex(*shape)]
        numbers = [found.mean, found.sd, *found.quantiles, found.ess, found.r_hat]
        values = torch.stack(numbers, -1).reshape(-1, len(columns)).numpy()
        table = pandas.DataFrame(values, index=places if shape else [name], columns=columns)
        if var_names is None and len(table) > _LISTED_ELEMENTS:
            table = _worst(table, name, shape)
        tables.append(table)
    return pandas.concat(tables)[columns].round(3)


def _worst(table: Any, name: str, shape: Sequence[int]) -> Any:
    """A large site's row: its worst R-hat and least ESS."""
    import pandas

    mixing = [column for column in table.columns if column.startswith(("ess", "r_hat"))]
    worst = {c: table[c].max() if c == "r_hat" else table[c].min() for c in mixing}
    label = f"{name} [{'x'.join(map(str, shape))}], worst"
    return pandas.DataFrame([worst], index=[label], columns=table.columns)


def weighted_moments(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(Mean, standard deviation) of draws `[chains, draws, ...]`, by element, `[elements]`."""
    flat = samples.flatten(0, 1).double().reshape(weights.numel(), -1)
    shares = weights.reshape(-1, 1) / weights.sum()
    mean = (shares * flat).sum(0)
    return mean, (shares * (flat - mean).square()).sum(0).sqrt()
