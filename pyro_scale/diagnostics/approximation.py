"""The report of an approximation: its bias by importance weights, and why that may not be known."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from pyro_scale.diagnostics.importance_bias import importance_bias
from pyro_scale.diagnostics.policy import WEIGHTS
from pyro_scale.diagnostics.psis import Psis
from pyro_scale.diagnostics.report import Finding, Report, Verdict
from pyro_scale.diagnostics.verdict import judge_bias
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.tuning.pilot import Bias


def report_on_fit(fit: Fit) -> Report:
    """The report of an approximation: that which its run stored, otherwise one that says why there
    are no importance weights to judge it by."""
    if "report" in fit.attrs:
        return Report.from_json(fit.attrs["report"])
    if not fit.gaussians or fit.temperature == 0:
        what = "starts" if fit.num_starts > 1 else "start"
        text = f"points without a spread, at temperature 0, of {fit.num_starts} {what}"
        return make_report(fit, [Finding("", "temperature", "ensemble", text)])
    text = "importance weights are computed at the end of run(), and not of step(), of another "
    text += "temperature, of rows by rank, or in files of earlier versions"
    return make_report(fit, [Finding("", "weights", "unknown", text, "run()")])


def make_report(fit: Fit, findings: list[Finding]) -> Report:
    """The report of an approximation with these findings, and its method and structure."""
    method = f"{fit.attrs['method']}, structure='{fit.attrs['structure']}'"
    return Report.from_findings(findings, {"method": method})


def judge_weights(fit: Fit, drawn: PosteriorDraws, table: Psis) -> list[Finding]:
    """Findings for the report on the importance weights of a fit's draws: whether their tail allows
    for means, whether the fit is too narrow, and the bias of each site that has a Gaussian.

    Args:
        fit: the approximation.
        drawn: draws of the fit.
        table: importance weights of the draws.
    """
    advice, pareto_k = advice_for(fit), table.pareto_k
    if math.isnan(pareto_k):
        text = table.words.removeprefix("not known: ")
        return [Finding("", "weights", "unknown", text, advice)]
    is_reliable = pareto_k <= WEIGHTS.pareto_k
    text = f"Pareto k of the importance weights of {table.words} is {pareto_k:.2f}"
    text += "" if is_reliable else f", above {WEIGHTS.pareto_k}, so they do not measure the bias"
    severity = pareto_k / WEIGHTS.pareto_k
    verdict: Verdict = "yes" if is_reliable else "unknown"
    findings = [Finding("", "weights", verdict, text, advice, severity)]
    if table.spread > WEIGHTS.spread:
        text = f"by the log joint at its draws, it is {table.spread:.2g} times too narrow"
        severity = table.spread / WEIGHTS.spread
        findings.append(Finding("", "width", "no", text, advice, severity))
    return findings + (_judge_sites(fit, drawn, table, advice) if is_reliable else [])


def _judge_sites(fit: Fit, drawn: PosteriorDraws, table: Psis, advice: str) -> list[Finding]:
    """Findings for the report on the bias of the constrained values of each site; if some sites
    have no Gaussian, a single one, as weights compare the others at fixed values of these."""
    fixed = [name for name in fit.log_posterior.latents if name not in fit.sites]
    if fixed:
        text = f"sites without a Gaussian have one value: {', '.join(fixed)}"
        return [Finding("", "sites", "unknown", text, "sites=None")]
    samples = drawn.samples
    draws = {name: _varying_elements(samples[name]) for name in fit.sites}
    count = sum(elements.shape[1] for elements in draws.values())

    def judge(name: str) -> Finding:
        bias = importance_bias(draws[name], table.log_weights)
        bias = Bias(  # an error of e nats of log weights moves means and log sds by no more
            bias.mean,
            bias.mean_mcse.hypot(torch.tensor(table.error)),
            bias.log_sd,
            bias.log_sd_mcse.hypot(torch.tensor(table.error / 2**0.5)),
        )
        return dataclasses.replace(judge_bias(name, bias, count, advice), check="bias")

    return [judge(name) for name, elements in draws.items() if elements.shape[1]]


def _varying_elements(values: Tensor) -> Tensor:
    """The elements of a site that are not the same in all draws, in double precision, `[draws,
    elements]`.

    Args:
        values: draws of the site, `[chains, draws, ...]`.
    """
    flat = values.flatten(0, 1).flatten(1).double().cpu()
    return flat[:, flat.amin(0) < flat.amax(0)]


def advice_for(fit: Fit) -> str:
    """What to try in place of a fit that is not the posterior: a dense structure if it has none,
    another parametrization, a sampler."""
    denser = "" if fit.attrs["structure"] == "dense" else "structure='dense', "
    return (
        f"{denser}another parametrization, or a sampler such as BAOA, which may start from it "
        "(init_strategy=)"
    )
