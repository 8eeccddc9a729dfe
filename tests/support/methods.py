"""The table of methods.  Contract tests go through its rows: a new sampler costs one."""

from typing import Any, NamedTuple

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.kernels import Kernel


class Row(NamedTuple):
    """What tests need to know of a method.

    Attributes:
        kernel: its kernel.
        lr: a large step that is stable where the precision over N is about 1.
        others: values of its other hyperparameters but the temperature, none a default's.
        sgd: whether it is SGD with momentum at temperature 0.
    """

    kernel: type[Kernel]
    lr: float
    others: dict[str, Any]
    sgd: bool = False

    @property
    def name(self):
        return self.kernel.__name__

    @property
    def sampler(self):
        return getattr(ps, self.name)

    @property
    def has_momentum(self):
        return "mass" in self.others

    def of(self, **hyperparameters):
        """The kernel with the row's values, but for these."""
        return self.kernel(**{"lr": self.lr, **self.others, **hyperparameters})


DAMPED = {"friction": 0.7, "mass": 1.5}
TABLE = [
    Row(kernels.BAOA, 0.3, DAMPED, sgd=True),
    Row(kernels.GHMC, 0.3, DAMPED),
    Row(kernels.SGHMC, 0.25, DAMPED, sgd=True),
    Row(kernels.SGLD, 0.3, {}),
    Row(kernels.SGNHT, 0.2, DAMPED),
    Row(kernels.UBU, 0.3, DAMPED),
    Row(kernels.pSGLD, 0.05, {"forgetting": 0.2, "damping": 0.3}),
]
#: Those that take minibatches, and temperature 0.
STOCHASTIC = [row for row in TABLE if not row.kernel.adjusted]
METHODS = {row.name: row for row in TABLE}
UNDERDAMPED = [row for row in TABLE if row.has_momentum]


def by_name(row):
    """A row's id."""
    return row.name if isinstance(row, Row) else None
