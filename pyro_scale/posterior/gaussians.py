"""The result of an approximation: Gaussians in unconstrained space, and the facts of the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.data.sources import Data
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.errors import ArgumentError
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.rng.seeds import Purpose, generator

#: Draws of each start, unless the user asks for others.
_DRAWS = 1000
#: Of which so many are drawn at a time: torch fills memory in chunks of 16.
_AT_ONCE = 16


@dataclass(frozen=True)
class Fit:
    """An approximation from each start.

    Attributes:
        log_posterior: what was approximated.
        data: what it was run on; None for single steps.
        layout: of a position.
        centers: the Gaussians' means or the modes, `[starts, D]`; sites and points without a
            Gaussian stay there.
        sites: those with a Gaussian, in the layout's order.
        gaussians: over their elements, one a start; none of a MAP.
        seed: of the run.
        attrs: strings and numbers: method, N, B, seed, versions, seconds, ...
        trace: the objective's estimate at every step, in nats, a total: `[starts, steps]`.
        ranks: the processes that share out what reads rows again; every one of them has the fit.
        other_target: why the fit is not meant to be the model's posterior; empty where it is.
    """

    log_posterior: LogPosterior
    data: Data | None
    layout: Layout
    centers: Tensor
    sites: tuple[str, ...]
    gaussians: tuple[Gaussian, ...]
    seed: int
    attrs: dict[str, Any] = field(default_factory=dict)
    trace: Tensor | None = None
    ranks: Ranks = ALONE
    other_target: str = ""

    @cached_property
    def result(self) -> PosteriorDraws:
        """The draws of the run's seed: 1,000 a start, the same at each call; of a MAP, one."""
        every = torch.arange(self.num_draws)
        return self._result_of(torch.stack([self.drawn(i, every) for i in range(self.num_starts)]))

    @property
    def num_starts(self) -> int:
        """Where it began, and where it has a center."""
        return len(self.centers)

    @property
    def num_draws(self) -> int:
        """Of a start."""
        return _DRAWS if self.gaussians else 1

    def drawn(self, start: int, chosen: Tensor) -> Tensor:
        """Those of a start's draws that are chosen, in order, `[n, D]`, without holding the
        others."""
        if not self.gaussians:
            return self.centers[start].repeat(len(chosen), 1)
        source = generator(self.seed, start, Purpose.APPROXIMATION)
        noise, last = [self.noise(0)], int(chosen[-1]) if len(chosen) else -1
        for first in range(0, last + 1, _AT_ONCE):
            normals = self.noise(min(_AT_ONCE, _DRAWS - first), source)
            noise.append(normals[chosen[(chosen >= first) & (chosen < first + _AT_ONCE)] - first])
        return self.at(start, torch.cat(noise))

    def by_start(self, chosen: Tensor) -> list[Tensor]:
        """Those of all starts' draws that are chosen, in order, `[n, D]` of each start."""
        starts, draws = chosen // self.num_draws, chosen % self.num_draws
        return [self.drawn(start, draws[starts == start]) for start in range(self.num_starts)]

    def thin(self, chosen: Tensor) -> PosteriorDraws:
        """The same as one chain, `[1, n, D]`, without holding the others."""
        return self._result_of(torch.cat(self.by_start(chosen))[None])

    def draws(self, noise: Tensor) -> PosteriorDraws:
        """Draws `[1, n]`, from each start in turn, given standard normals `[n, d]`."""
        starts = torch.arange(len(noise)) % len(self.centers)
        positions = self.centers[starts]
        if self.gaussians:
            for start in range(len(self.centers)):
                positions[starts == start] = self.at(start, noise[starts == start])
        return self._result_of(positions[None])

    def noise(self, count: int, source: torch.Generator | None = None) -> Tensor:
        """Standard normals `[count, d]`, from torch's generator unless another is given."""
        shape = count, len(self.places)
        return torch.randn(shape, generator=source, dtype=self.centers.dtype).to(self.centers)

    def seeded_noise(self, count: int, seed: int) -> Tensor:
        """The same of a seed, whose first draws are the same, however many there are."""
        sources = (generator(seed, i, Purpose.APPROXIMATION, block=1) for i in range(count))
        return torch.cat([self.noise(1, source) for source in sources])

    @property
    def temperature(self) -> float:
        """By what the posterior's covariance was multiplied."""
        return float(self.attrs.get("temperature", 1.0))

    def at_temperature_1(self, start: int) -> Gaussian:
        """The Gaussian of a start, as it would be at temperature 1.

        Raises:
            ArgumentError: the temperature is 0, at which it has no spread.
        """
        if self.temperature == 0:
            raise ArgumentError(
                "at temperature 0 a Gaussian has no spread to go on from: fit it at another one"
            )
        return self.gaussians[start].temper(1 / self.temperature)

    @cached_property
    def places(self) -> Tensor:
        """Where in a position the Gaussians' elements are, [d]."""
        return self.layout.places(self.sites)

    def at(self, start: int, noise: Tensor) -> Tensor:
        """Positions `[n, D]`, from standard normals `[n, d]`."""
        positions = self.centers[start].repeat(len(noise), 1)
        positions[:, self.places] = self.gaussians[start].sample(noise)
        return positions

    def _result_of(self, positions: Tensor) -> PosteriorDraws:
        result = PosteriorDraws(
            self.log_posterior, self.data, self.layout, positions, {}, self.attrs
        )
        return dataclasses.replace(result, ranks=self.ranks)

    def replaced(self, **changes: Any) -> Fit:
        """The fit with these attributes in place of its own."""
        return dataclasses.replace(self, **changes)
