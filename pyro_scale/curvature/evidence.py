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
from pyro_scale.core.warn import warn
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.kronecker_gaussian import kronecker_at
from pyro_scale.curvature.low_rank import low_rank_at
from pyro_scale.curvature.mode_search import climb_to_mode
from pyro_scale.curvature.precision import CurvatureKind, Expansion, expansion_at, gaussian_at
from pyro_scale.curvature.shared import SharedDensity, sums_of
from pyro_scale.distributed.ranks import Ranks
from pyro_scale.errors import ApproximationWarning, ArgumentError, PyroScaleError

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
#: The slope of the log evidence, in nats, that is no maximum's.
_STEEP = 1.0
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
            ArgumentError: there is none that could be found; the log joint does not depend on what
                is tuned.

        Warns:
            UserWarning: the search for most evidence ended too early.
        """
        if self.tuned is None:
            return self._nearest(start)
        tuned, last = self.tuned, start
        self._check_tuned(start, tuned)

        def candidate(values: Tensor) -> Candidate:
            nonlocal last  # each search starts where the last one ended
            found = self._nearest(last.index_put((tuned,), values))
            last = found.center
            return found

        def with_slope(values: Tensor) -> tuple[Candidate, Tensor]:
            """The candidate and the slope of its log evidence: at a mode, that of the log joint is
            its own; that of the log determinant is taken by differences."""
            mode = candidate(values)
            _, slope = self.density.grad(mode.center)
            slope = self.density.log_posterior.num_data * slope[tuned]
            step = _difference(values)
            units = step * torch.eye(len(values)).to(values)
            above, below = (
                torch.stack([candidate(values + sign * unit).gaussian.log_det for unit in units])
                for sign in (1, -1)
            )
            return mode, slope + (above - below) / (4 * step)

        def evidence(values: Tensor) -> tuple[float, Tensor]:
            mode, slope = with_slope(values)
            return mode.log_evidence, slope

        best, slope = with_slope(maximize(evidence, start[tuned]))
        if not bool((slope.abs() < _STEEP).all()):
            warn(
                ApproximationWarning,
                f"tune: the log evidence has a slope of {slope.tolist()} nats, in unconstrained "
                "units, where the search for its maximum ended, which is elsewhere: the modes are "
                f"not found precisely enough in {start.dtype}. Pass data and model in double "
                "precision, or compare fits at fixed values",
            )
        return best

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
        places = self._places
        found, distance = climb_to_mode(
            self.density, start, self._near, places, moves, _WITHOUT_MODE
        )
        return found._replace(distance=distance)

    def _near(self, position: Tensor) -> Candidate:
        """The candidate after steps of Newton's method, where these are cheap."""
        num_data, places = self.density.log_posterior.num_data, self._places
        if self.structure == "dense" or len(places) <= _FEW:
            # a slope by differences needs more than the GGN's steps may give: the Hessian's
            kinds = [self.kind] if self.tuned is None else [self.kind, "hessian"]
            near = 0.0 if self.tuned is None else _difference(position) ** 4
            for kind in dict.fromkeys(kinds):

                def precision(at: Tensor, kind: CurvatureKind = kind) -> Tensor:
                    return self._expansion(at, True, kind).precision / num_data

                position = self.density.newton_refine(position, precision, places, near).position
        return self.at(position)

    def _check_tuned(self, start: Tensor, tuned: Tensor) -> None:
        """Refuses params that the log joint does not depend on, here or at other values of theirs.

        Raises:
            ArgumentError: names them.
        """
        elsewhere = start.index_add(0, tuned, torch.ones_like(start[tuned]))
        slopes = [self.density.grad(at)[1][tuned] for at in (start, elsewhere)]
        flat = tuned[torch.stack(slopes).eq(0).all(0)].tolist()
        if flat:
            names = list(dict.fromkeys(self.density.layout.site_at(place) for place in flat))
            raise ArgumentError(
                f"tune: the log joint does not change with pyro.param {names}: call pyro.param "
                "within the model, and use its value there as a tensor (not .item(), nor detached)"
            )

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
        value, slope, precision = self._expansion(center, self.structure == "dense", self.kind)
        return value, slope, gaussian_at(self.density, center, self.sites, precision)

    def _expansion(self, center: Tensor, dense: bool, kind: CurvatureKind) -> Expansion:
        how = self.sites, kind, dense, self.seed, self.num_rows
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


def _difference(values: Tensor) -> float:
    """Half of the distance over which a slope is taken by central differences."""
    return float(torch.finfo(values.dtype).eps ** (1 / 3))


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
