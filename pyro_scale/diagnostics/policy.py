"""The thresholds of verdicts and warnings, grouped by what they judge.

`docs/diagnostics.md` quotes them, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """R-hat, effective draws, and modes that chains did not visit."""

    #: R-hat up to which chains agree, and above which they surely do not.
    agree: float = 1.01
    disagree: float = 1.05
    #: Draws from which on an R-hat is not chance: of all chains (Vehtari et al. 2021 ask for an ESS
    #: of 400), and of each.
    many_draws: int = 400
    many_each: int = 50
    #: R-hat above which chains disagree if there are fewer draws, and draws of each chain below
    #: which no warning is given.
    disagree_of_few: float = 1.3
    few_each: int = 20
    #: Draws of a chain below which a report says nothing of mixing or rounding.
    fewest_each: int = 8
    #: Fraction of the draws that must be effective.
    effective: float = 0.5
    #: Chains are in modes of their own if R-hat of each chain's halves is below the first, and that
    #: of all chains is not below the second.
    stays: float = 1.1
    apart: float = 1.3
    #: Chains that are many: `superchains=` says more, and their means give a standard error.
    many_chains: int = 20
    #: Acceptance rate below which a chain that has not moved is blamed on `lr`.
    few_accepted: float = 0.05
    #: Fraction of the variance that starts may explain: R-hat of 1.05, squared, less 1.
    remembered: float = 0.1
    #: Probability that chains seem to remember their starts by chance, per site.
    false_alarms: float = 0.001
    #: Elements of a site that are looked at.
    elements: int = 200
    #: Training rows whose predictions tell whether a network's chains agree.
    predicted_rows: int = 200
    #: Draws of a chain among which modes are looked for.
    draws_at_modes: int = 500
    #: Draws that a mode should have before its lack of any is reported.
    missed_draws: float = 5.0
    #: Fraction of the posterior from which on a mode without a draw is surely missed.
    missed: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Heat of minibatches and long steps, and Monte Carlo errors of a report's checks."""

    #: Factor on the temperature that is visible: 5% in sds.
    hot: float = 1.1
    #: The same where the factor is an estimate from some rows.
    surely_hot: float = 1.25
    #: Standard errors beyond which a table warns, and how often chance goes beyond three.
    errors: float = 3.0
    one_sided: float = 0.00135
    #: Draws, and moments of momenta, below which a temperature has no standard error.
    fewest_draws: int = 50
    fewest_moments: int = 16
    #: Probability that chance makes some element of a right run fail a check of the report.
    family_wise: float = 0.01
    #: Standard errors of a temperature and of an sd, over those of a normal, above which too little
    #: is known: few draws, heavy tails.
    wide: float = 2.0
    heavy: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Explosion:
    """Chains that are on their way to infinity."""

    #: Distance from 0 in unconstrained space.
    distance: float = 1e15
    #: Temperature of the last quarter of a run, and its factor over that of the first.
    hot: float = 300.0
    #: Draws of a quarter, of all chains, that tell.
    fewest_draws: int = 6
    #: Nats per dimension by which the log joint falls.
    fallen: float = 100.0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Importance weights, of approximations and of left-out rows."""

    #: Pareto k above which weights are not reliable (Vehtari et al. 2024).
    pareto_k: float = 0.7
    #: Sds of a fit by which the weights may move its mean.
    shift: float = 0.25
    #: Width of the posterior over that of the fit.
    spread: float = 1.5
    #: Error of log weights from some of the rows, in nats.
    error: float = 0.2
    #: Draws below which a tail has no shape.
    fewest_draws: int = 20


MIXING = Mixing()
TEMPERATURE = Temperature()
EXPLOSION = Explosion()
WEIGHTS = Weights()
