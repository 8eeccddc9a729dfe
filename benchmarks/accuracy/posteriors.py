"""Published posteriors as plain Pyro models: those of posteriordb, from their descriptions.

Set torch's default dtype to float64 before use.
"""

from __future__ import annotations

import others
import regressions as of
from entry import Posterior
from regressions import half_cauchy, half_normal, linear

POSTERIORS = (
    linear(
        "kidiq-kidscore_momhs",
        "434 test scores by a binary column, in raw units: sigma is 20, condition number 10^4",
        of.kidscore_momhs,
        32,
        half_cauchy(2.5),
    ),
    linear(
        "kidiq-kidscore_momiq",
        "434 test scores by IQ, in raw units: condition number 10^5",
        of.kidscore_momiq,
        32,
        half_cauchy(2.5),
    ),
    linear(
        "kidiq-kidscore_momiq-scaled",
        "434 test scores in units of 20, by standardized IQ",
        of.kidscore_momiq_scaled,
        32,
        half_cauchy(2.5 / 20),
    ),
    linear(
        "kidiq_with_mom_work-kidscore_interaction_z",
        "434 test scores in raw units, standardized predictors and their product",
        of.kidscore_interaction_z,
        32,
    ),
    linear(
        "earnings-earn_height-scaled",
        "1192 earnings by height; dollars and inches standardized",
        of.earn_height,
        64,
    ),
    linear(
        "earnings-logearn_interaction_z",
        "1192 log earnings by standardized height, sex and their product",
        of.logearn_interaction_z,
        64,
    ),
    linear(
        "mesquite-logmesquite_logvolume",
        "46 bushes, log weight by log volume; all rows at every step",
        of.logmesquite_logvolume,
        None,
    ),
    linear("nes1996-nes", "1043 voters, nine raw columns: condition number 10^3", of.nes, 64),
    linear(
        "sblri-blr",
        "100 rows, five independent columns of sd 100, noise of sd 1: condition number 10^4",
        of.simulated,
        10,
        half_normal(10.0),
        10.0,
    ),
    linear(
        "sblrc-blr-scaled",
        "100 rows, five correlated columns, in units of their sd of 100",
        of.simulated_scaled,
        10,
        half_normal(10.0),
        1000.0,
    ),
    linear(
        "arK-arK",
        "an autoregression of order 5, 195 rows of lagged values",
        of.autoregression,
        16,
        half_cauchy(2.5),
        10.0,
    ),
    of.KILPISJARVI,
    Posterior(
        "eight_schools-eight_schools_noncentered",
        "8 schools, 10 dimensions: a funnel, non-centered; all rows at every step",
        others.eight_schools,
        lambda d: (d["y"], d["sigma"]),
        sites=("theta", "mu", "tau"),
    ),
    Posterior(
        "arma-arma11",
        "200 values of a series; errors are a recurrence, so no minibatches",
        others.arma11,
        lambda d: (d["y"],),
        sites=("mu", "phi", "theta", "sigma"),
        start=others.stable,
    ),
    Posterior(
        "garch-garch11",
        "200 values of a series; variances are a recurrence, so no minibatches",
        others.garch11,
        lambda d: (d["y"],),
        sites=("mu", "alpha0", "alpha1", "beta1"),
    ),
    Posterior(
        "low_dim_gauss_mix-low_dim_gauss_mix",
        "1000 rows of a mixture of two normals with ordered means",
        others.low_dim_gauss_mix,
        lambda d: (d["y"],),
        64,
        sites=("mu", "sigma", "theta"),
        start=others.apart,
    ),
    Posterior(
        "gp_pois_regr-gp_pois_regr",
        "11 counts under a Gaussian process: a Cholesky factor at every step",
        others.gp_pois_regr,
        lambda d: (d["x"], d["k"]),
        sites=("rho", "alpha", "f"),
        start=others.calm,
    ),
    Posterior(
        "hmm_example-hmm_example",
        "100 values of a hidden Markov chain, its states summed out; no minibatches",
        others.hmm_example,
        lambda d: (d["y"],),
        sites=("theta1", "theta2", "mu"),
        start=others.at_prior_means,
    ),
)
