"""Sinks take the draws of a run that do not stay in memory: into a store, or into moments."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import dtype_name
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError, FileError
from pyro_scale.posterior.draws import PosteriorDraws, SampleTotals, finite_samples
from pyro_scale.posterior.export import attributes, dims_of, numbered_dims
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.run.config import Store
from pyro_scale.run.parts import Part
from pyro_scale.run.problem import Problem
from pyro_scale.storage.files import FilePath
from pyro_scale.storage.lazy_draws import StoredPositions
from pyro_scale.storage.zarr_store import POSTERIOR, UNCONSTRAINED, DrawStore, Field, writing_into

#: Bytes of a site's name: a file has this name with `_dim_0` appended.
_LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True)
class Buffering:
    """Limits on the draws that wait in memory before they are written to a store or added up to
    moments: bytes in all (`waiting_bytes`); bytes and draws of a file of one chain (`file_bytes`,
    `file_draws`); seconds between two writes, at least `wait_seconds` and `wait_times` the time
    that a write takes."""

    #: Most bytes of all chains' draws that are pending.
    waiting_bytes: int = 2**25
    #: Most bytes and most draws of a file.  Larger files would be hardly faster, and malloc would
    #: keep the memory of their buffers.
    file_bytes: int = 2**21
    file_draws: int = 2**14
    #: Draws are pending for at most this long: seconds, or this multiple of the time a write takes.
    wait_seconds: float = 5.0
    wait_times: float = 20.0

    def draws_of_file(self, width: int) -> int:
        """The number of draws of a chain that one file holds; at least 1.

        Args:
            width: bytes of one draw.
        """
        return max(1, min(self.file_draws, self.file_bytes // width))


BUFFERING = Buffering()


@contextlib.contextmanager
def sink_for(
    store: Store, problem: Problem, num_draws: int, resumes: bool
) -> Iterator[ToDisk | ToMoments | None]:
    """Context that yields the sink (a store, or moments) to which a run writes its draws; None if
    draws stay in memory. A store is locked against other runs.

    Args:
        store: path of a store; False to keep moments only; None to keep draws in memory.
        problem: model, data and chains of the run.
        num_draws: number of draws of each chain that will be kept.
        resumes: whether the run continues an earlier run.

    Raises:
        ArgumentError: there is something at the path already.
        FileError: the store cannot be created, or another run is writing into it.
    """
    if store is None:
        yield None
        return
    first = problem.positions[:, None].cpu()
    starts = PosteriorDraws(problem.log_posterior, problem.data, problem.engine.layout, first, {})
    if store is False:
        width = first.numel() * first.element_size()
        chunk = BUFFERING.draws_of_file(width)
        yield ToMoments(starts, first, problem, num_draws, chunk)
        return
    if isinstance(store, bool):
        raise ArgumentError("store=True: pass the path of a Zarr store, or False to keep no draws")
    with writing_into(store) if problem.is_first else contextlib.nullcontext():
        yield ToDisk(starts, first, problem, store, resumes)


class ToDisk:
    """Writes the draws of this process's chains into a store, which all processes share.

    One process creates the store, and makes draws visible to readers when they are written for the
    chains of all processes.

    Args:
        starts: model and facts of the run, with the chains' starts as draws.
        first: unconstrained values at these starts, `[chains, 1, D]`.
        problem: model, data and chains of the run.
        path: path of the store's directory.
        resumes: whether the store exists already, because an earlier run is continued.

    Attributes:
        none: an empty tensor of draws, `[chains, 0, D]`.
        store: the store on disk that has the draws.

    Raises:
        ArgumentError: a site's name cannot be a file's name; there is something at the path.
        FileError: the store cannot be created.
    """

    #: There are draws instead.
    totals: SampleTotals | None = None

    def __init__(
        self, starts: PosteriorDraws, first: Tensor, problem: Problem, path: FilePath, resumes: bool
    ):
        self._starts, self._problem, self.none = starts, problem, first[:, :0]
        self._parts: list[PartToDisk] = []
        self._transformed = _transformed(starts)
        if not resumes:
            problem.reduce(lambda _: self._create_store(path, first), None, "the making of a store")
        self.store = DrawStore.open(path)

    def _create_store(self, path: FilePath, first: Tensor) -> None:
        values, num_chains = self._values(first), self._starts.num_chains
        width = sum(v[0, 0].numel() * v.element_size() for v in values.values())
        pending = max(1, BUFFERING.waiting_bytes // (num_chains * width))
        fields = {name: _field(self._starts, name, value) for name, value in values.items()}
        chunk, run = min(pending, BUFFERING.draws_of_file(width)), secrets.token_hex(8)
        DrawStore.create(path, fields, num_chains, chunk, run)

    def begin(self, parts: Sequence[Part]) -> list[PartToDisk]:
        """A new sink for each of this process's groups of chains (`Part`), in the order of `parts`,
        set to continue after the draws of the group's checkpoint. Draws in the store beyond these
        are removed.

        Raises:
            FileError: the store is of another run, or lacks draws that its parts have written.
        """
        self._parts = [PartToDisk(self, part.chains) for part in parts]
        for part, sink in zip(parts, self._parts, strict=True):
            state = None if part.last is None else part.last.sink
            if part.last is not None and state is not None:
                self._check_holds(part.chains, part.last.run_state.alive, state)
            sink.go_on_from(state)
        self._problem.least(self._written_by_all)
        # before draws are written again
        self._problem.reduce(self._truncate, self._written_by_all, "the draws that there are")
        for sink in self._parts:
            self.drop(sink.chains, sink.written)
        return self._parts

    def end(self, finished: Sequence[Sequence[int]]) -> FileError | None:
        """Makes the draws of all chains visible to readers, after the last step.

        A part all of whose chains broke does not limit the other parts: its missing draws are NaN.

        Args:
            finished: for each part, the indices of its chains that reached the end.

        Returns:
            The error that occurred in any process while writing; None if there was none.
        """
        counts = [
            (part.written, bool(chains)) for part, chains in zip(self._parts, finished, strict=True)
        ]
        count = self._problem.reduce(_common_count, counts, "the last draws")
        error = None
        try:
            for part in self._parts:
                part.end_at(count)
        except FileError as raised:
            error = raised

        def show(errors: list[FileError | None]) -> tuple[int, FileError | None]:
            error = next(filter(None, errors), None)
            if error is None and count != self.store.count:
                try:
                    (self.store.show if count > self.store.count else self.store.truncate)(count)
                except FileError as raised:
                    error = raised
            return self.store.count, error

        self.store.count, error = self._problem.reduce(show, error, "the end of their files")
        return error

    def positions(self, draws: Draws) -> StoredPositions:
        """The unconstrained draws of the finished chains in the store, `[chains, n, D]`, which are
        read from disk only when they are indexed."""
        numbers = self._problem.numbers(len(draws.log_joint))
        chains = torch.tensor([numbers[chain] for chain in draws.finished], dtype=torch.long)
        count = min(self.store.count, len(draws.kept_steps))
        return StoredPositions(self.store, self._starts.layout, chains, count)

    def describe(self, result: PosteriorDraws) -> None:
        """Writes the statistics of the draws and the facts of the run into the store, in one
        process.

        Raises:
            FileError: the disk cannot be written.
        """
        if self._problem.is_first:
            assert isinstance(result.positions, StoredPositions)
            attrs = attributes(result.attrs)
            self.store.put("sample_stats", result.sample_stats, result.positions.chains, attrs)

    def write(self, positions: Tensor, start: int, chains: Sequence[int]) -> None:
        """Writes draws of some chains into the store.

        Args:
            positions: unconstrained draws, `[chains, n, D]`.
            start: number of the first of these draws in the run.
            chains: numbers of the chains.

        Raises:
            FileError: the disk cannot be written.
        """
        if self._problem.is_writer:
            self.store.write(self._values(positions), start, chains)

    def drop(self, chains: Sequence[int], count: int) -> None:
        """Removes the files of these chains that hold only draws after the first `count`.

        Raises:
            FileError: the files cannot be removed.
        """
        if self._problem.is_writer:
            self.store.drop(chains, count)

    def show(self) -> None:
        """Makes the draws visible to readers of the store that by now are written for the chains of
        all processes. Has to be called on every rank.

        Raises:
            FileError: the store cannot be written.
        """
        count = self._problem.least(self._written_by_all)
        if self._problem.is_first and count > self.store.count:
            self.store.show(count)

    @property
    def _written_by_all(self) -> int:
        """The number of draws that are in the store for every chain of this process: the least over
        its groups of chains."""
        return min(part.written for part in self._parts)

    def _truncate(self, counts: list[int]) -> None:
        """Removes draws from the store that are not written in all processes, whose numbers of
        written draws are `counts`."""
        self.store.truncate(min(self.store.count, *counts))

    def _check_holds(self, chains: Sequence[int], alive: Tensor, state: Mapping[str, Any]) -> None:
        """Raises if the store lacks draws in full files that an earlier sink wrote.

        Args:
            chains: numbers of the part's chains.
            alive: mask of the chains that have not broken.
            state: what `PartToDisk.state` returned at the checkpoint.

        Raises:
            FileError: the store is of another run, or lacks these draws.
        """
        sound = [chain for chain, is_alive in zip(chains, alive.tolist(), strict=True) if is_alive]
        stored = state["stored"]
        if state["run"] != self.store.run or (stored and not self.store.holds(sound, stored)):
            raise FileError(
                f"store='{self.store.path}' does not hold the draws of the run that goes on: pass "
                "the store that it had",
                code="resume",
            )

    def _values(self, positions: Tensor) -> dict[str, Tensor]:
        """The arrays to store for some draws, `[chains, n, ...]` by `<group>/<site>`: constrained
        draws, and also unconstrained ones of sites with a transform.

        Args:
            positions: unconstrained draws, `[chains, n, D]`.
        """
        unconstrained = self._starts.layout.unflatten(positions)
        if not self._transformed and not self._starts.log_posterior.model_info.steady:
            return {f"{POSTERIOR}/{name}": value for name, value in unconstrained.items()}
        samples = finite_samples(self._starts, positions)
        constrained = {f"{POSTERIOR}/{name}": value for name, value in samples.items()}
        return constrained | {
            f"{UNCONSTRAINED}/{name}": unconstrained[name] for name in self._transformed
        }


class PartToDisk:
    """Writes the draws of some chains into a store, file by file.

    From time to time it also writes a file that is not full yet.  The draws of this file stay in
    memory, and are written again when it is full.  The content of a full file is therefore
    computed from its draws in one block, and does not depend on when draws came: values may round
    differently in other blocks.

    Args:
        run: sink of all parts of the run.
        chains: numbers of the chains.

    Attributes:
        written: number of draws of each chain that are in the store.
    """

    def __init__(self, run: ToDisk, chains: Sequence[int]):
        self._run, self.chains = run, chains
        self._held = 0, run.none[list(chains)]  # (number of the first draw, draws)
        self._due = time.monotonic() + BUFFERING.wait_seconds
        self.written = run.store.count

    @property
    def count(self) -> int:
        """The number of draws of each chain that were passed to `add` so far, written to the store
        or not."""
        begin, held = self._held
        return begin + held.shape[1]

    def add(self, positions: Tensor) -> None:
        """Adds the next n draws of these chains, `positions`, unconstrained, `[chains, n, D]`. Full
        files are written, and from time to time one that is not full.

        Raises:
            FileError: the disk cannot be written.
        """
        self._held = self._in_full_files, torch.cat([self._waiting, positions], 1)
        self._fill_files()
        if time.monotonic() >= self._due:
            self._write_rest()

    def close(self) -> None:
        """Writes all draws that are in memory.

        Raises:
            FileError: the disk cannot be written.
        """
        self._fill_files()
        self._write_rest()

    def end_at(self, count: int) -> None:
        """Gives these chains exactly `count` draws in the store: missing ones are NaN, files with
        later draws only are removed.

        Raises:
            FileError: the store cannot be written.
        """
        chunk, none = self._run.store.chunk, self._held[1][:, :1]
        while self.count < count:
            missing = min(chunk, count - self.count)
            self.add(none.new_full((len(none), missing, none.shape[2]), torch.nan))
        if self.written < count:
            self.close()
        self._run.drop(self.chains, count)

    def state(self) -> dict[str, Any]:
        """All that another sink needs to continue after a checkpoint, by name: the store's run
        (`run`), the number of draws in full files (`stored`) and the draws after these (`held`)."""
        return {"run": self._run.store.run, "stored": self._in_full_files, "held": self._waiting}

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Sets this sink to the state that another sink's `state` returned, when a run resumes from
        a checkpoint; None sets it back to no draws."""
        state = state or {"stored": 0, "held": self._held[1][:, :0]}
        stop = state["stored"] + state["held"].shape[1]
        self.written = max(state["stored"], min(stop, self.written))
        self._held = state["stored"], state["held"]

    @property
    def _in_full_files(self) -> int:
        """The number of draws of each chain that are in files of the store which are full and thus
        not written again."""
        return self.written - self.written % self._run.store.chunk

    @property
    def _waiting(self) -> Tensor:
        """The draws that are in memory because no full file has them yet, unconstrained, `[chains,
        n, D]`."""
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
        self._due = now + max(BUFFERING.wait_seconds, BUFFERING.wait_times * (now - begun))


def _common_count(by_process: list[list[tuple[int, bool]]]) -> int:
    """The number of draws that all parts have which reached the end, or all parts if none did.

    Args:
        by_process: for each part of each process, (its number of written draws, whether a chain of
            it reached the end).
    """
    parts = [part for of_process in by_process for part in of_process]
    return min([count for count, has_ended in parts if has_ended] or [n for n, _ in parts])


def _transformed(starts: PosteriorDraws) -> list[str]:
    """Names of the sites whose unconstrained values are stored besides the constrained ones: those
    with a transform, and point-estimated params."""
    shifted = starts.positions[0, 0] + 1 / 3  # at a start, both values may be equal by chance
    unconstrained = starts.layout.unflatten(shifted)
    constrained = starts.log_posterior.constrain(unconstrained)
    latents = starts.log_posterior.latents
    return [
        name
        for name, value in unconstrained.items()
        if name not in latents
        or constrained[name].shape != value.shape
        or not torch.equal(constrained[name], value)
    ]


def _field(starts: PosteriorDraws, path: str, value: Tensor) -> Field:
    """Shape, dtype and dims of the stored array of a site's draws.

    Args:
        starts: the model, with the chains' starts as draws.
        path: the array's name, `<group>/<site>`.
        value: draws of the site, `[chains, n, ...]`, for shape and dtype.

    Raises:
        ArgumentError: the site's name cannot be a file's name.
    """
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
        dims = numbered_dims(starts, name, len(shape))
    return Field(shape, dtype_name(value.dtype), tuple(dims))
