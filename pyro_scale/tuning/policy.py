"""Thresholds and limits of tuning and calibration, grouped by purpose, with a reason for each.

Modules read the instances below each class.  A test passes a smaller one where a function takes it,
or replaces the instance in the module that reads it.  The `SINGLE_*` instances are for calibration,
where a data set has one chain, and thousands of chains are moved by one compiled step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Search:
    """Limits of the searches for modes: how many there are and where they start, what they may
    cost, and how close the ends of two searches have to be to count as the same mode."""

    #: Searches: one for each chain, within these bounds.
    fewest: int = 4
    most: int = 8
    #: Places that are compared for a start: prior draws, and places further out.
    places: int = 128
    #: The number of these places for a model that is evaluated at one place at a time.
    places_one_by_one: int = 16
    #: Places that are evaluated at once.
    at_once: int = 32
    #: Rows of the log density that compares them.
    rows: int = 2_000
    #: Places are at most this many times further from 0 than 2.
    furthest: float = 16.0
    #: A search without a mode is repeated from nearer to 0: factors on the start.
    shrinkages: tuple[float, ...] = 1.0, 0.25, 0.0625
    #: Newton steps of a search and its repetitions, at most. Of 58 posteriors, no mode was more
    #: than 60 steps away; without a mode, the first steps already lead past the posterior.
    steps: int = 64
    #: Fraction of a run's rows that searches may take.
    fraction: float = 0.10
    #: Fraction of the gradients of NUTS that searches after it may take.
    fraction_of_nuts: float = 0.05
    #: Modes closer than this are one: in sds, and in nats of evidence.
    same_sds: float = 3.0
    same_nats: float = 2.0
    #: Modes closer than this are one, whatever their evidence: in many dimensions, evidence changes
    #: by nats within a fraction of an sd.
    surely_same_sds: float = 0.5
    #: Nats of evidence below the best mode, beyond which a mode's posterior mass is negligible.
    negligible_nats: float = 10.0
    #: Curvatures below this fraction of the largest are set to it: flat directions.
    flattest: float = 1e-10
    #: Nats per dimension by which the posterior may differ from the mode's Gaussian. Beyond that,
    #: Gaussians along the search path are tried.
    gap_nats: float = 0.5
    #: Points on the search path whose Gaussians are compared, and draws of each Gaussian.
    path_places: int = 48
    path_draws: int = 64


@dataclass(frozen=True, kw_only=True)
class ManyRows:
    """How many rows the stages of a search for modes through many rows have: at first `rows_each`
    for each dimension (within `least_rows` and `most_rows`), then `growth` times as many, and how
    close, in nats a dimension, a stage comes to its mode."""

    #: Rows of the first stage: per dimension, at least, and at most.
    rows_each: int = 500
    least_rows: int = 5_000
    most_rows: int = 20_000
    #: Factor on the rows from one stage to the next.
    growth: int = 16
    #: A stage ends where less than this is left to gain, in nats per dimension: the mode of the
    #: next stage is further away than that.
    near_nats: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Limits on the whitened coordinates in which chains move (up to which dimension they are a
    matrix, on how many rows curvatures are evaluated), and on how far from a mode chains start."""

    #: Dimensions up to which chains are whitened by a matrix, and curvature is held as one.
    dense: int = 500
    #: The same limit in calibration, where every chain has its own matrix.
    dense_single: int = 100
    #: Chains start this many sds of the mode's Gaussian away, as R-hat needs overdispersed starts.
    dispersion: float = 2.0
    #: No chain starts further below the mode than this: nats per dimension, and nats added.
    deep_each: float = 4.0
    deep: float = 10.0
    #: Times that a start is moved halfway to the mode; a negligible distance is left then.
    halvings: int = 40
    #: Rows in the density for frequent evaluations of the curvature: at most, and at least.
    most_rows: int = 20_000
    least_rows: int = 2_000
    #: Most rows times dimensions of such an evaluation, as a Hessian passes through the rows once
    #: for each dimension; and the same limit if these rows are a sample of more, which gives the
    #: curvature away from the mode.
    work: tuple[int, int] = 2**20, 2**16

    def depth(self, size: int) -> float:
        """The largest distance in nats of a start's log joint below that of the mode; starts
        further down are moved closer.

        Args:
            size: dimension of the posterior.
        """
        return self.deep_each * size + self.deep


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Lengths and thresholds of the windows of warm-up, each twice as long as the one before."""

    #: Steps of the first window.
    first_window: int = 256
    #: Windows, at most: the last has 64 times as many steps.
    most_windows: int = 7
    #: Draws that are kept of a window, per chain.
    draws: int = 256
    #: Fraction of a window that is left out, as chains still move to where they settle.
    left_out: float = 0.25
    #: Windows agree if no direction's sd changes by more than this factor beyond chance,
    most_change: float = 1.25
    #: and if R-hat is below this.
    most_r_hat: float = 1.1
    #: The fraction of groups that must agree, or have settled, to end a stage.
    most_groups: float = 0.75
    #: Factor by which a window may change a direction's sd.
    largest_change: float = 3.0
    #: Distance from the median, in sds, beyond which draws do not stretch the geometry.
    far: float = 8.0
    #: Dimensions above which a window has too few draws for a covariance.
    matrix: int = 128
    #: How often broken chains restart at half the step size.
    halvings: int = 8
    #: Draws at which the curvature is evaluated after a window.
    looks: int = 32
    #: The same from this many dimensions on: the curvature then costs as many gradients.
    wide: int = 64
    looks_if_wide: int = 8
    #: Fraction of these draws at which the step size must be well inside the stable range.
    steepest: float = 0.9
    #: A chain this far below its best draw has left the posterior: nats per dimension, and added.
    fallen_each: float = 10.0
    fallen: float = 20.0

    def depth(self, size: int) -> float:
        """The fall of the log joint, in nats, below a chain's best draw from which the chain counts
        as having drifted away from the posterior.

        Args:
            size: dimension of the posterior.
        """
        return self.fallen_each * size + self.fallen


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Tolerated errors of a run's posterior means (in posterior sds) and sds (relative), by which
    the run is tuned and judged."""

    #: Of a mean, in posterior sds.
    mean: float = 0.1
    #: Of an sd, relative.
    sd: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Pilots:
    """Lengths and thresholds of pilots: coupled runs that measure the bias of a step size."""

    #: Pilots, at most.
    most: int = 5
    #: Draws that are kept of a pilot, per chain.
    draws: int = 512
    #: Steps of a pilot, in autocorrelation times.
    times: float = 60.0
    #: Steps of a pilot: at least, and at most.
    least: int = 512
    longest: int = 2**15
    #: Bias that a step size may have, of means in sds and of sds: two fifths of the tolerance.
    mean_bias: float = 0.04
    sd_bias: float = 0.02
    #: Standard errors beyond which a bias is significant.
    errors: float = 2.0
    #: Standard errors by which the bias of every element must be within tolerance for a YES. Four
    #: chains have 16 parts to estimate them from; a bias at the tolerance then passes in 1% of runs
    #: (1.6% where the better of two independent estimates counts); with 2, in 3%. More elements
    #: make that rarer, as all must pass.
    errors_of_yes: float = 2.6
    #: Parts of a chain whose means give the standard error.
    parts: int = 4
    #: Factors on a step size that is too long: at least, and at most.
    shorter: float = 0.4
    longer: float = 0.8
    #: Factor if the coupled paths part: the step is too long in the stiffest direction.
    if_vague: float = 0.7
    #: Fraction of the draws that are to be effective by the thinning that follows a pilot; of the
    #: default's 4,000, more than twice the 400 that a report asks for.
    effective: float = 0.25
    #: Times that a pilot is repeated at twice the length because its bias is not known.
    lengthenings: int = 2


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Lengths and thresholds of pilots for kernels that accept or reject proposals."""

    #: Acceptance rate.  On six models of benchmarks/exact, effective draws per gradient are flat
    #: from 0.8 to 0.9, or best at 0.9; shorter steps go further into narrow places.
    target: float = 0.9
    #: Factors on the step size after a pilot: at least, and at most.
    shorter: float = 0.25
    longer: float = 2.0
    #: A step size is settled where its factor is within this: acceptance rates of 0.85 to 0.93.
    settled: float = 1.15
    #: Pilots, at most.
    most: int = 10
    #: Draws that are kept of a pilot, per chain.
    draws: int = 512
    #: Steps of a pilot: in autocorrelation times, and at most.
    times: float = 60.0
    longest: int = 2**15


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise of minibatches: its tolerated effects on chains, and the rows from which it is
    estimated."""

    #: Relative rise of the temperature that is allowed, in the direction where it is largest.
    most_heat: float = 0.04
    #: The same if a larger batch would remove the heat.
    little_heat: float = 0.01
    #: Rows of a batch, at least, where the library chooses them.
    fewest_rows: int = 64
    #: Kick that a row of a batch may give a chain, in sds of the momentum; the chain moves by half
    #: as many.  Rows of a small group are rare and count N/B times: on average they hardly heat,
    #: yet kicks that grow with the distance from the center throw chains far out.
    most_kick: float = 2.0
    #: Distance of such a chain from the center, in sds: in the run, and at overdispersed starts.
    far: float = 3.0
    far_at_first: float = 6.0
    #: Places at which the noise of all rows is evaluated.
    places: int = 64
    #: Least distance from the center, in sds along the gradient's direction, at which a row's
    #: gradient is used: nearer to the center, what control variates leave of the gradient is mostly
    #: rounding.
    near: float = 0.3
    #: Rows that estimate the noise at one place, or where the model takes no single rows.
    rows: int = 4096
    #: Draws that estimate the noise of a run: at most (8,192 rows: a relative standard error of
    #: 1.6%, if normal), and at least (256 rows: 9%); and rows at each.
    draws: int = 128
    fewest_draws: int = 4
    rows_each: int = 64


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Limits on step sizes that are chosen by theory: in whitened coordinates, or at the mode."""

    #: The longest in whitened coordinates.
    longest: float = 0.5
    #: Error of the log sd of a standard normal that the longest may have.
    sd_bias: float = 0.015
    #: Friction in whitened coordinates: about that at which all directions relax fastest.
    friction: float = 1.0
    #: Dimensions up to which the Hessian at the mode is held.
    most_dimensions: int = 1000
    #: Fraction of the stable range that is used, as posteriors are not quite Gaussian.
    safety: float = 0.5
    #: Draws of the Gaussian at which the posterior is evaluated, and rows whose gradients are
    #: computed.
    draws: int = 4
    rows: int = 2048
    #: Fraction of its exact variance to which a thermostat may cool a direction: predictions below
    #: are not credible.
    least_variance: float = 0.1
    #: Curvatures below this fraction of the largest are set to it: flat directions.
    flattest: float = 1e-12
    #: Predicted error, in posterior sds, above which a run is of little use.
    large_error: float = 1.0
    #: Steps per draw that a step size is chosen for where the thinning is not known yet.
    thinning: int = 10


@dataclass(frozen=True, kw_only=True)
class Training:
    """Limits for networks, and models at temperature 0: batches, when training ends, and the
    warm-up after."""

    #: Weights up to which a network without hidden layers is sampled as any other posterior.
    few_weights: int = 500
    #: Rows up to which each step takes all of them, and rows of a batch above; of a network.
    few_rows: int = 20_000
    batch: int = 1024
    network_batch: int = 128
    #: Rows times weights up to which chains of a network take all rows at each step.
    few_numbers: int = 2**22
    #: Epochs between two checks of the loss, and the least steps between them; training takes at
    #: least four of these intervals.
    epochs: int = 5
    steps: int = 50
    #: Checks after which training ends even if the loss still falls.
    most_looks: int = 60
    #: Standard errors beyond which a change of the loss is significant.
    errors: float = 2.0
    #: Parts of a quarter of the trace whose means give the standard error.
    parts: int = 25
    #: Change from one quarter to the next that is negligible: nats per root of the dimensions.
    small_change: float = 0.1
    #: Rows that give the curvature.
    rows: int = 2_000
    #: Fraction of the stable range that is used: with minibatches; in units of the prior, where
    #: friction is too small to remove the heat of steeper places.
    safety: float = 0.5
    safety_whitened: float = 0.25
    #: Draws of warm-up at which the curvature is evaluated, per chain.
    looks: int = 4
    #: Steps from the first draw to the last, per step of warm-up.
    length: int = 3
    #: Rows times weights times steps of a warm-up that takes a second or less: a warm-up has as
    #: many steps, even if training took fewer.
    cheap: int = 2**26


@dataclass(frozen=True, kw_only=True)
class Simulations:
    """Limits, in a calibration, on the draws from the posterior of each simulated data set."""

    #: Draws that a rank is taken among.
    ranked: int = 100
    #: Draws of a chain before they are thinned to these.
    draws: int = 400
    #: Effective draws of a chain that are enough.
    least_ess: int = 200
    #: Fraction of chains that may have fewer.
    slow: float = 0.01
    #: Times that thinning is doubled for the others; and that NUTS draws twice as many.
    doublings: int = 8
    doublings_of_nuts: int = 4
    #: Passes of a chain through its data, at most.
    most_passes: int = 200_000
    #: Thinning, in autocorrelation times of a chain that is among the slowest.
    thinning: float = 0.6


SEARCH = Search()
MANY_ROWS = ManyRows()
GEOMETRY = Geometry()
WARM_UP = WarmUp()
SINGLE_WARM_UP = WarmUp(looks=2, looks_if_wide=2, steepest=1.0)
TOLERANCE = Tolerance()
PILOTS = Pilots()
#: The standard errors of one chain are too rough to decide whether a bias is known.
SINGLE_PILOTS = Pilots(most=4, if_vague=1.0, lengthenings=0)
ACCEPTANCE = Acceptance()
SINGLE_ACCEPTANCE = Acceptance(most=6, draws=256, times=30.0, settled=1.3)
NOISE = Noise()
STEP_SIZE = StepSize()
TRAINING = Training()
SIMULATIONS = Simulations()
