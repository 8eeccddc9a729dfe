"""The table of `diagnostics()`: mixing, temperatures, and the effect of minibatch noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from pyro_scale.core.rows import DataLike
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.convergence import (
    mixing,
    mixing_of_moments,
    mixing_of_predictions,
    nested_r_hats,
    select_elements,
    standard_error,
    warn_of_frozen,
    warn_of_remembered_starts,
    warn_of_unmixed,
)
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.diagnostics.policy import TEMPERATURE, errors_by_chance
from pyro_scale.diagnostics.resolution import frozen_latents
from pyro_scale.errors import BiasWarning
from pyro_scale.posterior.draws import PosteriorDraws

if TYPE_CHECKING:
    import pandas


def diagnostics(result: PosteriorDraws, predict_at: DataLike = None) -> pandas.DataFrame:
    """A DataFrame with a row for each latent site: R-hat and ESS, and where they were measured,
    temperatures of draws and momenta (relative to the requested one) and the effect of minibatch
    noise. Warns of each problem that it shows.

    Args:
        result: draws of a run.
        predict_at: the model's arguments at rows to predict for; the table then also has a row for
            each data site, with R-hat and ESS of its predictive means. None for none.
    """
    import pandas

    if result.tables is not None and predict_at is None:
        return result.tables["diagnostics"].copy()
    sites, slices = list(result.log_posterior.latents), result.layout.slices()
    predicted, frozen = None, frozen_latents(result) if result.online is None else []
    if result.online is not None:
        table = mixing_of_moments(result.online.moments([0.5]), sites)
    else:
        table = mixing({name: select_elements(result, name) for name in sites})
        table.loc[frozen] = math.nan
        predicted = None if predict_at is None else mixing_of_predictions(result, predict_at)
    temperatures = _temperatures(result)
    if temperatures is not None:
        for kind, label in enumerate(("temperature", "max_gradient_temperature")):
            table[label] = temperatures.values[:, kind].tolist()
            table[f"{label}_mcse"] = temperatures.mcses[:, kind].tolist()
    nested = nested_r_hats(result) if result.online is None else None
    if nested is not None:
        table["nested_r_hat"] = nested
    noise = result.measurements.gradient_noise
    if noise is not None and result.attrs["temperature"] != 0:
        table["gradient_variance"] = [float(noise.variance[slices[n]].max()) for n in sites]
        if noise.reduction is not None:
            table["variance_reduction"] = [float(noise.reduction[slices[n]].min()) for n in sites]
        if noise.inflation is not None:
            table["minibatch_heating"] = [float(noise.inflation[slices[n]].max()) for n in sites]
    if (kinetic := result.measurements.kinetic) is not None:
        table["kinetic_temperature"] = kinetic.measured.mean((0, 1)).tolist()
        table["kinetic_temperature_mcse"] = [
            standard_error(moments, TEMPERATURE.fewest_moments)
            for moments in kinetic.measured.unbind(-1)
        ]
        table["kinetic_temperature_expected"] = kinetic.expected.tolist()
    if result.attrs.get("share_batches") and result.num_chains > 1:
        table["chain_correlation"] = [chain_correlation(result.samples[name]) for name in sites]
    if message := explosion(result):
        warn(BiasWarning, message, code="exploded")
    else:
        _warn(result, table, temperatures, frozen, predicted)
    if predicted is not None:
        table = pandas.concat([table, predicted])
    table.attrs.update(result.attrs)
    return table


def chain_correlation(samples: Tensor) -> float:
    """The correlation of an element's draws between two chains, averaged over all pairs of chains,
    of the element where it is largest. About 0 for independent chains; larger if chains share their
    minibatches.

    Args:
        samples: draws of a site, `[chains, draws, ...]`, of two chains or more.
    """
    centered = samples.reshape(*samples.shape[:2], -1).double()
    centered = centered - centered.mean(1, keepdim=True)
    unit = centered / centered.norm(dim=1, keepdim=True)
    chains = len(unit)
    total = unit.sum(0).square().sum(0)  # chains + 2 * the sum over pairs
    return float(((total - chains) / (chains * (chains - 1))).max())


class _Temperatures(NamedTuple):
    """Virial temperatures of the draws, relative to the requested temperature: for each latent
    site, the mean over its elements, and the temperature of its steepest element; `[sites, 2]`
    each.

    Attributes:
        values: relative temperatures; 1 is right.
        mcses: Monte Carlo standard errors of `values`.
        errors: number of standard errors that chance does not exceed.
    """

    values: Tensor
    mcses: Tensor
    errors: Tensor

    @property
    def is_hot(self) -> Tensor:
        """Whether temperatures are significantly above 1.1 times the requested one, standard errors
        included; booleans `[sites, 2]`, for the mean over a site's elements and for the site's
        steepest element."""
        return self.values - self.errors * self.mcses > TEMPERATURE.hot

    @property
    def is_cold(self) -> Tensor:
        """Whether temperatures are significantly below 0.9 times the requested one, standard errors
        included; booleans `[sites, 2]`, for the mean over a site's elements and for the site's
        steepest element."""
        return self.values + self.errors * self.mcses < 2 - TEMPERATURE.hot

    @property
    def is_right(self) -> Tensor:
        """Whether temperatures are surely within 10% of the requested one, three standard errors
        included; booleans `[sites, 2]`, for the mean over a site's elements and for the site's
        steepest element."""
        gap = (self.values - 1).abs() + TEMPERATURE.errors * self.mcses
        return gap < TEMPERATURE.hot - 1


def _temperatures(result: PosteriorDraws) -> _Temperatures | None:
    """The virial temperatures of all latent sites relative to the requested temperature, with
    standard errors; None if temperatures were not measured."""
    if (virial := result.measurements.virial) is None:
        return None
    parts = (virial.parts / result.sample_stats["temperature"].mean()).double()
    mcses = [[standard_error(kind) for kind in site.unbind(-1)] for site in parts.unbind(2)]
    slices = [result.layout.slices()[name] for name in result.log_posterior.latents]
    errors = [  # the steepest is one of as many elements
        [TEMPERATURE.errors, errors_by_chance(TEMPERATURE.one_sided, place.stop - place.start)]
        for place in slices
    ]
    return _Temperatures(parts.mean((0, 1)), parts.new_tensor(mcses), parts.new_tensor(errors))


def has_wrong_temperature(result: PosteriorDraws) -> bool:
    """Whether the virial temperature of any site is significantly too high or too low, or not
    finite; False if temperatures were not measured."""
    if (temperatures := _temperatures(result)) is None:
        return False
    is_off = temperatures.is_hot | temperatures.is_cold | ~temperatures.values.isfinite()
    return bool(is_off.any())


# ------------------------------------------------------------------ warnings


def _warn(
    result: PosteriorDraws,
    table: pandas.DataFrame,
    temperatures: _Temperatures | None,
    frozen: list[str],
    predicted: pandas.DataFrame | None,
) -> None:
    """Warns of each problem that the table of diagnostics shows; once for several problems with the
    same cause.

    Args:
        result: draws of a run.
        table: DataFrame with a row for each latent site.
        temperatures: relative temperatures of the draws; None if they were not measured.
        frozen: names of sites with an element that is the same in all draws of a chain.
        predicted: DataFrame of R-hat and ESS of predictions; None if there is none.
    """
    is_hot = temperatures is not None and bool(temperatures.is_hot.any())
    is_right = temperatures is not None and bool(temperatures.is_right.all())
    inflation = 1.0
    # a run that chose its step has weighed the heat, and a measured temperature counts more
    is_weighed = "lr_choice" in result.attrs or is_hot or is_right
    if "minibatch_heating" in table and not is_weighed:
        inflation = float(table["minibatch_heating"].max())
    is_hot = is_hot or inflation > TEMPERATURE.hot
    hot_momenta = [] if is_hot or "kinetic_temperature" not in table else _hot_momenta(table)
    is_long_step = is_hot or bool(hot_momenta) or "lr_choice" in result.attrs
    if frozen:
        warn_of_frozen(frozen[0], float(result.attrs.get("acceptance_rate", 1.0)))
        is_unmixed = True
    elif "nested_r_hat" in table:
        is_unmixed = warn_of_remembered_starts(result, is_long_step)
    else:
        mixing_table = table if predicted is None else predicted
        is_unmixed = warn_of_unmixed(result, mixing_table, predicted is not None, is_long_step)
    if temperatures is not None:
        _warn_of_temperatures(result, temperatures, is_unmixed)
    if inflation > TEMPERATURE.hot:
        _warn_of_heating(result, inflation)
    if hot_momenta:
        _warn_of_momenta(result, table, hot_momenta)


def _warn_of_temperatures(
    result: PosteriorDraws, temperatures: _Temperatures, is_unmixed: bool
) -> None:
    """Warns of the sites whose draws are hottest and coldest, if their temperature is significantly
    wrong.

    Args:
        result: draws of a run.
        temperatures: relative temperatures of the draws.
        is_unmixed: whether chains disagree; chains that are still on their way to the posterior
            look hot as well.
    """
    values, mcses, _ = temperatures
    hot = values.where(temperatures.is_hot, -math.inf)
    cold = values.where(temperatures.is_cold, math.inf)

    def describe(place: int, how: str, advice: str) -> str:
        site, kind = divmod(place, 2)
        draws = ("draws have", "element of the largest gradient has")[kind]
        return (
            f"site '{result.log_posterior.latents[site]}' is {how} than it should be: its {draws} "
            f"{values[site, kind]:.3g} ± {mcses[site, kind]:.2g} times the temperature that was "
            "asked for, by the virial theorem, with gradients that they have not seen: "
            f"{advice}"
        )

    if bool(temperatures.is_hot.any()):
        advice = _cooler(result, float(hot.max()))
        if is_unmixed:
            advice = f"take a longer warm-up first; if it stays, {advice}"
        code = "chains-disagree" if is_unmixed else _cause_of_heat(result)
        warn(BiasWarning, describe(int(hot.argmax()), "hotter", advice), code)
    if bool(temperatures.is_cold.any()):
        advice = (
            "the run is too short for its draws to spread, or its noise is canceled (shuffled "
            "batches with a thermostat, subtract_noise)"
        )
        warn(BiasWarning, describe(int(cold.argmin()), "colder", advice), code="too-narrow")


def _warn_of_heating(result: PosteriorDraws, factor: float) -> None:
    """Warns that minibatches make the posterior too wide; the caller has checked that they do.

    Args:
        result: draws of a run.
        factor: predicted factor on the temperature.
    """
    shuffled = ""
    if result.attrs.get("sampling") != "replacement":
        shuffled = (
            " if batches are drawn anew; shuffled ones cancel of it what chains do not forget "
            "within an epoch"
        )
    noise = result.measurements.gradient_noise
    is_anchored = noise is not None and noise.reduction is not None
    anchor = "move the anchor of control_variates" if is_anchored else "pass control_variates=True"
    warn(
        BiasWarning,
        f"the noise of minibatches multiplies the temperature by up to {factor:.3g}, so the "
        f"posterior comes out about {100 * (factor**0.5 - 1):.0f}% too wide in standard deviations "
        f"there{shuffled}: {_lower_lr(result, factor)}, raise batch_size in proportion, or "
        f"{anchor}",
    )


def _hot_momenta(table: pandas.DataFrame) -> list[str]:
    """The names of sites whose kinetic temperature (of their momenta) is significantly above the
    one that the step size explains; empty if there are none."""
    least = table["kinetic_temperature"] - TEMPERATURE.errors * table["kinetic_temperature_mcse"]
    limit = table["kinetic_temperature_expected"] + TEMPERATURE.hot - 1
    return [*table.index[least > limit]]


def _warn_of_momenta(result: PosteriorDraws, table: pandas.DataFrame, hot: list[str]) -> None:
    """Warns of the site whose momenta are hottest, compared with what the step size alone explains.

    Args:
        result: draws of a run.
        table: DataFrame with a row for each latent site.
        hot: names of the sites whose momenta are significantly too hot, at least one.
    """
    heat = table["kinetic_temperature"] - table["kinetic_temperature_expected"]
    site = str(heat[hot].idxmax())
    row = table.loc[site]
    warn(
        BiasWarning,
        f"the momenta of site '{site}' are hotter than they should be: "
        f"{row.kinetic_temperature:.3g} ± {row.kinetic_temperature_mcse:.2g} times the "
        f"temperature asked for, where this step size alone gives "
        f"{row.kinetic_temperature_expected:.3g}: {_cooler(result, 1 + heat[site])}",
        code=_cause_of_heat(result),
    )


# ------------------------------------------------------------------ advice


def _cooler(result: PosteriorDraws, factor: float) -> str:
    """Advice, as a phrase for messages, on how to cool draws whose temperature was measured to be
    `factor` times the requested one: a smaller lr, or larger batches.

    Heat of minibatches is proportional to lr.  A long step alone lowers the precision in
    proportion to lr instead, as SGLD's on a Gaussian.
    """
    if _cause_of_heat(result) == "step-size":
        return lower_lr(result, (1 - 1 / TEMPERATURE.hot) / (1 - 1 / factor))
    return f"{_lower_lr(result, factor)}; where minibatches heat, raise batch_size"


def _cause_of_heat(result: PosteriorDraws) -> Literal["step-size", "minibatch-heat"]:
    """The likely cause of draws that are too hot, as the anchor of its section on the page of
    symptoms: "step-size" if gradients have no minibatch noise, otherwise "minibatch-heat"."""
    noise = result.measurements.gradient_noise
    is_exact = noise is not None and not noise.variance.any()
    return "step-size" if is_exact else "minibatch-heat"


def _lower_lr(result: PosteriorDraws, factor: float) -> str:
    """Advice, as a phrase for messages, to lower the step size so that a temperature that is
    `factor` times the requested one becomes tolerable, where the excess is proportional to lr."""
    return lower_lr(result, (TEMPERATURE.hot - 1) / (factor - 1))


def lower_lr(result: PosteriorDraws, factor: float) -> str:
    """Advice, as a phrase for messages, to multiply lr by `factor`. If the run chose lr, the advice
    is to take more steps, because the choice weighs bias against slow mixing."""
    if "lr_choice" in result.attrs:
        return "take more steps, for which lr='auto' chooses a smaller one"
    lr = result.sample_stats.get("lr")
    if lr is None:
        return f"lower lr to {factor:.2g} of what it is"
    mean = float(lr.mean())
    return f"lower lr from {mean:.2g} to about {mean * factor:.2g}"
