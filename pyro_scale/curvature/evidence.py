"""The Laplace approximation at a mode, and its log evidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.memory import check_fits
from pyro_scale.core.warn import warn
from pyro_scale.curvature.density import FullDataDensity, SharedDensity
from pyro_scale.curvature.modes import Candidate, climb_to_mode, newton_refine
from pyro_scale.curvature.precision import (
    CurvatureKind,
    CurvatureSpec,
    Expansion,
    expand,
    gaussian_at,
)
from pyro_scale.curvature.row_gaussians import kronecker_at, low_rank_at
from pyro_scale.distributed.sums import Sums
from pyro_scale.errors import ApproximationWarning, ArgumentError, PyroScaleError

T = TypeVar("T")
#: Which elements of a Gaussian may be correlated: none ("diag"), all ("dense"), those of the same
#: weight ("kron"), or all, by a few directions ("low_rank").
GaussianStructure: TypeAlias = Literal["diag", "dense", "kron", "low_rank"]
#: The structures that are computed from sums over rows, without a matrix [d, d].
OF_ROWS: tuple[GaussianStructure, ...] = ("kron", "low_rank")

#: Matrices in memory at once: the precision, its factor, the covariance's.
_MATRICES = 6
_ADVICE = "pass mode=, a fitted MAP or a dict of values, or start nearer (init_strategy=)"
#: Most elements for which the mode of a diagonal Gaussian, too, is refined by Newton's method.
_NEWTON_SIZE = 500
#: Slope of the log evidence, in nats, above which a point is no maximum.
_SLOPE_TOL = 1.0
#: Most steps of L-BFGS on the log evidence.
_TUNING_STEPS = 50


@dataclass(frozen=True)
class Search:
    """The settings of a Laplace approximation, with methods that find the posterior's mode, build
    the Gaussian there, and choose hyperparameters by the largest log evidence.

    A position is a vector [D] of all unconstrained params.  The Gaussian is over d of its elements.

    Attributes:
        density: the log joint density of all rows.
        sites: names of the sites that the Gaussian is over.
        kind: the curvature that the Gaussian's precision is computed from: "hessian", "ggn",
            "empirical_fisher" or "monte_carlo".
        structure: the structure of the Gaussian's covariance: "diag", "dense", "kron" or
            "low_rank".
        seed: seed of drawn observations, for curvature by Monte Carlo.
        notes: remarks for users about parts of the curvature that are estimates.
        num_rows: number of rows that the model is run on at a time; None for the default.
        held: indices of the position's elements that stay at their start; None for no element.
        tuned: indices of the position's elements that are set to maximize the log evidence; None
            for no element.
        rank: rank of the Gaussian's correlations, for "low_rank".
        corrected: for "kron", whether each block's eigenvalues are computed from rows' gradients
            (EKFAC) and not from the factors (K-FAC).
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
        """The mode that a search from `start` reaches, with the Gaussian (the Laplace
        approximation) and the log evidence there. Params in `tuned` have the values of largest log
        evidence.

        Args:
            start: the position where the search begins, [D].

        Raises:
            ArgumentError: no mode was found, or the log joint does not depend on a tuned param.

        Warns:
            ApproximationWarning: the search for the largest evidence ended at a point that is not a
                maximum.
        """
        if self.tuned is None:
            return self._nearest(start)
        tuned, last = self.tuned, start
        self._check_tuned(start, tuned)

        def candidate_at(values: Tensor) -> Candidate:
            nonlocal last  # each search starts where the last one ended
            candidate = self._nearest(last.index_put((tuned,), values))
            last = candidate.center
            return candidate

        def with_slope(values: Tensor) -> tuple[Candidate, Tensor]:
            """(The mode with these values of the tuned params, the gradient of the log evidence
            with respect to them).

            At a mode, the log joint's part of the slope is its gradient; the part of the log
            determinant comes from differences.
            """
            candidate = candidate_at(values)
            _, slope = self.density.grad(candidate.center)
            slope = self.density.log_posterior.num_data * slope[tuned]
            step = _difference(values)
            units = step * torch.eye(len(values)).to(values)
            above, below = (
                torch.stack([candidate_at(values + sign * unit).gaussian.log_det for unit in units])
                for sign in (1, -1)
            )
            return candidate, slope + (above - below) / (4 * step)

        def evidence(values: Tensor) -> tuple[float, Tensor]:
            candidate, slope = with_slope(values)
            return candidate.log_evidence, slope

        best, slope = with_slope(_maximize(evidence, start[tuned]))
        if not bool((slope.abs() < _SLOPE_TOL).all()):
            warn(
                ApproximationWarning,
                f"tune: the log evidence has a slope of {slope.tolist()} nats, in unconstrained "
                "units, where the search for its maximum ended, which is elsewhere: the modes are "
                f"not found precisely enough in {start.dtype}. Pass data and model in double "
                "precision, or compare fits at fixed values",
            )
        return best

    def at(self, center: Tensor) -> Candidate:
        """The Laplace approximation (the Gaussian and the log evidence) at a position [D] without a
        search for the mode, with an estimate of the squared distance to the mode, in the Gaussian's
        sds.
        """
        value, slope, gaussian = self._gaussian_at(center)
        num_data = self.density.log_posterior.num_data
        total = num_data * slope
        evidence = num_data * value + (len(slope) * math.log(2 * math.pi) + gaussian.log_det) / 2
        distance = float(total @ gaussian.covariance_times(total))
        return Candidate(center, gaussian, float(evidence), distance)

    @property
    def _places(self) -> Tensor:
        """Indices, in a position [D], of the d elements that the Gaussian is over, `[d]`."""
        return self.density.layout.places(self.sites)

    def _nearest(self, start: Tensor) -> Candidate:
        moves = torch.ones_like(start)
        for places in (self.held, self.tuned):
            if places is not None:
                moves[places] = 0
        return climb_to_mode(self.density, start, self._refined, self._places, moves, _ADVICE)

    def _refined(self, position: Tensor) -> Candidate:
        """Refines a position [D] near a mode by Newton's method, unless the Gaussian is too large
        for that, and returns the Gaussian and the log evidence there."""
        num_data, places = self.density.log_posterior.num_data, self._places
        if self.structure == "dense" or len(places) <= _NEWTON_SIZE:
            # a slope by differences needs modes more precise than the GGN's steps: the Hessian's
            kinds = [self.kind] if self.tuned is None else [self.kind, "hessian"]
            near = 0.0 if self.tuned is None else _difference(position) ** 4
            for kind in dict.fromkeys(kinds):

                def precision(at: Tensor, kind: CurvatureKind = kind) -> Tensor:
                    return self._expand(self._spec(at, kind), dense=True).precision.div_(num_data)

                refined = newton_refine(self.density, position, precision, places, near)
                position = refined.position
        return self.at(position)

    def _check_tuned(self, start: Tensor, tuned: Tensor) -> None:
        """Checks that the log joint depends on every tuned param: the gradient is not 0 both at
        the start and where the tuned params are larger by 1.

        Args:
            start: the position where the search begins, [D].
            tuned: indices, in `start`, of the tuned params' elements.

        Raises:
            ArgumentError: the log joint does not depend on some; the message names them.
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

    def _gaussian_at(self, center: Tensor) -> tuple[Tensor, Tensor, Gaussian]:
        """(The log joint, its gradient with respect to the Gaussian's d elements, [d], both divided
        by N; the Gaussian) at a position [D]."""
        spec = self._spec(center, self.kind)
        if self.structure in OF_ROWS:
            value, slope = self.density.grad(center)
            gaussian: Gaussian
            if self.structure == "kron":
                gaussian = kronecker_at(self.density, spec, self.corrected)
            else:
                gaussian = low_rank_at(self.density, spec, self.rank)
            return value, slope[self._places], gaussian
        value, slope, precision = self._expand(spec, self.structure == "dense")
        return value, slope, gaussian_at(self.density, spec, precision)

    def _spec(self, position: Tensor, kind: CurvatureKind) -> CurvatureSpec:
        return CurvatureSpec(position, self.sites, kind, self.seed, self.num_rows)

    def _expand(self, spec: CurvatureSpec, dense: bool) -> Expansion:
        return Expansion(*self.density.add_up(expand, spec, dense))

    def run(self, work: Callable[[Search], T], sums: Sums) -> T:
        """The result of `work(search)`, where `search` is this search with its sums over rows
        computed by several processes together, or this search itself if there is just one."""
        if sums.are_here:
            return work(self)
        density = SharedDensity.from_density(self.density, sums)
        return density.sums.run(lambda: work(dataclasses.replace(self, density=density)))

    def check_fits(self, position: Tensor) -> None:
        """Raises an `ArgumentError` if `structure` is "dense" and its matrices do not fit in
        memory; otherwise returns None. `position` is any vector [D] with the dtype and device of
        the params.
        """
        if self.structure == "dense":
            size = len(self._places)
            check_fits(size, position.dtype, position.device, _MATRICES, "Laplace")


def _difference(values: Tensor) -> float:
    """The step h for a numerical derivative (f(x + h) - f(x - h)) / (2 h), of a size that suits the
    dtype of `values`.
    """
    return float(torch.finfo(values.dtype).eps ** (1 / 3))


def _maximize(function: Callable[[Tensor], tuple[float, Tensor]], start: Tensor) -> Tensor:
    """The point [k] of largest value of a function, by L-BFGS.

    Args:
        function: point [k] -> (value, gradient [k]). A PyroScaleError, raised where there is no
            mode, makes the search turn back.
        start: the first point, [k].
    """
    values = start.detach().double().requires_grad_()
    last, tolerance = function(start), torch.finfo(start.dtype).eps ** 0.5

    def closure() -> Tensor:
        nonlocal last
        try:
            last = function(values.detach().to(start))
            values.grad = -last[1].double()
        except PyroScaleError:  # no mode: return the last point's value and slope, as a barrier
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
