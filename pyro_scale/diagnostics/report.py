"""The table of `diagnostics()`: mixing, temperatures, and the bias of minibatches."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.convergence import (
    mixing,
    mixing_of_moments,
    mixing_of_predictions,
    some_elements,
    warn_of_frozen,
    warn_of_unmixed,
)
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.diagnostics.nested_rhat import nested_r_hats, warn_of_remembered_starts
from pyro_scale.diagnostics.policy import MIXING, TEMPERATURE
from pyro_scale.diagnostics.resolution import frozen_latents
from pyro_scale.errors import BiasWarning
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.draws import PosteriorDraws


def diagnostics(result: PosteriorDraws, predict_at: Any = None) -> Any:
    """A table, one row a site; see `Posterior.diagnostics`."""
    import pandas

    if result.tables is not None and predict_at is None:
        return result.tables["diagnostics"].copy()

    sites = [*result.log_posterior.latents]
    predicted = nested = None
    if result.online is not None:
        table = mixing_of_moments(result.online.moments([0.5]), sites)
    else:
        table = mixing({name: some_elements(result, name) for name in sites})
        predicted = None if predict_at is None else mixing_of_predictions(result, predict_at)
        nested = nested_r_hats(result)
        table.loc[frozen_latents(result)] = math.nan
    heat = _heat(result)
    kinds = {"temperature": "all", "max_gradient_temperature": "steepest"} if heat else {}
    for name, kind in kinds.items():
        table[name] = [each.mean for each in heat if each.of == kind]
        table[f"{name}_mcse"] = [each.error for each in heat if each.of == kind]
    if nested is not None:
        table["nested_r_hat"] = nested
    noise = result.measurements.gradient_noise
    if noise is not None and result.attrs["temperature"] != 0:
        places = [result.layout.slices()[name] for name in table.index]
        table["gradient_variance"] = [float(noise.variance[place].max()) for place in places]
        if noise.reduction is not None:
            table["variance_reduction"] = [float(noise.reduction[place].min()) for place in places]
        if noise.inflation is not None:
            table["minibatch_heating"] = [float(noise.inflation[place].max()) for place in places]
    if (kinetic := result.measurements.kinetic) is not None:
        measured = kinetic.measured
        errors = [standard_error(each, TEMPERATURE.fewest_moments) for each in measured.unbind(-1)]
        table["kinetic_temperature"] = measured.mean((0, 1)).tolist()
        table["kinetic_temperature_mcse"] = errors
        table["kinetic_temperature_expected"] = kinetic.expected.tolist()
    if result.attrs.get("share_batches") and result.num_chains > 1:
        table["chain_correlation"] = [
            chain_correlation(result.samples[name]) for name in table.index
        ]
    if message := explosion(result):
        warn(BiasWarning, message, code="exploded")
    else:
        _warn(result, table, heat, predicted)
    if predicted is not None:
        table = pandas.concat([table, predicted])
    table.attrs.update(result.attrs)
    return table


def _warn(result: PosteriorDraws, table: Any, heat: list[_Heat], predicted: Any) -> None:
    """Warns of what the table says, and of a cause once."""
    inflation = 1.0
    # a step that was chosen has weighed it, and what is measured counts more
    is_weighed = "lr_choice" in result.attrs or _is_settled(heat)
    if "minibatch_heating" in table and not is_weighed:
        inflation = float(table["minibatch_heating"].max())
    hot = inflation > TEMPERATURE.hot or any(each.is_hot for each in heat)
    momenta = [] if hot or "kinetic_temperature" not in table else _hot_momenta(table)
    no_longer = hot or bool(momenta) or "lr_choice" in result.attrs
    if frozen := frozen_latents(result) if result.online is None else []:
        unmixed = warn_of_frozen(frozen[0], float(result.attrs.get("acceptance_rate", 1.0)))
    elif "nested_r_hat" in table:
        unmixed = warn_of_remembered_starts(result, no_longer)
    else:
        seen = table if predicted is None else predicted
        unmixed = warn_of_unmixed(result, seen, predicted is not None, no_longer)
    warn_of_the_temperature(result, heat, unmixed)
    warn_of_inflation(inflation, result)
    if momenta:
        _warn_of_momenta(result, table, momenta)


def standard_error(series: Tensor, least: int = TEMPERATURE.fewest_draws) -> float:
    """The Monte Carlo standard error of the mean of `[chains, draws]`, NaN of fewer draws than
    `least`: of many chains from their own means, of few by ArviZ's effective draws."""
    chains, draws = series.shape
    if chains * draws < least:
        return math.nan
    if chains >= MIXING.many_chains:
        return float(series.mean(1).std()) / chains**0.5
    if draws < 4:
        return math.nan
    return arviz_api.mcse_of_mean(series)


def errors_of_the_worst(count: int) -> float:
    """Standard errors within which the worst of so many elements is, as one is within three."""
    return -NormalDist().inv_cdf(TEMPERATURE.one_sided / count)


class _Heat(NamedTuple):
    """A temperature of draws by the virial theorem, over that of the run.

    Attributes:
        site: whose.
        of: whether of all its elements on average, or of the steepest.
        mean: the temperature.
        error: its standard error.
        most: standard errors that chance does not go beyond.
    """

    site: str
    of: Literal["all", "steepest"]
    mean: float
    error: float
    most: float

    @property
    def is_hot(self) -> bool:
        """Whether it is known to be too high."""
        return self.mean - self.most * self.error > TEMPERATURE.hot

    @property
    def is_cold(self) -> bool:
        """Whether it is known to be too low."""
        return self.mean + self.most * self.error < 2 - TEMPERATURE.hot

    @property
    def is_right(self) -> bool:
        """Whether it is known not to be off."""
        return abs(self.mean - 1) + TEMPERATURE.errors * self.error < TEMPERATURE.hot - 1


def _heat(result: PosteriorDraws) -> list[_Heat]:
    """Every latent site's temperatures; none where they are not known."""
    if (virial := result.measurements.virial) is None:
        return []
    asked = result.sample_stats.get("temperature")
    relative = virial.parts / (1.0 if asked is None else float(asked.mean()))
    rows, slices = [], result.layout.slices()
    for site, parts in zip(result.log_posterior.latents, relative.unbind(2), strict=True):
        chance = errors_of_the_worst(slices[site].stop - slices[site].start)  # it was picked
        whole, steepest = ((float(each.mean()), standard_error(each)) for each in parts.unbind(-1))
        rows.append(_Heat(site, "all", *whole, TEMPERATURE.errors))
        rows.append(_Heat(site, "steepest", *steepest, chance))
    return rows


def is_off(result: PosteriorDraws) -> bool:
    """Whether some temperature is known to be off."""
    heat = _heat(result)
    return any(each.is_hot or each.is_cold or not math.isfinite(each.mean) for each in heat)


def _is_settled(heat: list[_Heat]) -> bool:
    """Whether some temperature is known to be too high, or all are known to be right."""
    right = bool(heat) and all(each.is_right for each in heat)
    return right or any(each.is_hot for each in heat)


def _hot_momenta(table: Any) -> list[str]:
    """Sites whose momenta are known to be too hot."""
    least = table["kinetic_temperature"] - TEMPERATURE.errors * table["kinetic_temperature_mcse"]
    gap = TEMPERATURE.hot - 1
    return [*table.index[least > table["kinetic_temperature_expected"] + gap]]


def _warn_of_momenta(result: PosteriorDraws, table: Any, hot: list[str]) -> None:
    """Warns of the hottest of sites whose momenta are too hot."""
    heat = table["kinetic_temperature"] - table["kinetic_temperature_expected"]
    site = heat[hot].idxmax()
    row = table.loc[site]
    warn(
        BiasWarning,
        f"the momenta of site '{site}' are hotter than they should be: "
        f"{row.kinetic_temperature:.3g} ± {row.kinetic_temperature_mcse:.2g} times the "
        f"temperature asked for, where this step size alone gives "
        f"{row.kinetic_temperature_expected:.3g}: {_cooler(result, 1 + heat[site])}",
        code=_what_heats(result),
    )


def warn_of_the_temperature(result: PosteriorDraws, heat: list[_Heat], unmixed: bool) -> None:
    """Warns where draws are known to be hotter or colder than they should be; chains that are
    still on their way look hot, too."""

    def said(one: _Heat, how: str, advice: str) -> str:
        draws = "draws have" if one.of == "all" else "element of the largest gradient has"
        return (
            f"site '{one.site}' is {how} than it should be: its {draws} {one.mean:.3g} ± "
            f"{one.error:.2g} times the temperature that was asked for, by the virial theorem, "
            f"with gradients that they have not seen: {advice}"
        )

    hot, cold = ([e for e in heat if e.is_hot], [e for e in heat if e.is_cold])
    if hot:
        worst = max(hot, key=lambda each: each.mean)
        advice = _cooler(result, worst.mean)
        if unmixed:
            advice = f"take a longer warm-up first; if it stays, {advice}"
        code = "chains-disagree" if unmixed else _what_heats(result)
        warn(BiasWarning, said(worst, "hotter", advice), code)
    if cold:
        worst = min(cold, key=lambda each: each.mean)
        advice = (
            "the run is too short for its draws to spread, or its noise is canceled (shuffled "
            "batches with a thermostat, subtract_noise)"
        )
        warn(BiasWarning, said(worst, "colder", advice), code="too-narrow")


def warn_of_inflation(factor: float, result: PosteriorDraws) -> None:
    """Warns when minibatches make the posterior too wide."""
    if factor > TEMPERATURE.hot:
        shuffled = result.attrs.get("sampling") != "replacement"
        noise = result.measurements.gradient_noise
        anchored = noise is not None and noise.reduction is not None
        warn(
            BiasWarning,
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
            + ("move the anchor of control_variates" if anchored else "pass control_variates=True"),
        )


def _cooler(result: PosteriorDraws, factor: float) -> str:
    """What to do about a temperature that was measured to be so many times too high.

    Minibatches heat in proportion to lr; of a long step alone it is the precision that falls so,
    as SGLD's on a Gaussian.
    """
    if _what_heats(result) == "step-size":
        return lower_lr(result, (1 - 1 / TEMPERATURE.hot) / (1 - 1 / factor))
    return f"{_lower_lr(result, factor)}; where minibatches heat, raise batch_size"


def _what_heats(result: PosteriorDraws) -> Literal["step-size", "minibatch-heat"]:
    """The section of the page of symptoms on draws that are too hot: without noise of minibatches,
    it is the length of the steps."""
    noise = result.measurements.gradient_noise
    is_exact = noise is not None and not noise.variance.any()
    return "step-size" if is_exact else "minibatch-heat"


def _lower_lr(result: PosteriorDraws, factor: float) -> str:
    """What to do about a temperature that is so many times too high, to first order in lr."""
    return lower_lr(result, (TEMPERATURE.hot - 1) / (factor - 1))


def lower_lr(result: PosteriorDraws, share: float) -> str:
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
    centered = samples.flatten(2).double() if samples.dim() > 2 else samples[..., None].double()
    centered = centered - centered.mean(1, keepdim=True)
    unit = centered / centered.norm(dim=1, keepdim=True)
    chains = len(unit)
    together = unit.sum(0).square().sum(0)  # chains + 2 * the sum over pairs
    return float(((together - chains) / (chains * (chains - 1))).max())
