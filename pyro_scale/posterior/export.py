"""Exports draws to ArviZ: groups with named dims and coords."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.row_batches import data_sites
from pyro_scale.storage.lazy_draws import StoredSamples

#: The name of the rows' dimension where the model has no plate for them.
ROWS = "row"


def to_inference_data(result: PosteriorDraws, groups: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """ArviZ's InferenceData, or, with ArviZ 1, the DataTree that took its place.

    Args:
        result: of the run.
        groups: by group, by variable: `[chains, draws, ...]`, but `observed_data` as it is; a
            posterior in a store is read when it is needed.
    """
    import xarray

    datasets: dict[str, Any] = {
        group: xarray.Dataset(
            {name: _array(result, group, name, value) for name, value in variables.items()},
            attrs=attributes(result.attrs),
        )
        for group, variables in groups.items()
        if variables and not isinstance(variables, StoredSamples)
    }
    for group, variables in groups.items():
        if isinstance(variables, StoredSamples):
            datasets = {
                group: variables.dataset().assign_attrs(attributes(result.attrs)),
                **datasets,
            }
    return arviz_api.tree_of(datasets, attributes(result.attrs))


def _array(result: PosteriorDraws, group: str, name: str, value: Tensor) -> Any:
    import xarray

    value = value.detach().cpu()
    array = (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # it has no such
    lead = () if group == "observed_data" else ("chain", "draw")
    dims = (*lead, *dims_of(result, group, name, array.ndim - len(lead)))
    coords = {dim: np.arange(size) for dim, size in zip(dims, array.shape, strict=True)}
    if lead and result.chains is not None:
        coords["chain"] = np.array(result.chains)
    return xarray.DataArray(array, dims=dims, coords=coords)


def dims_of(result: PosteriorDraws, group: str, name: str, count: int) -> list[str]:
    """A variable's dims after chain and draw: plates by their names, the rest by the site's."""
    info = result.log_posterior.model_info
    if group == "sample_stats":
        return []
    rows = _rows_dim(result, name)
    if group == "log_likelihood":
        return [rows]
    dims = own_dims(result, name, count)
    site = info.sites.get(name)
    if site is None:
        return dims
    for frame in site.plates:
        place = count - len(site.fn.event_shape) + (frame.dim or 0)
        if frame.dim is not None and 0 <= place < count:
            dims[place] = str(frame.name)
    axes = data_sites(result)
    if name in axes:
        dims[count + axes[name]] = rows
    return dims


def own_dims(result: PosteriorDraws, name: str, count: int) -> list[str]:
    """A site's dims named after itself, none of which is another site."""
    sites = result.log_posterior.model_info.sites
    taken = "_" if any(f"{name}_dim_{i}" in sites for i in range(count)) else ""
    return [f"{name}_dim_{i}{taken}" for i in range(count)]


def _rows_dim(result: PosteriorDraws, name: str) -> str:
    """The name of the dimension of a site's rows: that of the data's plate, or of the site's own
    plate if the site needs the whole data, as it may have fewer values than there are rows."""
    info = result.log_posterior.model_info
    own = info.scaling.rules.get(name)
    if own is not None and own.whole_data:
        plates = info.sites[name].plates if name in info.sites and not own.depth else ()
        return str(next((f.name for f in plates if f.dim == own.dim), f"{name}_{ROWS}"))
    names = {
        next((f.name for f in site.plates if f.dim == rule.dim), ROWS)
        for name, rule in info.scaling.rules.items()
        if rule.role == "rows" and (site := info.sites.get(name)) is not None and not rule.depth
    }
    return str(names.pop()) if len(names) == 1 else ROWS


def attributes(attrs: Mapping[str, Any]) -> dict[str, str | int | float]:
    """netCDF attributes are strings and numbers; the rest goes in as JSON."""
    return {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in attrs.items()
    }


def grouped(result: PosteriorDraws, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`[chains * draws, ...]` -> `[chains, draws, ...]`."""
    chains, draws = result.positions.shape[:2]
    return {k: v.reshape(chains, draws, *v.shape[1:]) for k, v in values.items()}


def log_likelihood_bytes(result: PosteriorDraws, num_sites: int) -> int:
    """The size of the pointwise log likelihood of all draws."""
    chains, draws = result.positions.shape[:2]
    size = torch.finfo(result.layout.dtype).bits // 8
    return chains * draws * result.log_posterior.num_data * num_sites * size
