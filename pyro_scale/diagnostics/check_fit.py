"""Checks an approximation by its importance weights at the end of a run, if they are cheap."""

from __future__ import annotations

from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.policy import WEIGHTS
from pyro_scale.diagnostics.psis import Psis, psis, rows_for, sums_at
from pyro_scale.diagnostics.resolution import resolution
from pyro_scale.distributed.sums import HERE, Sums
from pyro_scale.errors import ApproximationWarning, DataError
from pyro_scale.posterior.gaussians import Fit

#: Dimensions up to which weights are computed: beyond, their tail is heavy however well a network's
#: fit predicts.
_MOST_DIMENSIONS = 100
#: Evaluations of rows at draws that are always cheap.
_CHEAP = 2**22
#: Most numbers in the draws of all sites, those without a Gaussian included.
_MOST_NUMBERS = 2**22


def check_fit(fit: Fit, evaluations: int, sums: Sums = HERE, reason: str | None = None) -> None:
    """Computes the importance weights of a fit if they cost less than the fit did, writes the
    result into the fit's facts (`pareto_k`, `psis`), and warns if the fit is not the posterior.

    Args:
        fit: fit of a run that is about to end.
        evaluations: cost of the fit, in evaluations of a row's log density.
        sums: object that computes sums over rows, in this process or in several.
        reason: sentence on why the fit is wrong, if that is known, which is warned of in place of
            its weights; None otherwise.

    Warns:
        ApproximationWarning: the fit is not the posterior.
    """
    if reason is not None:
        warn(ApproximationWarning, reason, code="pareto-k")
    if not fit.gaussians or fit.data is None:
        return
    if len(fit.places) > _MOST_DIMENSIONS:
        fit.attrs["psis"] = (
            f"not known: of {len(fit.places):,} dimensions; beyond {_MOST_DIMENSIONS} the "
            "weights do not judge a network: check its predictions of held-out rows"
        )
        return
    draws, budget = fit.num_starts * fit.num_draws, max(_CHEAP, evaluations)
    rows = rows_for(fit.log_posterior, len(fit.places), draws, budget)
    if rows is None or draws * fit.layout.size > _MOST_NUMBERS:
        fit.attrs["psis"] = "not known: more expensive than the fit; call psis()"
        return
    for finding in resolution(fit.result) if fit.temperature else ():
        if finding.site in fit.sites:  # others are constants
            warn(ApproximationWarning, f"{finding}; try: {finding.advice}")
    sums = sums_at(fit, fit.result, sums)

    def compute() -> Psis | str:
        try:
            return psis(fit, fit.result, rows, sums=sums)
        except (DataError, RuntimeError, ValueError, NotImplementedError) as error:
            return f"not known: {error}"

    table = sums.run(compute)
    if isinstance(table, str):
        fit.attrs["psis"] = table
        return
    fit.attrs.update(pareto_k=table.pareto_k, psis=table.words)
    if reason is not None:
        return
    if table.pareto_k > WEIGHTS.pareto_k:
        warn(ApproximationWarning, advice_on(fit, table.pareto_k), code="pareto-k")
    elif table.shift > WEIGHTS.shift:
        warn(
            ApproximationWarning,
            "the approximation does not fit the posterior: importance weights move its mean "
            f"by {table.shift:.2g} of its sds: take sample(n, resample=True), "
            f"{_denser(fit)}or a sampler such as BAOA",
            code="pareto-k",
        )
    elif table.spread > WEIGHTS.spread:
        warn(
            ApproximationWarning,
            "the approximation does not fit the posterior: it is too narrow, by the log joint "
            f"at its draws {table.spread:.2g} times: take {_denser(fit)}a sampler such as BAOA",
            code="too-narrow",
        )


def advice_on(fit: Fit, pareto_k: float) -> str:
    """The text of a warning that a fit does not approximate the posterior: Pareto k of its
    importance weights, the limit that it exceeds, and what to try instead."""
    return (
        f"the approximation does not fit the posterior: Pareto k of its importance weights is "
        f"{pareto_k:.2f}, above {WEIGHTS.pareto_k}: use {_denser(fit)}another parametrization, "
        "or a sampler such as BAOA, which may start from it (init_strategy=)"
    )


def _denser(fit: Fit) -> str:
    """The part of an advice that recommends a dense structure, "structure='dense', "; empty for a
    fit that has one."""
    return "" if fit.attrs["structure"] == "dense" else "structure='dense', "
