"""Samplers and optimizers, one file for each method: pure functions on vectors, independent of Pyro
and of the data.

In docstrings, N is the number of rows of the data, and D the number of unconstrained parameters.
"""

from pyro_scale.kernels.baoa import BAOA
from pyro_scale.kernels.ghmc import GHMC
from pyro_scale.kernels.hyperparameters import Hyperparameters
from pyro_scale.kernels.ivon import IVON
from pyro_scale.kernels.kernel import Kernel, Target
from pyro_scale.kernels.map import MAP
from pyro_scale.kernels.psgld import pSGLD
from pyro_scale.kernels.sghmc import SGHMC
from pyro_scale.kernels.sgld import SGLD
from pyro_scale.kernels.sgnht import SGNHT
from pyro_scale.kernels.svgd import SVGD
from pyro_scale.kernels.ubu import UBU
from pyro_scale.kernels.vi import VI, FullRank, MeanField

__all__ = [
    "BAOA",
    "GHMC",
    "IVON",
    "MAP",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "SVGD",
    "UBU",
    "VI",
    "FullRank",
    "Hyperparameters",
    "Kernel",
    "MeanField",
    "Target",
    "pSGLD",
]
