"""Checkpoints: the state of the chains and the draws so far, enough to continue exactly.

A directory holds the latest two states of a run, `state-<number>`, and the draws kept between
states, `draws-<number>`. Each file is written as a whole or not at all. Random numbers and
minibatches are functions of the seed and the step's number, so a state is all that a run needs to
continue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.layout import dtype_name
from pyro_scale.core.warn import warn
from pyro_scale.engine.draws import Draws, Failure
from pyro_scale.engine.step import State
from pyro_scale.errors import ArgumentError, FileError, PyroScaleWarning
from pyro_scale.storage import files

#: Number of states that are kept: if the latest is damaged, the one before remains.
_KEPT = 2
#: Names of our files; others in the directory are the user's.
_NAME = re.compile(r"(?:state|draws)-(\d{1,9})")


class RunState(NamedTuple):
    """The state of a run between two steps, as a checkpoint stores it.

    Attributes:
        step: number of steps taken.
        state: the state of the sampler's kernel, for all chains.
        alive: whether each chain is running, booleans `[chains]`.
        failures: one failure for each chain that stopped.
    """

    step: int
    state: Any
    alive: Tensor
    failures: tuple[Failure, ...]


class Checkpoint(NamedTuple):
    """A checkpoint that was read from a directory: a run's state and its draws until then.

    Attributes:
        number: the number in the name of the checkpoint's file.
        parts: names of the files that hold the draws.
        facts: settings that must be the same when the run is resumed, such as its seed, by name.
        run_state: state of the run, with the kernel's state as a list of its tensors.
        batches: which minibatch is next, as an object for `Batches.seek`.
        positions: unconstrained draws until then, D parameters each, `[chains, kept draws, D]`.
        log_joint: log joints of the steps that led to these draws, in nats, `[chains, kept draws]`.
        kinetic: kinetic temperatures, `[chains, measurements, latent sites]`, or None if they were
            not measured.
        look_every: number of draws from one measurement of the kinetic temperature to the next.
        program: name of the program that ran the steps, such as "compiled loop"; None before the
            first step.
        sink: state of the sink that stores the draws; None if they are in memory.
    """

    number: int
    parts: tuple[str, ...]
    facts: dict[str, Any]
    run_state: RunState
    batches: Any
    positions: Tensor
    log_joint: Tensor
    kinetic: Tensor | None
    look_every: int
    program: str | None
    sink: dict[str, Any] | None = None

    def state_like(self, state: State) -> State:
        """The state of the sampler's kernel from the checkpoint, which stores it as a list of
        tensors: in the pytree structure and on the devices of `state`, another state of the same
        kernel.
        """
        leaves, structure = pytree.tree_flatten(state)
        pairs = zip(self.run_state.state, leaves, strict=True)
        return pytree.tree_unflatten([leaf.to(like.device) for leaf, like in pairs], structure)


class Checkpoints:
    """Writes a run's checkpoints into a directory, which is created if its parent exists.

    Args:
        path: the directory.
        every: seconds from one checkpoint to the next.
        facts: settings that must be the same when the run is resumed, by name.
        last: checkpoint that the run continues. If None, the first checkpoint replaces those that
            are in the directory.

    Raises:
        FileError: the directory cannot be created.
    """

    def __init__(
        self,
        path: files.FilePath,
        every: float,
        facts: Mapping[str, Any],
        last: Checkpoint | None = None,
    ):
        self._directory, self._every, self._facts = files.as_path(path), every, dict(facts)
        self._parts = [] if last is None else list(last.parts)
        # draws that are in no file yet come from another directory
        self._kept = last.positions.shape[1] if last is not None and last.parts else 0
        self._intact = [] if last is None else [last.number]
        self._written = time.monotonic()
        try:
            self._directory.mkdir(exist_ok=True)
        except OSError as error:
            raise FileError(
                f"checkpoint: '{path}' cannot be made ({error.strerror or error}): pass a "
                "directory whose parent is there and can be written to",
                code="cannot-write",
            ) from error
        # names are not used twice: a state and its draws belong together
        self._number = 1 + max((number for number, _ in _files(self._directory)), default=-1)

    @property
    def due(self) -> bool:
        """Whether it is time to write the next checkpoint: as many seconds as `every` says have
        passed since the last one.
        """
        return time.monotonic() - self._written >= self._every

    def write(
        self,
        run_state: RunState,
        batches: Any,
        draws: Draws,
        look_every: int,
        sink: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the next checkpoint, and deletes files that are no longer needed.

        Args:
            run_state: state of the run between two steps.
            batches: which minibatch is next, as `Batches.position` returns it.
            draws: all draws kept so far; only those that are in no file yet are written.
            look_every: number of draws from one measurement of the kinetic temperature to the next.
            sink: state of the sink that stores the draws; None if they are in memory.

        Raises:
            FileError: a file cannot be written; the checkpoint before remains.
        """
        kept = draws.positions.shape[1]
        parts = list(self._parts)
        if kept > self._kept:
            parts.append(f"draws-{self._number}")
            new = slice(self._kept, kept)
            self._write(
                parts[-1],
                {"positions": draws.positions[:, new], "log_joint": draws.log_joint[:, new]},
            )
        self._write(
            f"state-{self._number}",
            {
                "facts": self._facts,
                "step": run_state.step,
                "state": pytree.tree_leaves(run_state.state),
                "alive": run_state.alive,
                "failures": [list(dataclasses.astuple(fail)) for fail in run_state.failures],
                "batches": batches,
                "sink": sink,
                "parts": parts,
                "shape": list(draws.positions.shape),
                "dtype": dtype_name(draws.positions.dtype),
                "kinetic": draws.kinetic,
                "look_every": look_every,
                "program": draws.program if run_state.step else None,
            },
        )
        self._parts, self._kept = parts, kept
        self._intact = [*self._intact, self._number][-_KEPT:]
        self._number += 1
        self._written = time.monotonic()
        self._tidy()

    def _write(self, name: str, contents: Mapping[str, Any]) -> None:
        files.write(self._directory / name, contents, "checkpoint")

    def _tidy(self) -> None:
        """Deletes the checkpoint files in the directory that the latest intact states do not need;
        files with other names are the user's and remain."""
        needed = {*self._parts, *(f"state-{number}" for number in self._intact)}
        for _, file in _files(self._directory):
            if file.name not in needed:
                with contextlib.suppress(OSError):
                    file.unlink()
        files.drop_unfinished(self._directory)


def check_unused(path: files.FilePath, places: Sequence[Path]) -> None:
    """Raises if a directory holds checkpoints already: a new run must not overwrite them.

    Args:
        path: the directory as the user passed it, for the message.
        places: the directories where checkpoints would be written: `path` itself, or directories in
            it.

    Raises:
        ArgumentError: one of the directories holds checkpoints.
        FileError: one of the directories cannot be read.
    """
    if any(_files(place) for place in places):
        raise ArgumentError(
            f"checkpoint='{path}' holds the checkpoints of a run: pass resume= instead to go on "
            "with that one, or another directory",
            code="resume",
        )


def holds_state(path: files.FilePath) -> bool:
    """Whether a directory holds checkpoints of a run; False if it does not exist or cannot
    be read.
    """
    with contextlib.suppress(FileError):
        return any(file.name.startswith("state-") for _, file in _files(files.as_path(path)))
    return False


def read(path: files.FilePath) -> Checkpoint:
    """The latest intact checkpoint in a directory.

    Raises:
        FileError: there is no checkpoint, or none is intact; the message says what is wrong with
            each.

    Warns:
        UserWarning: a later checkpoint is damaged.
    """
    directory = files.as_path(path)
    latest_first = sorted(_files(directory), reverse=True)
    states = [(n, file) for n, file in latest_first if file.name.startswith("state-")]
    if not states:
        what = "holds no checkpoint" if directory.is_dir() else "is no directory"
        raise FileError(
            f"resume='{path}' {what}: pass the directory that checkpoint= was, or leave it out to "
            "start",
            code="resume",
        )
    damages: list[str] = []
    for number, state in states:
        try:
            checkpoint = _read(directory, number, state)
        except FileError as error:
            damages.append(format(error))
            continue
        if damages:
            warn(
                PyroScaleWarning,
                f"the latest checkpoint is damaged ({'; '.join(damages)}): the one before it is "
                "taken",
            )
        return checkpoint
    raise FileError(
        f"resume='{path}' holds no intact checkpoint: {'; '.join(damages)}", code="resume"
    )


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], within: str | None = None
) -> list[str]:
    """Lines such as "seed was 0, is 1", one for each setting that differs between a checkpoint and
    the run that is to continue it; empty if all are the same.

    Args:
        then: settings of the checkpoint, by name.
        now: settings of the run that is to continue it, by name.
        within: name of the setting whose entries are compared, in a recursive call; None for all
            settings.
    """
    lines = []
    for name in dict.fromkeys([*then, *now]):
        was, is_now = then.get(name), now.get(name)
        place = name if within is None else f"{within}['{name}']"
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            lines += differences(was, is_now, place)
        elif not _same(was, is_now):
            lines.append(f"{place} was {_show(was)}, is {_show(is_now)}")
    return lines


def _read(directory: Path, number: int, state: Path) -> Checkpoint:
    held = files.read(state, "checkpoint")
    parts = [files.read(directory / part, "checkpoint") for part in held["parts"]]
    chains, kept, size = held["shape"]
    dtype = getattr(torch, held["dtype"])
    none = torch.empty(chains, 0, size, dtype=dtype), torch.empty(chains, 0, dtype=torch.float64)
    failures = tuple(Failure(*fields) for fields in held["failures"])
    checkpoint = Checkpoint(
        number=number,
        parts=tuple(held["parts"]),
        facts=held["facts"],
        run_state=RunState(held["step"], held["state"], held["alive"], failures),
        batches=held["batches"],
        positions=torch.cat([none[0], *(part["positions"] for part in parts)], 1),
        log_joint=torch.cat([none[1], *(part["log_joint"] for part in parts)], 1),
        kinetic=held["kinetic"],
        look_every=held["look_every"],
        program=held["program"],
        sink=held["sink"],
    )
    if checkpoint.positions.shape[1] != kept:
        raise FileError(f"'{state}' and its draws do not belong together")
    return checkpoint


def _files(directory: Path) -> list[tuple[int, Path]]:
    """(Number, path) of each checkpoint file in a directory, unsorted; an empty list if there is no
    such directory.

    Raises:
        FileError: the directory cannot be read.
    """
    try:
        paths = list(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        raise FileError(f"'{directory}' cannot be read ({error.strerror or error})") from error
    matches = [(_NAME.fullmatch(file.name), file) for file in paths]
    return [(int(match[1]), file) for match, file in matches if match]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _show(fact: Any) -> str:
    if fact is None:
        return "not there"
    return "another tensor" if isinstance(fact, Tensor) else repr(fact)
