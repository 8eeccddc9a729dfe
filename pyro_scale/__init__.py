"""Minibatch Bayesian inference for Pyro models.

`LogPosterior` turns a Pyro model, or an `nn.Module` with a prior on its weights, into a
minibatch-scaled log posterior.  The inference classes sample or approximate it on tensors or a
`DataLoader`, and their draws go to ArviZ.
"""

from pyro_scale import errors, metrics
from pyro_scale.core import schedules
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.curvature.ggn import Curvature
from pyro_scale.diagnostics.replay import Replay, replay
from pyro_scale.infer.compare import compare
from pyro_scale.infer.ekf import EKF
from pyro_scale.infer.explain import explain
from pyro_scale.infer.laplace import Laplace
from pyro_scale.infer.map import MAP
from pyro_scale.infer.nuts import NUTS
from pyro_scale.infer.sample import sample
from pyro_scale.infer.sampler import Sampler
from pyro_scale.infer.samplers import BAOA, GHMC, SGHMC, SGLD, SGNHT, UBU, pSGLD
from pyro_scale.infer.sbc import sbc
from pyro_scale.infer.svgd import SVGD
from pyro_scale.infer.versions import __version__ as __version__
from pyro_scale.infer.versions import show_versions
from pyro_scale.infer.vi import IVON, VI
from pyro_scale.marginal.grouped import Grouped
from pyro_scale.marginal.summed import marginalize
from pyro_scale.model.init_strategies import init_to_module
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.nn.bayesianize import bayesianize
from pyro_scale.model.nn.norm import FilterResponseNorm, replace_batchnorm
from pyro_scale.model.nn.priors import weight_decay
from pyro_scale.results.files import load
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.results.particles import ParticlePosterior
from pyro_scale.results.posterior import Posterior

__all__ = [
    "BAOA",
    "EKF",
    "GHMC",
    "IVON",
    "MAP",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "SVGD",
    "UBU",
    "VI",
    "Curvature",
    "Evaluation",
    "FilterResponseNorm",
    "GaussianPosterior",
    "Grouped",
    "Laplace",
    "LogPosterior",
    "ParticlePosterior",
    "Posterior",
    "Replay",
    "Sampler",
    "bayesianize",
    "compare",
    "errors",
    "explain",
    "init_to_module",
    "load",
    "marginalize",
    "metrics",
    "pSGLD",
    "replace_batchnorm",
    "replay",
    "sample",
    "sbc",
    "schedules",
    "show_versions",
    "weight_decay",
]
