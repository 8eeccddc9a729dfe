"""One file per method: pure functions on vectors, which know no Pyro and no data."""

from pyro_scale.kernels.baoa import BAOA
from pyro_scale.kernels.kernel import Kernel, Target
from pyro_scale.kernels.sghmc import SGHMC
from pyro_scale.kernels.sgld import SGLD

__all__ = ["BAOA", "SGHMC", "SGLD", "Kernel", "Target"]
