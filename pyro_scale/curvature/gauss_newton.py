"""The log density of many rows, whose curvature takes few passes through them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.precision import expansion_at
from pyro_scale.errors import ModelError, SiteError


@dataclass(frozen=True)
class GaussNewtonDensity(FullDataDensity):
    """The log joint of all rows, with the generalized Gauss-Newton matrix for their Hessian.

    That of the prior stays exact.  A Hessian goes through the rows once for each dimension, this
    matrix once in all (Martens, New insights and perspectives on the natural gradient method, JMLR
    2020).
    """

    def hessian(self, position: Tensor) -> Tensor:
        """The matrix over N, [D, D]."""
        return self.derivatives(position)[2]

    def derivatives(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The log joint, its gradient [D], the matrix [D, D]), all over N, in one pass."""
        found = expansion_at(self, position, self.layout.names, "ggn", dense=True)
        return found.value, found.slope, -found.precision / self.log_posterior.num_data

    @property
    def passes(self) -> int:
        """Gradients of all rows that value, gradient and matrix cost together."""
        return 2


def with_gauss_newton(density: FullDataDensity) -> FullDataDensity:
    """The same density with that matrix; with its Hessian where the model has none."""
    ours = GaussNewtonDensity(**_fields(density))
    few = ours.of_some_rows(1, 0)
    layout, device = density.layout, rows.device(density.data.first())
    try:
        few.hessian(torch.zeros(layout.size, dtype=layout.dtype, device=device))
    except (ModelError, SiteError):
        return density
    return ours


@dataclass(frozen=True)
class AnchoredDensity(FullDataDensity):
    """The log joint as some rows have it, whose Hessian is that of all rows at one point.

    Elsewhere it differs from that as some rows say: a control variate.  Without it, a group of
    which one row of a thousand was drawn would curve a thousand times too much.

    Attributes:
        shift: what all rows have there more than some, over N, [D, D].
    """

    shift: Tensor = field(default_factory=lambda: torch.zeros(()))

    def hessian(self, position: Tensor) -> Tensor:
        """The Hessian over N, [D, D]."""
        return super().hessian(position) + self.shift

    def hessian_times(self, position: Tensor, vector: Tensor) -> Tensor:
        """The Hessian over N times a vector, [D]."""
        return super().hessian_times(position, vector) + self.shift @ vector

    def hessian_diagonal(self, position: Tensor) -> Tensor:
        """Its diagonal, [D]."""
        return super().hessian_diagonal(position) + self.shift.diagonal()


def anchored(some: FullDataDensity, position: Tensor, precision: Tensor) -> AnchoredDensity:
    """The density of some rows with the curvature that all rows have at a position.

    Args:
        some: which stand for all, anchored elsewhere or not.
        position: [D].
        precision: minus the Hessian of all rows there, or what stands for it, [D, D], in nats.
    """
    fields = _fields(some)
    at_anchor = -precision.to(position) / some.log_posterior.num_data
    own = FullDataDensity(**fields).hessian(position)
    return AnchoredDensity(**fields, shift=at_anchor - own)


def _fields(density: FullDataDensity) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(FullDataDensity)]
    return {name: getattr(density, name) for name in names}
