"""Log joint densities whose Hessian is an approximation that takes few passes through the data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.precision import CurvatureSpec, expand
from pyro_scale.errors import ModelError, SiteError


@dataclass(frozen=True)
class GaussNewtonDensity(FullDataDensity):
    """The log joint of all rows, with the generalized Gauss-Newton matrix as its Hessian.

    The prior's Hessian stays exact.  A Hessian goes through the rows once for each dimension, this
    matrix once in all (Martens, New insights and perspectives on the natural gradient method, JMLR
    2020).
    """

    def derivatives(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The log joint, its gradient [D], minus the Gauss-Newton precision [D, D] in place of the
        Hessian) at a position [D], all divided by N, in one pass."""
        spec = CurvatureSpec(position, self.layout.names, "ggn")
        value, slope, precision = expand(self, spec, dense=True)
        return value, slope, -precision / self.log_posterior.num_data

    def derivatives_at(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The log joint `[P]`, its gradients `[P, D]`, minus the Gauss-Newton precisions `[P, D,
        D]`) at each of P positions `[P, D]`, all divided by N, in a pass for each."""
        return self._derivatives_one_by_one(positions)

    @property
    def at_once(self) -> int:
        """The number of positions whose matrices are computed together: 1."""
        return 1

    @property
    def passes(self) -> int:
        """The cost of one call of `derivatives`, in gradients over all rows of data."""
        return 2


def with_gauss_newton(density: FullDataDensity) -> FullDataDensity:
    """A density with the same log joint and the Gauss-Newton matrix in place of its Hessian; the
    density itself if the model has no such matrix (because of a likelihood term without a
    distribution, for example).
    """
    replaced = GaussNewtonDensity(**_fields(density))
    layout, device = density.layout, rows.device(density.data.first())
    try:
        origin = torch.zeros(layout.size, dtype=layout.dtype, device=device)
        replaced.of_some_rows(1, 0).hessian(origin)
    except (ModelError, SiteError):
        return density
    return replaced


@dataclass(frozen=True)
class AnchoredDensity(FullDataDensity):
    """The log joint of a sample of the rows, whose Hessian at one point is that of all rows.

    At any other point, the difference between the sample's Hessians at the two points is added (a
    control variate).  Without it, the curvature of a group would be a thousand times too large if
    one of its thousand rows was drawn.

    Attributes:
        shift: the Hessian of all rows minus that of the sample at the point, divided by N, [D, D].
    """

    shift: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(()))

    def hessian(self, position: Tensor) -> Tensor:
        """The Hessian of the log joint at a position [D], divided by N, [D, D]: that of the sample
        of rows plus a constant, with which it is exactly that of all rows at one point.
        """
        return super().hessian(position) + self.shift

    def hessians(self, positions: Tensor) -> Tensor:
        """The same at each of P positions `[P, D]`: `[P, D, D]`."""
        return super().hessians(positions) + self.shift

    def hessian_times(self, position: Tensor, vector: Tensor) -> Tensor:
        """The Hessian of the log joint at a position [D], divided by N and corrected to be that of
        all rows at one point, times a vector [D]: a vector [D].
        """
        return super().hessian_times(position, vector) + self.shift @ vector

    def hessian_diagonal(self, position: Tensor) -> Tensor:
        """The diagonal [D] of the Hessian of the log joint at a position [D], divided by N and
        corrected to be that of all rows at one point.
        """
        return super().hessian_diagonal(position) + self.shift.diagonal()


def anchored(sample: FullDataDensity, position: Tensor, precision: Tensor) -> AnchoredDensity:
    """The density of a sample of the rows with the curvature of all rows: at `position` its Hessian
    is minus `precision`, elsewhere it differs from that as the sample's Hessian does.

    Args:
        sample: the density of the sample; it may be anchored elsewhere.
        position: the point, [D].
        precision: minus the Hessian of all rows there, or an approximation, [D, D], in nats.
    """
    fields = _fields(sample)
    at_anchor = -precision.to(position) / sample.log_posterior.num_data
    of_sample = FullDataDensity(**fields).hessian(position)
    return AnchoredDensity(**fields, shift=at_anchor - of_sample)


def _fields(density: FullDataDensity) -> dict[str, Any]:
    fields = dataclasses.fields(FullDataDensity)
    return {field.name: getattr(density, field.name) for field in fields}
