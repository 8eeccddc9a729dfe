"""Thresholds of verdicts and warnings, grouped by what they judge.

`docs/diagnostics.md` quotes them, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Thresholds of checks on R-hat and effective sample size, on chains in different modes, and on
    modes without draws."""

    #: R-hat up to which chains agree, and R-hat above which they do not, if chance does not explain
    #: it.
    agree: float = 1.01
    disagree: float = 1.05
    #: Draws of each chain from which on an R-hat above `disagree` is not chance.
    many_per_chain: int = 50
    #: Effective draws, bulk and tail, from which on a report does not doubt Monte Carlo errors, and
    #: draws from which on a table does not doubt R-hat (Vehtari et al. 2021 require 400).
    many_draws: int = 400
    #: With fewer draws, R-hat above which chains disagree, and draws of each chain below which
    #: there is no warning.
    disagree_of_few: float = 1.3
    few_per_chain: int = 20
    #: Draws of each chain below which a report does not judge mixing or rounding.
    fewest_per_chain: int = 8
    #: Chains stay in different modes if R-hat of the two halves of each chain is below `stays`,
    #: and R-hat of all chains at least `apart`.
    stays: float = 1.1
    apart: float = 1.3
    #: Effective draws below which more of them are not the only advice.
    few_effective: int = 100
    #: Number of chains from which `superchains=` is more informative than R-hat, and chain means
    #: alone give a standard error.
    many_chains: int = 20
    #: Acceptance rate below which `lr` is blamed for a chain that has not moved.
    few_accepted: float = 0.05
    #: Fraction of the variance that starts may explain: 1.05^2 - 1, that is R-hat of 1.05.
    remembered: float = 0.1
    #: Probability, per site, of a false alarm that chains remember their starts.
    false_alarms: float = 0.001
    #: Elements of a site that are judged, evenly spread.
    elements: int = 200
    #: Training rows whose predictions show whether a network's chains agree.
    predicted_rows: int = 200
    #: Draws of each chain that are assigned to modes.
    draws_at_modes: int = 500
    #: Expected number of draws from which on a mode without any is reported.
    missed_draws: float = 5.0
    #: Fraction of the posterior from which on a mode without a draw fails the check.
    missed: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Thresholds of checks on temperatures, which minibatch noise and long steps raise, and on
    Monte Carlo errors."""

    #: Factor on the temperature that is reported: 5% in sds.
    hot: float = 1.1
    #: The same if the factor is estimated from some of the rows.
    surely_hot: float = 1.25
    #: Standard errors that a table's warning requires, and the probability that a normal exceeds
    #: three.
    errors: float = 3.0
    one_sided: float = 0.00135
    #: Draws, and moments of momenta, below which a temperature has no standard error.
    fewest_draws: int = 50
    fewest_moments: int = 16
    #: Standard errors of a temperature (few draws) and of an sd (heavy tails), relative to those of
    #: normal draws, above which a check is inconclusive.
    wide: float = 2.0
    heavy: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Explosion:
    """Thresholds beyond which chains count as running away from the posterior: distance from 0,
    virial temperature, and fall of the log joint."""

    #: Distance from 0 in unconstrained space.
    distance: float = 1e15
    #: Temperature of the last quarter of a run, and its ratio to that of the first.
    hot: float = 300.0
    #: Draws of all chains in a quarter below which temperatures are not compared.
    fewest_draws: int = 6
    #: Nats per dimension by which the log joint falls if the step size is to blame.
    fallen: float = 100.0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Thresholds of checks on importance weights, of approximations and of left-out rows."""

    #: Pareto k above which weights are not reliable (Vehtari et al. 2024).
    pareto_k: float = 0.7
    #: Largest ratio of the posterior's width to the fit's.
    spread: float = 1.5
    #: Largest error of log weights that are estimated from some of the rows, in nats.
    error: float = 0.2
    #: Draws below which Pareto k is not estimated.
    fewest_draws: int = 20
    #: Factor on a fit's draws where theirs leave its bias unknown.
    more_draws: int = 8


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Limits of the check that gradients are those of the log density."""

    #: Gap, in nats (root mean square), between the difference of log densities and the integral of
    #: the gradient: a normal whose density jumps by a third at its median has a gap of 0.2, and a
    #: mean that is off by 0.1 sds.
    gap: float = 0.2
    #: Errors of the integral that the gap must exceed as well.
    errors: float = 5.0
    #: Pairs of draws: at most, and at least.
    pairs: int = 32
    fewest_pairs: int = 4
    #: Fraction of the gradients of the run's draws that the check may take; seven times as many
    #: where a gap has to be told from an error of the integral.
    fraction: float = 0.1
    #: Rows of which the log density consists, at most.
    rows: int = 1_000
    #: Panels of the line between two draws, and how often one of them is halved.
    panels: int = 4
    halvings: int = 12


MIXING = Mixing()
TEMPERATURE = Temperature()
EXPLOSION = Explosion()
WEIGHTS = Weights()
GRADIENTS = Gradients()


def errors_by_chance(probability: float, count: int) -> float:
    """How many standard errors away from 0 the largest of `count` estimates has to be to count as
    significant: chance exceeds that with at most the given probability (one-sided, Bonferroni)."""
    return -NormalDist().inv_cdf(probability / count)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How the nodes over which local latents are summed out are checked after a run."""

    #: Draws, and units of data, at which more nodes are placed anew.
    draws: int = 16
    units: int = 2000
    #: Standard errors that are added to the bias of a mean.
    errors: float = 2.6
    #: Largest sd of the log density's error, in nats: it moves sds by 5% at most, as an error
    #: quadratic in one direction that changes an sd by 5% has this sd.
    spread: float = 0.07


NODES = Nodes()
