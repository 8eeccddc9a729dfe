"""Modes of a posterior, found by a search from each start, and a Gaussian to start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Gaussian, triangular
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.newton import Ascent, Search, ascent, run_together
from pyro_scale.errors import ArgumentError
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.policy import SEARCH

#: Places between two modes at which the log density is evaluated.
_PLACES_BETWEEN = 9
Item = TypeVar("Item")
Result = TypeVar("Result")


def _never() -> bool:
    """False: the default `is_over` of `SearchLimits`, by which searches for modes may take any
    time."""
    return False


class Map(Protocol):
    """The type of `map_here` and of functions like it that share items out among processes."""

    def __call__(
        self, function: Callable[[Item], Result], items: Sequence[Item], /
    ) -> list[Result]:
        """The function's results for all items, as a list in the order of the items."""
        ...


def map_here(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The function's results for the items, in order, computed one after another in this process;
    the `Map` that shares nothing out."""
    return [function(item) for item in items]


@dataclass(frozen=True)
class SearchLimits:
    """Limits of searches for modes, and how the searches are run.

    Attributes:
        passes: most passes through the data of each search. If the log joint rises without end, the
            path up to this limit is enough for a Gaussian along it.
        is_over: function that says whether the searches' time is over; they then end with the best
            that they have found, after one step at least.
        map: function that runs the searches: `map_here`, or one that shares them out among
            processes.
    """

    passes: float = math.inf
    is_over: Callable[[], bool] = _never
    map: Map = map_here


NO_LIMITS = SearchLimits()


class Mode(NamedTuple):
    """A mode of the posterior, or a Gaussian that stands for one.

    Attributes:
        gaussian: the Gaussian with the mode as its mean and the curvature there, in unconstrained
            space.
        log_evidence: log evidence by Laplace's approximation, or a lower bound of it if the
            Gaussian stands for a mode, in nats.
        searches: numbers of the searches that ended there.
    """

    gaussian: Gaussian
    log_evidence: float
    searches: tuple[int, ...]


@dataclass(frozen=True)
class Modes:
    """The modes of a posterior, found by searches from several starts.

    Attributes:
        modes: modes, the one with the most evidence first; if there is none, Gaussians that stand
            for the posterior.
        are_modes: whether `modes` are modes; False if they are Gaussians that stand for the
            posterior.
        searches: number of searches.
        gap: Kullback-Leibler divergence of the best mode's Gaussian from the posterior, in nats,
            estimated from the Gaussian's draws; NaN if it was not estimated.
        evaluations: passes through the data; a Hessian counts as one for each dimension.
        elsewhere: further modes, which only searches from other places than the user's starts
            found. No chain starts there.
    """

    modes: tuple[Mode, ...]
    are_modes: bool
    searches: int
    gap: float
    evaluations: int
    elsewhere: tuple[Mode, ...] = ()

    @property
    def best(self) -> Mode:
        """The mode with the largest log evidence."""
        return self.modes[0]

    @property
    def worth_visiting(self) -> tuple[Mode, ...]:
        """The modes that chains should visit, largest evidence first: those whose log evidence is
        less than `SEARCH.negligible_nats` nats below the best mode's."""
        return tuple(worth_visiting(self.modes))

    def starting_points(self, num_chains: int) -> list[Gaussian]:
        """The Gaussian that each chain starts from, one for each of `num_chains` chains: that of
        the mode where the search with the chain's number ended, or of the best mode if that search
        led to nothing. The last chains start from modes that no other chain starts from."""
        by_search = {
            search: mode.gaussian for mode in self.worth_visiting for search in mode.searches
        }
        searches = max(1, self.searches)
        chosen = [by_search.get(i % searches, self.best.gaussian) for i in range(num_chains)]
        left = [g for g in by_search.values() if not any(g is other for other in chosen)]
        for place, gaussian in enumerate(left[: num_chains - 1]):
            chosen[-1 - place] = gaussian
        return chosen

    def unvisited(self, num_chains: int) -> list[Mode]:
        """The modes with more than a negligible part of the posterior from which none of
        `num_chains` chains starts; empty if every one has a chain."""
        starts = self.starting_points(num_chains)
        return [
            mode
            for mode in self.worth_visiting
            if not any(mode.gaussian is start for start in starts)
        ]


def worth_visiting(modes: Sequence[Mode]) -> list[Mode]:
    """The modes that have more than a negligible part of the posterior, in their order: those whose
    log evidence is less than `SEARCH.negligible_nats` nats below the largest."""
    least = max(mode.log_evidence for mode in modes) - SEARCH.negligible_nats
    return [mode for mode in modes if mode.log_evidence > least]


def find_modes(
    density: FullDataDensity,
    starts: Tensor,
    temperature: float,
    seed: int,
    limits: SearchLimits = NO_LIMITS,
) -> Modes:
    """Searches for modes of log joint / temperature by Newton's method from every start.

    If there is no mode (a funnel, an improper posterior), or its Gaussian is far from the
    posterior, the Gaussian with the best evidence lower bound along the search paths replaces it:
    Pathfinder (Zhang, Carpenter, Gelman and Vehtari, JMLR 2022) with Hessians.

    Args:
        density: log density of all rows, or of rows that represent them.
        starts: where searches begin, `[searches, D]`.
        temperature: temperature of the posterior.
        seed: seed of the draws that estimate the evidence lower bound.
        limits: limits of the searches.

    Raises:
        ArgumentError: there is neither a mode nor a Gaussian.
    """
    groups = starts.split(density.at_once)
    found, passes = run_searches(partial(_search_together, density), groups, limits)
    ascents, evaluations = [ascent for group in found for ascent in group], int(passes)
    modes = merge([mode_at(end, temperature, (i,)) for i, end in enumerate(ascents) if end.is_mode])
    gap, stand_in = math.inf, None
    if modes:
        best = modes[0].gaussian
        assert isinstance(best, Dense)
        bound, evidence = _bound(density, best, temperature, seed)
        gap = evidence - bound
    if not gap <= SEARCH.gap_nats * starts.shape[1] + 1:  # also if it is NaN
        places = places_on_the_way(ascents)
        if limits.is_over():
            every = -(-len(places) // SEARCH.fewest)
            places = places[every // 2 :: every]
        evaluations += len(places) * density.passes
        stand_in = best_on_the_way(density, places, temperature, seed, limits.map)
    if stand_in is None and not modes:
        raise ArgumentError(
            f"no Gaussian fits the posterior along the search paths from {len(starts)} starts"
            f"{what_to_try(density, ascents[0].position)}",
            code="not-finite",
        )
    if stand_in is not None and (not modes or stand_in.bound > bound):
        mode = stand_in.as_mode(tuple(range(len(starts))))
        gap = stand_in.evidence - stand_in.bound
        return Modes((mode,), False, len(starts), gap, evaluations)
    return Modes(tuple(modes), bool(modes), len(starts), gap, evaluations)


def run_searches(
    search: Callable[[Item, SearchLimits], tuple[Result, float]],
    items: Sequence[Item],
    limits: SearchLimits,
) -> tuple[list[Result], float]:
    """Runs a search from every item, in this process or shared out among several (`limits.map`).

    Args:
        search: (item, limits of each search) -> a pytree of tensors, and the passes through the
            data that the search took.
        items: what each search begins from, such as its start.
        limits: limits of each search.

    Returns:
        The results, in the order of `items`; the passes of all searches together.
    """
    done = limits.map(lambda item: search(item, limits), items)
    return [result for result, _ in done], sum(cost for _, cost in done)


def _search_together(
    density: FullDataDensity, starts: Tensor, limits: SearchLimits
) -> tuple[list[Ascent], int]:
    """Searches from the unconstrained params `starts` `[searches, D]`, at the same time; returns
    the search paths, and the passes through the data that they took."""
    steps = int(min(SEARCH.steps, limits.passes / density.passes))
    found = run_together(density, [_search(start, steps, limits.is_over) for start in starts])
    return [path for path, _ in found], density.passes * sum(steps for _, steps in found)


def _search(
    start: Tensor, most_steps: int, is_over: Callable[[], bool]
) -> Search[tuple[Ascent, int]]:
    """A search by Newton's method, which returns its path and the number of Hessians.

    If there is no mode at the path's end, the search is repeated from closer to 0: far from 0,
    rounding hides the derivatives of a steep log density. Without a mode, the path to the largest
    log joint is returned.

    Args:
        start: unconstrained params `[D]`.
        most_steps: most steps of the search, its repetitions included.
        is_over: function that says whether the searches' time is over.
    """
    paths, steps = list[Ascent](), 0
    for shrinkage in SEARCH.shrinkages:
        if paths and (steps >= most_steps or is_over()):
            break
        paths.append(
            (yield from ascent(start * shrinkage, most_steps=most_steps - steps, is_over=is_over))
        )
        steps += len(paths[-1].path)
        if paths[-1].is_mode:
            break
    return max(paths, key=lambda path: (path.is_mode, path.value)), steps


def mode_at(ascent: Ascent, temperature: float, searches: tuple[int, ...]) -> Mode:
    """The mode at the end of a search: the Gaussian of the curvature there, and its log evidence by
    Laplace's approximation.

    Args:
        ascent: search path with the log joint and curvature at its end.
        temperature: temperature of the posterior.
        searches: numbers of the searches that ended there.
    """
    gaussian = gaussian_at(ascent.position, ascent.precision, temperature)
    constant = len(ascent.position) / 2 * math.log(2 * math.pi)
    evidence = ascent.value / temperature + float(gaussian.log_det) / 2 + constant
    return Mode(gaussian, evidence, searches)


def gaussian_at(position: Tensor, precision: Tensor, temperature: float) -> Dense:
    """The Gaussian with the mean `position` and the covariance temperature / precision, in float64.
    Negative curvatures count by their absolute value, and flat ones are bounded below.

    Args:
        position: mean, unconstrained params `[D]`.
        precision: negative Hessian of the log joint there, `[D, D]`.
        temperature: temperature of the posterior.
    """
    scale = precision.diagonal().abs().clamp(min=1e-300).rsqrt()
    lengths, axes = torch.linalg.eigh(scale[:, None] * precision * scale)
    lengths = lengths.abs().clamp(min=SEARCH.flattest * float(lengths.abs().max()))
    root = scale[:, None] * axes * (temperature / lengths).sqrt()
    return Dense(position.double(), triangular(root))


def merge(modes: Sequence[Mode]) -> list[Mode]:
    """The distinct modes, sorted by log evidence, largest first: modes that count as the same
    (`_are_near`) are merged, and those whose Gaussian is not finite are left out."""
    return merge_by([mode for mode in modes if _is_finite(mode)], _are_near)


def merge_by(modes: Sequence[Mode], are_same: Callable[[Mode, Mode], bool]) -> list[Mode]:
    """The distinct modes among `modes`, sorted by log evidence, largest first. Modes that are the
    same are merged: the one with the largest log evidence stays, with the numbers of all their
    searches.

    Args:
        modes: modes in any order.
        are_same: function that says whether two modes are the same; its first argument is the one
            with more evidence.
    """
    distinct: list[Mode] = []
    for mode in sorted(modes, key=lambda mode: -mode.log_evidence):
        for place, better in enumerate(distinct):
            if are_same(better, mode):
                distinct[place] = better._replace(searches=(*better.searches, *mode.searches))
                break
        else:
            distinct.append(mode)
    return distinct


def _is_finite(mode: Mode) -> bool:
    assert isinstance(mode.gaussian, Dense)
    return bool(torch.isfinite(mode.gaussian.scale_tril).all())


def _are_near(better: Mode, mode: Mode) -> bool:
    """Whether two modes count as the same, because searches ended at slightly different points:
    their means are a few sds apart and their log evidence is about equal, or their means are within
    a fraction of an sd."""
    sds, sds_of_better = (_distance(mode, better, by.gaussian) for by in (better, mode))
    nats = abs(mode.log_evidence - better.log_evidence)
    alike = sds < SEARCH.same_sds and nats < SEARCH.same_nats
    return alike or max(sds, sds_of_better) < SEARCH.surely_same_sds


def _distance(one: Mode, other: Mode, by: Gaussian) -> float:
    """The distance between the means of two modes, in sds along the line between them of the
    Gaussian `by` (Mahalanobis distance)."""
    assert isinstance(by, Dense)
    away = (one.gaussian.mean - other.gaussian.mean)[:, None]
    return float(torch.linalg.solve_triangular(by.scale_tril, away, upper=False).norm())


def has_dip(density: FullDataDensity, begin: Tensor, end: Tensor, temperature: float) -> bool:
    """Whether the log density falls by more than a tolerance on the straight line between two
    places, below both of them, so that they are at different modes.

    Args:
        density: log density of all rows, or of rows that represent them.
        begin: unconstrained params `[D]`.
        end: unconstrained params `[D]`.
        temperature: temperature of the posterior.
    """
    parts = torch.linspace(0, 1, _PLACES_BETWEEN, dtype=end.dtype)[:, None].to(end.device)
    values = density.values(begin + parts * (end - begin)).double()
    values = values * density.log_posterior.num_data / temperature
    lower = min(float(values[0]), float(values[-1]))
    return not float(values.min()) > lower - SEARCH.same_nats


class StandIn(NamedTuple):
    """A Gaussian that replaces a mode where there is none, or where the mode's own does not fit.

    Attributes:
        bound: evidence lower bound of the Gaussian, in nats.
        mean: mean, `[D]`.
        scale_tril: lower triangular factor of the covariance, `[D, D]`.
        evidence: log evidence, estimated by importance sampling with the Gaussian's draws, in nats.
    """

    bound: float
    mean: Tensor
    scale_tril: Tensor
    evidence: float

    def as_mode(self, searches: tuple[int, ...]) -> Mode:
        """The Gaussian as a `Mode`, with the evidence lower bound as its log evidence.

        Args:
            searches: numbers of the searches for which it stands.
        """
        return Mode(Dense(self.mean, self.scale_tril), self.bound, searches)


def _stand_in(
    density: FullDataDensity, place: Tensor, precision: Tensor, temperature: float, seed: int
) -> StandIn:
    """The Gaussian at a place with the curvature there, and its evidence lower bound. Arguments as
    for `gaussian_at` and `_bound`."""
    gaussian = gaussian_at(place, precision, temperature)
    bound, evidence = _bound(density, gaussian, temperature, seed)
    return StandIn(bound, gaussian.mean, gaussian.scale_tril, evidence)


def _bound(
    density: FullDataDensity, gaussian: Dense, temperature: float, seed: int
) -> tuple[float, float]:
    """(Evidence lower bound of a Gaussian; log evidence by importance sampling with its draws),
    both in nats. Their difference estimates the Kullback-Leibler divergence of the Gaussian from
    the posterior.

    Args:
        density: log density of all rows, or of rows that represent them.
        gaussian: the Gaussian over D unconstrained params.
        temperature: temperature of the posterior.
        seed: seed of the draws.
    """
    source = generator(seed, 0, Purpose.SEARCH)
    shape = SEARCH.path_draws, len(gaussian.mean)
    noise = torch.randn(shape, generator=source, dtype=torch.float64)
    draws = gaussian.sample(noise).to(density.layout.dtype)
    num_data = density.log_posterior.num_data
    values = density.values(draws).double() * num_data / temperature
    constant = len(gaussian.mean) * math.log(2 * math.pi)
    log_density = -(noise.square().sum(1) + gaussian.log_det + constant) / 2
    ratio = (values - log_density).nan_to_num(-math.inf, -math.inf, -math.inf)
    bound = float(ratio.mean())
    return bound, float(torch.logsumexp(ratio, 0)) - math.log(SEARCH.path_draws)


def places_on_the_way(ascents: Sequence[Ascent]) -> Tensor:
    """Points on the paths of all searches, about `SEARCH.path_places`, as unconstrained params
    `[places, D]`; candidates for the center of a Gaussian if no mode was found.

    They are denser near the paths' starts: where the log joint rises without end, a path soon
    leaves the posterior for where it is narrow.
    """
    each = torch.linspace(0, 1, max(2, SEARCH.path_places // len(ascents))).square()
    places = [((len(path) - 1) * each).round().long().unique() for *_, path in ascents]
    return torch.cat([ascent.path[at] for ascent, at in zip(ascents, places, strict=True)])


def best_on_the_way(
    density: FullDataDensity,
    places: Tensor,
    temperature: float,
    seed: int,
    map: Map = map_here,
) -> StandIn | None:
    """The Gaussian that stands for a mode if none was found: of the Gaussians with the curvature at
    some points on the search paths, the one with the largest evidence lower bound. None if no bound
    is finite.

    Args:
        density: log density of all rows, or of rows that represent them.
        places: points on the search paths, `[places, D]`.
        temperature: temperature of the posterior.
        seed: seed of the draws that estimate the bounds.
        map: function that computes the Gaussians, in this process or shared out among several.
    """

    def fit(places: Tensor, limits: SearchLimits) -> tuple[list[StandIn], float]:
        precisions = -density.log_posterior.num_data * density.hessians(places).double()
        pairs = zip(places, precisions, strict=True)
        usable = [pair for pair in pairs if bool(torch.isfinite(pair[1]).all())]
        return [_stand_in(density, *pair, temperature, seed) for pair in usable], 0

    groups, _ = run_searches(fit, places.split(density.at_once), SearchLimits(map=map))
    finite = [one for group in groups for one in group if math.isfinite(one.bound)]
    return max(finite, key=lambda one: one.bound, default=None)
