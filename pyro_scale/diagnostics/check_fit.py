"""Checks an approximation by its importance weights at the end of a run, if they are cheap."""

from __future__ import annotations

from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.approximation import judge_weights, make_report
from pyro_scale.diagnostics.psis import Psis, psis, rows_for, sums_at
from pyro_scale.diagnostics.report import Finding
from pyro_scale.diagnostics.resolution import resolution
from pyro_scale.distributed.sums import HERE, Sums
from pyro_scale.errors import ApproximationWarning, DataError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.rng.seeds import Purpose, generator

#: Dimensions up to which weights are computed: beyond, their tail is heavy however well a network's
#: fit predicts.
_MOST_DIMENSIONS = 100
#: Evaluations of rows at draws that are always cheap.
_CHEAP = 2**22
#: Most numbers in the draws of all sites, those without a Gaussian included.
_MOST_NUMBERS = 2**22
#: Factor on the draws where their errors are too large to judge a bias.
_MORE_DRAWS = 8


def check_fit(fit: Fit, evaluations: int, sums: Sums = HERE, reason: str | None = None) -> None:
    """Judges a fit by its importance weights if they cost less than the fit did, writes the result
    into the fit's facts (`pareto_k`, `psis`, `report`), and warns if the fit is not the posterior.

    Args:
        fit: fit of a run that is about to end.
        evaluations: cost of the fit, in evaluations of a row's log density.
        sums: object that computes sums over rows, in this process or in several.
        reason: sentence on why the fit is wrong, if that is known; None otherwise.

    Warns:
        ApproximationWarning: a finding of the report says that the fit is not the posterior, or
            Pareto k is too large.
    """
    if not fit.gaussians or fit.data is None:
        return
    findings = [] if reason is None else [Finding("", "mode", "no", reason)]
    findings += _check_weights(fit, max(_CHEAP, evaluations), sums)
    report = make_report(fit, findings)
    if fit.temperature > 0:
        fit.attrs["report"] = report.to_json()
    for finding in report.findings:
        if finding.verdict == "no" or (finding.check == "weights" and finding.severity > 1):
            advice = f"; try: {finding.advice}" if finding.advice else ""
            warn(
                ApproximationWarning,
                f"the approximation does not fit the posterior: {finding}{advice}",
                code="too-narrow" if finding.check == "width" else "pareto-k",
            )
            return


def _check_weights(fit: Fit, budget: int, sums: Sums) -> list[Finding]:
    """Findings for the report on a fit's importance weights, whose tail is written into the fit's
    facts; a single one, "unknown", if they cannot be computed.

    Args:
        fit: fit of a run that is about to end.
        budget: most evaluations of a row's log density.
        sums: object that computes sums over rows.
    """
    dimensions, draws = len(fit.places), fit.num_starts * fit.num_draws
    if dimensions > _MOST_DIMENSIONS:
        return _unknown(
            fit,
            f"of {dimensions:,} dimensions; beyond {_MOST_DIMENSIONS} the weights do not judge a "
            "network: check its predictions of held-out rows",
        )
    rows = rows_for(fit.log_posterior, dimensions, draws, budget)
    if rows is None or draws * fit.layout.size > _MOST_NUMBERS:
        return _unknown(fit, "more expensive than the fit; call psis()")
    rounded = resolution(fit.result) if fit.temperature else []
    rounded = [finding for finding in rounded if finding.site in fit.sites]  # others are constants
    result = _weigh(fit, fit.result, rows, sums)
    if isinstance(result, str):
        return [*rounded, *_unknown(fit, result)]
    table, findings = result
    fit.attrs.update(pareto_k=table.pareto_k, psis=table.words)
    more = min(_MORE_DRAWS * draws, budget // rows, _MOST_NUMBERS // fit.layout.size)
    is_vague = any(each.check == "bias" and each.verdict == "unknown" for each in findings)
    if is_vague and table.error == 0 and more >= 2 * draws:
        noise = fit.noise(more, generator(fit.seed, 0, Purpose.APPROXIMATION, block=3))
        again = _weigh(fit, fit.draws(noise), rows, sums)
        findings = findings if isinstance(again, str) else again[1]
    return [*rounded, *findings]


def _unknown(fit: Fit, reason: str) -> list[Finding]:
    """A list with the finding that importance weights are not known; the reason is written into the
    fit's facts, too."""
    fit.attrs["psis"] = f"not known: {reason}"
    return [Finding("", "weights", "unknown", f"importance weights are not known: {reason}")]


def _weigh(
    fit: Fit, drawn: PosteriorDraws, rows: int, sums: Sums
) -> tuple[Psis, list[Finding]] | str:
    """(Importance weights of a fit's draws, and the findings for the report on them); the reason if
    they cannot be computed.

    Args:
        fit: the approximation.
        drawn: draws of the fit.
        rows: number of rows to evaluate at each draw.
        sums: object that computes sums over rows.
    """
    sums = sums_at(fit, drawn, sums)

    def compute() -> tuple[Psis, list[Finding]] | str:
        try:
            table = psis(fit, drawn, rows, sums=sums)
        except (DataError, RuntimeError, ValueError, NotImplementedError) as error:
            return str(error)
        return table, judge_weights(fit, drawn, table)

    return sums.run(compute)
