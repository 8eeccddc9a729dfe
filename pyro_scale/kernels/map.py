"""Maximum a posteriori, by a stochastic optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.optimizer import Optimizing, ascend, init_optimizer


class MAPState(NamedTuple):
    """State of a search for the mode by an optimizer.

    Attributes:
        position: unconstrained parameters, `[D]`.
        optimizer: state of the optimizer.
    """

    position: Tensor
    optimizer: Any


@dataclass(frozen=True, kw_only=True)
class MAP(Optimizing):
    """Maximum a posteriori estimation by a stochastic optimizer:

        theta' = theta + optimizer(g(theta)),    g = gradient of log joint / N.

    Args:
        optimizer: optimizer that minimizes the negative log joint divided by N: the mean loss of a
            row of data plus the negative log prior divided by N, the number of rows.
    """

    normals: ClassVar[int] = 0
    settings: ClassVar[tuple[str, ...]] = ("optimizer",)

    def init(self, position: Tensor, values: Values, noise: Tensor) -> MAPState:
        return MAPState(position, init_optimizer(self.optimizer_at(values), [position]))

    def update(
        self, state: MAPState, target: Target, values: Values, noise: Tensor
    ) -> tuple[MAPState, Evaluation]:
        gradient, evaluation = target.grad(state.position)
        (position,), optimizer = ascend(
            self.optimizer_at(values), [gradient], state.optimizer, [state.position]
        )
        return MAPState(position, optimizer), evaluation
