"""Whether the means and sds of draws are biased by no more than is tolerated."""

from __future__ import annotations

import math

from pyro_scale.core.mixing import FAMILY_WISE
from pyro_scale.diagnostics.policy import errors_by_chance
from pyro_scale.diagnostics.report import Finding, Verdict
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.pilot import Bias
from pyro_scale.tuning.policy import PILOTS, TOLERANCE


def check_bias(result: PosteriorDraws, choice: Choice | None) -> list[Finding]:
    """Findings for the report on the bias of means and sds that the step size causes, as tuning
    measured it by a coupled run; "unknown" if it was not measured."""
    if "acceptance_rate" in result.attrs:
        rate = float(result.attrs["acceptance_rate"])
        text = f"no step size biases the draws: {rate:.0%} of proposals were accepted"
        return [Finding("", "step size", "yes", text)]
    if choice is not None and choice.trained is not None:
        text = "the bias of the step size is not measured for networks"
        return [Finding("", "step size", "unknown", text)]
    if choice is None or choice.pilot is None:
        text = "the bias of this step size was not measured: step_size_bias() does"
        return [Finding("", "step size", "unknown", text, "lr='auto', or step_size_bias()")]
    advice = "another parametrization"
    if (bias := choice.pilot.bias) is None:
        text = "every coupled run became NaN or infinite"
        return [Finding("", "step size", "unknown", text, advice, math.inf)]
    slices = result.layout.slices()
    return [
        judge_bias(name, Bias(*(values[slices[name]] for values in bias)), len(bias.mean), advice)
        for name in result.log_posterior.latents
    ]


def judge_bias(
    site: str,
    bias: Bias,
    count: int,
    advice: str,
    how: str = "",
    check: str = "step size",
    errors_of_yes: float = PILOTS.errors_of_yes,
) -> Finding:
    """The finding for the report on the bias of a site's means and sds, as of the step size:
    "no" if it is surely beyond the tolerance at some element, "yes" if it is surely within it at
    all elements, otherwise "unknown".

    With standard errors of 16 parts, a bias of one element exactly at the tolerance has a "yes" in
    1% of runs, and in at most 1.6% where the more precise of two estimates counts (of the value or
    of the unconstrained element); if more elements are biased, in fewer, as all must pass.

    Args:
        site: name of the site.
        bias: bias of the site's elements.
        count: number of elements of all sites, one of which may be off by chance.
        advice: what to try.
        how: how the bias was measured, to follow the figures.
        check: name of the check.
        errors_of_yes: standard errors by which a bias must be within the tolerance for a "yes".
    """
    mean, mean_mcse, log_sd, log_sd_mcse = bias
    errors = errors_by_chance(FAMILY_WISE / 2, count)
    is_biased = (mean.abs() - errors * mean_mcse > TOLERANCE.mean) | (
        log_sd.abs() - errors * log_sd_mcse > TOLERANCE.sd
    )
    of_sd = int((log_sd.abs() + log_sd_mcse).nan_to_num(math.inf).argmax())
    text = (
        f"bias of means up to {float(mean.abs().max()):.2g} sds, of sds "
        f"{100 * float(log_sd[of_sd].abs()):.2g} +- {100 * float(log_sd_mcse[of_sd]):.2g}%{how}"
    )
    verdict: Verdict = "yes" if bool(bias.is_within(errors_of_yes).all()) else "unknown"
    verdict = "no" if bool(is_biased.any()) else verdict
    severity = max(
        float(mean.abs().max()) / TOLERANCE.mean, float(log_sd.abs().max()) / TOLERANCE.sd
    )
    return Finding(site, check, verdict, text, advice, severity)
