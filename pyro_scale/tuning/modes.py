"""The posterior's modes, each chain's search its own, and a Gaussian to start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Gaussian, triangular
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.errors import ArgumentError
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.newton import MOST_STEPS, Ascent, ascend
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.tuning.no_start import what_to_try
from pyro_scale.tuning.policy import SEARCH

#: Is told of passes through the data, and may raise.
Check: TypeAlias = Callable[[float], None]

#: The evidence lower bound of a Gaussian, its mean and factor, the log evidence.
Bounded: TypeAlias = tuple[float, Tensor, Tensor, float]

T = TypeVar("T")
Found = TypeVar("Found")


class Mode(NamedTuple):
    """A mode, or what stands for one.

    Attributes:
        gaussian: around it.
        log_evidence: by Laplace's approximation, in nats.
        searches: which searches led there.
    """

    gaussian: Gaussian
    log_evidence: float
    searches: tuple[int, ...]


@dataclass(frozen=True)
class Modes:
    """What searches from several points found.

    Attributes:
        modes: the best first; one Gaussian that stands for all where there is none.
        found: whether they are modes.
        searches: how many there were.
        gap: nats by which the first one's Gaussian differs from the posterior (its
            Kullback-Leibler divergence from it), as far as draws of the Gaussian tell.
        evaluations: passes through the data, a Hessian counted as one for each dimension.
    """

    modes: tuple[Mode, ...]
    found: bool
    searches: int
    gap: float
    evaluations: int

    @property
    def best(self) -> Mode:
        """The mode of most evidence."""
        return self.modes[0]

    @property
    def worth_visiting(self) -> tuple[Mode, ...]:
        """Those where something of the posterior is."""
        least = self.best.log_evidence - SEARCH.negligible_nats
        return tuple(mode for mode in self.modes if mode.log_evidence > least)

    def starting_points(self, num_chains: int) -> list[Gaussian]:
        """The Gaussian that each chain starts from: that of its own search, unless nothing of the
        posterior is there."""
        own = {search: mode.gaussian for mode in self.worth_visiting for search in mode.searches}
        searches = max(1, self.searches)
        chosen = [own.get(chain % searches, self.best.gaussian) for chain in range(num_chains)]
        left = [g for g in own.values() if not any(g is each for each in chosen)]
        for place, gaussian in enumerate(left[: num_chains - 1]):  # of searches that no chain has
            chosen[-1 - place] = gaussian
        return chosen

    def unvisited(self, num_chains: int) -> list[Mode]:
        """Modes with something of the posterior from which none of so many chains starts."""
        starts = self.starting_points(num_chains)
        return [
            mode
            for mode in self.worth_visiting
            if not any(mode.gaussian is each for each in starts)
        ]


def find_modes(
    density: FullDataDensity,
    starts: Tensor,
    temperature: float,
    seed: int,
    check: Check | None = None,
    ranks: Ranks = ALONE,
    most: float = math.inf,
) -> Modes:
    """Searches from each of the starts, `[searches, D]`, for the modes of log joint / temperature.

    Where the log density has none (a funnel, an improper posterior), or its Gaussian is far from
    the posterior, the best Gaussian at a point on the ways up stands for it, by the evidence lower
    bound: that of Pathfinder (Zhang, Carpenter, Gelman and Vehtari, JMLR 2022), with Hessians.

    Args:
        density: of all rows, or some that stand for them.
        starts: where searches begin.
        temperature: of the posterior.
        seed: of what is drawn.
        check: is told of the passes through the rows, and may end the search by raising.
        ranks: the processes, which share searches out.
        most: passes through the rows that each search may take: where it rises without end, what
            it has seen by then is enough for a Gaussian on the way up.

    Raises:
        ArgumentError: there is neither a mode nor a Gaussian.
    """
    search, device = partial(_search, density, most), starts.device
    ascents, passes = in_order(search, list(starts), check, ranks, device)
    evaluations = int(passes)
    modes = _distinct([(i, each) for i, each in enumerate(ascents) if each.is_mode], temperature)
    gap, stand_in = math.inf, None
    if modes:
        best = modes[0].gaussian
        assert isinstance(best, Dense)
        bound, evidence = _bound(density, best, temperature, seed)
        gap = evidence - bound
    if not gap <= SEARCH.gap_nats * starts.shape[1] + 1:  # nor where it is not known
        chosen = some_places(ascents)
        evaluations += len(chosen) * density.passes
        stand_in = best_on_the_way(density, chosen, temperature, seed, ranks)
    if stand_in is None and not modes:
        raise ArgumentError(
            f"no Gaussian fits the posterior anywhere on the way up from {len(starts)} starts"
            f"{what_to_try(density, ascents[0].position)}",
            code="not-finite",
        )
    if stand_in is not None and (not modes or stand_in[0] > bound):
        everything = tuple(range(len(starts)))
        mode = Mode(stand_in[1], stand_in[0], everything)
        return Modes((mode,), False, len(starts), stand_in[2] - stand_in[0], evaluations)
    return Modes(tuple(modes), bool(modes), len(starts), gap, evaluations)


def in_order(
    search: Callable[[T, Check | None], tuple[Found, float]],
    items: Sequence[T],
    check: Check | None,
    ranks: Ranks,
    device: torch.device,
    spent: float = 0,
) -> tuple[list[Found], float]:
    """(What searches from some items come to, in order, on every rank; the passes that they took,
    with those before).

    Each rank does some of the searches, and tells the check of those passes; afterwards it tells
    it of all, as one process does.

    Args:
        search: from an item, with a check of its own passes: what it comes to, a pytree of
            tensors, and the passes that it took.
        items: where searches begin.
        check: is told of passes, and may end the searches by raising.
        ranks: the processes.
        device: where positions are.
        spent: passes before.
    """
    own, passes = list[tuple[Found, float, float]](), spent
    for item in ranks.share.of(items):
        told = [0.0]

        def checked(more: float, passes: float = passes, told: list[float] = told) -> None:
            told.append(more)
            if check is not None:
                check(passes + more)

        found, taken = search(item, checked)
        own.append((found, taken, max(told)))
        passes += taken
    if ranks.is_alone:
        return [found for found, _, _ in own], passes
    every, passes = ranks.in_turn(own, "searches for modes", device), spent
    for _, taken, most in every:
        if check is not None:
            check(passes + most)
        passes += taken
    return [found for found, _, _ in every], passes


def _search(
    density: FullDataDensity, most: float, start: Tensor, check: Check | None
) -> tuple[Ascent, int]:
    """(The way up from a start, or from nearer to 0 where it leads to no mode, the passes that
    it took): far out a log density may be too steep for its derivatives to be told from rounding.
    """
    ascents, passes = list[Ascent](), 0
    for shrinkage in SEARCH.shrinkages:
        steps = min(MOST_STEPS, (most - passes) / density.passes)
        if ascents and steps < 1:
            break
        own = further(check, passes)
        ascents.append(ascend(density, start * shrinkage, most_steps=int(steps), check=own))
        passes += len(ascents[-1].path) * density.passes
        if ascents[-1].is_mode:
            return ascents[-1], passes
    return max(ascents, key=lambda ascent: ascent.value), passes


def further(check: Check | None, passes: float, part: float = 1.0) -> Check | None:
    """The check of passes through a part of the rows, after so many through all."""
    return None if check is None else lambda more: check(passes + part * more)


def _distinct(found: Sequence[tuple[int, Ascent]], temperature: float) -> list[Mode]:
    """Modes, the best first, without those that are another one's."""
    return merged([mode_at(ascent, temperature, (search,)) for search, ascent in found])


def mode_at(ascent: Ascent, temperature: float, searches: tuple[int, ...]) -> Mode:
    """The Gaussian where an ascent ended, and its evidence."""
    gaussian = gaussian_at(ascent.position, ascent.precision, temperature)
    constant = len(ascent.position) / 2 * math.log(2 * math.pi)
    evidence = ascent.value / temperature + float(gaussian.log_det) / 2 + constant
    return Mode(gaussian, evidence, searches)


def merged(modes: Sequence[Mode]) -> list[Mode]:
    """Modes whose Gaussian is finite, the best first; equal ones count once, with the searches of
    all."""
    return each_once([mode for mode in modes if _is_finite(mode)], _are_near)


def each_once(modes: Sequence[Mode], are_one: Callable[[Mode, Mode], bool]) -> list[Mode]:
    """The best first, without those that are one with a better one, which has their searches.

    Args:
        modes: in any order.
        are_one: whether two are one, the better one first.
    """
    distinct: list[Mode] = []
    for mode in sorted(modes, key=lambda mode: -mode.log_evidence):
        for place, better in enumerate(distinct):
            if are_one(better, mode):
                distinct[place] = better._replace(searches=(*better.searches, *mode.searches))
                break
        else:
            distinct.append(mode)
    return distinct


def _is_finite(mode: Mode) -> bool:
    assert isinstance(mode.gaussian, Dense)
    return bool(torch.isfinite(mode.gaussian.scale_tril).all())


def _are_near(better: Mode, mode: Mode) -> bool:
    """Whether two modes are one by the distance of their means and by their evidence."""
    sds, own = (_sds_between(mode, better, by.gaussian) for by in (better, mode))
    nats = abs(mode.log_evidence - better.log_evidence)
    alike = sds < SEARCH.same_sds and nats < SEARCH.same_nats
    return alike or max(sds, own) < SEARCH.surely_same_sds


def _sds_between(one: Mode, other: Mode, by: Gaussian) -> float:
    """How far two modes are apart, in sds of a Gaussian."""
    assert isinstance(by, Dense)
    away = (one.gaussian.mean - other.gaussian.mean)[:, None]
    return float(torch.linalg.solve_triangular(by.scale_tril, away, upper=False).norm())


def gaussian_at(position: Tensor, precision: Tensor, temperature: float) -> Dense:
    """The Gaussian of a curvature: where that is negative, of its size; in float64."""
    scale = precision.diagonal().abs().clamp(min=1e-300).rsqrt()
    lengths, axes = torch.linalg.eigh(scale[:, None] * precision * scale)
    lengths = lengths.abs().clamp(min=SEARCH.flattest * float(lengths.abs().max()))
    root = scale[:, None] * axes * (temperature / lengths).sqrt()
    return Dense(position.double(), triangular(root))


def _bound(
    density: FullDataDensity, gaussian: Dense, temperature: float, seed: int
) -> tuple[float, float]:
    """(The evidence lower bound of a Gaussian, the log evidence by importance), by its draws."""
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


def some_places(ascents: Sequence[Ascent]) -> Tensor:
    """Some points on the ways up, `[places, D]`."""
    every = torch.cat([each.path for each in ascents])
    return every[torch.linspace(0, len(every) - 1, SEARCH.path_places).round().long().unique()]


def best_on_the_way(
    density: FullDataDensity, places: Tensor, temperature: float, seed: int, ranks: Ranks = ALONE
) -> tuple[float, Dense, float] | None:
    """(The evidence lower bound, the Gaussian, the log evidence) of the best of some points, which
    ranks share out."""

    def at(place: Tensor, check: Check | None) -> tuple[Bounded | None, float]:
        hessian = density.hessian(place).double()
        if not bool(torch.isfinite(hessian).all()):
            return None, 0
        gaussian = gaussian_at(place, -hessian * density.log_posterior.num_data, temperature)
        bound, evidence = _bound(density, gaussian, temperature, seed)
        return (bound, gaussian.mean, gaussian.scale_tril, evidence), 0

    best = None
    for found in in_order(at, list(places), None, ranks, places.device)[0]:
        if found is not None and math.isfinite(found[0]) and (best is None or found[0] > best[0]):
            best = found
    return None if best is None else (best[0], Dense(best[1], best[2]), best[3])
