"""Reads what a run stored: mixing, and the bias of minibatches."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from pyro_scale.infer.export import quiet_arviz, to_inference_data
from pyro_scale.infer.predictive import in_proportion
from pyro_scale.infer.result import Result

#: A site of more elements is one row of `summary`, unless it is named.
_MOST_ELEMENTS = 100
#: Above this, minibatches make the posterior visibly too wide (5% in standard deviations).
_MOST_INFLATION = 1.1


def summary(result: Result, var_names: list[str] | None) -> Any:
    """ArviZ's table; a large site is one row, with its worst R-hat and least ESS.

    Where draws have weights, means and sds are weighted, and the rest is of draws that are
    repeated or left out in proportion.
    """
    import pandas

    arviz = quiet_arviz()
    samples, weights = result.samples, result.weights
    if weights is not None:  # the same for all chains
        chosen = in_proportion(weights[0], weights.shape[1])
        samples = {name: value[:, chosen] for name, value in samples.items()}
    idata = to_inference_data(result, {"posterior": samples})
    tables: list[Any] = []
    for name in var_names or samples:
        table: Any = arviz.summary(idata, var_names=[name])
        if weights is not None and "mean" in table:
            moments = _weighted_moments(result.samples[name], weights)
            table["mean"], table["sd"] = (moment.round(decimals=3).tolist() for moment in moments)
        columns = table.columns
        if var_names is None and len(table) > _MOST_ELEMENTS:
            worst = {c: table[c].max() if c == "r_hat" else table[c].min() for c in _mixing(table)}
            shape = "x".join(str(n) for n in samples[name].shape[2:])
            table = pandas.DataFrame([worst], index=[f"{name} [{shape}], worst"])
        tables.append(table)
    return pandas.concat(tables)[columns]


def _weighted_moments(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(Mean, standard deviation) of draws `[chains, draws, ...]`, by element, `[elements]`."""
    flat = samples.flatten(0, 1).double().reshape(weights.numel(), -1)
    shares = weights.reshape(-1, 1) / weights.sum()
    mean = (shares * flat).sum(0)
    return mean, (shares * (flat - mean).square()).sum(0).sqrt()


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
    noise = result.gradient_noise
    if noise is not None and result.attrs["temperature"] != 0:
        places = [result.layout.slices()[name] for name in table.index]
        table["gradient_variance"] = [float(noise.variance[place].max()) for place in places]
        if noise.reduction is not None:
            table["variance_reduction"] = [float(noise.reduction[place].min()) for place in places]
        table["temperature_inflation"] = [float(noise.inflation[place].max()) for place in places]
        if "lr_choice" not in result.attrs:  # which has weighed it
            warn_of_inflation(float(noise.inflation.max()), result)
    if result.attrs.get("share_batches") and result.num_chains > 1:
        table["chain_correlation"] = [
            chain_correlation(result.samples[name]) for name in table.index
        ]
    table.attrs.update(result.attrs)
    return table


def _each(dataset: Any, reduce: str) -> list[float]:
    return [float(getattr(array, reduce)()) for array in dataset.data_vars.values()]


def warn_of_inflation(factor: float, result: Result) -> None:
    """Warns when minibatches make the posterior too wide."""
    if factor > _MOST_INFLATION:
        share = (_MOST_INFLATION - 1) / (factor - 1)
        lr = result.sample_stats.get("lr")
        lower = f"lower lr to {share:.2g} of what it is"
        if lr is not None:
            now = float(lr.mean())
            lower = f"lower lr from {now:.2g} to about {now * share:.2g}"
        shuffled = result.attrs.get("sampling") != "replacement"
        anchored = result.gradient_noise is not None and result.gradient_noise.reduction is not None
        warnings.warn(
            f"the noise of minibatches multiplies the temperature by up to {factor:.3g}, so the "
            f"posterior comes out about {100 * (factor**0.5 - 1):.0f}% too wide in standard "
            "deviations there"
            + (
                " if batches are drawn anew; shuffled ones cancel of it what chains do not forget "
                "within an epoch"
                if shuffled
                else ""
            )
            + f": {lower}, raise batch_size in proportion, or "
            + ("move the anchor of control_variates" if anchored else "pass control_variates=True"),
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
