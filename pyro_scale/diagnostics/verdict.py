"""The checks whose results, findings on sites or on the whole run, make up `report()`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.mixing import FAMILY_WISE, autocorrelation_time, mixing_and_chance
from pyro_scale.core.validation import evenly
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.bias import check_bias
from pyro_scale.diagnostics.convergence import (
    APART,
    are_apart,
    mixing_of_predictions,
    select_elements,
)
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.diagnostics.gradients import check_gradients
from pyro_scale.diagnostics.local_latents import check_local_latents
from pyro_scale.diagnostics.policy import MIXING, TEMPERATURE, errors_by_chance
from pyro_scale.diagnostics.report import Finding, Report, Verdict
from pyro_scale.diagnostics.resolution import resolution
from pyro_scale.diagnostics.stray_draws import check_stray_draws
from pyro_scale.diagnostics.warm_up import check_warm_up
from pyro_scale.marginal.integrated import integrated_of
from pyro_scale.model.diagnose import centered_latents, how_to_non_center
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.blame import WITHIN
from pyro_scale.run.budget import rounded_up
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.policy import TOLERANCE

#: Function from a factor to the argument of a run, as text, with which it takes so many times as
#: many steps.
Longer: TypeAlias = Callable[[float], str]
#: Factor on the steps that are advised, as effective draws are estimates.
_MORE = 1.25
#: Temperatures between which sds are within tolerance.
_LOWEST, _HIGHEST = (1 - TOLERANCE.sd) ** 2, (1 + TOLERANCE.sd) ** 2
#: Factor on the steps from which more of them are no advice.
_MOST_MORE = 1000.0


def report(
    result: PosteriorDraws, choice: Choice | None, num_samples: int, longer: Longer | None = None
) -> Report:
    """The report of a sampler's run: the findings of all checks, from which its verdict follows,
    and the choices of tuning.

    Args:
        result: draws of the run.
        choice: settings that tuning chose; None if the user set everything.
        num_samples: requested draws of each chain.
        longer: the argument of `run`, as text, with which it takes so many times as many steps;
            None if that is `num_samples`.
    """
    trained = None if choice is None else choice.trained
    reasons = result.attrs["thinning"], result.attrs.get("lr_choice")
    choices = _nodes_of(result)
    if choice is not None:
        choices |= choice.reasons_at(*reasons)
    if result.attrs.get("temperature") == 0:
        what = "points, one a chain," if result.positions.shape[1] == 1 else "optimizers"
        text = f"{result.num_chains} {what} at temperature 0"
        text += "" if trained is None else f", after {trained:,} steps of training"
        return Report.from_findings([Finding("", "temperature", "ensemble", text)], choices)
    if exploded := explosion(result):
        return Report.from_findings([Finding("", "explosion", "no", exploded)], choices)
    if trained is None:
        stray, mixing = check_stray_draws(result), _check_mixing(result, longer)
        if any(finding.verdict == "no" for finding in stray):  # which look like heavy tails
            mixing = [finding for finding in mixing if finding.check != "tails"]
        findings = [*stray, *mixing, *resolution(result), *check_gradients(result)]
    else:
        findings = _check_predictions(result)
    findings = [
        *_check_length(result, num_samples),
        *findings,
        *_check_temperatures(result, longer),
        *_check_heating(result, choice),
        *check_bias(result, choice),
        *check_warm_up(result, choice),
        *check_local_latents(result),
    ]
    column = result.sample_stats["temperature"]
    temperatures = float(column.min()), float(column.max())
    return Report.from_findings(_with_advice(result, findings), choices, temperatures)


def report_on_exact(result: PosteriorDraws, num_samples: int) -> Report:
    """The report of a run of NUTS, whose draws are right if chains mix and nothing diverges.

    Args:
        result: draws of the run.
        num_samples: requested draws of each chain.
    """
    findings = [
        *_check_length(result, num_samples),
        *_check_mixing(result),
        *resolution(result),
        *_check_divergences(result),
    ]
    for stored in ("modes", "local_latents"):
        if stored in result.attrs:
            findings.append(Finding(**json.loads(result.attrs[stored])))
    method = f"{result.attrs['method']}, exact on all rows, up to Monte Carlo error"
    choices, temperature = {"method": method}, float(result.attrs["temperature"])
    choices |= _nodes_of(result)
    return Report.from_findings(_with_advice(result, findings), choices, (temperature, temperature))


def _nodes_of(result: PosteriorDraws) -> dict[str, str]:
    """How local latents were summed out, for the choices of the report; empty if none were."""
    model = integrated_of(result.log_posterior)
    return {} if model is None else {"local latents": model.description}


def _with_advice(result: PosteriorDraws, findings: list[Finding]) -> list[Finding]:
    """The findings for the report; if the model has a latent site that is better written
    non-centered, those which have not passed get the advice to do so."""
    if result.data is None or all(finding.verdict == "yes" for finding in findings):
        return findings
    params = result.layout.unflatten(result.positions[0, -1])
    centered = centered_latents(result.log_posterior, params, result.data.first())
    if not centered:
        return findings
    causes = {name: site for site, parents in centered.items() for name in (site, *parents)}

    def advise(finding: Finding) -> Finding:
        site = causes.get(finding.site, next(iter(centered)))
        if finding.verdict == "yes":
            return finding
        return dataclasses.replace(finding, advice=how_to_non_center(site, centered[site]))

    return [advise(finding) for finding in findings]


# ------------------------------------------------------------------ of all runs


def _check_length(result: PosteriorDraws, num_samples: int) -> list[Finding]:
    """A list with one finding (the result of a check, for the report) if the run ended before
    `num_samples` draws of each chain; empty if it did not."""
    kept = result.sample_stats["lp"].shape[1]
    if kept == num_samples:
        return []
    text = f"it ended after {kept:,} of {num_samples:,} draws a chain"
    advice = "more max_seconds="
    return [Finding("", "length", "unknown", text, advice, num_samples / max(1, kept))]


def _check_mixing(result: PosteriorDraws, longer: Longer | None = None) -> list[Finding]:
    """Findings for the report on each latent site: whether chains agree, and how large Monte Carlo
    errors are. A single one, "unknown", if draws are too few for a check.

    Chains disagree if R-hat is above its limits and chance does not explain it. Where half chains
    have too few effective draws to tell what is chance, only a large R-hat is a "no". Draws whose
    Monte Carlo errors are large are right, but too few: "unknown", never "no".

    Args:
        result: draws of a run.
        longer: the argument, as text, with which a run takes so many times as many steps; None if
            that is `num_samples`.
    """
    chains, draws = result.positions.shape[:2]
    if draws < MIXING.fewest_per_chain:
        text = f"{draws} draws a chain are too few to check it"
        severity = MIXING.fewest_per_chain / max(1, draws)
        return [Finding("", "mixing", "unknown", text, severity=severity)]
    varying = {}
    for name in result.log_posterior.latents:
        values = select_elements(result, name)
        values = values[..., values.amin((0, 1)) != values.amax((0, 1))]  # see `resolution`
        if values.shape[-1]:
            varying[name] = values
    by_chance = FAMILY_WISE / max(1, sum(values.shape[-1] for values in varying.values()))
    findings = []
    for name, values in varying.items():
        r_hats, bulk, tail, chance = mixing_and_chance(values)
        r_hat = float(r_hats.max())
        r_hats = r_hats.nan_to_num(math.inf)
        significant = float(torch.where(chance < by_chance, r_hats, 1.0).max())
        not_judged = float(torch.where(chance.isnan(), r_hats, 1.0).max())
        apart = are_apart(result, name, r_hat)
        has_many = chains * draws >= MIXING.many_draws
        ess, ess_bulk = float(torch.minimum(bulk, tail).min()), float(bulk.min())
        text = (
            f"{ess:.0f} effective draws of {chains * draws}: means have Monte Carlo errors of up "
            f"to {ess_bulk**-0.5:.2g} sds"
        )
        text = text if chains < 2 else f"R-hat {r_hat:.3f}, {text}"
        verdict: Verdict = "yes"
        advice, severity = "", 0.0
        if not ess >= MIXING.many_draws:
            verdict, severity = "unknown", MIXING.many_draws / ess
            advice = _more_steps(result, _MORE * severity, longer)
            if not severity < _MOST_MORE:
                advice = "lr='auto', or another parametrization (poutine.reparam)"
            elif ess < MIXING.few_effective:
                advice += "; or another parametrization (poutine.reparam)"
        if chains < 2:
            verdict, advice = "unknown", "num_chains=4: a single chain cannot show it"
        elif max(significant, not_judged) > MIXING.agree:
            is_large = has_many and not_judged > MIXING.disagree_of_few
            verdict = "no" if apart or is_large or significant > MIXING.disagree else "unknown"
            severity = max(severity, (max(significant, not_judged) - 1) / (MIXING.agree - 1))
            advice = advice or f"{_more_steps(result, 4, longer)}, or another parametrization"
            advice = APART if apart else advice
        findings.append(Finding(name, "mixing", verdict, text, advice, severity))
        findings += _check_tails(result, name, values, longer)
    return findings


def _more_steps(result: PosteriorDraws, factor: float, longer: Longer | None) -> str:
    """The advice to repeat a run with `factor` times as many steps. Without seconds, as the reports
    of equal runs are equal."""
    if not math.isfinite(factor):
        return "a larger num_samples="
    argument = f"num_samples={rounded_up(factor * result.positions.shape[1])}"
    argument = argument if longer is None else longer(factor)
    return f"{argument} ({factor:.2g} times the steps)"


def _check_tails(
    result: PosteriorDraws, name: str, draws: Tensor, longer: Longer | None
) -> list[Finding]:
    """A list with one finding for the report if a site's tails are so heavy that its draws do not
    determine an sd; empty otherwise.

    Args:
        result: draws of a run.
        name: name of the site.
        draws: draws of the site's elements, `[chains, draws, elements]`.
        longer: the argument, as text, with which a run takes so many times as many steps.
    """
    deviations = draws.double() - draws.double().mean((0, 1))
    sd = deviations.square().mean((0, 1)).sqrt().clamp(min=1e-150)
    squares = (deviations / sd).square()  # fourth powers of stray draws would overflow
    heaviness = squares.flatten(0, 1).std(0) / 2**0.5  # 1 for a normal
    heavy = heaviness > TEMPERATURE.heavy
    if not bool(heavy.any()):
        return []
    squares = squares[..., heavy]
    count = squares.shape[0] * squares.shape[1] / autocorrelation_time(squares)
    worst = float((heaviness[heavy] / (2 * count) ** 0.5).max())
    if worst <= TOLERANCE.sd:
        return []
    text = f"tails are so heavy that the sd has a Monte Carlo error of {100 * worst:.0f}%"
    severity = worst / TOLERANCE.sd
    advice = f"{_more_steps(result, severity**2, longer)}; or quantiles instead of sds"
    return [Finding(name, "tails", "unknown", text, advice, severity)]


def _check_divergences(result: PosteriorDraws) -> list[Finding]:
    """A list with one finding for the report of NUTS: whether trajectories diverged, as draws then
    miss regions where the posterior is narrow."""
    diverging = result.sample_stats["diverging"]
    count, where = int(diverging.sum()), result.attrs.get("diverged_where", "")
    advice = WITHIN if where else "target_accept=0.95, or another parametrization"
    text = f"{count} of {diverging.numel()} trajectories diverged{where}"
    return [Finding("", "divergences", "unknown" if count else "yes", text, advice, float(count))]


def _check_predictions(result: PosteriorDraws) -> list[Finding]:
    """A list with one finding for a network's report: whether chains agree in their predictions for
    some training rows. Weights cannot be compared, as networks have equivalent modes."""
    advice = (
        "nothing, if an ensemble is enough; for a posterior, larger warmup_steps= and thinning="
    )
    arguments = None if result.data is None else result.data.first()
    is_short = result.num_chains < 2 or result.positions.shape[1] < MIXING.fewest_per_chain
    if is_short or arguments is None:
        text = "too few chains or draws to compare predictions"
        return [Finding("", "predictions", "ensemble", text, advice)]
    if isinstance(result.data, TensorData):
        arguments = result.data.arguments
    places = evenly(rows.count(arguments) or 0, MIXING.predicted_rows)
    r_hat = float(mixing_of_predictions(result, rows.take(arguments, places)).r_hat.max())
    text = f"R-hat of {len(places)} training rows' predictions is {r_hat:.3f}"
    verdict: Verdict = "yes" if r_hat < MIXING.disagree else "ensemble"
    return [Finding("", "predictions", verdict, text, advice)]


# ------------------------------------------------------------------ of steps and minibatches


def _takes_all_rows(result: PosteriorDraws) -> bool:
    """Whether every step of the run took all rows of the data."""
    return int(result.attrs.get("batch_size", 0)) >= int(result.attrs["num_data"])


def _check_temperatures(result: PosteriorDraws, longer: Longer | None) -> list[Finding]:
    """A finding for the report on each latent site: whether the virial temperature of every element
    is the requested one. An empty list if temperatures were not measured by element.

    Args:
        result: draws of a run.
        longer: the argument, as text, with which a run takes so many times as many steps.
    """
    virial = result.measurements.virial
    if virial is None or virial.elements is None:
        return []
    means, mcses = virial.elements / result.sample_stats["temperature"].mean()
    slices, latents = result.layout.slices(), result.log_posterior.latents
    count = sum(slices[name].stop - slices[name].start for name in latents)
    errors = errors_by_chance(FAMILY_WISE / 2, count)
    # inconclusive if the standard error is that of fewer draws than a report asks for
    assert virial.num_draws is not None
    widest = TEMPERATURE.wide * (2 / min(virial.num_draws, MIXING.many_draws)) ** 0.5
    findings = []
    for name in latents:
        mean, mcse = means[slices[name]], mcses[slices[name]]
        surely_off = (mean - 1).abs() - errors * mcse
        is_outside = (mean - errors * mcse > _HIGHEST) | (mean + errors * mcse < _LOWEST)
        place = int(surely_off.argmax())
        severity = float(surely_off[place]) / (_HIGHEST - 1)
        text = (
            f"virial temperature {float(mean[place]):.3f} +- {float(mcse[place]):.2g} at its "
            "element that is furthest off (1 is right)"
        )
        advice = "smaller steps (lr=), or larger batches"
        verdict: Verdict = "no" if bool(is_outside.any()) else "yes"
        if verdict == "yes" and bool((mcse > widest).any()):
            error, verdict = float(mcse.max()), "unknown"
            severity = error / widest
            text = f"the virial temperature of some element has an error of {error:.2g}"
            advice = _more_steps(result, _MORE * severity**2, longer)
            advice += "" if _takes_all_rows(result) else ", or larger batches (batch_size=)"
        findings.append(Finding(name, "temperature", verdict, text, advice, severity))
    return findings


def _check_heating(result: PosteriorDraws, choice: Choice | None) -> list[Finding]:
    """Findings for the report on how much minibatches are predicted to heat the chains, to first
    order in the step size: one on the run if tuning measured it on gradients of all rows, otherwise
    one on each site, from some batches. Empty if every step takes all rows."""
    if _takes_all_rows(result):
        return []
    check, limit = "minibatch heat", TEMPERATURE.hot - 1
    if choice is not None and choice.heat is not None:
        text = f"minibatches multiply the temperature by at most {1 + choice.heat:.3g} (all rows)"
        verdict: Verdict = "yes" if choice.heat <= limit else "no"
        advice = "larger batches (batch_size=)"
        return [Finding("", check, verdict, text, advice, choice.heat / limit)]
    noise = result.measurements.gradient_noise
    if noise is None or noise.inflation is None:
        text = "the noise of minibatches is not known for this model or method"
        return [Finding("", check, "unknown", text, "batch_size=None")]
    findings, slices = [], result.layout.slices()
    more = "" if noise.reduction is not None else "control_variates=True, "
    advice = f"larger batches (batch_size=), {more}or a smaller lr"
    for name in result.log_posterior.latents:
        factor = float(noise.inflation[slices[name]].max())
        text = f"minibatches multiply the temperature by up to {factor:.3g}"
        verdict = "yes" if factor <= TEMPERATURE.hot else "unknown"
        verdict = verdict if factor <= TEMPERATURE.surely_hot else "no"
        findings.append(Finding(name, check, verdict, text, advice, (factor - 1) / limit))
    return findings
