"""The checkpoints of a run on any number of processes.

A part is some of the chains, with checkpoints of its own, as chains need nothing of each other.
The directory of a run of one process is one part, of all chains; of several processes, each
writes parts into directories of their own, `part-<generation>.<rank>.<number>`.  A run goes on
with each chain from the furthest state that is there, on as many processes as there are then.
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
    """Some chains of a run.

    Attributes:
        path: where they are written; None for nowhere.
        chains: their numbers.
        last: what they go on from; None for their beginning.
    """

    path: Path | None
    chains: tuple[int, ...]
    last: Checkpoint | None


class Sinks(Protocol):
    """Takes the draws of this process's parts, where they do not stay in memory."""

    def begin(self, parts: Sequence[Part]) -> Sequence[Sink]:
        """What takes those of each, from where it goes on; all processes have to begin."""
        ...

    def end(self, finished: Sequence[Sequence[int]]) -> FileError | None:
        """Brings all to its place, once all processes have taken their steps.

        Args:
            finished: the places of the chains of each part that have reached the end.

        Returns:
            What was in the way.
        """
        ...


def progress(part: Part) -> tuple[int, int]:
    """How far a saved part is: how small its step size, and at which step."""
    assert part.last is not None
    return int(part.last.facts["halvings"]), part.last.run_state.step


def read_parts(path: FilePath) -> list[Part]:
    """All parts in a run's directory, as far as they are whole.

    Raises:
        FileError: there is none.
    """
    places, parts, damaged = places_in(path), [], None
    for place in [each for each in places if holds_state(each)] or places[:1]:
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
    """Where in a directory checkpoints of a run can be: of one process, or of any number."""
    directory = as_path(path)
    return [directory, *_folders(directory)]


def holds_parts(path: FilePath) -> bool:
    """Whether a directory holds checkpoints of a run of any number of processes."""
    return any(holds_state(place) for place in places_in(path))


def generation(path: Path) -> int:
    """One that no part in a directory has."""
    return 1 + max((int(_NAME.fullmatch(f.name)[1]) for f in _folders(path)), default=-1)  # type: ignore[index]


def parts_of(
    chains: Sequence[int], saved: Sequence[Part], path: Path, rank: int, number: int
) -> list[Part]:
    """The parts in which some chains go on.

    Args:
        chains: their numbers.
        saved: what there is.
        path: the run's directory.
        rank: of this process.
        number: of the generation of parts that have to be made.
    """
    furthest = dict.fromkeys(chains) | {
        chain: place
        for place, part in sorted(enumerate(saved), key=lambda each: progress(each[1]))
        for chain in part.chains
        if chain in chains
    }
    parts = []
    for i, place in enumerate(dict.fromkeys(furthest.values())):
        own = tuple(chain for chain in chains if furthest[chain] == place)
        new = path / f"part-{number}.{rank}.{i}"
        if place is None:
            parts.append(Part(new, own, None))
            continue
        source = saved[place]
        assert source.last is not None
        is_same = own == source.chains
        last = source.last if is_same else _of(source.last, [source.chains.index(c) for c in own])
        parts.append(Part(source.path if is_same else new, own, last))
    return parts


def drop_others(path: Path, used: Sequence[str]) -> None:
    """Removes the parts that have been taken over by others."""
    for folder in _folders(path):
        if folder.name not in used:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _of(last: Checkpoint, places: list[int]) -> Checkpoint:
    """What a checkpoint holds of some of its chains."""
    state = last.run_state
    failures = tuple(
        dataclasses.replace(failure, chain=places.index(failure.chain))
        for failure in state.failures
        if failure.chain in places
    )

    def own(leaf: Tensor) -> Tensor:
        return leaf[torch.tensor(places, device=leaf.device)]

    leaves = [own(leaf) for leaf in state.state]
    return last._replace(
        parts=(),
        run_state=RunState(state.step, leaves, state.alive[places], failures),
        positions=last.positions[places],
        log_joint=last.log_joint[places],
        kinetic=None if last.kinetic is None else last.kinetic[places],
        sink=pytree.tree_map_only(Tensor, own, last.sink),
    )


def _folders(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(f for f in directory.iterdir() if f.is_dir() and _NAME.fullmatch(f.name))
    return []
