"""The draws of a run, and the facts of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout
from pyro_scale.core.online_moments import Moments, OnlineMoments, Totals
from pyro_scale.data.sources import Data
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.chunked_vmap import CHUNK_BYTES, vmap_in_chunks
from pyro_scale.run.measurements import Measurements
from pyro_scale.storage.lazy_draws import Positions, StoredPositions, StoredSamples


@dataclass(frozen=True)
class PosteriorDraws:
    """The draws of a run's finished chains, and the facts of the run: what summaries and
    predictions are computed from.

    Attributes:
        log_posterior: the model that was sampled.
        data: the data of the run; None for single steps and for draws from a file.
        layout: indices of each site's elements among all D unconstrained parameters.
        positions: unconstrained draws, `[chains, draws, D]`, in memory or in a store.  Where draws
            were not kept, a few of them and the chains' last states.
        sample_stats: statistics of each draw by name (log joint, step, hyperparameters), `[chains,
            draws]`.
        attrs: facts of the run, strings and numbers by name: method, hyperparameters, N, B, seed,
            versions, seconds, ...
        measurements: gradient noise and temperatures that the run measured.
        online: moments of all draws, where draws were not kept; None where they were.
        chains: the chains' numbers; None if every chain that was started finished.
        tables: `"summary"` and `"diagnostics"` of the chains of all processes, where the draws are
            those of one process; None otherwise.
        read_together: whether several processes have all draws, and share out later passes through
            the rows.
        unfinished: draws of chains that were interrupted before those in `positions` ended,
            `[n, D]`; None if there are none.
    """

    log_posterior: LogPosterior
    data: Data | None
    layout: Layout
    positions: Positions
    sample_stats: dict[str, Tensor]
    attrs: dict[str, Any] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)
    online: SampleTotals | None = None
    chains: Sequence[int] | None = None
    tables: Mapping[str, Any] | None = None
    read_together: bool = False
    unfinished: Tensor | None = None

    @property
    def every_draw(self) -> PosteriorDraws:
        """The draws of all chains, for computations that do not need to know which chain a draw is
        of. The result is this object itself; if some chains are unfinished, a copy with a single
        chain that has all draws, those of unfinished chains last."""
        if self.unfinished is None:
            return self
        draws = torch.cat([*self.blocks(), self.unfinished])
        return dataclasses.replace(self, positions=draws[None], unfinished=None)

    @property
    def num_chains(self) -> int:
        """The number of finished chains."""
        return self.positions.shape[0]

    @property
    def weights(self) -> Tensor | None:
        """Weights of the draws for posterior expectations, `[chains, draws]`, 1 on average; None if
        all draws have equal weights."""
        return self.sample_stats.get("weight")

    @cached_property
    def samples(self) -> Mapping[str, Tensor]:
        """Constrained draws of latents and of deterministic sites outside the data's plate,
        `[chains, draws, ...]` by site, in float32 at least: NumPy and statistics want no half
        precision. They share no memory with `positions`."""
        values = self._values
        if isinstance(values, StoredSamples) or not self._are_unconstrained:
            return values
        return {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in values.items()
        }

    @cached_property
    def _values(self) -> Mapping[str, Tensor]:
        """Constrained draws by site, `[chains, draws, ...]`, as in `samples`, but without a copy:
        they share memory with `positions` if no site has a transform, so callers must not change
        them."""
        if isinstance(self.positions, StoredPositions):
            return self.positions.samples
        log_posterior = self.log_posterior
        if self._are_unconstrained:
            values = self.layout.unflatten(self.positions)
            return {name: _at_least_single(values[name]) for name in log_posterior.latents}

        def sites(params: dict[str, Tensor]) -> dict[str, Tensor]:
            constrained = log_posterior.constrain(params)
            latents = {name: constrained[name] for name in log_posterior.latents}
            values = latents | log_posterior.deterministics(params)
            return {name: _at_least_single(value) for name, value in values.items()}

        shape = self.positions.shape[:2]
        return {name: value.unflatten(0, shape) for name, value in self.over_draws(sites).items()}

    def __getstate__(self) -> dict[str, Any]:
        """The attributes to pickle, by name, without the cached `samples`, which are views of
        `positions` and would be written to the file again."""
        return {name: v for name, v in vars(self).items() if name not in ("samples", "_values")}

    @property
    def _are_unconstrained(self) -> bool:
        """Whether the constrained draws of all sites equal the unconstrained ones, and there are no
        deterministic sites to compute."""
        log_posterior = self.log_posterior
        return log_posterior.is_unconstrained and not log_posterior.model_info.steady

    def all_samples(self) -> dict[str, Tensor]:
        """Constrained draws of all chains, one chain after another, `[chains * draws, ...]` by
        site, as a copy that the caller may change."""
        chains, draws = (torch.arange(size) for size in self.positions.shape[:2])
        if isinstance(self._values, StoredSamples):
            return self._values.at(chains.repeat_interleave(len(draws)), draws.repeat(len(chains)))
        return {name: value.flatten(0, 1).clone() for name, value in self._values.items()}

    def samples_at(self, chains: Tensor, draws: Tensor) -> dict[str, Tensor]:
        """Some of the constrained draws, `[..., *shape]` by site.

        Args:
            chains: indices of chains.
            draws: indices of draws, broadcast together with `chains` to the shape `[...]`.
        """
        if isinstance(self._values, StoredSamples):
            return self._values.at(chains, draws)
        return {name: value[chains, draws] for name, value in self._values.items()}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of a single constrained draw of every site in `samples`, by site."""
        if isinstance(self._values, StoredSamples):
            return self._values.shapes
        return {name: value.shape[2:] for name, value in self._values.items()}

    def elements(self, name: str, places: Tensor) -> Tensor:
        """All constrained draws of some elements of a site, `[chains, draws, len(places)]`.

        Args:
            name: name of the site.
            places: indices into the site's flattened value.
        """
        if isinstance(self._values, StoredSamples):
            return self._values.elements(name, places)
        return self._values[name].reshape(*self.positions.shape[:2], -1)[..., places]

    def unconstrained_elements(self, draws: Tensor, columns: Tensor) -> Tensor:
        """Unconstrained draws of some params at some draws of every chain, `[chains, len(draws),
        len(columns)]`.

        Args:
            draws: indices of the draws.
            columns: indices of the parameters, among all D.
        """
        chains = torch.arange(self.num_chains)[:, None]
        if isinstance(self.positions, StoredPositions):
            return self.positions[chains, draws][..., columns]
        return self.positions[chains[..., None], draws[:, None], columns]

    def moments(self, levels: Sequence[float]) -> dict[str, Moments]:
        """Posterior mean, sd, quantiles, R-hat and ESS of every element, by site.

        Args:
            levels: levels of the quantiles, from 0 to 1.
        """
        if self.online is not None:
            return self.online.moments(levels)
        chains, count = self.positions.shape[:2]
        every = torch.arange(chains)[:, None]
        width = chains * self.layout.size * torch.finfo(self.layout.dtype).bits // 8
        online = OnlineSamples.empty(self.samples_at(every, torch.zeros(1).long()), count)
        for block in torch.arange(count).split(max(1, CHUNK_BYTES // width)):
            online.add(self.samples_at(every, block))
        return SampleTotals(online.online.totals(range(chains)), online.layout).moments(levels)

    @property
    def params(self) -> dict[str, Tensor]:
        """Constrained values of the point-estimated sites (`pyro.param`, unfrozen weights) at the
        last draw of the first chain."""
        last = self.layout.unflatten(self.positions[0, -1])
        constrained = self.log_posterior.constrain(last)
        return {name: constrained[name] for name in self.log_posterior.points}

    def over_draws(
        self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]], random: bool = False
    ) -> dict[str, Tensor]:
        """A function's values at every draw, `[chains * draws, ...]` by name.

        Args:
            function: function from one draw's unconstrained values by site to a dict of tensors.
            random: whether the function draws from torch's generator.
        """
        total = self.positions.shape[0] * self.positions.shape[1]
        values: dict[str, Tensor] = {}
        start = 0
        for chunk in self.chunks(function, random):
            count = len(next(iter(chunk.values()), ()))
            if not values:  # each value is written once, into its place
                values = {n: value.new_empty(total, *value.shape[1:]) for n, value in chunk.items()}
            for name, value in chunk.items():
                values[name][start : start + count] = value
            start += count
        return values

    def chunks(
        self, function: Callable[[dict[str, Tensor]], Any], random: bool = False
    ) -> Iterator[Any]:
        """Yields a function's values at every draw, in the draws' order, for as many draws at a
        time as fit into memory: pytrees of tensors `[n, ...]`.

        Args:
            function: function from one draw's unconstrained values by site to a pytree of tensors.
            random: whether the function draws from torch's generator.
        """

        def at_position(position: Tensor) -> Any:
            return function(self.layout.unflatten(position))

        yield from vmap_in_chunks(at_position, self.blocks(), random)

    def blocks(self) -> Iterator[Tensor]:
        """Yields all unconstrained draws, chain by chain, in blocks `[n, D]`: several for draws in
        a store, one for draws in memory."""
        if isinstance(self.positions, StoredPositions):
            return self.positions.blocks()
        return iter([self.positions.flatten(0, 1)])


def _at_least_single(value: Tensor) -> Tensor:
    """The tensor in float32 if it is in half precision (float16 or bfloat16), which NumPy and
    statistics cannot use well; otherwise the tensor itself."""
    if not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def finite_samples(starts: PosteriorDraws, positions: Tensor) -> dict[str, Tensor]:
    """Constrained draws by site, `[chains, n, ...]`, from unconstrained ones of chains that may
    have diverged.

    Such a chain has NaN (0 for integer sites) from the first state on that is not finite or at
    which the model cannot be evaluated.

    Args:
        starts: the model, with the chains' finite starts as draws.
        positions: unconstrained draws, `[chains, n, D]`.
    """
    is_sound = torch.isfinite(positions).all(-1)

    def evaluate(chains: slice, draws: slice) -> Mapping[str, Tensor]:
        mask = is_sound[chains, draws, None]
        finite = positions[chains, draws].where(mask, starts.positions[0, 0])
        return dataclasses.replace(starts, positions=finite)._values

    every = slice(None), slice(None)
    try:
        samples = evaluate(*every)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # only the last finite state of a chain can be the cause, because the chain stopped there
        for chain in torch.nonzero(is_sound[:, 0])[:, 0].tolist():
            last = int(is_sound[chain].sum()) - 1
            try:
                evaluate(slice(chain, chain + 1), slice(last, last + 1))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                is_sound[chain, last] = False
        samples = evaluate(*every)
    if bool(is_sound.all()):
        return dict(samples)
    return {
        name: value.masked_fill(
            ~is_sound.reshape(*is_sound.shape, *(1 for _ in value.shape[2:])),
            torch.nan if value.is_floating_point() else 0,
        )
        for name, value in samples.items()
    }


@dataclass(frozen=True)
class OnlineSamples:
    """Accumulates moments of the constrained draws of all sites, without keeping the draws.

    Attributes:
        online: moments of all sites' elements in one vector.
        layout: indices of each site's elements in this vector.
    """

    online: OnlineMoments
    layout: Layout

    @classmethod
    def empty(cls, like: Mapping[str, Tensor], num_draws: int) -> OnlineSamples:
        """An accumulator without draws.

        Args:
            like: draws of the sites, `[chains, n, ...]`, which give names, shapes and number of
                chains.
            num_draws: number of draws of each chain that will be added.
        """
        layout = Layout.from_tensors({name: value[0, 0] for name, value in like.items()})
        num_chains = len(next(iter(like.values())))
        return cls(OnlineMoments(num_chains, layout.size, num_draws), layout)

    def add(self, samples: Mapping[str, Tensor]) -> None:
        """Adds the next n draws of every chain to the moments.

        Args:
            samples: constrained draws by site, `[chains, n, ...]`.
        """
        self.online.add(torch.vmap(torch.vmap(self.layout.flatten))(dict(samples)))


@dataclass(frozen=True)
class SampleTotals:
    """Moments of the constrained draws of all sites, accumulated over all draws.

    Attributes:
        totals: moments of all sites' elements in one vector.
        layout: indices of each site's elements in this vector.
    """

    totals: Totals
    layout: Layout

    def moments(self, levels: Sequence[float]) -> dict[str, Moments]:
        """Mean, sd, quantiles, R-hat and ESS of every element, by site, in double precision.

        Args:
            levels: levels of the quantiles, from 0 to 1.
        """
        names, double = self.layout.names, (torch.float64,) * len(self.layout.names)
        layout = Layout(names, self.layout.shapes, double)
        parts = [layout.unflatten(part) for part in self.totals.moments(levels)]
        return {name: Moments(*(part[name] for part in parts)) for name in names}
