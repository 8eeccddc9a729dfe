"""The draws of a run, and the facts of the run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.online_moments import Moments
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.sources import Data
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.model.guards import trace_modules
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.online import OnlineSamples, SampleTotals
from pyro_scale.run.measurements import Measurements
from pyro_scale.storage.lazy_draws import Positions, StoredPositions, StoredSamples

#: Bytes of the largest tensor of one vmapped call over draws.
_CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class PosteriorDraws:
    """The draws of a run's finished chains.

    Attributes:
        log_posterior: what was sampled.
        data: what it was run on; None for single steps.
        layout: of a position.
        positions: unconstrained draws, `[chains, draws, D]`; where they were not kept, some of
            them and the chains' last states.
        sample_stats: by name, `[chains, draws]`.
        attrs: strings and numbers: method, hyperparameters, N, B, seed, versions, seconds, ...
        measurements: what was measured besides.
        online: what draws came to that were not kept.
        chains: the chains' numbers; None where they are all that were started.
        tables: `"summary"` and `"diagnostics"` of the chains of all processes, where these are
            those of one; None where they are all.
        ranks: the processes that share out what reads rows again; every one of them has all draws.
        unfinished: draws of chains that were ended before those in `positions`, `[n, D]`; None
            where there are none.
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
    ranks: Ranks = ALONE
    unfinished: Tensor | None = None

    @property
    def every_draw(self) -> PosteriorDraws:
        """The result for what does not tell chains apart: draws of unfinished chains come last, in
        one chain with all others."""
        if self.unfinished is None:
            return self
        draws = torch.cat([*self.blocks(), self.unfinished])
        return replace(self, positions=draws[None], unfinished=None)

    @property
    def num_chains(self) -> int:
        """Chains that finished."""
        return self.positions.shape[0]

    @property
    def weights(self) -> Tensor | None:
        """How much each draw counts, `[chains, draws]`, where they do not count alike."""
        return self.sample_stats.get("weight")

    @cached_property
    def samples(self) -> Mapping[str, Tensor]:
        """Constrained latents and deterministic sites outside the data's plate,
        `[chains, draws, ...]`, in float32 at least: NumPy and statistics want no half precision."""
        if isinstance(self.positions, StoredPositions):
            return self.positions.samples

        log_posterior = self.log_posterior
        if log_posterior.is_unconstrained and not log_posterior.model_info.steady:
            bare = self.layout.unflatten(self.positions)
            return {
                name: _at_least_single(bare[name]).clone(memory_format=torch.contiguous_format)
                for name in log_posterior.latents
            }

        def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
            constrained = log_posterior.constrain(params)
            latents = {name: constrained[name] for name in log_posterior.latents}
            sites = latents | log_posterior.deterministics(params)
            return {name: _at_least_single(value) for name, value in sites.items()}

        chains, draws = self.positions.shape[:2]
        flat = self.over_draws(values)
        return {k: v.reshape(chains, draws, *v.shape[1:]) for k, v in flat.items()}

    def all_samples(self) -> dict[str, Tensor]:
        """Those of all chains, one after another, `[chains * draws, *shape]`, in memory of their
        own."""
        chains, draws = (torch.arange(size) for size in self.positions.shape[:2])
        if isinstance(self.samples, StoredSamples):
            return self.samples.at(chains.repeat_interleave(len(draws)), draws.repeat(len(chains)))
        return {name: value.flatten(0, 1).clone() for name, value in self.samples.items()}

    def samples_at(self, chains: Tensor, draws: Tensor) -> dict[str, Tensor]:
        """Those at (chains, draws), which are broadcast, `[..., *shape]`."""
        if isinstance(self.samples, StoredSamples):
            return self.samples.at(chains, draws)
        return {name: value[chains, draws] for name, value in self.samples.items()}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of one draw of every site."""
        if isinstance(self.samples, StoredSamples):
            return self.samples.shapes
        return {name: value.shape[2:] for name, value in self.samples.items()}

    def elements(self, name: str, places: Tensor) -> Tensor:
        """All draws of some elements of a site, by their places in the flattened one, `[chains,
        draws, len(places)]`."""
        if isinstance(self.samples, StoredSamples):
            return self.samples.elements(name, places)
        return self.samples[name].reshape(*self.positions.shape[:2], -1)[..., places]

    def moments(self, levels: Sequence[float]) -> dict[str, Moments]:
        """Posterior means, sds and quantiles, by site."""
        if self.online is not None:
            return self.online.moments(levels)
        chains, count = self.positions.shape[:2]
        every = torch.arange(chains)[:, None]
        width = chains * self.layout.size * torch.finfo(self.layout.dtype).bits // 8
        online = OnlineSamples.of(self.samples_at(every, torch.zeros(1).long()), count)
        for columns in torch.arange(count).split(max(1, _CHUNK_BYTES // width)):
            online.add(self.samples_at(every, columns))
        totals = online.online.totals(range(chains))
        return SampleTotals(totals, online.layout).moments(levels)

    @property
    def params(self) -> dict[str, Tensor]:
        """Points' constrained values: `pyro.param` sites and unfrozen weights."""
        last = self.layout.unflatten(self.positions[0, -1])
        constrained = self.log_posterior.constrain(last)
        return {name: constrained[name] for name in self.log_posterior.points}

    def over_draws(
        self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]], random: bool = False
    ) -> dict[str, Tensor]:
        """A function of one draw's unconstrained params, of all draws: `[chains * draws, ...]`.

        Args:
            function: of params, to a dict of tensors.
            random: whether it draws from torch's generator.
        """
        parts = list(self.chunks(function, random))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def chunks(
        self, function: Callable[[dict[str, Tensor]], Any], random: bool = False
    ) -> Iterator[Any]:
        """The same of some draws after others, as many as memory allows, `[draws, ...]` each."""

        def of_one(position: Tensor) -> Any:
            return function(self.layout.unflatten(position))

        yield from in_chunks(of_one, self.blocks(), random)

    def blocks(self) -> Iterator[Tensor]:
        """All positions, chain by chain, as many at a time as are in memory, `[n, D]`."""
        if isinstance(self.positions, StoredPositions):
            return self.positions.blocks()
        return iter([self.positions.flatten(0, 1)])


def _at_least_single(value: Tensor) -> Tensor:
    """A value in float32 where it is of half precision."""
    if not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def in_chunks(
    function: Callable[[Tensor], Any], blocks: Iterable[Tensor], random: bool = False
) -> Iterator[Any]:
    """A function of one vector, of some of the vectors after others, as many as memory allows:
    vmapped, or one by one for what vmap refuses.

    How many those are does not depend on the blocks, nor do the numbers that it draws.

    Args:
        function: of a vector [D], to a pytree of tensors.
        blocks: the vectors, `[n, D]` each; at least one.
        random: whether it draws from torch's generator.
    """
    blocks = iter(blocks)
    block = next(blocks)
    with torch.no_grad(), _Normals(), without_vmap_warnings():
        with exclusive, trace_modules():  # their mode may be another one than when it was run
            size = max(1, _CHUNK_BYTES // _largest(function, block[0].clone()))
        every = torch.vmap(function, randomness="different" if random else "error")
        chunks = _of_size(size, itertools.chain([block], blocks))
        first = next(chunks)
        try:
            with exclusive:  # they draw from torch's generator, which other threads may have seeded
                values = every(first)
        except (RuntimeError, NotImplementedError):  # of a model, or a sampler of Pyro's
            vectors = itertools.chain(first, itertools.chain.from_iterable(chunks))
            for vector in vectors:
                with exclusive:
                    values = _stack(function(vector))
                yield values
            return
        yield values
        for chunk in chunks:
            with exclusive:
                values = every(chunk)
            yield values


def _of_size(size: int, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same vectors, so many at a time."""
    held: list[Tensor] = []
    for block in blocks:
        held.append(block)
        if sum(map(len, held)) >= size:
            *parts, last = _together(held).split(size)
            yield from parts
            held = [last]
    yield _together(held)


def _together(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _stack(values: Any) -> Any:
    return pytree.tree_map(lambda value: value[None], values)


def _largest(function: Callable[[Tensor], Any], position: Tensor) -> int:
    """Bytes of the largest tensor that a call makes."""
    with own_generator(), _Sizes() as sizes:
        function(position)
    return sizes.largest


class _Normals(TorchFunctionMode):
    """Has normals drawn as `torch.randn` does, which vmap takes, and not in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.normal and len(args) == 2 and all(isinstance(a, Tensor) for a in args):
            mean, sd = torch.broadcast_tensors(*args)
            return mean + sd * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)
        if func is Tensor.normal_ and len(args) == 1 and not kwargs:
            return torch.randn(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **(kwargs or {}))


class _Sizes(TorchDispatchMode):
    """Keeps an eye on the tensors that are made; a view is none."""

    largest = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return made


def samples_of(starts: PosteriorDraws, positions: Tensor) -> dict[str, Tensor]:
    """Constrained values by site of draws `[chains, n, D]`; NaN (0 of whole numbers) of chains that
    broke, from the state on at which the model cannot be evaluated."""
    sound = torch.isfinite(positions).all(-1)

    def of_sound_ones(chains: slice, draws: slice) -> Mapping[str, Tensor]:
        here = sound[chains, draws, None]
        held = positions[chains, draws].where(here, starts.positions[0, 0])
        return dataclasses.replace(starts, positions=held).samples

    every = slice(None), slice(None)
    try:
        samples = of_sound_ones(*every)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # at the last state of a chain that broke, or is about to: it went no further
        for chain in torch.nonzero(sound[:, 0])[:, 0].tolist():
            last = int(sound[chain].sum()) - 1
            try:
                of_sound_ones(slice(chain, chain + 1), slice(last, last + 1))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                sound[chain, last] = False
        samples = of_sound_ones(*every)
    if bool(sound.all()):
        return dict(samples)
    return {
        name: value.masked_fill(
            ~sound.reshape(*sound.shape, *(1 for _ in value.shape[2:])),
            torch.nan if value.is_floating_point() else 0,
        )
        for name, value in samples.items()
    }
