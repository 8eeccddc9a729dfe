"""Laplace's Gaussian at a mode, and the log evidence that it gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.memory import check_fits
from pyro_scale.distributed.ranks import Ranks
from pyro_scale.errors import PyroScaleError
from pyro_scale.fullbatch.density import NEAR, FullDataDensity, no_mode
from pyro_scale.fullbatch.kronecker import kronecker_at
from pyro_scale.fullbatch.low_rank import low_rank_at
from pyro_scale.fullbatch.precision import CurvatureKind, Expansion, expansion_at, gaussian_at
from pyro_scale.fullbatch.shared import SharedDensity, sums_of

T = TypeVar("T")
#: Which elements a Gaussian knows to be correlated: none, all, those of a
#: weight, or some directions.
GaussianStructure: TypeAlias = Literal["diag", "dense", "kron", "low_rank"]
#: Those that are made of the rows' terms.
OF_ROWS: tuple[GaussianStructure, ...] = ("kron", "low_rank")

#: Matrices that are held at once: the precision, its factor, the covariance's.
_MATRICES = 6
#: What to do where there is no mode.
_WITHOUT_MODE = "pass mode=, a fitted MAP or a dict of values, or start nearer (init_strategy=)"
#: Elements up to which a diagonal Gaussian's mode, too, is found by Newton's method.
_FEW = 500
#: Steps of L-BFGS that look for the best of what is tuned, at most.
_TUNING_STEPS = 50


class Candidate(NamedTuple):
    """A point, and the Gaussian there.

    Attributes:
        center: the point, [D].
        gaussian: over some sites.
        log_evidence: in nats.
        distance: the square of that to the mode, in the Gaussian's sds, by a step of Newton's
            method.
    """

    center: Tensor
    gaussian: Gaussian
    log_evidence: float
    distance: float


@dataclass(frozen=True)
class Search:
    """Looks for candidates.

    Attributes:
        density: the log joint of all rows.
        sites: which have a Gaussian.
        kind: the curvature.
        structure: of the Gaussian.
        seed: of Monte Carlo.
        notes: what of the curvature is estimated.
        num_rows: rows at a time.
        held: places of params that stay as they are.
        tuned: places of params that are set by the evidence.
        rank: of a Gaussian of low rank.
        corrected: whether Kronecker factors have the curvature's own diagonal in their bases.
    """

    density: FullDataDensity
    sites: tuple[str, ...]
    kind: CurvatureKind
    structure: GaussianStructure
    seed: int
    notes: Sequence[str] = ()
    num_rows: int | None = None
    held: Tensor | None = None
    tuned: Tensor | None = None
    rank: int = 20
    corrected: bool = False

    def best(self, start: Tensor) -> Candidate:
        """The nearest candidate, from a position [D]; over what is tuned, that of most evidence.

        Raises:
            ArgumentError: there is none that could be found.
        """
        if self.tuned is None:
            return self._nearest(start)
        tuned, last = self.tuned, start

        def candidate(values: Tensor) -> Candidate:
            nonlocal last  # each search starts where the last one ended
            found = self._nearest(last.index_put((tuned,), values))
            last = found.center
            return found

        def evidence(values: Tensor) -> tuple[float, Tensor]:
            """The log evidence and its slope: at a mode, that of the log joint is its own; that of
            the log determinant is taken by differences."""
            mode = candidate(values)
            _, slope = self.density.grad(mode.center)
            slope = self.density.log_posterior.num_data * slope[tuned]
            step = torch.finfo(values.dtype).eps ** (1 / 3)
            units = step * torch.eye(len(values)).to(values)
            above, below = (
                torch.stack([candidate(values + sign * unit).gaussian.log_det for unit in units])
                for sign in (1, -1)
            )
            return mode.log_evidence, slope + (above - below) / (4 * step)

        return candidate(maximize(evidence, start[tuned]))

    def at(self, center: Tensor) -> Candidate:
        """The candidate at a point [D]."""
        value, slope, gaussian = self._around(center)
        num_data = self.density.log_posterior.num_data
        total = num_data * slope
        evidence = num_data * value + (len(slope) * math.log(2 * math.pi) + gaussian.log_det) / 2
        distance = float(total @ gaussian.covariance_times(total))
        return Candidate(center, gaussian, float(evidence), distance)

    @property
    def _places(self) -> Tensor:
        """Where in a position the Gaussian's elements are."""
        return self.density.layout.places(self.sites)

    def _nearest(self, start: Tensor) -> Candidate:
        moves = torch.ones_like(start)
        for places in (self.held, self.tuned):
            if places is not None:
                moves[places] = 0
        mode = self.density.lbfgs(start, _WITHOUT_MODE, moves).position
        num_data, places = (
            self.density.log_posterior.num_data,
            self.density.layout.places(self.sites),
        )
        if self.structure == "dense" or len(places) <= _FEW:
            mode = self.density.newton_refine(
                mode, lambda at: self._expansion(at, dense=True).precision / num_data, places
            ).position
        candidate = self.at(mode)
        if not candidate.distance <= NEAR * len(places):
            raise no_mode(_WITHOUT_MODE)
        return candidate

    def _around(self, center: Tensor) -> tuple[Tensor, Tensor, Gaussian]:
        """(The log joint over N, its gradient over the sites [d], the Gaussian there)."""
        if self.structure in OF_ROWS:
            assert self.kind != "hessian"
            value, slope = self.density.grad(center)
            where, how = (self.density, center, self.sites, self.kind), (self.seed, self.num_rows)
            if self.structure == "kron":
                found = kronecker_at(*where, *how, self.corrected)
                return value, slope[self._places], found
            return value, slope[self._places], low_rank_at(*where, self.rank, *how)
        value, slope, precision = self._expansion(center, self.structure == "dense")
        return value, slope, gaussian_at(self.density, center, self.sites, precision)

    def _expansion(self, center: Tensor, dense: bool) -> Expansion:
        how = self.sites, self.kind, dense, self.seed, self.num_rows
        return Expansion(*self.density.add_up(expansion_at, center, *how))

    def on_ranks(self, ranks: Ranks, like: Tensor, work: Callable[[Search], T]) -> T:
        """What some work with the search comes to, on every rank; they share the rows out.

        Args:
            ranks: the processes.
            like: where positions are.
            work: rank 0 does it.
        """
        if ranks.is_alone:
            return work(self)
        sums = sums_of(self.density, ranks, like.device)
        density = SharedDensity.of(self.density, sums)
        return sums.run(lambda: work(dataclasses.replace(self, density=density)))

    def check_fits(self, position: Tensor) -> None:
        """Refuses a dense Gaussian that memory does not hold."""
        if self.structure == "dense":
            size = len(self._places)
            check_fits(size, position.dtype, position.device, _MATRICES, "Laplace")


def maximize(function: Callable[[Tensor], tuple[float, Tensor]], start: Tensor) -> Tensor:
    """Where a function of a few values [k], which gives its slope too, is largest, by L-BFGS."""
    values = start.detach().double().requires_grad_()
    last, tolerance = function(start), torch.finfo(start.dtype).eps ** 0.5

    def closure() -> Tensor:
        nonlocal last
        try:
            last = function(values.detach().to(start))
            values.grad = -last[1].double()
        except PyroScaleError:  # a wall, as high as the last point and as steep: half of the step
            values.grad = last[1].double()
        return torch.tensor(-last[0])

    optimizer = torch.optim.LBFGS(
        [values],
        max_iter=_TUNING_STEPS,
        max_eval=_TUNING_STEPS,
        tolerance_grad=tolerance,
        tolerance_change=tolerance,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    return values.detach().to(start)
