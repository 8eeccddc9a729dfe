"""Where draws go that do not stay in memory: to disk, or into online moments alone."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import dtype_name
from pyro_scale.core.validation import evenly
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError, FileError
from pyro_scale.posterior.draws import Result
from pyro_scale.posterior.export import attributes, dims_of, own_dims
from pyro_scale.posterior.online import OnlineSamples
from pyro_scale.run.config import Store
from pyro_scale.run.problem import Problem
from pyro_scale.storage.files import FilePath
from pyro_scale.storage.lazy_draws import StoredPositions
from pyro_scale.storage.zarr_store import POSTERIOR, UNCONSTRAINED, DrawStore, Field, writing_into

#: Bytes of all chains' draws that are held until they are written; bytes and draws of a file.
#: (Larger files would be faster by little, and what they pass through would be kept by malloc.)
_HELD_BYTES, _FILE_BYTES, _MOST_DRAWS = 2**25, 2**21, 2**14
#: Draws of all chains that are kept to be looked at, of those that are added up.
_SEEN = 1000
#: Seconds for which draws wait at most to be written, and how often the time that it takes.
_WAIT_SECONDS, _WAIT_TIMES = 5.0, 20
#: Of a site, which with `_dim_0` behind it is a file's.
_LONGEST_NAME = 200


@contextlib.contextmanager
def sink_for(
    store: Store, problem: Problem, num_draws: int, resumes: bool
) -> Iterator[ToDisk | ToMoments | None]:
    """What takes the draws of a run, if they do not stay in memory, while no other run can write
    where it does.

    Args:
        store: where they go.
        problem: of the run.
        num_draws: of each chain.
        resumes: whether the run goes on with another.

    Raises:
        ArgumentError, FileError: the store cannot be made, or another run is writing into it.
    """
    if store is None:
        yield None
        return
    first = problem.positions[:, None].cpu()
    starts = Result(problem.log_posterior, problem.data, problem.engine.layout, first, {})
    if store is False:
        yield ToMoments(starts, first, num_draws)
        return
    if isinstance(store, bool):
        raise ArgumentError("store=True: pass the path of a Zarr store, or False to keep no draws")
    with writing_into(store):
        yield ToDisk(starts, first, store, resumes)


class ToDisk:
    """Writes draws into a store, as many at a time as its files hold, and by time those of a file
    that is not full yet, which stay in memory until it is.

    What a full file holds is thus a function of its draws alone: constrained in other blocks, they
    may round otherwise.

    Args:
        starts: a result whose draws are the chains' starts.
        first: those, `[chains, 1, D]`.
        path: of the store.
        resumes: whether it may be there already, of the run that goes on.

    Raises:
        ArgumentError: a site's name cannot be a file's; there is something at the path.
        FileError: the store cannot be made.
    """

    def __init__(self, starts: Result, first: Tensor, path: FilePath, resumes: bool):
        self._starts = starts
        self._transformed = _transformed(starts)
        values, num_chains = self._values(first), starts.num_chains
        width = sum(v[0, 0].numel() * v.element_size() for v in values.values())
        affordable = min(_HELD_BYTES // (num_chains * width), _FILE_BYTES // width)
        self._held = 0, first[:, :0]  # (the first one's number, draws)
        self._due = time.monotonic() + _WAIT_SECONDS
        if resumes:
            self.store = DrawStore.opened(path)
        else:
            fields = {name: _field(starts, name, value) for name, value in values.items()}
            chunk, run = max(1, min(_MOST_DRAWS, affordable)), secrets.token_hex(8)
            self.store = DrawStore.created(path, fields, num_chains, chunk, run)

    @property
    def count(self) -> int:
        """Draws of each chain that it has got."""
        begin, held = self._held
        return begin + held.shape[1]

    def add(self, positions: Tensor) -> None:
        """Takes the next draws.

        Raises:
            FileError: they cannot be written.
        """
        self._held = self._in_full_files, torch.cat([self._waiting, positions], 1)
        self._fill_files()
        if time.monotonic() >= self._due:
            self._write_rest()

    def close(self) -> None:
        """Writes what it holds.

        Raises:
            FileError: it cannot be written.
        """
        self._fill_files()
        self._write_rest()

    def state(self) -> dict[str, Any]:
        """What another one needs to go on."""
        return {"run": self.store.run, "stored": self._in_full_files, "held": self._waiting}

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Takes up where another one was; None begins anew.

        Raises:
            FileError: the store is of another run, or lacks draws.
        """
        state = state or {"run": self.store.run, "stored": 0, "held": self._held[1][:, :0]}
        if state["run"] != self.store.run or state["stored"] > self.store.count:
            raise FileError(
                f"store='{self.store.path}' does not hold the draws of the run that goes on: pass "
                "the store that it had"
            )
        stop = state["stored"] + state["held"].shape[1]
        self.store.truncate(min(stop, self.store.count))
        self._held = state["stored"], state["held"]

    def kept(self, draws: Draws) -> StoredPositions:
        """The draws of a run's finished chains that have been written."""
        chains = torch.tensor(draws.finished, dtype=torch.long)
        count = min(self.store.count, len(draws.kept_steps))
        return StoredPositions(self.store, self._starts.layout, chains, count)

    def describe(self, result: Result) -> None:
        """Writes down the facts of the run, next to its draws.

        Raises:
            FileError: they cannot be written.
        """
        assert isinstance(result.positions, StoredPositions)
        attrs = attributes(result.attrs)
        self.store.put("sample_stats", result.sample_stats, result.positions.chains, attrs)

    @property
    def _in_full_files(self) -> int:
        """Draws that are written for good."""
        return self.store.count - self.store.count % self.store.chunk

    @property
    def _waiting(self) -> Tensor:
        """Those after them."""
        begin, held = self._held
        return held[:, self._in_full_files - begin :]

    def _fill_files(self) -> None:
        while self._waiting.shape[1] >= self.store.chunk:
            self._write(self._waiting[:, : self.store.chunk])

    def _write_rest(self) -> None:
        if self.count > self.store.count:
            self._write(self._waiting)

    def _write(self, positions: Tensor) -> None:
        begun = time.monotonic()
        self.store.append(self._values(positions), self._in_full_files)
        now = time.monotonic()
        self._due = now + max(_WAIT_SECONDS, _WAIT_TIMES * (now - begun))

    def _values(self, positions: Tensor) -> dict[str, Tensor]:
        """What is stored of draws `[chains, n, D]`, by group and site."""
        bare = self._starts.layout.unflatten(positions)
        if not self._transformed and not self._starts.log_posterior.model_info.steady:
            return {f"{POSTERIOR}/{name}": value for name, value in bare.items()}
        samples = _samples(self._starts, positions)
        constrained = {f"{POSTERIOR}/{name}": value for name, value in samples.items()}
        return constrained | {f"{UNCONSTRAINED}/{name}": bare[name] for name in self._transformed}


class ToMoments:
    """Adds draws up, always as many at a time, so that sums are rounded alike, and forgets all but
    some, from which temperatures are found out.

    Args:
        starts: a result whose draws are the chains' starts.
        first: those, `[chains, 1, D]`.
        num_draws: draws of each chain that are to come.
    """

    _waiting: Tensor
    _seen: Tensor

    def __init__(self, starts: Result, first: Tensor, num_draws: int):
        self._starts, self._none, self._num_draws = starts, first[:, :0], num_draws
        width = first.numel() * first.element_size()
        self._chunk = max(1, min(_MOST_DRAWS, _FILE_BYTES // width))
        self._seen_draws = evenly(num_draws, max(1, min(_SEEN // len(first), _HELD_BYTES // width)))
        self.go_on_from(None)

    @property
    def count(self) -> int:
        """Draws of each chain that it has got."""
        return self._moments.online.count + self._waiting.shape[1]

    def add(self, positions: Tensor) -> None:
        """Takes the next draws."""
        places = self._seen_draws - self.count
        here = places[(places >= 0) & (places < positions.shape[1])]
        self._seen = torch.cat([self._seen, positions[:, here]], 1)
        self._waiting = torch.cat([self._waiting, positions], 1)
        while self._waiting.shape[1] >= self._chunk:
            self._sum_up(self._chunk)

    def close(self) -> None:
        """Adds up what it holds."""
        if self._waiting.shape[1]:
            self._sum_up(self._waiting.shape[1])

    def state(self) -> dict[str, Any]:
        """What another one needs to go on."""
        sums = self._moments.online.state()
        return {"sums": sums, "waiting": self._waiting, "seen": self._seen}

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Takes up where another one was; None begins anew."""
        self._moments = OnlineSamples.of(self._starts.samples, self._num_draws)
        self._waiting = self._seen = self._none
        if state is not None:
            self._waiting, self._seen = state["waiting"], state["seen"]
            self._moments.online.go_on_from(state["sums"])

    def kept(self, draws: Draws) -> OnlineSamples:
        """The moments of a run's finished chains."""
        return dataclasses.replace(self._moments, chains=draws.finished)

    def positions(self, draws: Draws) -> Tensor:
        """Some draws of the finished chains, evenly over the run, and where they are now."""
        last = draws.state.position[:, None].cpu()
        return torch.cat([self._seen, last], 1)[draws.finished]

    def _sum_up(self, count: int) -> None:
        block, self._waiting = self._waiting[:, :count], self._waiting[:, count:].clone()
        self._moments.add(_samples(self._starts, block))


def _samples(starts: Result, positions: Tensor) -> dict[str, Tensor]:
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


def _transformed(starts: Result) -> list[str]:
    """Sites whose value is not their unconstrained one, points among them."""
    elsewhere = starts.positions[0, 0] + 1 / 3  # at a start the two may be equal by chance
    bare = starts.layout.unflatten(elsewhere)
    own = starts.log_posterior.constrain(bare)
    latents = starts.log_posterior.latents
    return [
        name
        for name, value in bare.items()
        if name not in latents
        or own[name].shape != value.shape
        or not torch.equal(own[name], value)
    ]


def _field(starts: Result, path: str, value: Tensor) -> Field:
    """How a site's draws `[chains, n, ...]` are stored."""
    group, _, name = path.partition("/")
    if "/" in name or name.startswith((".", "__")) or len(name.encode()) > _LONGEST_NAME:
        raise ArgumentError(
            f"store: site '{name}' cannot be an array's name in a Zarr store: rename it, without "
            f"'/', without '.' or '__' in front, with at most {_LONGEST_NAME} bytes"
        )
    shape = tuple(value.shape[2:])
    if group == POSTERIOR:
        dims = dims_of(starts, group, name, len(shape))
    else:
        dims = own_dims(starts, name, len(shape))
    return Field(shape, dtype_name(value.dtype), tuple(dims))
