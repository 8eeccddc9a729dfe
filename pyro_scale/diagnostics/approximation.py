"""The report of an approximation, by its importance weights, if they are cheap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_scale.core.mixing import FAMILY_WISE
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.bias import judge_bias
from pyro_scale.diagnostics.importance_bias import importance_bias
from pyro_scale.diagnostics.local_latents import check_local_latents
from pyro_scale.diagnostics.policy import NODES, WEIGHTS, errors_by_chance
from pyro_scale.diagnostics.psis import Psis, psis, rows_for, sums_at
from pyro_scale.diagnostics.report import Finding, Report, Verdict
from pyro_scale.diagnostics.resolution import resolution
from pyro_scale.distributed.sums import HERE, Sums
from pyro_scale.errors import ApproximationWarning, DataError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.tuning.pilot import Bias

#: Dimensions up to which weights are computed: beyond, their tail is heavy however well a network's
#: fit predicts.
_MOST_DIMENSIONS = 100
#: Evaluations of rows at draws that are always cheap.
_CHEAP = 2**22
#: Most numbers in the draws of all sites, those without a Gaussian included.
_MOST_NUMBERS = _CHEAP
#: Distance from the mode, in sds, that may be rounding.
_NEAR = 1e-3


def check_fit(fit: Fit, evaluations: int, sums: Sums = HERE, reason: str | None = None) -> None:
    """Judges a fit by its importance weights if they cost less than the fit did, writes the result
    into the fit's facts (`pareto_k`, `psis`, `report`), and warns if the fit is not the posterior.

    Args:
        fit: fit of a run that is about to end.
        evaluations: cost of the fit, in evaluations of a row's log density.
        sums: object that computes sums over rows, in this process or in several.
        reason: sentence on why the fit is wrong, if that is known, which is warned of in place of
            its weights; None otherwise.

    Warns:
        ApproximationWarning: the report's verdict is "no", or Pareto k is too large.
    """
    findings = [] if reason is None else [Finding("", "mode", "no", reason, severity=math.inf)]
    if fit.gaussians and fit.data is not None:
        findings += _check_weights(fit, max(_CHEAP, evaluations), sums)
        draws = fit.draws(fit.seeded_noise(NODES.draws, int(fit.attrs["seed"])))
        findings += check_local_latents(draws)
        fit.attrs["report"] = _make_report(fit, findings).to_json()
    serious = [finding for finding in findings if finding.verdict == "no" or _is_heavy(finding)]
    if serious:
        worst = Report.from_findings(serious, {}).findings[0]
        advice = f"; try: {worst.advice}" if worst.advice else ""
        warn(
            ApproximationWarning,
            f"the approximation does not fit the posterior: {worst}{advice}",
            code="too-narrow" if worst.check == "width" else "pareto-k",
        )


def report_on_fit(fit: Fit) -> Report:
    """The report of an approximation: that which its run stored, otherwise one that says why its
    importance weights were not computed."""
    if "report" in fit.attrs:
        return Report.from_json(fit.attrs["report"])
    reason = (
        "they are computed at the end of run(), not of step(), of rows by rank, at another "
        "temperature, or in files of earlier versions"
    )
    return _make_report(fit, [_not_known(reason)])


def advice_for(fit: Fit) -> str:
    """What to try if a fit is not the posterior: a dense structure if it has none, another
    parametrization, a sampler."""
    denser = "" if fit.attrs["structure"] == "dense" else "structure='dense', "
    return (
        f"{denser}another parametrization, or a sampler such as BAOA, which may start from it "
        "(init_strategy=)"
    )


# ------------------------------------------------------------------ inside


def _make_report(fit: Fit, findings: list[Finding]) -> Report:
    """The report of an approximation: these findings, or, if it is made of points, that it is no
    posterior; and how near it is to the point that the method looks for."""
    if not fit.gaussians or fit.temperature == 0:
        text = f"{fit.num_starts} point(s), one a start, at temperature 0"
        findings = [Finding("", "temperature", "ensemble", text)]
    attrs = fit.attrs
    choices = {"method": f"{attrs['method']}, structure='{attrs['structure']}'"}
    if "distance" in attrs:
        away = max(max(attrs["distance"]) ** 0.5, _NEAR)
        choices["mode"] = f"at most {away:.2g} posterior sds away, by a step of Newton's method"
    if "mean_offset" in attrs:
        means, sds = max(attrs["mean_offset"]), 100 * max(attrs["sd_offset"])
        choices["optimum"] = f"means are within {means:.2g} sds of it, sds within {sds:.2g}%"
        if not (math.isfinite(means) and math.isfinite(sds)):
            choices["optimum"] = "it is not known how far it is, after so few steps"
    return Report.from_findings(findings, choices, (fit.temperature, fit.temperature))


def _not_known(reason: str) -> Finding:
    """The finding that there are no importance weights to judge a fit by."""
    return Finding("", "weights", "unknown", f"the importance weights are not known: {reason}")


def _check_weights(fit: Fit, budget: int, sums: Sums) -> list[Finding]:
    """Findings for the report on a fit's importance weights: their tail, the fit's width, and the
    bias of each site. If the weights cannot be computed, one finding says why ("unknown"). Also
    writes Pareto k, or why there is none, into the fit's facts (`pareto_k`, `psis`).

    Args:
        fit: fit of a run that is about to end.
        budget: most evaluations of a row's log density.
        sums: object that computes sums over rows.
    """
    dimensions, draws = len(fit.places), fit.num_starts * fit.num_draws
    rows = rows_for(fit.log_posterior, dimensions, draws, budget)
    table, rounded = None, list[Finding]()
    if dimensions > _MOST_DIMENSIONS:
        reason = (
            f"of {dimensions:,} dimensions; beyond {_MOST_DIMENSIONS} the weights do not judge a "
            "network: check its predictions of held-out rows"
        )
        findings = [_not_known(reason)]
    elif rows is None or draws * fit.layout.size > _MOST_NUMBERS:
        findings = [_not_known("more expensive than the fit; call psis()")]
    else:
        of_all = resolution(fit.result) if fit.temperature else []
        rounded = [finding for finding in of_all if finding.site in fit.sites]  # others: constants
        table, findings = _weigh(fit, fit.result, rows, sums)
    if table is None:
        fit.attrs["psis"] = findings[0].told.removeprefix("the importance weights are ")
        return [*rounded, *findings]
    assert rows is not None
    more = min(WEIGHTS.more_draws * draws, budget // rows, _MOST_NUMBERS // fit.layout.size)
    is_vague = Report.from_findings(findings, {}).verdict == "unknown"
    if is_vague and table.error == 0 and more >= 2 * draws:
        noise = fit.noise(more, generator(fit.seed, 0, Purpose.APPROXIMATION, block=3))
        again, of_more = _weigh(fit, fit.draws(noise), rows, sums)
        table, findings = (table, findings) if again is None else (again, of_more)
    fit.attrs.update(pareto_k=table.pareto_k, psis=table.words)
    return [*rounded, *findings]


def _weigh(
    fit: Fit, drawn: PosteriorDraws, rows: int, sums: Sums
) -> tuple[Psis | None, list[Finding]]:
    """(Importance weights of a fit's draws, None if they cannot be computed; the findings for the
    report on them).

    Args:
        fit: the approximation.
        drawn: draws of the fit.
        rows: number of rows to evaluate at each draw.
        sums: object that computes sums over rows.
    """
    sums = sums_at(fit, drawn, sums)

    def compute() -> tuple[Psis | None, list[Finding]]:
        try:
            table = psis(fit, drawn, rows, sums=sums)
        except (DataError, RuntimeError, ValueError, NotImplementedError) as error:
            return None, [_not_known(str(error).removeprefix("psis: "))]
        return table, _judge_weights(fit, drawn, table)

    return sums.run(compute)


def _is_heavy(finding: Finding) -> bool:
    """Whether a finding says that Pareto k is above its limit."""
    return finding.check == "weights" and finding.severity > 1


def _judge_weights(fit: Fit, drawn: PosteriorDraws, table: Psis) -> list[Finding]:
    """Findings for the report on the importance weights of a fit's draws: whether their tail allows
    for means, whether the fit is too narrow, and the bias of each site. A bias that weights of a
    heavy tail show is evidence against the fit, as they rather hide one, and none for it.

    Args:
        fit: the approximation.
        drawn: draws of the fit.
        table: importance weights of the draws.
    """
    advice, pareto_k = advice_for(fit), table.pareto_k
    if math.isnan(pareto_k):
        return [_not_known(table.words.removeprefix("not known: "))]
    is_reliable = pareto_k <= WEIGHTS.pareto_k
    text = f"Pareto k of its importance weights is {pareto_k:.2f}"
    text += f" ({table.words})" if is_reliable else f", above {WEIGHTS.pareto_k}"
    verdict: Verdict = "yes" if is_reliable else "unknown"
    severity = pareto_k / WEIGHTS.pareto_k
    findings = [Finding("", "weights", verdict, text, advice, severity)]
    if table.spread > WEIGHTS.spread:
        times = f"{table.spread:.2g} times" if math.isfinite(table.spread) else "beyond measure"
        text = f"it is too narrow, by the log joint at its draws {times}"
        severity = table.spread / WEIGHTS.spread
        findings.append(Finding("", "width", "no", text, advice, severity))
    if pareto_k >= 1:  # the weights have no mean
        return findings
    biases = _judge_sites(fit, drawn, table, f"sample(n, resample=True), {advice}")
    return findings + [bias for bias in biases if is_reliable or bias.verdict == "no"]


def _judge_sites(fit: Fit, drawn: PosteriorDraws, table: Psis, advice: str) -> list[Finding]:
    """Findings for the report on the bias of each site's constrained values. A single one if some
    sites have no Gaussian: the weights are then those of a posterior given their values.

    Args:
        fit: the approximation.
        drawn: draws of the fit.
        table: importance weights of the draws.
        advice: what to try.
    """
    fixed = [name for name in fit.log_posterior.latents if name not in fit.sites]
    if fixed:
        text = f"sites without a Gaussian stay at one value: {', '.join(fixed)}"
        return [Finding("", "sites", "unknown", text, "sites=None")]
    samples = drawn.samples
    draws = {name: _varying_elements(samples[name]) for name in fit.sites}
    count = sum(elements.shape[1] for elements in draws.values())

    def judge(name: str) -> Finding:
        bias = importance_bias(draws[name], table.log_weights)
        bias = Bias(  # log weights that are off by e nats move a mean by up to e sds
            bias.mean,
            bias.mean_mcse.hypot(torch.tensor(table.error)),
            bias.log_sd,
            bias.log_sd_mcse.hypot(torch.tensor(table.error / 2**0.5)),
        )
        errors = errors_by_chance(FAMILY_WISE / 2, count)  # a yes is as sure as a no
        return judge_bias(name, bias, count, advice, check="bias", errors_of_yes=errors)

    return [judge(name) for name, elements in draws.items() if elements.shape[1]]


def _varying_elements(values: Tensor) -> Tensor:
    """The elements of a site that are not the same in all draws, in double precision, `[draws,
    elements]`.

    Args:
        values: draws of the site, `[chains, draws, ...]`.
    """
    flat = values.reshape(values.shape[:2].numel(), -1).double().cpu()
    return flat[:, flat.amin(0) < flat.amax(0)]
