"""Messages for chains that become NaN or infinite, or are about to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.diagnostics.policy import EXPLOSION
from pyro_scale.engine.draws import Draws, Failure
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.blame import WITHIN, Broken

#: What is wrong where the log joint is not finite.
NOT_A_DENSITY = "the log joint became NaN or infinite"


def message(
    draws: Draws,
    lr: Tensor,
    sites: Mapping[int, Broken],
    replay: str = "",
    by: str = "get_samples()",
) -> str:
    """Which chains stopped, where, and what to try.

    Args:
        draws: what the run kept.
        sites: by chain, as `broken_sites` gives them.
        lr: every step's, `[steps, ...]`.
        replay: where their last steps are, which say why, as a sentence.
        by: what gives the results of the others.
    """
    failures = draws.failures
    stopped = "; ".join(
        f"chain {each.chain} at step {each.step}" + where(each, sites) for each in failures[:5]
    )
    more = f" and {len(failures) - 5} more" if len(failures) > 5 else ""
    errors = [each.error for each in failures if each.error is not None]
    raised = f"the model raised {errors[0]}" if errors else ""
    states = [each for each in failures if each.error is None and not each.in_density]
    non_finite = "the state became NaN or infinite" if states else ""
    outside = NOT_A_DENSITY if any(each.in_density for each in failures) else ""
    what = ", or ".join(filter(None, [non_finite, outside, raised]))
    finished = ", ".join(map(str, draws.finished))
    if len(draws.finished) > 10:
        finished = f"{len(draws.finished)} of them"
    kept = f"Finished, and in {by}: chains {finished}. " if finished else ""
    now = float(lr[failures[0].step].max())
    smaller = f"try lr={now / 3:.2g} instead of {now:.2g}"
    if any(_is_of_the_batch(failure, draws, sites) for failure in failures):
        advice = (
            "The batch of that step holds NaN or infinite numbers: clean the data (torch.isfinite "
            "finds them)"
        )
    elif errors:
        advice = (
            "If the values are extreme, the step size is above the stable range: "
            f"{smaller}.  Otherwise the model fails at values that chains visit: make it stable "
            "there (add to the diagonal of its matrices), or use tighter priors"
        )
    elif beyond_its_domain(sites):
        advice = beyond_its_domain(sites)
    elif not states:
        advice = (
            "The log density is NaN or infinite where its gradient is finite: a support that "
            "depends on a latent, or the log of a negative number.  Give that latent a "
            "distribution whose own support ends there; scale data whose log density overflows"
        )
    elif any(failure.step == 0 for failure in states):
        advice = (
            "At the first step, either the gradient is not finite at the start (check data and "
            "model, or pass init_strategy=), or "
            f"lr={now:.2g} is far too large"
        )
    else:
        advice = (
            f"The usual cause is a step size above the stable range: {smaller}.  Otherwise start "
            "near the mode (init_strategy=), scale the data, give the site a tighter prior, or "
            "check the model if it is NaN at moderate values"
        )
    return f"{what}: {stopped}{more}. {kept}{replay and replay + '. '}{advice}"


def _is_of_the_batch(failure: Failure, draws: Draws, sites: Mapping[int, Broken]) -> bool:
    """Whether NaN in the step's batch is what stopped a chain: not where the chain has run away,
    and has taken a step on such rows before, which a mask leaves out."""
    if not failure.bad_batch or failure.chain in sites:
        return failure.bad_batch and not sites[failure.chain].is_far
    *before, last = draws.last_steps.get(failure.chain) or (None,)
    if last is None or last.arguments is None:  # the same rows at every step, or not recorded
        return last is None or failure.step == 0
    return all(step.arguments is None or rows.are_finite(step.arguments) for step in before)


def where(failure: Failure, sites: Mapping[int, Broken]) -> str:
    """At which site a chain stopped, behind a comma, if that is known."""
    if failure.chain in sites:
        broken = sites[failure.chain]
        return f", site '{broken.site}': its log density is {broken.finding}"
    is_known = failure.error is None and not failure.in_density
    return f", site '{failure.site}'" if is_known else ""


def beyond_its_domain(sites: Mapping[int, Broken]) -> str:
    """What to try where a site's log density is not finite at values that chains visit; "" where
    they are so far out that the step size may be the cause."""
    site = next((broken.site for broken in sites.values() if not broken.is_far), None)
    if site is None:
        return ""
    return (
        f"Site '{site}' has no log density at values that chains visit: a log or a root of a "
        f"negative number, a support that depends on a latent, an overflow.  {WITHIN.capitalize()}"
    )


def all_stopped(store: Path | None, why: str) -> str:
    """Why a run has no results of which no chain finished.

    Args:
        store: where draws went, if on disk.
        why: what its NonFiniteError said.
    """
    message = "has no draws: all chains of the run stopped"
    if store is not None:
        message += f", and their draws up to then are in the store '{store}'"
    return f"{message} ({why})"


def explosion(result: PosteriorDraws) -> str | None:
    """What to say of chains that have exploded, though their states are finite yet; None where
    none has."""
    last = result.positions[torch.arange(result.num_chains), -1].abs().amax(0)
    far, runaway = int(last.argmax()), _runaway(result)
    site = result.layout.site_at(far)
    if float(last[far]) >= EXPLOSION.distance:
        message = f"site '{site}' has reached {float(last[far]):.2g}"
        message += " in unconstrained space"
    elif runaway is not None:
        site, heat = runaway
        message = (
            f"site '{site}' has grown ever hotter, to {heat:.2g} times the temperature asked for"
        )
    else:
        return None
    lr, log_joint = (result.sample_stats.get(name) for name in ("lr", "lp"))
    hint = "" if lr is None else f", {float(lr[0, -1]) / 3:.2g} instead of {float(lr[0, -1]):.2g}"
    advice = f"The step size is most likely above the stable range: pass a smaller lr{hint}"
    if log_joint is not None and (
        float((log_joint[:, 0] - log_joint[:, -1]).max()) < EXPLOSION.fallen * result.layout.size
    ):
        advice = (
            "The log joint is no lower there than where chains came from, so the posterior may not "
            f"end: give site '{site}' a proper prior, or a tighter one"
        )
    return (
        f"the chains have exploded: {message}, and no number that is made of the draws means "
        f"anything. {advice}"
    )


def _runaway(result: PosteriorDraws) -> tuple[str, float] | None:
    """(The site that has become hottest, its temperature over the one asked for in the last quarter
    of the draws), where that is what a step above the stable range does to it.

    Draws that run away are pulled back to their mean, by ever more.  A chain that comes from a bad
    start is as hot, but first and not last, and on the way from there it is pulled on, away from
    the mean.
    """
    if (virial := result.measurements.virial) is None:
        return None
    heat = virial.parts / result.sample_stats["temperature"].mean()
    quarter = heat.shape[1] // 4
    if quarter * result.num_chains < EXPLOSION.fewest_draws:
        return None
    first, last = (
        part.flatten(0, 1).median(0).values.amax(-1)
        for part in (heat[:, :quarter], heat[:, -quarter:])
    )
    grown = last.where(last > EXPLOSION.hot * first.clamp(min=1), 0)
    site = int(grown.argmax())
    return (result.log_posterior.latents[site], float(grown[site])) if grown[site] > 0 else None
