"""How far to trust a run: evidence by site, and a verdict in one line."""

from __future__ import annotations

import dataclasses
from statistics import NormalDist

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.autocorrelation import autocorrelation_time, mixing_of
from pyro_scale.core.validation import evenly
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.convergence import (
    APART,
    are_apart,
    mixing_of_predictions,
    some_elements,
)
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.diagnostics.modes_seen import modes_seen
from pyro_scale.diagnostics.policy import MIXING, TEMPERATURE
from pyro_scale.diagnostics.resolution import resolution
from pyro_scale.diagnostics.run_report import Finding, Report, Verdict
from pyro_scale.model.diagnose import centered_latents, how_to_non_center
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.blame import WITHIN
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.policy import TOLERANCE

#: Of the temperature, where sds are within 5%.
_TEMPERATURE = ((1 - TOLERANCE.sd) ** 2, (1 + TOLERANCE.sd) ** 2)


def report(result: PosteriorDraws, choice: Choice | None, num_samples: int) -> Report:
    """What is known of a run.

    Args:
        result: of the run.
        choice: what was chosen before it; None where everything was set.
        num_samples: draws of each chain that were asked for.
    """
    trained = None if choice is None else choice.trained
    choices = {} if choice is None else choice.reasons_at(result.attrs["thinning"])
    if "temperature" in result.attrs and result.attrs["temperature"] == 0:
        what = "points, one a chain," if result.positions.shape[1] == 1 else "optimizers"
        told = f"{result.num_chains} {what} at temperature 0"
        told += "" if trained is None else f", after {trained:,} steps of training"
        finding = Finding("", "temperature", "ensemble", told)
        return Report("ensemble", (finding,), choices)
    if exploded := explosion(result):
        return Report("no", (Finding("", "explosion", "no", exploded),), choices)
    findings = [
        *_length(result, num_samples),
        *(_thinned_mixing(result) if trained is None else _agreement(result)),
        *(resolution(result) if trained is None else []),
        *_temperatures(result),
        *_heating(result, choice),
        *_bias(result, choice),
        *_warmup(result, choice),
    ]
    return Report.of(_with_advice(result, findings), choices)


def report_on_exact(result: PosteriorDraws, num_samples: int) -> Report:
    """What is known of a run of an exact sampler, whose draws are right once chains have mixed and
    nothing has diverged.

    Args:
        result: of the run.
        num_samples: draws of each chain that were asked for.
    """
    exact = "exact on all rows, up to Monte Carlo error"
    findings = [
        *_length(result, num_samples),
        *_mixing(result, MIXING.many_draws, 0.0, "a larger num_samples="),
        *resolution(result),
        *_divergences(result),
    ]
    return Report.of(
        _with_advice(result, findings), {"method": f"{result.attrs['method']}, {exact}"}
    )


def _divergences(result: PosteriorDraws) -> list[Finding]:
    """Whether trajectories diverged, which leaves out where the posterior is narrow."""
    diverged = result.sample_stats["diverging"]
    count, advice = int(diverged.sum()), "target_accept=0.95, or another parametrization"
    where = result.attrs.get("diverged_where", "")
    if where:
        advice = WITHIN
    verdict: Verdict = "unknown" if count else "yes"
    told = f"{count} of {diverged.numel()} trajectories diverged{where}"
    return [Finding("", "divergences", verdict, told, advice)]


def _length(result: PosteriorDraws, num_samples: int) -> list[Finding]:
    """Whether the run has come to its end."""
    kept = result.sample_stats["lp"].shape[1]
    if kept == num_samples:
        return []
    told = f"it ended after {kept:,} of {num_samples:,} draws a chain"
    return [Finding("", "length", "unknown", told, "more max_seconds=, or resume=")]


def _with_advice(result: PosteriorDraws, findings: list[Finding]) -> list[Finding]:
    """The findings; where a latent is centered, they say so, and what to do."""
    if result.data is None or all(finding.verdict == "yes" for finding in findings):
        return findings
    params = result.layout.unflatten(result.positions[0, -1])
    centered = centered_latents(result.log_posterior, params, result.data.first())
    involved = {name: site for site, parents in centered.items() for name in (site, *parents)}

    def advised(finding: Finding) -> Finding:
        site = involved.get(finding.site) or next(iter(centered), None)
        if site is None or finding.verdict == "yes" or (finding.site and not involved):
            return finding
        advice = how_to_non_center(site, centered[site])
        return dataclasses.replace(finding, advice=advice)

    return [advised(finding) for finding in findings]


def _thinned_mixing(result: PosteriorDraws) -> list[Finding]:
    """That of draws whose thinning was chosen so that most of them are effective."""
    enough = MIXING.effective * result.num_chains * result.positions.shape[1]
    return _mixing(result, enough, enough / 2)


def _mixing(
    result: PosteriorDraws, enough: float, too_few: float, more: str = "a larger max_rows="
) -> list[Finding]:
    """Whether chains agree, and how many draws they are worth: enough, or surely too few; `more`
    gets more of them."""
    sites = list(result.log_posterior.latents)
    chains, draws = result.positions.shape[:2]
    if draws < MIXING.fewest_each:
        return [Finding("", "mixing", "unknown", f"{draws} draws a chain say nothing of it")]
    found = []
    for name in sites:
        some = some_elements(result, name)
        some = some[..., some.amin((0, 1)) != some.amax((0, 1))]  # `resolution` tells of the others
        if not some.shape[-1]:
            continue
        r_hats, bulk, tail = mixing_of(some)
        r_hat, ess = float(r_hats.max()), float(torch.minimum(bulk, tail).min())
        told = f"R-hat {r_hat:.3f}, {ess:.0f} effective draws of {chains * draws}"
        advice = f"{more}, or another parametrization (poutine.reparam)"
        verdict: Verdict = "yes"
        if are_apart(result, name, r_hat):
            advice = APART
        if chains < 2:
            verdict, advice = "unknown", "num_chains=4: one chain alone cannot tell"
        elif not r_hat <= MIXING.disagree or not ess >= too_few:
            # of few, it may be chance
            verdict = "no" if chains * draws >= MIXING.many_draws else "unknown"
        elif r_hat > MIXING.agree or ess < enough:
            verdict = "unknown"
        found.append(Finding(name, "mixing", verdict, told, advice))
        found += _tails(name, some)
    return found


def _tails(name: str, draws: Tensor) -> list[Finding]:
    """Whether tails are so heavy that so many draws do not tell an sd, `[chains, draws, some]`."""
    squares = (draws.double() - draws.double().mean((0, 1))).square()
    variance, scatter = squares.mean((0, 1)), squares.flatten(0, 1).std(0)
    count = squares.shape[0] * squares.shape[1] / autocorrelation_time(squares)
    heaviness = scatter / (2**0.5 * variance.clamp(min=1e-300))  # 1 of a normal
    error = heaviness / (2 * count) ** 0.5
    heavy = (error > TOLERANCE.sd) & (heaviness > TEMPERATURE.heavy)
    if not bool(heavy.any()):
        return []
    most = 100 * float(error[heavy].max())
    told = f"tails are so heavy that the sd has a Monte Carlo error of {most:.0f}%"
    advice = "more num_samples=, or quantiles in the place of sds"
    return [Finding(name, "tails", "unknown", told, advice)]


def _agreement(result: PosteriorDraws) -> list[Finding]:
    """Whether a network's chains agree in what they predict for some of their rows: weights have
    equivalent modes."""
    advice = "nothing, if an ensemble will do; a larger warmup_steps= and thinning="
    check, arguments = "predictions", None if result.data is None else result.data.first()
    if result.num_chains < 2 or result.positions.shape[1] < MIXING.fewest_each or arguments is None:
        return [Finding("", check, "ensemble", "too few chains or draws to tell more", advice)]
    if isinstance(result.data, TensorData):
        arguments = result.data.arguments
    places = evenly(rows.count(arguments) or 0, MIXING.predicted_rows)
    r_hat = float(mixing_of_predictions(result, rows.take(arguments, places)).r_hat.max())
    told = f"R-hat of {len(places)} training rows' predictions is {r_hat:.3f}"
    verdict: Verdict = "yes" if r_hat < MIXING.disagree else "ensemble"
    return [Finding("", check, verdict, told, advice)]


def _family_wise(count: int) -> float:
    """Standard errors that no element of so many goes beyond by chance."""
    return -NormalDist().inv_cdf(TEMPERATURE.family_wise / 2 / max(1, count))


def _temperatures(result: PosteriorDraws) -> list[Finding]:
    """The virial temperature of each site's element that is furthest off."""
    virial = result.measurements.virial
    if virial is None or virial.elements is None:
        return []
    column = result.sample_stats.get("temperature")
    asked = 1.0 if column is None else float(column.mean())
    if asked == 0:
        return []
    means, errors = (each / asked for each in virial.elements)
    slices = result.layout.slices()
    latents = list(result.log_posterior.latents)
    far = _family_wise(sum(slices[n].stop - slices[n].start for n in latents))
    # a bar that is wider than the tolerance tells nothing, unless draws are but few
    draws = virial.parts.shape[0] * virial.parts.shape[1]
    too_wide = max((_TEMPERATURE[1] - 1) / 2, TEMPERATURE.wide * (2 / draws) ** 0.5)
    found = []
    for name in latents:
        mean, error = means[slices[name]], errors[slices[name]]
        low, high = mean - far * error, mean + far * error
        outside = (low > _TEMPERATURE[1]) | (high < _TEMPERATURE[0])
        place = int(((mean - 1).abs() - far * error).argmax())
        told = (
            f"virial temperature {float(mean[place]):.3f} +- {float(error[place]):.2g} at its "
            "element that is furthest off (1 is right)"
        )
        advice = "smaller steps (lr=), or larger batches"
        verdict: Verdict = "no" if bool(outside.any()) else "yes"
        if verdict == "yes" and bool((error > too_wide).any()):
            verdict, advice = "unknown", "more num_samples=, or larger batches (batch_size=)"
            told = (
                f"the virial temperature of some element has an error of {float(error.max()):.2g}"
            )
        found.append(Finding(name, "temperature", verdict, told, advice))
    return found


def _heating(result: PosteriorDraws, choice: Choice | None) -> list[Finding]:
    """What minibatches add to the temperature, to first order in the step size: by the gradients of
    all rows where these were looked at, else by those of some batches."""
    if int(result.attrs.get("batch_size", 0)) >= int(result.attrs["num_data"]):
        return []
    if choice is not None and choice.heat is not None:
        told = f"minibatches multiply the temperature by {1 + choice.heat:.3g} at most, by all rows"
        verdict: Verdict = "yes" if 1 + choice.heat <= TEMPERATURE.hot else "no"
        return [Finding("", "minibatch heat", verdict, told, "larger batches (batch_size=)")]
    noise = result.measurements.gradient_noise
    if noise is None or noise.inflation is None:
        told = "the noise of minibatches is not known for this model or method"
        return [Finding("", "minibatch heat", "unknown", told, "batch_size=None")]
    found, slices = [], result.layout.slices()
    more = "" if noise.reduction is not None else "control_variates=True, "
    advice = f"larger batches (batch_size=), {more}or a smaller lr"
    for name in result.log_posterior.latents:
        most = float(noise.inflation[slices[name]].max())
        told = f"minibatches multiply the temperature by up to {most:.3g}"
        verdict = "yes" if most <= TEMPERATURE.hot else "unknown"
        verdict = verdict if most <= TEMPERATURE.surely_hot else "no"
        found.append(Finding(name, "minibatch heat", verdict, told, advice))
    return found


def _bias(result: PosteriorDraws, choice: Choice | None) -> list[Finding]:
    """What the step size does to means and sds, by the coupled run."""
    if "acceptance_rate" in result.attrs:
        rate = float(result.attrs["acceptance_rate"])
        told = f"no step size biases the draws: {rate:.0%} of proposals were accepted"
        return [Finding("", "step size", "yes", told)]
    if choice is not None and choice.trained is not None:
        told = "the bias of the step size is not measured for networks"
        return [Finding("", "step size", "unknown", told)]
    if choice is None or choice.pilot is None:
        told = "the bias of this step size was not measured: step_size_bias() does"
        return [Finding("", "step size", "unknown", told, "lr='auto', or step_size_bias()")]
    bias = choice.pilot.bias
    if bias is None:
        told = "every coupled run became NaN or infinite"
        return [Finding("", "step size", "unknown", told, "another parametrization")]
    found, slices = [], result.layout.slices()
    for name in result.log_posterior.latents:
        mean, mean_mcse, log_sd, log_sd_mcse = (each[slices[name]] for each in bias)
        far = _family_wise(len(bias.mean))
        surely = (mean.abs() - far * mean_mcse > TOLERANCE.mean) | (
            log_sd.abs() - far * log_sd_mcse > TOLERANCE.sd
        )
        known = bias.is_known[slices[name]]
        place = int((log_sd.abs() + log_sd_mcse).argmax())
        told = (
            f"bias of means up to {float(mean.abs().max()):.2g} sds, of sds "
            f"{100 * float(log_sd[place].abs()):.2g} +- {100 * float(log_sd_mcse[place]):.2g}%"
        )
        verdict: Verdict = "yes"
        if bool(surely.any()):
            verdict = "no"
        elif not bool(known.all()):
            verdict = "unknown"
        found.append(Finding(name, "step size", verdict, told, "another parametrization"))
    return found


def _warmup(result: PosteriorDraws, choice: Choice | None) -> list[Finding]:
    """Whether warm-up settled, and whether draws are at all modes that were found."""
    if choice is None or choice.window is None:
        return []
    window = choice.window
    change = "by no more than chance"
    if window.change > 1:
        change = f"{window.change:.2f} times more in some direction's sd than by chance"
    told = (
        f"after {window.steps:,} steps R-hat is {window.r_hat:.3f}, the geometry changes {change}"
    )
    verdict: Verdict = "yes" if window.agrees else "unknown"
    found = [Finding("", "warm-up", verdict, told, "another parametrization")]
    return found if choice.modes is None else [*found, *modes_seen(result, choice.modes)]
