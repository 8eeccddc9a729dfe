"""Reads what a run stored: mixing, and the bias of minibatches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout
from pyro_scale.drive.batches import Batch
from pyro_scale.infer.export import quiet_arviz
from pyro_scale.infer.result import Result
from pyro_scale.model.log_posterior import LogPosterior

#: A site of more elements is one row of `summary`, unless it is named.
_MOST_ELEMENTS = 100
#: A batch's rows times D, above which rows are not differentiated one by one.
_MOST_NUMBERS = 2**28
#: Above this, minibatches make the posterior visibly too wide (5% in standard deviations).
_MOST_INFLATION = 1.1


def summary(idata: Any, var_names: list[str] | None) -> Any:
    """ArviZ's table; a large site is one row, with its worst R-hat and least ESS."""
    import pandas

    arviz = quiet_arviz()
    posterior = idata.posterior
    names = list(var_names or posterior.data_vars)
    tables: list[Any] = []
    for name in names:
        table: Any = arviz.summary(idata, var_names=[name])
        columns = table.columns
        if var_names is None and len(table) > _MOST_ELEMENTS:
            worst = {c: table[c].max() if c == "r_hat" else table[c].min() for c in _mixing(table)}
            shape = "x".join(str(n) for n in posterior[name].shape[2:])
            table = pandas.DataFrame([worst], index=[f"{name} [{shape}], worst"])
        tables.append(table)
    return pandas.concat(tables)[columns]


def _mixing(table: Any) -> list[str]:
    return [column for column in table.columns if column.startswith(("ess", "r_hat"))]


def diagnostics(result: Result, idata: Any) -> Any:
    """A table, one row a site; see `Method.diagnostics`."""
    import pandas

    arviz = quiet_arviz()
    table = pandas.DataFrame(index=pandas.Index([*result.log_posterior.latents], name="site"))
    latent = idata.posterior[list(table.index)]
    table["r_hat"] = _each(arviz.rhat(latent), "max")
    table["ess_bulk"] = _each(arviz.ess(latent, method="bulk"), "min")
    table["ess_tail"] = _each(arviz.ess(latent, method="tail"), "min")
    inflation = result.temperature_inflation
    if inflation is not None:
        table["temperature_inflation"] = [
            float(inflation[place].max())
            for name, place in result.layout.slices().items()
            if name in table.index
        ]
        warn_of_inflation(float(inflation.max()), float(result.sample_stats["lr"][0, -1]))
    if result.attrs.get("share_batches") and result.num_chains > 1:
        table["chain_correlation"] = [
            chain_correlation(result.samples[name]) for name in table.index
        ]
    table.attrs.update(result.attrs)
    return table


def _each(dataset: Any, reduce: str) -> list[float]:
    return [float(getattr(array, reduce)()) for array in dataset.data_vars.values()]


def warn_of_inflation(factor: float, lr: float) -> None:
    """Warns when minibatches make the posterior too wide."""
    if factor > _MOST_INFLATION:
        lower = lr * (_MOST_INFLATION - 1) / (factor - 1)
        warnings.warn(
            f"the noise of minibatches multiplies the temperature by up to {factor:.3g}, so the "
            f"posterior comes out about {100 * (factor**0.5 - 1):.0f}% too wide in standard "
            f"deviations there (less with shuffled batches): lower lr from {lr:.2g} to about "
            f"{lower:.2g}, or raise batch_size in proportion",
            UserWarning,
            stacklevel=4,
        )


def chain_correlation(samples: Tensor) -> float:
    """The largest mean correlation between chains over an element's draws `[C, S, ...]`."""
    centred = samples.flatten(2).double() if samples.dim() > 2 else samples[..., None].double()
    centred = centred - centred.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    chains = len(unit)
    together = unit.sum(0).square().sum(0)  # chains + 2 * the sum over pairs
    return float(((together - chains) / (chains * (chains - 1))).max())


def gradient_noise(
    log_posterior: LogPosterior,
    layout: Layout,
    positions: Tensor,
    batches: Sequence[Sequence[Batch]],
    replacement: bool,
) -> Tensor | None:
    """The variance of the minibatch gradient of the log joint, over N, `[latents]`.

    N V / B with V the variance over rows of one row's log likelihood gradient, on average over
    the draws; times 1 - B/N where a batch's rows are all different.  None where the model has
    no rows, or they are too many to differentiate one by one.

    Args:
        log_posterior: the target.
        layout: of a position.
        positions: `[chains, draws, D]`.
        batches: whose rows to use, some for each draw.
        replacement: whether a batch's rows are drawn with replacement.
    """
    scaling = log_posterior.understanding.scaling
    has_rows = any(rule.role == "rows" for rule in scaling.rules.values())
    size = log_posterior.understanding.batch_size
    if not has_rows or size * layout.size > _MOST_NUMBERS:
        return None
    latents = [name for name in layout.names if name in log_posterior.latents]
    variances = []
    for chain, draws in enumerate(positions):
        for position, some in zip(draws, batches, strict=True):
            gradients = []
            for batch in some:
                data = batch.of_chain(chain)

                def rows_of(params: Any, data: Any = data) -> Tensor:
                    return log_posterior(params, *data).log_lik

                jacobian = torch.func.jacrev(rows_of, chunk_size=256)(layout.unflatten(position))
                parts = [jacobian[name].reshape(size, -1) for name in latents]
                gradients.append(torch.cat(parts, dim=1))
            rows = torch.cat(gradients)
            centred = rows - rows.mean(0)  # torch's own var is many times slower along rows
            variances.append(centred.square().sum(0) / (len(rows) - 1))
    num_data = log_posterior.num_data
    all_different = 0.0 if replacement else size / num_data
    return torch.stack(variances).mean(0) * num_data / size * (1 - all_different)
