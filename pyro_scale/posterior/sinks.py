"""Where draws go that do not stay in memory: to disk, or into online moments alone."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import dtype_name
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError, FileError
from pyro_scale.posterior.draws import PosteriorDraws, finite_samples
from pyro_scale.posterior.export import attributes, dims_of, own_dims
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.run.config import Store
from pyro_scale.run.parts import Part
from pyro_scale.run.problem import Problem
from pyro_scale.storage.files import FilePath
from pyro_scale.storage.lazy_draws import StoredPositions
from pyro_scale.storage.zarr_store import POSTERIOR, UNCONSTRAINED, DrawStore, Field, writing_into

#: Bytes of all chains' draws that are held until they are written; bytes and draws of a file.
#: (Larger files would be faster by little, and what they pass through would be kept by malloc.)
_HELD_BYTES, _FILE_BYTES, _MOST_DRAWS = 2**25, 2**21, 2**14
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
    starts = PosteriorDraws(problem.log_posterior, problem.data, problem.engine.layout, first, {})
    if store is False:
        width = first.numel() * first.element_size()
        chunk = max(1, min(_MOST_DRAWS, _FILE_BYTES // width))
        yield ToMoments(starts, first, problem, num_draws, chunk)
        return
    if isinstance(store, bool):
        raise ArgumentError("store=True: pass the path of a Zarr store, or False to keep no draws")
    with writing_into(store) if problem.ranks.is_first else contextlib.nullcontext():
        yield ToDisk(starts, first, problem, store, resumes)


class ToDisk:
    """Writes the draws of this process's chains into a store that all processes write.

    Rank 0 makes the store and tells readers how many draws there are of all chains, as far as
    ranks have said how many they have.

    Args:
        starts: a result whose draws are the chains' starts.
        first: those, `[chains, 1, D]`.
        problem: of the run.
        path: of the store.
        resumes: whether it may be there already, of the run that goes on.

    Raises:
        ArgumentError: a site's name cannot be a file's; there is something at the path.
        FileError: the store cannot be made.
    """

    def __init__(
        self, starts: PosteriorDraws, first: Tensor, problem: Problem, path: FilePath, resumes: bool
    ):
        self._starts, self._problem, self._none = starts, problem, first[:, :0]
        self._parts: list[PartToDisk] = []
        self._transformed = _transformed(starts)
        if not resumes and problem.ranks.is_first:
            values, num_chains = self._values(first), starts.num_chains
            width = sum(v[0, 0].numel() * v.element_size() for v in values.values())
            affordable = min(_HELD_BYTES // (num_chains * width), _FILE_BYTES // width)
            fields = {name: _field(starts, name, value) for name, value in values.items()}
            chunk, run = max(1, min(_MOST_DRAWS, affordable)), secrets.token_hex(8)
            DrawStore.created(path, fields, num_chains, chunk, run)
        problem.ranks.of_first(None, "the making of a store")
        self.store = DrawStore.opened(path)

    def begin(self, parts: Sequence[Part]) -> list[PartToDisk]:
        """What takes the draws of some parts, each from where it goes on.

        Raises:
            FileError: the store is of another run, or lacks draws.
        """
        ranks, none = self._problem.ranks, self._none
        self._parts = [PartToDisk(self, part.chains, none[list(part.chains)]) for part in parts]
        for part, own in zip(parts, self._parts, strict=True):
            state = None if part.last is None else part.last.sink
            if part.last is not None and state is not None:
                self._check_holds(part.chains, part.last.run_state.alive, state)
            own.go_on_from(state)
        ranks.least(self._least)
        told = ranks.of_all(self._least, "the draws that there are")
        if ranks.is_first:
            self.store.truncate(min(self.store.count, *told))
        ranks.of_first(None, "the draws that readers see")  # before they are written again
        for own in self._parts:
            self.drop(own.chains, own.written)
        return self._parts

    def end(self, finished: Sequence[Sequence[int]]) -> FileError | None:
        """Shows readers the draws that all chains have, after the last step.

        Chains that have all stopped hold the others up at nothing: the draws that they lack are
        NaN.

        Args:
            finished: the places of the chains of each part that have reached the end.

        Returns:
            What was in the way.
        """
        ranks, store = self._problem.ranks, self.store
        own = [(part.written, bool(c)) for part, c in zip(self._parts, finished, strict=True)]
        told = [each for of_rank in ranks.of_all(own, "the last draws") for each in of_rank]
        count = min([n for n, has_ended in told if has_ended] or [n for n, _ in told])
        error = None
        try:
            for part in self._parts:
                part.end_at(count)
        except FileError as raised:
            error = raised
        error = next(filter(None, ranks.of_all(error, "the end of their files")), None)
        if ranks.is_first and error is None and count != store.count:
            try:
                (store.show if count > store.count else store.truncate)(count)
            except FileError as raised:
                error = raised
        store.count, error = ranks.of_first((store.count, error), "the draws that readers see")
        return error

    def kept(self, draws: Draws) -> StoredPositions:
        """The draws of a run's finished chains that have been written."""
        numbers = self._problem.numbers(len(draws.log_joint))
        chains = torch.tensor([numbers[chain] for chain in draws.finished], dtype=torch.long)
        count = min(self.store.count, len(draws.kept_steps))
        return StoredPositions(self.store, self._starts.layout, chains, count)

    def describe(self, result: PosteriorDraws) -> None:
        """Writes down the facts of the run, next to its draws; rank 0 does.

        Raises:
            FileError: they cannot be written.
        """
        if self._problem.ranks.is_first:
            assert isinstance(result.positions, StoredPositions)
            attrs = attributes(result.attrs)
            self.store.put("sample_stats", result.sample_stats, result.positions.chains, attrs)

    def write(self, positions: Tensor, start: int, chains: Sequence[int]) -> None:
        """Writes draws of some chains, `[chains, n, D]`.

        Raises:
            FileError: they cannot be written.
        """
        if self._problem.is_writer:
            self.store.write(self._values(positions), start, chains)

    def drop(self, chains: Sequence[int], count: int) -> None:
        """Removes files of some chains that only hold draws after the first `count`.

        Raises:
            FileError: they cannot be removed.
        """
        if self._problem.is_writer:
            self.store.drop(chains, count)

    def show(self) -> None:
        """Shows readers what is known to be written of all chains.

        Raises:
            FileError: it cannot be shown.
        """
        count = self._problem.ranks.least(self._least)
        if self._problem.ranks.is_first and count > self.store.count:
            self.store.show(count)

    @property
    def _least(self) -> int:
        return min(part.written for part in self._parts)

    def _check_holds(self, chains: Sequence[int], alive: Tensor, state: Mapping[str, Any]) -> None:
        """Refuses a store without the draws that a sink has written for good."""
        sound = [chain for chain, is_alive in zip(chains, alive.tolist(), strict=True) if is_alive]
        stored = state["stored"]
        if state["run"] != self.store.run or (stored and not self.store.holds(sound, stored)):
            raise FileError(
                f"store='{self.store.path}' does not hold the draws of the run that goes on: pass "
                "the store that it had",
                code="resume",
            )

    def _values(self, positions: Tensor) -> dict[str, Tensor]:
        """What is stored of draws `[chains, n, D]`, by group and site."""
        bare = self._starts.layout.unflatten(positions)
        if not self._transformed and not self._starts.log_posterior.model_info.steady:
            return {f"{POSTERIOR}/{name}": value for name, value in bare.items()}
        samples = finite_samples(self._starts, positions)
        constrained = {f"{POSTERIOR}/{name}": value for name, value in samples.items()}
        return constrained | {f"{UNCONSTRAINED}/{name}": bare[name] for name in self._transformed}


class PartToDisk:
    """Writes the draws of some chains into a store, as many at a time as its files hold, and by
    time those of a file that is not full yet, which stay in memory until it is.

    What a full file holds is thus a function of its draws alone: constrained in other blocks, they
    may round otherwise.

    Args:
        run: that they are of.
        chains: their numbers.
        none: of their draws, `[chains, 0, D]`.

    Attributes:
        written: draws of each chain that are in the store.
    """

    def __init__(self, run: ToDisk, chains: Sequence[int], none: Tensor):
        self._run, self.chains = run, chains
        self._held = 0, none  # (the first one's number, draws)
        self._due = time.monotonic() + _WAIT_SECONDS
        self.written = run.store.count

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

    def end_at(self, count: int) -> None:
        """Has so many draws, in files: NaN in the place of those that are not there.

        Raises:
            FileError: they cannot be written.
        """
        chunk, none = self._run.store.chunk, self._held[1][:, :1]
        while self.count < count:
            missing = min(chunk, count - self.count)
            self.add(none.new_full((len(none), missing, none.shape[2]), torch.nan))
        if self.written < count:
            self.close()
        self._run.drop(self.chains, count)

    def state(self) -> dict[str, Any]:
        """What another one needs to go on."""
        return {"run": self._run.store.run, "stored": self._in_full_files, "held": self._waiting}

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Takes up where another one was; None begins anew."""
        state = state or {"stored": 0, "held": self._held[1][:, :0]}
        stop = state["stored"] + state["held"].shape[1]
        self.written = max(state["stored"], min(stop, self.written))
        self._held = state["stored"], state["held"]

    @property
    def _in_full_files(self) -> int:
        """Draws that are written for good."""
        return self.written - self.written % self._run.store.chunk

    @property
    def _waiting(self) -> Tensor:
        """Those after them."""
        begin, held = self._held
        return held[:, self._in_full_files - begin :]

    def _fill_files(self) -> None:
        while self._waiting.shape[1] >= self._run.store.chunk:
            self._write(self._waiting[:, : self._run.store.chunk])

    def _write_rest(self) -> None:
        if self.count > self.written:
            self._write(self._waiting)

    def _write(self, positions: Tensor) -> None:
        begun, start = time.monotonic(), self._in_full_files
        self._run.write(positions, start, self.chains)
        self.written = start + positions.shape[1]
        self._run.show()
        now = time.monotonic()
        self._due = now + max(_WAIT_SECONDS, _WAIT_TIMES * (now - begun))


def _transformed(starts: PosteriorDraws) -> list[str]:
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


def _field(starts: PosteriorDraws, path: str, value: Tensor) -> Field:
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
