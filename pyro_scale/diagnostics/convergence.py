"""R-hat and effective sample size, of latent sites and of predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.online_moments import Moments
from pyro_scale.core.validation import evenly
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.errors import ArgumentError, CallError, ConvergenceWarning, PyroScaleError
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.recorder import LatentShapeChanged
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.like_run import check_like_run
from pyro_scale.posterior.predictive import predictive_means
from pyro_scale.posterior.row_batches import data_sites

#: What is said of chains that are apart.
APART = (
    "each chain agrees with itself, so they are most likely in modes of their own, and no warm-up "
    "leads out: give the model one (an order, a sign), or start all chains in it (init_strategy=)"
)


def some_elements(result: PosteriorDraws, name: str) -> Tensor:
    """Up to 200 elements of a site, evenly spread, `[chains, draws, some]`: ArviZ takes some
    milliseconds for each."""
    return result.elements(name, evenly(result.shapes[name].numel(), MIXING.elements))


def mixing(draws: Mapping[str, Tensor]) -> Any:
    """A table, one row a variable: the worst R-hat and the least ESS of its elements; constants
    have neither.

    Args:
        draws: by variable, `[chains, draws, elements]`.
    """
    import pandas
    import xarray

    latent = xarray.Dataset(
        {
            name: (("chain", "draw", f"{name}_element"), _without_constants(each).cpu().numpy())
            for name, each in draws.items()
        }
    )
    table = pandas.DataFrame(index=pandas.Index(list(draws), name="site"))
    alone = latent.sizes["chain"] < 2
    table["r_hat"] = math.nan if alone else _each(arviz_api.rhat(latent), "max")
    table["ess_bulk"] = _each(arviz_api.ess(latent, method="bulk"), "min")
    table["ess_tail"] = _each(arviz_api.ess(latent, method="tail"), "min")
    return table


def _without_constants(draws: Tensor) -> Tensor:
    """Draws `[chains, draws, elements]` with NaN for elements that are one number: ArviZ has all of
    their draws effective."""
    return draws.masked_fill(draws.amin((0, 1)) == draws.amax((0, 1)), math.nan)


def mixing_of_moments(moments: Mapping[str, Moments], sites: Sequence[str]) -> Any:
    """The same, by split R-hat and batch means, of draws that were not kept."""
    import pandas

    table = pandas.DataFrame(index=pandas.Index(sites, name="site"))
    table["r_hat"] = [float(moments[name].r_hat.max()) for name in sites]
    table["ess_bulk"] = [float(moments[name].ess.min()) for name in sites]
    return table


def mixing_of_predictions(result: PosteriorDraws, predict_at: Any) -> Any:
    """The same of each data site's predictive means for the rows of `predict_at`.

    Args:
        result: of the run.
        predict_at: the model's arguments.

    Raises:
        ArgumentError: no data site, or one without a mean; what the model cannot be run on.
    """
    if not data_sites(result):
        raise ArgumentError("predict_at: the model has no data site with a value a row")
    arguments = rows.as_arguments(predict_at)
    try:
        check_like_run(result.log_posterior, result.data, predict_at)
        with own_generator():
            means = predictive_means(result, arguments)
    except Exception as error:  # the model's own
        differ = rows.other_columns(arguments, result.log_posterior.model_info.example)
        if isinstance(error, PyroScaleError) and not isinstance(
            error, CallError | LatentShapeChanged
        ):
            raise
        description = rows.described(arguments) if rows.leaves(arguments) else repr(predict_at)
        raise ArgumentError(
            f"predict_at: the model cannot be run on it ({description}; {differ or error}): pass"
            " some rows as the model's own arguments, a tensor, a tuple by position or a dict by "
            "name"
        ) from error
    chains, draws = result.positions.shape[:2]
    return mixing(
        {
            f"{name}, predicted": value[:, evenly(value.shape[1], MIXING.elements)]
            .double()
            .reshape(chains, draws, -1)
            for name, value in means.items()
        }
    )


def warn_of_unmixed(result: PosteriorDraws, table: Any, probed: bool, hot: bool) -> bool:
    """Warns where R-hat says that chains do not agree; one chain alone cannot tell.

    Args:
        result: of the run.
        table: with `r_hat` by site.
        probed: whether the sites are predictions.
        hot: whether its step is known to be too long, or was chosen.
    """
    chains, each = next(iter(result.sample_stats.values())).shape
    few = chains < 2 or each < MIXING.few_each
    if few or result.attrs["temperature"] == 0:  # where chains are to end in different places
        return False
    surely = each >= MIXING.many_each and chains * each >= MIXING.many_draws
    r_hat, most = table["r_hat"], MIXING.disagree if surely else MIXING.disagree_of_few
    unmixed = bool((r_hat > most).any())
    if unmixed:
        worst = r_hat.idxmax()
        steps = " or more steps" if hot else ", more steps or a larger lr"
        advice = f"take a longer warm-up{steps}"
        if not probed and are_apart(result, worst, r_hat[worst]):
            advice = APART
        of_weights = not probed and _has_weights(result)
        hint = ""
        if of_weights:
            hint = "; of a network, ask what its predictions do: diagnostics(predict_at=x)"
        if chains >= MIXING.many_chains and "superchains" not in result.attrs:
            hint += "; many short chains say more with superchains="
        warn(
            ConvergenceWarning,
            f"'{worst}': the chains do not agree, R-hat is {r_hat[worst]:.3g}: {advice}{hint}",
            code="ensemble" if of_weights else "chains-disagree",
        )
    return unmixed


def are_apart(result: PosteriorDraws, name: str, r_hat: float) -> bool:
    """Whether the halves of each chain agree in a site, where chains do not, by their R-hat: each
    is in a place of its own then, and none on its way.  Not known of draws that were not kept, and
    no news of a network's weights."""
    if result.online is not None or r_hat < MIXING.apart or _has_weights(result):
        return False
    half = result.positions.shape[1] // 2
    if half < MIXING.few_each:
        return False
    halves = some_elements(result, name)[:, : 2 * half].unflatten(1, (2, half))
    return all(mixing({name: each})["r_hat"][name] < MIXING.stays for each in halves)


def warn_of_frozen(name: str, accepted: float = 1.0) -> bool:
    """Warns of a site that has not moved, perhaps because hardly a proposal was accepted; True."""
    advice = (
        "take larger steps, or data in float64 and without their mean, if its sd is near the steps "
        "of its dtype"
    )
    if accepted < MIXING.few_accepted:
        advice = f"{100 * accepted:.2g}% of the proposals were accepted: lower lr"
    warn(
        ConvergenceWarning,
        f"'{name}': an element is the same number in all draws of a chain, so nothing tells "
        f"whether it mixes: {advice}",
        code="chains-disagree",
    )
    return True


def _has_weights(result: PosteriorDraws) -> bool:
    """Whether latents are weights of a network."""
    sites = result.log_posterior.model_info.sites.values()
    return any(WEIGHT in site.infer for site in sites if site.kind == "latent")


def _each(dataset: Any, reduce: str) -> list[float]:
    return [float(getattr(array, reduce)()) for array in dataset.data_vars.values()]
