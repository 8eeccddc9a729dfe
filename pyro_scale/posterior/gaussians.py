"""The result of an approximation: Gaussians in unconstrained space, and the facts of the run."""

from __future__ import annotations

import dataclasses
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian, as_structure
from pyro_scale.core.layout import Layout
from pyro_scale.data.sources import Data
from pyro_scale.errors import ArgumentError
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.rng.seeds import Purpose, generator

#: Default number of draws of each start.
_NUM_DRAWS = 1000
#: Draws that are made in one call: torch's generator fills memory in blocks of 16 numbers.
_DRAWS_TOGETHER = 16


@dataclass(frozen=True)
class Fit:
    """The result of an approximation (Laplace, VI, EKF, MAP): a Gaussian in unconstrained space, or
    a mode, for each start.

    Attributes:
        log_posterior: the model that was approximated.
        data: the data of the run; None for single steps and for fits from a file.
        layout: indices of each site's elements among all D unconstrained parameters.
        centers: means of the Gaussians, or modes, `[starts, D]`. Sites and params without a
            Gaussian have these values in all draws.
        sites: names of the sites with a Gaussian, in the layout's order.
        gaussians: Gaussians over the d elements of these sites, one for each start; empty for MAP.
        seed: seed of the run, and of the draws in `result`.
        attrs: facts of the run, strings and numbers by name: method, N, B, seed, versions, seconds,
            ...
        trace: estimates of the objective at every step, in nats, totals over the data, `[starts,
            steps]`; None if there are none.
        read_together: whether several processes have the fit, and share out later passes through
            the rows.
        other_target: the reason why the fit does not approximate the model's posterior; empty if it
            does.
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
    read_together: bool = False
    other_target: str = ""

    @cached_property
    def result(self) -> PosteriorDraws:
        """Draws of the fit, unconstrained, `[starts, 1000, D]` with one chain for each start, from
        the seed of the run, so that they are the same at each call; for a MAP, the modes, `[starts,
        1, D]`."""
        indices = torch.arange(self.num_draws)
        return self._as_draws(
            torch.stack([self.drawn(start, indices) for start in range(self.num_starts)])
        )

    @property
    def num_starts(self) -> int:
        """The number of starts, each with a center."""
        return len(self.centers)

    @property
    def num_draws(self) -> int:
        """The number of draws of each start in `result`: 1,000, or 1 for MAP."""
        return _NUM_DRAWS if self.gaussians else 1

    def drawn(self, start: int, chosen: Tensor) -> Tensor:
        """Some of the draws of one start in `result`, unconstrained, `[n, D]`; for fits whose draws
        in all do not fit into memory.

        Args:
            start: index of the start.
            chosen: indices of the draws, in ascending order.
        """
        if not self.gaussians:
            return self.centers[start].repeat(len(chosen), 1)
        source = generator(self.seed, start, Purpose.APPROXIMATION)
        noise, last = [self.noise(0)], int(chosen[-1]) if len(chosen) else -1
        for first in range(0, last + 1, _DRAWS_TOGETHER):
            block = self.noise(min(_DRAWS_TOGETHER, _NUM_DRAWS - first), source)
            is_chosen = (chosen >= first) & (chosen < first + _DRAWS_TOGETHER)
            noise.append(block[chosen[is_chosen] - first])
        return self.at(start, torch.cat(noise))

    def by_start(self, chosen: Tensor) -> list[Tensor]:
        """Some of the draws in `result`, unconstrained: a list with a tensor `[n, D]` for each
        start, which may have no draws.

        Args:
            chosen: indices of the draws, ascending, where the draws of all starts are numbered one
                start after another.
        """
        starts, draws = chosen // self.num_draws, chosen % self.num_draws
        return [self.drawn(start, draws[starts == start]) for start in range(self.num_starts)]

    def thin(self, chosen: Tensor) -> PosteriorDraws:
        """Some of the draws in `result`, of all starts, joined to one chain `[1, n, D]`, with the
        facts of the fit.

        Args:
            chosen: indices into the draws of all starts, one start after another, in ascending
                order.
        """
        return self._as_draws(torch.cat(self.by_start(chosen))[None])

    def draws(self, noise: Tensor) -> PosteriorDraws:
        """New draws from the Gaussians, `[1, n, D]` as one chain, from each start in turn; for MAP,
        the modes.

        Args:
            noise: standard normal numbers `[n, d]`, for the d elements that have a Gaussian.
        """
        starts = torch.arange(len(noise)) % len(self.centers)
        positions = self.centers[starts]
        if self.gaussians:
            for start in range(len(self.centers)):
                positions[starts == start] = self.at(start, noise[starts == start])
        return self._as_draws(positions[None])

    def noise(self, count: int, source: torch.Generator | None = None) -> Tensor:
        """Standard normal numbers `[count, d]` for new draws of the d elements that have a
        Gaussian, in the dtype and on the device of the fit.

        Args:
            count: number of draws that they are for.
            source: torch's generator on the CPU; None for the global one.
        """
        shape = count, len(self.places)
        return torch.randn(shape, generator=source, dtype=self.centers.dtype).to(self.centers)

    def seeded_noise(self, count: int, seed: int) -> Tensor:
        """Standard normal numbers `[count, d]` for new draws of the d elements that have a
        Gaussian: a function of the seed. The first draws are the same for any count."""
        sources = (generator(seed, i, Purpose.APPROXIMATION, block=1) for i in range(count))
        return torch.cat([self.noise(1, source) for source in sources])

    @property
    def temperature(self) -> float:
        """The temperature at which the fit approximates the posterior, by which its Gaussians'
        covariances are multiplied: 1 for the posterior itself, 0 for modes."""
        return float(self.attrs.get("temperature", 1.0))

    def at_temperature_1(self, start: int) -> Gaussian:
        """The Gaussian of one start with its covariance divided by the fit's temperature, so that
        it approximates the posterior itself.

        Raises:
            ArgumentError: the temperature is 0, at which the covariance is 0.
        """
        if self.temperature == 0:
            raise ArgumentError(
                "at temperature 0 a Gaussian has no spread to go on from: fit it at another one"
            )
        return self.gaussians[start].temper(1 / self.temperature)

    @cached_property
    def places(self) -> Tensor:
        """Indices of the d elements that have a Gaussian among all D unconstrained parameters,
        `[d]`.
        """
        return self.layout.places(self.sites)

    def at(self, start: int, noise: Tensor) -> Tensor:
        """Unconstrained draws `[n, D]` of one start's Gaussian; elements without a Gaussian have
        the center's value.

        Args:
            start: index of the start.
            noise: standard normal numbers `[n, d]`, for the d elements that have a Gaussian.
        """
        positions = self.centers[start].repeat(len(noise), 1)
        positions[:, self.places] = self.gaussians[start].sample(noise)
        return positions

    def _as_draws(self, positions: Tensor) -> PosteriorDraws:
        """Unconstrained draws as a `PosteriorDraws`, which has the model, the data and the facts of
        the fit.

        Args:
            positions: the draws, `[chains, n, D]`.
        """
        return PosteriorDraws(
            self.log_posterior,
            self.data,
            self.layout,
            positions,
            {},
            self.attrs,
            read_together=self.read_together,
        )

    def replaced(self, **changes: Any) -> Fit:
        """A copy of the fit with other values of the named attributes."""
        return dataclasses.replace(self, **changes)


class Guide(PyroModule):
    """A Gaussian approximation as a Pyro guide, which `SVI` can optimize further.

    It draws all latent sites from one Gaussian in unconstrained space, whose mean and spread are
    params.  The guide of a mode is a Delta, without a Jacobian, as `AutoDelta` has it.

    Args:
        fit: the approximation, whose first start's Gaussian is used. Sites without a Gaussian stay
            at the center.

    Raises:
        ArgumentError: the fit is at temperature 0, so that it has no density.
    """

    def __init__(self, fit: Fit):
        # a unique name, because Pyro's store identifies params by name
        super().__init__(f"guide_{uuid.uuid4().hex[:12]}")
        self._fit = fit
        self.loc: Any = PyroParam(fit.centers[0, fit.places].clone(), constraints.real)
        self._is_dense = False
        if fit.gaussians:
            fit.at_temperature_1(0)  # raises at temperature 0
            self._is_dense = not isinstance(fit.gaussians[0], Diagonal)
            gaussian = as_structure(fit.gaussians[0], self._is_dense)
            spread = (
                gaussian.scale_tril if isinstance(gaussian, Dense) else gaussian.variance.sqrt()
            )
            kind = constraints.lower_cholesky if self._is_dense else constraints.positive
            self.scale: Any = PyroParam(spread.clone(), kind)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws every latent site as a Pyro statement and returns the constrained values by site;
        the arguments are the model's, and are not used."""
        fit, log_posterior = self._fit, self._fit.log_posterior
        position = fit.centers[0].index_put((fit.places,), self._draw())
        params = fit.layout.unflatten(position)
        with exclusive, pyro.poutine.block():  # this run only determines the sites' supports
            sites = log_posterior.run(
                params, log_posterior.model_info.example, log_posterior.first_indices()
            ).sites
        self._read_params()  # again, because the run has removed the marks by which SVI finds them
        values, plates = {}, {}
        for name in log_posterior.latents:
            site = sites[name]
            event_dim = len(site.fn.event_shape)
            batch_shape = site.value.shape[: site.value.dim() - event_dim]
            log_density = site.value.new_zeros(batch_shape)
            if fit.gaussians and site.log_det is not None:  # divided equally among the elements
                log_density = log_density - site.log_det / max(1, batch_shape.numel())
            with ExitStack() as stack:
                for frame in site.plates:
                    if frame.name not in plates:
                        plates[frame.name] = pyro.plate(frame.name, frame.size, dim=frame.dim)
                    stack.enter_context(plates[frame.name])
                values[name] = pyro.sample(
                    name, dist.Delta(site.value, log_density=log_density, event_dim=event_dim)
                )
        return values

    def _read_params(self) -> tuple[Any, Any]:
        """(Mean `[d]`; scale: a lower triangular matrix `[d, d]` or sds `[d]`, None for a mode).
        Reading them as attributes makes Pyro register them as params, so that `SVI` optimizes them.
        """
        return self.loc, self.scale if self._fit.gaussians else None

    def _draw(self) -> Tensor:
        """An unconstrained draw of the elements that have a Gaussian, `[d]`; the mode itself for a
        Delta."""
        loc, scale = self._read_params()
        if scale is None:
            return loc
        if self._is_dense:
            fn: Any = dist.MultivariateNormal(loc, scale_tril=scale)
        else:
            fn = dist.Normal(loc, scale).to_event(1)
        return pyro.sample("_position", fn, infer={"is_auxiliary": True})
