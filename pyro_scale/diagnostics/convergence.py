"""Checks of whether chains agree: R-hat, nested R-hat and effective sample size (ESS) of latent
sites and of predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.mixing import mixing_of, standard_error_of_mean
from pyro_scale.core.online_moments import Moments
from pyro_scale.core.rows import DataLike
from pyro_scale.core.validation import evenly
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.policy import MIXING, TEMPERATURE
from pyro_scale.errors import ArgumentError, CallError, ConvergenceWarning, PyroScaleError
from pyro_scale.metrics.nested_rhat import split_variance
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.recorder import LatentShapeChanged
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.like_run import check_like_run
from pyro_scale.posterior.predictive import predictive_means
from pyro_scale.posterior.row_batches import data_sites

if TYPE_CHECKING:
    import pandas

#: Advice where chains stay in different modes.
APART = (
    "each chain agrees with itself, so chains are most likely in different modes, which no warm-up "
    "leaves: give the model one mode (an order, a sign)"
)


# ------------------------------------------------------------------ tables of R-hat and ESS


def select_elements(result: PosteriorDraws, name: str) -> Tensor:
    """Draws of up to 200 elements of a site, evenly spread over it, `[chains, draws, elements]`.
    For checks of large sites."""
    return result.elements(name, evenly(result.shapes[name].numel(), MIXING.elements))


def mixing(draws: Mapping[str, Tensor]) -> pandas.DataFrame:
    """A DataFrame with a row for each variable: the largest R-hat and the smallest bulk and tail
    ESS of its elements, without elements that are constant.

    Args:
        draws: draws of each variable by name, `[chains, draws, elements]`.
    """
    import pandas

    table = pandas.DataFrame(index=pandas.Index(list(draws), name="site"))
    columns = zip(*(mixing_of(of_site) for of_site in draws.values()), strict=True)
    for label, column in zip(("r_hat", "ess_bulk", "ess_tail"), columns, strict=True):
        of_sites = [pandas.Series(of_elements) for of_elements in column]  # their extremes skip NaN
        table[label] = [site.max() if label == "r_hat" else site.min() for site in of_sites]
    return table


def mixing_of_moments(moments: Mapping[str, Moments], sites: Sequence[str]) -> pandas.DataFrame:
    """A DataFrame with a row for each site: the largest split R-hat and the smallest ESS (by batch
    means) of its elements, for draws that were not kept.

    Args:
        moments: moments of the draws, by site.
        sites: names of the sites.
    """
    import pandas

    table = pandas.DataFrame(index=pandas.Index(sites, name="site"))
    table["r_hat"] = [float(moments[name].r_hat.max()) for name in sites]
    table["ess_bulk"] = [float(moments[name].ess.min()) for name in sites]
    return table


def mixing_of_predictions(result: PosteriorDraws, predict_at: DataLike) -> pandas.DataFrame:
    """A DataFrame with a row for each data site: the largest R-hat and the smallest bulk and tail
    ESS of its predictive means. For networks, whose weights have equivalent modes.

    Args:
        result: draws of a run.
        predict_at: the model's arguments at the rows to predict for.

    Raises:
        ArgumentError: the model has no data site, or a data site has no mean, or the model cannot
            be run on `predict_at`.
    """
    if not data_sites(result):
        raise ArgumentError("predict_at: the model has no data site with a value a row")
    arguments = rows.as_arguments(predict_at)
    try:
        check_like_run(result.log_posterior, result.data, predict_at)
        with own_generator():
            means = predictive_means(result, arguments)
    except Exception as error:  # the model may raise anything
        is_of_rows = isinstance(error, CallError | LatentShapeChanged)
        if isinstance(error, PyroScaleError) and not is_of_rows:
            raise
        differ = rows.other_columns(arguments, result.log_posterior.model_info.example)
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


def standard_error(series: Tensor, least: int = TEMPERATURE.fewest_draws) -> float:
    """The Monte Carlo standard error of the mean of a quantity, whose values at the draws are
    `series`, `[chains, draws]`; in its unit. NaN with fewer than `least` draws in all.

    From the chains' means if there are many chains, otherwise by the effective sample size.
    """
    chains, draws = series.shape
    if chains * draws < least:
        return math.nan
    if chains >= MIXING.many_chains:
        return float(series.mean(1).std()) / chains**0.5
    return float(standard_error_of_mean(series[..., None]))


# ------------------------------------------------------------------ chains that do not agree


def warn_of_unmixed(
    result: PosteriorDraws, table: pandas.DataFrame, of_predictions: bool, is_long_step: bool
) -> bool:
    """Warns if R-hat shows that chains do not agree; returns True if it warned. There is no warning
    with one chain, too few draws, or temperature 0, where chains end in different modes.

    Args:
        result: draws of a run.
        table: DataFrame with a column `r_hat` and a row for each site.
        of_predictions: whether the rows of `table` are predictions instead of latent sites.
        is_long_step: whether to leave out the advice of a larger lr: the step is too long already,
            or was chosen by the run.
    """
    chains, draws = next(iter(result.sample_stats.values())).shape
    is_short = chains < 2 or draws < MIXING.few_per_chain
    if is_short or result.attrs["temperature"] == 0:
        return False
    are_many = draws >= MIXING.many_per_chain and chains * draws >= MIXING.many_draws
    r_hat, limit = table["r_hat"], MIXING.disagree if are_many else MIXING.disagree_of_few
    if not bool((r_hat > limit).any()):
        return False
    worst = str(r_hat.idxmax())
    advice = "take a longer warm-up"
    advice += " or more steps" if is_long_step else ", more steps or a larger lr"
    if not of_predictions and are_apart(result, worst, r_hat[worst]):
        advice = APART
    of_weights = not of_predictions and _has_weights(result)
    if of_weights:
        advice += "; for a network, check its predictions: diagnostics(predict_at=x)"
    if chains >= MIXING.many_chains and "superchains" not in result.attrs:
        advice += "; with many short chains, superchains= tells more"
    warn(
        ConvergenceWarning,
        f"'{worst}': the chains do not agree, R-hat is {r_hat[worst]:.3g}: {advice}",
        code="ensemble" if of_weights else "chains-disagree",
    )
    return True


def are_apart(result: PosteriorDraws, name: str, r_hat: float) -> bool:
    """Whether chains stay in different modes of a site: the chains disagree, and the two halves of
    each chain agree. False if draws were not kept or are few, and for weights of networks, which
    have equivalent modes.

    Args:
        result: draws of a run.
        name: name of the site.
        r_hat: largest R-hat of the site's elements.
    """
    # R-hat of one chain is NaN
    if result.online is not None or not r_hat >= MIXING.apart or _has_weights(result):
        return False
    half = result.positions.shape[1] // 2
    if half < MIXING.few_per_chain:
        return False
    halves = select_elements(result, name)[:, : 2 * half].unflatten(1, (2, half))
    return all(mixing({name: chain})["r_hat"][name] < MIXING.stays for chain in halves)


def warn_of_frozen(name: str, acceptance_rate: float) -> None:
    """Warns that an element of a site is the same in all draws of a chain, with advice: a smaller
    lr if few proposals were accepted, otherwise larger steps or float64.

    Args:
        name: name of the site.
        acceptance_rate: accepted fraction of the proposals, 0 to 1.
    """
    advice = (
        "take larger steps, or data in float64 and without their mean, if its sd is near the steps "
        "of its dtype"
    )
    if acceptance_rate < MIXING.few_accepted:
        advice = f"{100 * acceptance_rate:.2g}% of the proposals were accepted: lower lr"
    warn(
        ConvergenceWarning,
        f"'{name}': an element is the same number in all draws of a chain, so its mixing cannot "
        f"be checked: {advice}",
        code="chains-disagree",
    )


def _has_weights(result: PosteriorDraws) -> bool:
    """Whether any latent site is a weight of a network, whose draws cannot be compared between
    chains, as networks have equivalent modes."""
    sites = result.log_posterior.model_info.sites.values()
    return any(WEIGHT in site.infer for site in sites if site.kind == "latent")


# ------------------------------------------------------------------ chains that share their starts


def nested_r_hats(result: PosteriorDraws) -> list[float] | None:
    """The nested R-hat of each latent site, the largest of its elements, in the model's order, over
    superchains (groups of chains with a common start) whose chains all finished. None for a run
    without superchains, and, with a warning, if fewer than two superchains are complete."""
    if "superchains" not in result.attrs:
        return None
    count, chains = _complete_superchains(result)
    if count < 2:
        warn(
            ConvergenceWarning,
            f"no nested R-hat: only {count} of the {result.attrs['superchains']} superchains have "
            "all of their chains, and two are needed; find out what stopped the others "
            "(ps.replay), or pass a larger superchains=",
            code="chains-disagree",
        )
        return None
    sites = result.log_posterior.latents
    parts = [split_variance(result.samples[name][chains].double(), count) for name in sites]
    return [float(part.nested_r_hat.max()) for part in parts]


def warn_of_remembered_starts(result: PosteriorDraws, is_long_step: bool = False) -> bool:
    """Warns if superchains (groups of chains with a common start) differ by more than the scatter
    of their chains explains, and returns whether they do.

    If the starts were forgotten, the variance between superchains would be the variance between the
    M chains of a superchain, divided by M. With one draw a chain that is the variance of all draws
    divided by M, the 1/M of Margossian et al. (2024); with longer chains it is less. What exceeds
    it is due to the starts, unless an F test says that chance explains it.

    Args:
        result: draws of a run with two or more complete superchains.
        is_long_step: whether to leave out the advice of a larger lr.
    """
    count, chains = _complete_superchains(result)
    if result.attrs["temperature"] == 0:  # chains without noise never forget their starts
        return False
    from scipy.stats import f

    size = len(chains) // count
    for name in result.log_posterior.latents:
        parts = split_variance(result.samples[name][chains].double(), count)
        scatter = parts.chains / size
        level = MIXING.false_alarms / scatter.numel()
        ratio = float(f.isf(level, count - 1, count * (size - 1)))
        of_starts = (parts.superchains - scatter) / (parts.chains + parts.draws)
        remembered = (of_starts > MIXING.remembered) & (parts.superchains > ratio * scatter)
        if bool(remembered.any()):
            worst = float(parts.nested_r_hat[remembered].max())
            lr = "" if is_long_step else "a larger lr, "
            advice = (
                f"take a longer warm-up, {lr}or starts nearer to the posterior (init_strategy= a "
                "fit)"
            )
            warn(
                ConvergenceWarning,
                f"site '{name}': chains remember their starts: those that share one agree more "
                f"with each other than with the rest (nested R-hat {worst:.3g}): "
                f"{APART if are_apart(result, name, worst) else advice}",
                code="chains-disagree",
            )
            return True
    return False


def _complete_superchains(result: PosteriorDraws) -> tuple[int, list[int]]:
    """(The number of complete superchains; the indices, among the finished chains, of all of their
    chains). A superchain is a group of chains with a common start, complete if all of these
    finished."""
    started = result.attrs["num_chains"]
    size = started // result.attrs["superchains"]
    finished = range(started) if result.chains is None else result.chains
    counts = Counter(chain // size for chain in finished)
    complete = {superchain for superchain, count in counts.items() if count == size}
    places = [place for place, chain in enumerate(finished) if chain // size in complete]
    return len(complete), places
