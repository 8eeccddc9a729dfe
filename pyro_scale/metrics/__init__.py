"""Metrics of predictions (uncertainty, scores, calibration, plots) and of draws.

All are functions of tensors, independent of models: predictions may come from any method of this
library, or from another one.  Draws are always the first dimension.
"""

from pyro_scale.metrics.calibration import coverage, pit
from pyro_scale.metrics.classification import accuracy, brier, nll
from pyro_scale.metrics.conformal import Interval, conformal
from pyro_scale.metrics.decomposition import Uncertainty, uncertainty, variance
from pyro_scale.metrics.nested_rhat import nested_r_hat
from pyro_scale.metrics.plots import plot_reliability, plot_risk_coverage
from pyro_scale.metrics.ranking import auroc, selective_accuracy
from pyro_scale.metrics.regression import log_predictive_density, rmse
from pyro_scale.metrics.reliability import ece
from pyro_scale.metrics.stein import ksd

__all__ = [
    "Interval",
    "Uncertainty",
    "accuracy",
    "auroc",
    "brier",
    "conformal",
    "coverage",
    "ece",
    "ksd",
    "log_predictive_density",
    "nested_r_hat",
    "nll",
    "pit",
    "plot_reliability",
    "plot_risk_coverage",
    "rmse",
    "selective_accuracy",
    "uncertainty",
    "variance",
]
