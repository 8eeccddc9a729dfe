"""The only module that imports ArviZ, for versions 0.23 and 1.x.

ArviZ 1.x has a DataTree in place of InferenceData.  Its `psislw` takes log likelihoods; that of
0.23 takes log weights, which are their negatives.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.exclusive import exclusive


def psis(log_ratios: Tensor, relative_ess: float) -> tuple[Tensor, Tensor]:
    """Smooths importance weights of draws by a Pareto distribution (Vehtari et al. 2024), for each
    row by itself.

    Args:
        log_ratios: log of target over proposal, up to a constant, `[rows, draws]`.
        relative_ess: effective sample size over number of draws.

    Returns:
        (Log weights `[rows, draws]`, normalized over the draws; the Pareto shape k of each row's
        weights, `[rows]`, which is minus infinity if all weights are equal, as for a masked row).
    """
    log_ratios = log_ratios.double().cpu()
    log_weights = torch.full_like(log_ratios, -math.log(log_ratios.shape[1]))
    pareto_k = log_ratios.new_full((len(log_ratios),), -math.inf)
    differ = log_ratios.amax(1) > log_ratios.amin(1)
    if not bool(differ.any()):
        return log_weights, pareto_k
    ratios = log_ratios[differ].numpy()
    with _quiet_arviz() as arviz:
        if _is_1():
            from arviz_stats.base import array_stats

            weights, shapes = array_stats.psislw(-ratios, r_eff=relative_ess)
        else:
            weights, shapes = arviz.psislw(ratios, reff=relative_ess)
    log_weights[differ] = torch.as_tensor(np.asarray(weights))
    pareto_k[differ] = torch.as_tensor(np.asarray(shapes)).reshape(-1)
    return log_weights, pareto_k


def tree_of(datasets: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    """The groups as an InferenceData (ArviZ 0.23) or a DataTree (1.x).

    Args:
        datasets: an `xarray.Dataset` for each group, by the group's name.
        attrs: attributes of the whole.
    """
    with _quiet_arviz() as arviz:
        if not _is_1():
            return arviz.InferenceData(attrs=attrs, **datasets)
    import xarray

    tree = xarray.DataTree.from_dict(dict(datasets))
    tree.attrs.update(attrs)
    return tree


def _is_1() -> bool:
    """Whether the installed ArviZ has version 1 or later, whose functions differ from 0.23."""
    return int(importlib.metadata.version("arviz").partition(".")[0]) >= 1


@contextlib.contextmanager
def _quiet_arviz() -> Iterator[Any]:
    """Context that yields the module arviz, imported on first use, and silences warnings that users
    can do nothing about: its notice of version 1, and overflow."""
    with exclusive, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        import arviz

        yield arviz
