"""Whether chains that share their starts have forgotten them: nested R-hat."""

from __future__ import annotations

from collections import Counter

from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.convergence import APART, are_apart
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.errors import ConvergenceWarning
from pyro_scale.metrics.nested_rhat import r_hat_of, variances
from pyro_scale.posterior.draws import PosteriorDraws


def nested_r_hats(result: PosteriorDraws) -> list[float] | None:
    """Each latent site's worst nested R-hat, of the superchains all of whose chains finished; None
    of a run without superchains, or with too few of those, of which it warns."""
    asked = result.attrs.get("superchains")
    if asked is None:
        return None
    superchains, chains = _complete_superchains(result)
    if superchains < 2:
        warn(
            ConvergenceWarning,
            f"no nested R-hat: only {superchains} of the {asked} superchains have all of their "
            "chains, and two are needed; find out what stopped the others (ps.replay), or pass a "
            "larger superchains=",
            code="chains-disagree",
        )
        return None
    sites = result.log_posterior.latents
    parts = [variances(result.samples[name][chains].double(), superchains) for name in sites]
    return [float(r_hat_of(each).max()) for each in parts]


def warn_of_remembered_starts(result: PosteriorDraws, hot: bool = False) -> bool:
    """Warns where superchains differ by more than their chains' own scatter lets them.

    Were the starts forgotten, the variance between superchains would be that between a
    superchain's M chains over M: all of the draws' variance over M for one draw a chain, which is
    the 1/M of Margossian et al. (2024), and the less the longer chains are.  What is above it is
    the starts' own part.  That it is not chance says the F distribution.

    Args:
        result: of a run with two or more whole superchains.
        hot: whether its step is known to be too long, or was chosen.
    """
    superchains, chains = _complete_superchains(result)
    if result.attrs["temperature"] == 0:  # where nothing forgets
        return False
    from scipy.stats import f

    each = len(chains) // superchains
    for name in result.log_posterior.latents:
        ratios = variances(result.samples[name][chains].double(), superchains)
        own = ratios.chains / each
        level = MIXING.false_alarms / own.numel()
        most = float(f.isf(level, superchains - 1, superchains * (each - 1)))
        part = (ratios.superchains - own) / (ratios.chains + ratios.draws)
        remembered = (part > MIXING.remembered) & (ratios.superchains > most * own)
        if bool(remembered.any()):
            worst = float(r_hat_of(ratios)[remembered].max())
            lr = "" if hot else "a larger lr, "
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
    """(How many superchains there are all of whose chains finished, these chains' places)."""
    started, asked = result.attrs["num_chains"], result.attrs["superchains"]
    each = started // asked
    finished = list(range(started)) if result.chains is None else list(result.chains)
    left = Counter(chain // each for chain in finished)
    complete = [superchain for superchain in left if left[superchain] == each]
    return len(complete), [i for i, chain in enumerate(finished) if chain // each in complete]
