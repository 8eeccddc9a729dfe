"""What kernels with a position and a momentum share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Kernel, Theory
from pyro_scale.kernels.theory import UnderdampedTheory


class PhaseState(NamedTuple):
    """A chain's position and momentum, each [D]."""

    position: Tensor
    momentum: Tensor


@dataclass(frozen=True, kw_only=True)
class Underdamped(Kernel):
    """Langevin dynamics of a position and a momentum of mass m, which friction f damps.

        d theta = p/m dt,    dp = g dt - f p dt + sqrt(2 f m T) dw

    (the paper's B.2, where friction is f m).  As f is a rate, a vector of masses leaves all
    momenta to relax alike.  They start at their stationary N(0, m T), so at rest at
    temperature 0.
    """

    friction: Hyper = 1.0
    mass: Hyper = 1.0

    per_site: ClassVar[tuple[str, ...]] = ("lr", "friction", "mass")
    theory: ClassVar[Theory | None] = UnderdampedTheory()

    def init(self, position: Tensor, values: Values, noise: Tensor) -> Any:
        thermal = torch.sqrt(values["mass"] * values["temperature"])
        return PhaseState(position, thermal * noise)
