"""The checkpoints of a run on any number of processes.

A part is a group of chains with checkpoints of its own; chains are independent.  A run of one
process has one part, of all chains, in its directory.  Of several processes, each writes its parts
into subdirectories, `part-<generation>.<process>.<number>`.  A run resumes each chain from its
furthest state, on any number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.engine.checkpoint import Checkpoint, RunState, holds_state, read
from pyro_scale.engine.draws import Sink
from pyro_scale.errors import FileError
from pyro_scale.storage.files import FilePath, as_path

_NAME = re.compile(r"part-(\d+)\.\d+\.\d+")
#: The fact that names a part's chains.
CHAINS = "chains"


class Part(NamedTuple):
    """A group of chains of a run that is written together.

    Attributes:
        path: the directory of its checkpoints; None if it is not written.
        chains: the chains' numbers.
        last: the checkpoint that it continues from; None at the beginning.
    """

    path: Path | None
    chains: tuple[int, ...]
    last: Checkpoint | None


class Sinks(Protocol):
    """Takes the draws of all parts of this process, if they do not stay in memory."""

    def begin(self, parts: Sequence[Part]) -> Sequence[Sink]:
        """A sink for each part, positioned where the part continues.  All processes have to call
        this."""
        ...

    def end(self, finished: Sequence[Sequence[int]]) -> FileError | None:
        """Completes the draws, once all processes have taken their steps.

        Args:
            finished: of each part, the places of the chains that have reached the end.

        Returns:
            The error that prevented it, if any.
        """
        ...


def progress(part: Part) -> tuple[int, int]:
    """(Halvings of the step size, step) of a saved part; the larger, the further it is."""
    assert part.last is not None
    return int(part.last.facts["halvings"]), part.last.run_state.step


def read_parts(path: FilePath) -> list[Part]:
    """All intact parts in a run's directory.

    Raises:
        FileError: there is none.
    """
    places, parts, damaged = places_in(path), [], None
    for place in list(filter(holds_state, places)) or places[:1]:
        try:
            last = read(place)
        except FileError as error:
            damaged = error
            continue
        chains = last.facts.get(CHAINS) or range(len(last.positions))
        parts.append(Part(place, tuple(chains), last))
    if damaged is not None and not parts:
        raise damaged
    return parts


def places_in(path: FilePath) -> list[Path]:
    """The directories that may hold checkpoints of a run: its own, and those of its parts."""
    directory = as_path(path)
    return [directory, *_folders(directory)]


def holds_parts(path: FilePath) -> bool:
    """Whether a run's directory holds checkpoints."""
    return any(holds_state(place) for place in places_in(path))


def generation(path: Path) -> int:
    """The next generation of parts: a number that no part in the directory has."""
    return 1 + max((int(_NAME.fullmatch(f.name)[1]) for f in _folders(path)), default=-1)  # type: ignore[index]


def parts_of(
    chains: Sequence[int], saved: Sequence[Part], path: Path, process: int, number: int
) -> list[Part]:
    """The parts of a process's chains, each resumed from its furthest saved state.

    A saved part that has exactly the same chains is continued in its own directory; otherwise its
    checkpoint is split and written to a new one.

    Args:
        chains: the process's.
        saved: the parts in the run's directory.
        path: the run's directory.
        process: the number of this one.
        number: the generation of new parts.
    """
    furthest = dict.fromkeys(chains) | {
        chain: place
        for place, part in sorted(enumerate(saved), key=lambda pair: progress(pair[1]))
        for chain in part.chains
        if chain in chains
    }
    parts = []
    for i, place in enumerate(dict.fromkeys(furthest.values())):
        members = tuple(chain for chain in chains if furthest[chain] == place)
        new = path / f"part-{number}.{process}.{i}"
        if place is None:
            parts.append(Part(new, members, None))
            continue
        source = saved[place]
        assert source.last is not None
        if members == source.chains:
            parts.append(source)
        else:
            places = [source.chains.index(chain) for chain in members]
            parts.append(Part(new, members, _select(source.last, places)))
    return parts


def drop_others(path: Path, used: Sequence[str]) -> None:
    """Removes the parts in a directory whose names are not in `used`."""
    for folder in _folders(path):
        if folder.name not in used:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _select(last: Checkpoint, places: list[int]) -> Checkpoint:
    """The checkpoint of the chains at some places of a checkpoint."""
    state = last.run_state
    failures = tuple(
        dataclasses.replace(failure, chain=places.index(failure.chain))
        for failure in state.failures
        if failure.chain in places
    )

    def select(leaf: Tensor) -> Tensor:
        return leaf[torch.tensor(places, device=leaf.device)]

    leaves = [select(leaf) for leaf in state.state]
    return last._replace(
        parts=(),
        run_state=RunState(state.step, leaves, state.alive[places], failures),
        positions=last.positions[places],
        log_joint=last.log_joint[places],
        kinetic=None if last.kinetic is None else last.kinetic[places],
        sink=pytree.tree_map_only(Tensor, select, last.sink),
    )


def _folders(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(f for f in directory.iterdir() if f.is_dir() and _NAME.fullmatch(f.name))
    return []
