"""Export of draws to ArviZ: groups of variables with named dims and coords."""

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

#: Name of the rows' dimension if the model has no plate for them.
ROWS = "row"


def to_inference_data(result: PosteriorDraws, groups: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Draws and other variables as ArviZ's InferenceData (0.23) or DataTree (1.x).

    Args:
        result: draws and facts of the run.
        groups: variables by ArviZ's group and name, `[chains, draws, ...]`; those of
            `observed_data` have no chains and draws. Empty groups are left out. A posterior in a
            store is read when it is used.
    """
    import xarray

    datasets, attrs = {}, attributes(result.attrs)
    for group, variables in groups.items():
        if isinstance(variables, StoredSamples):
            datasets[group] = variables.dataset().assign_attrs(attrs)
        elif variables:
            arrays = {name: _array(result, group, name, v) for name, v in variables.items()}
            datasets[group] = xarray.Dataset(arrays, attrs=attrs)
    return arviz_api.tree_of(datasets, attrs)


def _array(result: PosteriorDraws, group: str, name: str, value: Tensor) -> Any:
    """A variable as an `xarray.DataArray` with names of dims and their coordinates, as ArviZ wants
    it.

    Args:
        result: draws and facts of the run.
        group: ArviZ's group.
        name: name of the variable.
        value: its values, `[chains, draws, ...]`, or without these dimensions for `observed_data`.
    """
    import xarray

    value = value.detach().cpu()
    array = (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # NumPy has none
    lead = () if group == "observed_data" else ("chain", "draw")
    dims = (*lead, *dims_of(result, group, name, array.ndim - len(lead)))
    coords = {dim: np.arange(size) for dim, size in zip(dims, array.shape, strict=True)}
    if lead and result.chains is not None:
        coords["chain"] = np.array(result.chains)
    return xarray.DataArray(array, dims=dims, coords=coords)


def dims_of(result: PosteriorDraws, group: str, name: str, count: int) -> list[str]:
    """Names of a variable's dims after chain and draw: names of plates, otherwise `<site>_dim_0`
    and so on.

    Args:
        result: draws and facts of the run.
        group: ArviZ's group of the variable.
        name: name of the variable.
        count: number of these dims.
    """
    info = result.log_posterior.model_info
    if group == "sample_stats":
        return []
    rows = _rows_dim(result, name)
    if group == "log_likelihood":
        return [rows]
    dims = numbered_dims(result, name, count)
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


def numbered_dims(result: PosteriorDraws, name: str, count: int) -> list[str]:
    """`count` names for the dims of a site's value: "<site>_dim_0", "<site>_dim_1", ...; with "_"
    at the end if the model has a site of such a name."""
    sites = result.log_posterior.model_info.sites
    suffix = "_" if any(f"{name}_dim_{i}" in sites for i in range(count)) else ""
    return [f"{name}_dim_{i}{suffix}" for i in range(count)]


def _rows_dim(result: PosteriorDraws, name: str) -> str:
    """The name of the dim of a site's rows: that of the data's plate, or "row" if there is no
    single one. A site that needs the whole data has the name of its own plate, because it may have
    fewer values than the data have rows."""
    info = result.log_posterior.model_info
    rule = info.scaling.rules.get(name)
    if rule is not None and rule.whole_data:
        plates = info.sites[name].plates if name in info.sites and not rule.depth else ()
        return str(next((f.name for f in plates if f.dim == rule.dim), f"{name}_{ROWS}"))
    names = {
        next((f.name for f in site.plates if f.dim == rule.dim), ROWS)
        for name, rule in info.scaling.rules.items()
        if rule.role == "rows" and (site := info.sites.get(name)) is not None and not rule.depth
    }
    return str(names.pop()) if len(names) == 1 else ROWS


def attributes(attrs: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The attributes by name as strings and numbers, which netCDF can store; any other value, such
    as a list, becomes a JSON text."""
    return {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in attrs.items()
    }


def grouped(result: PosteriorDraws, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with a dimension of chains, `[chains, draws, ...]` by name, from tensors in which
    all chains' draws follow one another, `[chains * draws, ...]`; `result` gives the two sizes."""
    chains, draws = result.positions.shape[:2]
    return {k: v.reshape(chains, draws, *v.shape[1:]) for k, v in values.items()}


def log_likelihood_bytes(result: PosteriorDraws, num_sites: int) -> int:
    """The bytes of memory that the log likelihood of every row at every draw would take, for
    `num_sites` data sites; to decide before it is computed whether it fits."""
    chains, draws = result.positions.shape[:2]
    size = torch.finfo(result.layout.dtype).bits // 8
    return chains * draws * result.log_posterior.num_data * num_sites * size
