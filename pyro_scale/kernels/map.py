"""Maximum a posteriori, by a stochastic optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pyro_scale.kernels.hyperparameters import Hyperparameters
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.optimiser import Optimiser, begun, stepped


class MAPState(NamedTuple):
    """The position [D], and what the optimiser remembers."""

    position: Tensor
    optimiser: Any


@dataclass(frozen=True, kw_only=True)
class MAP(Hyperparameters):
    """theta' = theta + optimiser(g(theta)),    g = gradient of log joint / N.

    Args:
        optimiser: of the negative log joint over N: the mean loss over rows, plus the prior's
            over N.
    """

    optimiser: Optimiser

    normals: ClassVar[int] = 0
    settings: ClassVar[tuple[str, ...]] = ("optimiser",)

    def init(self, position: Tensor, noise: Tensor) -> MAPState:
        return MAPState(position, begun(self.optimiser, [position]))

    def update(self, state: MAPState, target: Target, noise: Tensor) -> tuple[MAPState, Any]:
        gradient, evaluation = target.grad(state.position)
        (position,), optimiser = stepped(
            self.optimiser, [gradient], state.optimiser, [state.position]
        )
        return MAPState(position, optimiser), evaluation
