"""How far to trust a run: mixing, temperatures, and the bias of minibatches."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from torch import Tensor

from pyro_scale.core.warn import warn
from pyro_scale.infer.divergence import explosion
from pyro_scale.infer.export import quiet_arviz
from pyro_scale.infer.mixing import (
    mixing,
    mixing_of_moments,
    mixing_of_predictions,
    some_elements,
    warn_of_unmixed,
)
from pyro_scale.infer.result import Result
from pyro_scale.infer.superchains import nested_r_hats, warn_of_remembered_starts

#: Above this, minibatches make the posterior visibly too wide (5% in standard deviations).
_MOST_INFLATION = 1.1
#: Standard errors beyond which a temperature is known to be wrong; draws below which there is none.
_ERRORS, _FEWEST_DRAWS = 3.0, 50
#: Moments of momenta, which are far apart, below which there is none.
_FEWEST_MOMENTS = 16
#: Chains from which on their means say how far off the mean of all is.
_MANY_CHAINS = 20
#: How often chance goes beyond three standard errors.
_ONE_SIDED = 0.00135


def diagnostics(result: Result, probe: Any = None) -> Any:
    """A table, one row a site; see `Method.diagnostics`."""
    import pandas

    sites = [*result.log_posterior.latents]
    predicted = nested = None
    if result.running is not None:
        table = mixing_of_moments(result.running.moments([0.5]), sites)
    else:
        table = mixing({name: some_elements(result, name) for name in sites})
        predicted = None if probe is None else mixing_of_predictions(result, probe)
        nested = nested_r_hats(result)
    if result.virial is not None:
        found = _virial_temperatures(result, result.virial)
        table["temperature"], table["temperature_error"] = found
    if nested is not None:
        table["nested_r_hat"] = nested
    noise = result.gradient_noise
    if noise is not None and result.attrs["temperature"] != 0:
        places = [result.layout.slices()[name] for name in table.index]
        table["gradient_variance"] = [float(noise.variance[place].max()) for place in places]
        if noise.reduction is not None:
            table["variance_reduction"] = [float(noise.reduction[place].min()) for place in places]
        table["temperature_inflation"] = [float(noise.inflation[place].max()) for place in places]
    if result.kinetic is not None:
        means, errors = _temperatures(result.kinetic.measured, _FEWEST_MOMENTS)
        table["kinetic_temperature"], table["kinetic_temperature_error"] = means, errors
        table["kinetic_temperature_expected"] = result.kinetic.expected.tolist()
    if result.attrs.get("share_batches") and result.num_chains > 1:
        table["chain_correlation"] = [
            chain_correlation(result.samples[name]) for name in table.index
        ]
    if said := explosion(result):
        warn(said)
    else:
        _warn(result, table, predicted)
    if predicted is not None:
        table = pandas.concat([table, predicted])
    table.attrs.update(result.attrs)
    return table


def _warn(result: Result, table: Any, predicted: Any) -> None:
    """Warns of what the table says, and of a cause once."""
    heated, inflation = None, 1.0
    if "temperature" in table:
        heated = list(table["temperature"]), list(table["temperature_error"])
    # a step that was chosen has weighed it, and what is measured counts more
    is_weighed = "lr_choice" in result.attrs or (heated is not None and _is_settled(*heated))
    if "temperature_inflation" in table and not is_weighed:
        inflation = float(table["temperature_inflation"].max())
    hot = inflation > _MOST_INFLATION or (heated is not None and _is_hot(*heated))
    momenta = [] if hot or "kinetic_temperature" not in table else _hot_momenta(table)
    no_longer = hot or bool(momenta) or "lr_choice" in result.attrs
    if "nested_r_hat" in table:
        unmixed = warn_of_remembered_starts(result, no_longer)
    else:
        seen = table if predicted is None else predicted
        unmixed = warn_of_unmixed(result, seen, predicted is not None, no_longer)
    if heated is not None:
        warn_of_the_temperature(result, [*table.index], *heated, unmixed)
    warn_of_inflation(inflation, result)
    if momenta:
        _warn_of_momenta(result, table, momenta)


def _temperatures(relative: Tensor, least: int) -> tuple[list[float], list[float]]:
    """(Every site's temperature over that of the run, its standard error), from some moments'
    parts in it, `[chains, moments, sites]`, at least so many."""
    means = relative.mean((0, 1)).tolist()
    return means, [standard_error(each, least) for each in relative.unbind(-1)]


def standard_error(series: Tensor, least: int = _FEWEST_DRAWS) -> float:
    """The Monte Carlo standard error of the mean of `[chains, draws]`, NaN of fewer draws than
    `least`: of many chains from their own means, of few by ArviZ's effective draws."""
    chains, draws = series.shape
    if chains * draws < least:
        return math.nan
    if chains >= _MANY_CHAINS:
        return float(series.mean(1).std()) / chains**0.5
    if draws < 4:
        return math.nan
    with quiet_arviz() as arviz:
        return float(arviz.mcse(series.numpy(), method="mean"))


def errors_of_the_worst(count: int) -> float:
    """Standard errors within which the worst of so many elements is, as one is within three."""
    return -NormalDist().inv_cdf(_ONE_SIDED / count)


def is_off(result: Result) -> bool:
    """Whether some temperature is known to be off."""
    if result.virial is None:
        return False
    gap = _MOST_INFLATION - 1
    pairs = zip(*_virial_temperatures(result, result.virial), strict=True)
    return any(
        abs(mean - 1) - _ERRORS * error > gap or not math.isfinite(mean) for mean, error in pairs
    )


def _virial_temperatures(result: Result, heat: Tensor) -> tuple[list[float], list[float]]:
    """Every site's by the virial theorem over that of the run, and its standard error."""
    asked = result.sample_stats.get("temperature")
    relative = heat / (1.0 if asked is None else float(asked.mean()))
    return _temperatures(relative, _FEWEST_DRAWS)


def _is_settled(means: list[float], errors: list[float]) -> bool:
    """Whether some temperature is known to be too high, or all are known to be right."""
    gap = _MOST_INFLATION - 1
    pairs = zip(means, errors, strict=True)
    all_right = all(abs(mean - 1) + _ERRORS * error < gap for mean, error in pairs)
    return all_right or _is_hot(means, errors)


def _is_hot(means: list[float], errors: list[float]) -> bool:
    """Whether some temperature is known to be too high."""
    pairs = zip(means, errors, strict=True)
    return any(mean - _ERRORS * error > _MOST_INFLATION for mean, error in pairs)


def _hot_momenta(table: Any) -> list[str]:
    """Sites whose momenta are known to be too hot."""
    least = table["kinetic_temperature"] - _ERRORS * table["kinetic_temperature_error"]
    gap = _MOST_INFLATION - 1
    return [*table.index[least > table["kinetic_temperature_expected"] + gap]]


def _warn_of_momenta(result: Result, table: Any, hot: list[str]) -> None:
    """Warns of the hottest of sites whose momenta are too hot."""
    heat = table["kinetic_temperature"] - table["kinetic_temperature_expected"]
    site = heat[hot].idxmax()
    row = table.loc[site]
    warn(
        f"the momenta of site '{site}' are hotter than they should be: they have "
        f"{row.kinetic_temperature:.3g} ± {row.kinetic_temperature_error:.2g} times the "
        f"temperature that was asked for, and {row.kinetic_temperature_expected:.3g} at this step "
        f"size without minibatches: {_lower_lr(result, 1 + heat[site])}; where minibatches heat, "
        "raise batch_size"
    )


def warn_of_the_temperature(
    result: Result, sites: list[str], means: list[float], errors: list[float], unmixed: bool
) -> None:
    """Warns where draws are known to be hotter or colder than they should be; chains that are
    still on their way look hot, too."""
    gap = _MOST_INFLATION - 1

    def said(site: int, how: str, advice: str) -> str:
        return (
            f"site '{sites[site]}' is {how} than it should be: its draws have {means[site]:.3g} "
            f"± {errors[site]:.2g} times the temperature that was asked for, by the virial "
            f"theorem, with gradients that they have not seen: {advice}"
        )

    hot = [i for i, e in enumerate(errors) if means[i] - _ERRORS * e > 1 + gap]
    cold = [i for i, e in enumerate(errors) if means[i] + _ERRORS * e < 1 - gap]
    if hot:
        worst = max(hot, key=lambda i: means[i])
        advice = f"{_lower_lr(result, means[worst])}; where minibatches heat, raise batch_size"
        if unmixed:
            advice = f"take a longer warm-up first; if it stays, {advice}"
        warn(said(worst, "hotter", advice))
    if cold:
        worst = min(cold, key=lambda i: means[i])
        advice = (
            "the run is too short for its draws to spread, or its noise is cancelled (shuffled "
            "batches with a thermostat, subtract_noise)"
        )
        warn(said(worst, "colder", advice))


def warn_of_inflation(factor: float, result: Result) -> None:
    """Warns when minibatches make the posterior too wide."""
    if factor > _MOST_INFLATION:
        shuffled = result.attrs.get("sampling") != "replacement"
        anchored = result.gradient_noise is not None and result.gradient_noise.reduction is not None
        warn(
            f"the noise of minibatches multiplies the temperature by up to {factor:.3g}, so the "
            f"posterior comes out about {100 * (factor**0.5 - 1):.0f}% too wide in standard "
            "deviations there"
            + (
                " if batches are drawn anew; shuffled ones cancel of it what chains do not forget "
                "within an epoch"
                if shuffled
                else ""
            )
            + f": {_lower_lr(result, factor)}, raise batch_size in proportion, or "
            + ("move the anchor of control_variates" if anchored else "pass control_variates=True")
        )


def _lower_lr(result: Result, factor: float) -> str:
    """What to do about a temperature that is so many times too high, to first order in lr."""
    return lower_lr(result, (_MOST_INFLATION - 1) / (factor - 1))


def lower_lr(result: Result, share: float) -> str:
    """The advice to lower lr to so much of it; one that was chosen has been weighed against how
    little chains move at a smaller one."""
    if "lr_choice" in result.attrs:
        return "take more steps, for which lr='auto' chooses a smaller one"
    lr = result.sample_stats.get("lr")
    if lr is None:
        return f"lower lr to {share:.2g} of what it is"
    now = float(lr.mean())
    return f"lower lr from {now:.2g} to about {now * share:.2g}"


def chain_correlation(samples: Tensor) -> float:
    """The largest mean correlation between chains over an element's draws `[C, S, ...]`."""
    centred = samples.flatten(2).double() if samples.dim() > 2 else samples[..., None].double()
    centred = centred - centred.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    chains = len(unit)
    together = unit.sum(0).square().sum(0)  # chains + 2 * the sum over pairs
    return float(((together - chains) / (chains * (chains - 1))).max())
