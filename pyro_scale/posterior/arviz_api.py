"""The only file that imports ArviZ: it serves 0.23 and 1.x.

What 1.x calls a DataTree was an InferenceData, and `psislw` of 1.x takes log likelihoods where that
of 0.23 took log weights, their negatives.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.exclusive import exclusive


def rhat(draws: Any) -> Any:
    """Rank-normalized split R-hat of every variable of a Dataset with dims chain and draw."""
    with _quiet_arviz() as arviz:
        return arviz.rhat(draws)


def ess(draws: Any, method: Literal["bulk", "tail", "mean"]) -> Any:
    """The effective number of draws of every variable of a Dataset with dims chain and draw."""
    with _quiet_arviz() as arviz:
        return arviz.ess(draws, method=method)


def mcse_of_mean(draws: Tensor) -> float:
    """The Monte Carlo standard error of the mean of draws, `[chains, draws]`."""
    with _quiet_arviz() as arviz:
        return float(arviz.mcse(draws.numpy(), method="mean"))


def psis(log_ratios: Tensor, relative_ess: float) -> tuple[Tensor, Tensor]:
    """Pareto-smoothed importance sampling (Vehtari et al. 2024).

    Args:
        log_ratios: of target over proposal, up to a constant, `[rows, draws]`.
        relative_ess: draws' worth in independent ones, as a part of their number.

    Returns:
        The log weights, which sum to one over the draws, and the shape k of the tail of each
        row's weights, `[rows]`; minus infinity where all weights are the same, as of a row that
        is masked.
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


def summary(tree: Any) -> Any:
    """ArviZ's own table of a posterior, a row an element."""
    with _quiet_arviz() as arviz:
        return arviz.summary(tree)


def tree_of(datasets: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    """Groups of Datasets as ArviZ's functions take them: an InferenceData or a DataTree."""
    with _quiet_arviz() as arviz:
        if not _is_1():
            return arviz.InferenceData(attrs=attrs, **datasets)
    import xarray

    tree = xarray.DataTree.from_dict(dict(datasets))
    tree.attrs.update(attrs)
    return tree


def _is_1() -> bool:
    """Whether ArviZ is of the line that begins with 1."""
    return int(importlib.metadata.version("arviz").partition(".")[0]) >= 1


@contextlib.contextmanager
def _quiet_arviz() -> Iterator[Any]:
    """ArviZ, imported when it is needed, without the notice of its next version, and without what
    it and NumPy say of single draws and of draws that overflow, on which nobody can act."""
    with exclusive, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        import arviz

        log = getattr(arviz, "_log", logging.getLogger("arviz"))  # logging does not know its own
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            yield arviz
        finally:
            log.setLevel(level)
