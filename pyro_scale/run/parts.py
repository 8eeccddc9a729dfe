"""The checkpoints of a run on any number of processes.

A "part" is a group of chains whose checkpoints are written together. A run of one process has one
part, of all chains, in the run's directory. Of several processes, each writes its parts into
subdirectories, `part-<generation>.<process>.<number>`. As chains do not depend on each other, a run
resumes each chain from its furthest saved state, on any number of processes.
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
    """A group of chains of a run whose checkpoints are written together, into one directory.

    Attributes:
        path: directory of the group's checkpoints; None if no checkpoints are written.
        chains: numbers of the chains.
        last: the checkpoint that the group continues from; None at the beginning of a run.
    """

    path: Path | None
    chains: tuple[int, ...]
    last: Checkpoint | None


class Sinks(Protocol):
    """Where the draws of this process's chains are written during a run, if they do not stay in
    memory: a store on disk, or moments."""

    def begin(self, parts: Sequence[Part]) -> Sequence[Sink]:
        """New sinks (storage for draws), one for each of this process's groups of chains, in their
        order. A sink is set to continue after the draws of its group's checkpoint. All processes
        have to call this.

        Args:
            parts: the groups of chains, with the checkpoints that they continue from.
        """
        ...

    def end(self, finished: Sequence[Sequence[int]]) -> FileError | None:
        """Completes the stored draws, after all processes have taken their steps.

        Args:
            finished: for each group of chains, the indices in the group of the chains that have
                reached the end.

        Returns:
            The error that prevented completion; None if there was none.
        """
        ...


def progress(part: Part) -> tuple[int, int]:
    """How far a saved group of chains has come, as a key to sort by: (halvings of the step size,
    steps taken). The group with the larger pair is further; the group must have a checkpoint."""
    assert part.last is not None
    return int(part.last.facts["halvings"]), part.last.run_state.step


def read_parts(path: FilePath) -> list[Part]:
    """The groups of chains that a run's directory has an intact checkpoint of, each with its latest
    checkpoint, to resume the run. Damaged checkpoints are left out if others are intact.

    Raises:
        FileError: there is no intact checkpoint.
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
    """The directories that may hold checkpoints of a run: the run's own directory, then the
    subdirectories of its groups of chains."""
    directory = as_path(path)
    return [directory, *_folders(directory)]


def holds_parts(path: FilePath) -> bool:
    """True if a run's directory, or one of its subdirectories for groups of chains, holds
    checkpoints.
    """
    return any(holds_state(place) for place in places_in(path))


def generation(path: Path) -> int:
    """A number that no subdirectory for groups of chains has in its name yet: one more than the
    largest `<generation>` in the run's directory, 0 if there is no subdirectory. New subdirectories
    get this number."""
    return 1 + max((int(_NAME.fullmatch(f.name)[1]) for f in _folders(path)), default=-1)  # type: ignore[index]


def parts_of(
    chains: Sequence[int], saved: Sequence[Part], path: Path, process: int, number: int
) -> list[Part]:
    """The groups into which a process's chains are divided for checkpoints when a run begins or
    resumes. Each chain continues from the furthest saved state that there is of it.

    A saved group that has exactly the same chains continues in its own directory; otherwise its
    checkpoint is split, and written to a new directory.

    Args:
        chains: numbers of the process's chains.
        saved: the saved groups in the run's directory.
        path: the run's directory.
        process: number of this process.
        number: the `<generation>` in names of new directories, from the function `generation`.
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
    """Deletes the subdirectories for groups of chains whose names are not in `used`."""
    for folder in _folders(path):
        if folder.name not in used:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _select(last: Checkpoint, places: list[int]) -> Checkpoint:
    """A checkpoint with only some of the chains of another checkpoint, when a resumed run divides
    chains among processes in another way.

    Args:
        last: the checkpoint of a group of chains.
        places: indices of the wanted chains among the group's chains.
    """
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
