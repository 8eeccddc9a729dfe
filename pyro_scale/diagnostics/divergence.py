"""Messages about chains that became NaN or infinite, or are diverging."""

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

#: How messages describe a log joint that is not finite.
NOT_A_DENSITY = "the log joint became NaN or infinite"


def message(
    draws: Draws,
    lr: Tensor,
    sites: Mapping[int, Broken],
    replay: str = "",
    by: str = "get_samples()",
) -> str:
    """The message of a NonFiniteError: which chains stopped, where, and what to try.

    Args:
        draws: draws of the run, with its failures.
        lr: step size at every step, `[steps, ...]`.
        sites: the site that broke each chain, by chain number; see `broken_sites`.
        replay: sentence about how to rerun the last steps; may be empty.
        by: the call that returns the draws of the finished chains, as users write it.
    """
    failures, finished = draws.failures, ", ".join(map(str, draws.finished))
    errors = [failure.error for failure in failures if failure.error is not None]
    is_of_state = any(map(_is_of_state, failures))
    causes = ["the state became NaN or infinite"] if is_of_state else []
    causes += [NOT_A_DENSITY] if any(failure.in_density for failure in failures) else []
    causes += [f"the model raised {errors[0]}"] if errors else []
    stopped = "; ".join(
        f"chain {failure.chain} at step {failure.step}{where(failure, sites)}"
        for failure in failures[:5]
    )
    more = f" and {len(failures) - 5} more" if len(failures) > 5 else ""
    if len(draws.finished) > 10:
        finished = f"{len(draws.finished)} of them"
    kept = f"Finished, and in {by}: chains {finished}. " if finished else ""
    replay = replay and f"{replay}. "
    advice = _advice(draws, float(lr[failures[0].step].max()), sites)
    return f"{', or '.join(causes)}: {stopped}{more}. {kept}{replay}{advice}"


def _advice(draws: Draws, lr: float, sites: Mapping[int, Broken]) -> str:
    """The part of a NonFiniteError's message that says what to try.

    Args:
        draws: draws of the run, with its failures.
        lr: step size of the step that broke the first chain.
        sites: the site that broke each chain, by chain number.
    """
    states = [failure for failure in draws.failures if _is_of_state(failure)]
    smaller = f"try lr={lr / 3:.2g} instead of {lr:.2g}"
    if any(_is_due_to_batch(failure, draws, sites) for failure in draws.failures):
        return (
            "The batch of that step holds NaN or infinite numbers: clean the data (torch.isfinite "
            "finds them)"
        )
    if any(failure.error is not None for failure in draws.failures):
        return (
            "If the values are extreme, the step size is above the stable range: "
            f"{smaller}.  Otherwise the model fails at values that chains visit: make it stable "
            "there (add to the diagonal of its matrices), or use tighter priors"
        )
    if beyond_its_domain(sites):
        return beyond_its_domain(sites)
    if not states:
        return (
            "The log density is NaN or infinite where its gradient is finite: a support that "
            "depends on a latent, or the log of a negative number.  Give that latent a "
            "distribution whose own support ends there; scale data whose log density overflows"
        )
    if any(failure.step == 0 for failure in states):
        return (
            "At the first step, either the gradient is not finite at the start (check data and "
            f"model, or pass init_strategy=), or lr={lr:.2g} is far too large"
        )
    return (
        f"The usual cause is a step size above the stable range: {smaller}.  Otherwise start "
        "near the mode (init_strategy=), scale the data, give the site a tighter prior, or "
        "check the model if it is NaN at moderate values"
    )


def _is_of_state(failure: Failure) -> bool:
    """Whether a chain stopped because its state became NaN or infinite, rather than because the
    model raised an error or the log joint was not finite."""
    return failure.error is None and not failure.in_density


def _is_due_to_batch(failure: Failure, draws: Draws, sites: Mapping[int, Broken]) -> bool:
    """Whether a chain stopped because the rows of its last step's batch have NaN or infinite
    numbers.

    The batch is not to blame if the chain had run away, or survived such rows before because a mask
    leaves them out.

    Args:
        failure: failure of the chain.
        draws: draws of the run, with the recorded steps.
        sites: the site that broke each chain, by chain number.
    """
    if not failure.bad_batch or failure.chain in sites:
        return failure.bad_batch and not sites[failure.chain].is_far
    *before, last = draws.last_steps.get(failure.chain) or (None,)
    if last is None or last.arguments is None:  # not recorded, or the same rows at every step
        return last is None or failure.step == 0
    return all(step.arguments is None or rows.are_finite(step.arguments) for step in before)


def where(failure: Failure, sites: Mapping[int, Broken]) -> str:
    """The end of a phrase that says at which site a chain stopped, such as ", site 'w'", and what
    the site's log density is, if that is known; empty if the site is not known.

    Args:
        failure: failure of the chain.
        sites: the site that broke each chain, by chain number; see `broken_sites`.
    """
    if failure.chain in sites:
        broken = sites[failure.chain]
        return f", site '{broken.site}': its log density is {broken.finding}"
    return f", site '{failure.site}'" if _is_of_state(failure) else ""


def beyond_its_domain(sites: Mapping[int, Broken]) -> str:
    """Advice for messages on a site whose log density is not finite at ordinary values, so that its
    support or parametrization is the cause and not the step size. Empty if there is no such site,
    or chains were so far out that the step size may be the cause.

    Args:
        sites: the site that broke each chain, by chain number; see `broken_sites`.
    """
    site = next((broken.site for broken in sites.values() if not broken.is_far), None)
    if site is None:
        return ""
    return (
        f"Site '{site}' has no log density at values that chains visit: a log or a root of a "
        f"negative number, a support that depends on a latent, an overflow.  {WITHIN.capitalize()}"
    )


def all_stopped(store: Path | None, reason: str) -> str:
    """The reason why a method has no posterior after a run in which all chains stopped, as the end
    of a sentence that begins with the method's name.

    Args:
        store: directory of the draws until then; None if they were in memory.
        reason: message of the run's NonFiniteError.
    """
    message = "has no draws: all chains of the run stopped"
    if store is not None:
        message += f", and their draws up to then are in the store '{store}'"
    return f"{message} ({reason})"


def explosion(result: PosteriorDraws) -> str | None:
    """A sentence, with advice, on chains that are running away from the posterior although their
    states are still finite: with enormous values or an ever higher temperature. None if there are
    no such chains."""
    last = result.positions[torch.arange(result.num_chains), -1].abs().amax(0)
    place, runaway = int(last.argmax()), _runaway(result)
    site, distance = result.layout.site_at(place), float(last[place])
    if distance >= EXPLOSION.distance:
        finding = f"site '{site}' has reached {distance:.2g} in unconstrained space"
    elif runaway is not None:
        site, heat = runaway
        finding = f"site '{site}' has become ever hotter, to {heat:.2g} times the temperature set"
    else:
        return None
    lr, log_joint = (result.sample_stats.get(name) for name in ("lr", "lp"))
    smaller = (
        "" if lr is None else f", {float(lr[0, -1]) / 3:.2g} instead of {float(lr[0, -1]):.2g}"
    )
    advice = f"The step size is most likely above the stable range: pass a smaller lr{smaller}"
    if log_joint is not None and (
        float((log_joint[:, 0] - log_joint[:, -1]).max()) < EXPLOSION.fallen * result.layout.size
    ):
        advice = (
            "The log joint is no lower there than where chains came from, so the posterior may be "
            f"improper: give site '{site}' a proper prior, or a tighter one"
        )
    return (
        f"the chains have exploded: {finding}, so all results from the draws are meaningless. "
        f"{advice}"
    )


def _runaway(result: PosteriorDraws) -> tuple[str, float] | None:
    """(Name of the latent site whose temperature rises most; the site's virial temperature in the
    last quarter of the draws, relative to the requested one), if it rises so much that the step
    size must be above the stable range. None if not, or if temperatures were not measured.

    Chains that come from a bad start are hot at first, but not at the end.
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
