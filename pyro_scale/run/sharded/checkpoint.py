"""The checkpoints of a sharded network's chain, by `torch.distributed.checkpoint`: one directory,
whatever the number of processes.

The latest two states are in `state-<number>`, and the draws kept between states in
`draws-<number>`: directories to which every rank writes its part.  The file `facts` in a state is
the last to be written, with the hashes of all others, so a state without it is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batches
from pyro_scale.data.loaders import to_device
from pyro_scale.data.sources import Data
from pyro_scale.distributed.shards import Holders
from pyro_scale.errors import ArgumentError, FileError, PyroScaleWarning
from pyro_scale.kernels import Hyperparameters
from pyro_scale.run.resume import (
    Journal,
    differences_of_runs,
    facts_of_data,
    facts_of_model,
    was_restarted,
)
from pyro_scale.run.sharded.chain import ShardedChain, ShardedProblem, part_of
from pyro_scale.storage import files

if TYPE_CHECKING:
    from pyro_scale.run.sharded.execute import Kept

#: States that are kept: should the latest become damaged, there is the one before.
_KEPT = 2
_FACTS = "facts"
_NAME = re.compile(r"(state|draws)-(\d{1,9})")


def open_checkpoints(
    checkpoint: files.FilePath | None,
    resume: files.FilePath | None,
    every: float,
    holders: Holders,
) -> ShardedCheckpoints:
    """Where a run is written, and what it goes on from, as a user asked for it.

    Processes that torchrun has restarted go on with what is in the directory.

    Raises:
        ArgumentError: a time below 0, two directories, one that another run is in.
        FileError: there is nothing whole to go on from.
    """
    journal = Journal.open(None, every, None)  # which checks the time
    if resume is not None:
        if checkpoint is not None and files.as_path(checkpoint) != files.as_path(resume):
            raise ArgumentError(
                f"checkpoint='{checkpoint}', but resume='{resume}', where the run goes on being "
                "written: leave checkpoint out"
            )
        return ShardedCheckpoints(resume, journal.every, holders, goes_on=True)
    assert checkpoint is not None
    goes_on = was_restarted() and _has_states(files.as_path(checkpoint))
    return ShardedCheckpoints(checkpoint, journal.every, holders, holders.of_first(goes_on))


def facts_of(problem: ShardedProblem, data: Data, kernel: Hyperparameters) -> dict[str, Any]:
    """What has to be alike for one run to go on with another, besides its arguments."""
    layout, first = problem.layout, part_of(problem.holders, data.first())
    params = layout.unflatten(problem.position)
    start = problem.engine.density.plain_grad(params, to_device(first, problem.holders.device))[1]
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    shapes |= {name: shard.shape for name, shard in problem.shards.items()}
    return {
        **facts_of_model(layout, shapes, kernel.hyperparameters()),
        **facts_of_data(
            data, data.batch_size, {"log joint where it starts": float(start.log_joint)}
        ),
        "num_data": problem.log_posterior.num_data,
        "seed": problem.seed,
    }


class ShardedCheckpoints:
    """Writes and reads the checkpoints of a run, on all ranks together.

    Args:
        path: the directory, which all ranks see.
        every: seconds from one to the next.
        holders: the ranks.
        goes_on: whether the run goes on with what is there.

    Raises:
        ArgumentError: a directory that another run is in.
        FileError: there is nothing whole to go on from, or the directory cannot be made.
    """

    def __init__(self, path: files.FilePath, every: float, holders: Holders, goes_on: bool):
        self.directory, self._every, self._holders = files.as_path(path), every, holders
        self._facts: dict[str, Any] = {}
        self._hashes: dict[str, str] = {}
        self._parts: list[tuple[str, int]] = []
        self._kept, self._begun = 0, time.monotonic()
        found = holders.of_first(self._find(goes_on) if holders.is_first else None)
        if isinstance(found, Exception):
            raise found
        self._number, self.last = found

    def _find(self, goes_on: bool) -> Any:
        """(A number that no file has yet, the state to go on from); what is wrong with that."""
        try:
            self.directory.mkdir(exist_ok=True)
            names = [match for each in self.directory.iterdir() if (match := _match(each))]
        except OSError as error:
            return FileError(
                f"checkpoint: '{self.directory}' cannot be made or read "
                f"({error.strerror or error})",
                code="cannot-write",
            )
        number = 1 + max((int(name[2]) for name in names), default=-1)
        if not goes_on:
            if names:
                return ArgumentError(
                    f"checkpoint='{self.directory}' holds the checkpoints of a run: pass resume= "
                    "instead to go on with that one, or another directory",
                    code="resume",
                )
            return number, None
        states = sorted(int(name[2]) for name in names if name[1] == "state")
        for state in reversed(states):
            try:
                held = files.read(self.directory / f"state-{state}" / _FACTS, "checkpoint")
                self._check_hashes(held["hashes"])
                return number, {**held, "number": state}
            except FileError as error:
                if (self.directory / f"state-{state}" / _FACTS).exists():
                    warn(PyroScaleWarning, f"state {state} is left out: {error}")
        return FileError(
            f"resume='{self.directory}' holds no whole checkpoint of a sharded network",
            code="resume",
        )

    @property
    def seed(self) -> int | None:
        """Of the run to go on with."""
        return None if self.last is None else int(self.last["facts"]["seed"])

    def check_same_run(self, facts: Mapping[str, Any], num_samples: int) -> None:
        """Takes the facts of the run, and refuses to go on with another one.

        Raises:
            FileError: it lists what differs.
            ArgumentError: more draws than are asked for have been kept.
        """
        self._facts = dict(facts)
        if self.last is None:
            return
        lines = differences_of_runs(self.last["facts"], facts)
        if lines:
            raise FileError(
                f"resume='{self.directory}' is another run ({'; '.join(lines)}): build the method "
                "and call run as they were, but for num_samples and progress",
                code="resume",
            )
        kept = sum(count for _, count in self.last["parts"])
        if kept > num_samples:
            raise ArgumentError(
                f"num_samples={num_samples}: '{self.directory}' holds {kept} draws already; it is "
                "their number in all",
                code="resume",
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs out of the directory."""
        with files.locked(self.directory) if self._holders.is_first else contextlib.nullcontext():
            yield

    @property
    def due(self) -> bool:
        """Whether it is time for the next one, by the first rank's clock."""
        is_due = time.monotonic() - self._begun >= self._every
        return bool(self._holders.total(torch.tensor(int(is_due and self._holders.is_first))))

    # ------------------------------------------------------------------ all ranks together

    def restore(self, chain: ShardedChain, batches: Batches, kept: Kept) -> None:
        """Takes the chain and the draws to where the last checkpoint was."""
        if self.last is None:
            return
        problem, (leaves, structure) = chain.problem, pytree.tree_flatten(chain.state)
        named = _named(problem, [leaf.clone() for leaf in leaves])
        self._load(f"state-{self.last['number']}", named)
        loaded = [_leaf(problem, named, str(i)).to(leaf.device) for i, leaf in enumerate(leaves)]
        chain.state = pytree.tree_unflatten(loaded, structure)
        chain.count = int(self.last["step"])
        batches.seek(chain.count, self.last["batches"])
        self._hashes = dict(self.last["hashes"])
        self._parts = [tuple(part) for part in self.last["parts"]]
        for name, count in self._parts:
            draws = _named(
                problem, [torch.empty(count, *kept.positions.shape[1:]).to(kept.positions)]
            )
            self._load(name, draws)
            kept.positions[self._kept : self._kept + count] = _leaf(problem, draws, "0").cpu()
            self._kept += count
        kept.log_joint[: self._kept] = self.last["log_joint"]

    def write(self, chain: ShardedChain, batches: Batches, kept: Kept, count: int) -> None:
        """Writes the next one.

        Args:
            chain: where it is.
            batches: that it takes.
            kept: the draws.
            count: how many of these there are by now.
        """
        problem, number = chain.problem, self._number
        if count > self._kept:
            name = f"draws-{number}"
            self._save(name, _named(problem, [kept.positions[self._kept : count]]))
            self._parts, self._kept = [*self._parts, (name, count - self._kept)], count
        self._save(f"state-{number}", _named(problem, pytree.tree_leaves(chain.state)))
        self._hash_all([name for name, _ in self._parts] + [f"state-{number}"])
        if self._holders.is_first:
            held = {
                "facts": self._facts,
                "step": chain.count,
                "batches": batches.position(chain.count),
                "parts": [list(part) for part in self._parts],
                "log_joint": kept.log_joint[:count].clone(),
                "hashes": self._hashes,
            }
            files.write(self.directory / f"state-{number}" / _FACTS, held, "checkpoint")
            self._tidy()
        self._holders.of_first(None)  # the others wait for it
        self._number, self._begun = number + 1, time.monotonic()

    def _save(self, name: str, tensors: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        group = self._holders.rows.group
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own deprecations
            save(tensors, checkpoint_id=self.directory / name, process_group=group)

    def _load(self, name: str, tensors: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        group = self._holders.rows.group
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(tensors, checkpoint_id=self.directory / name, process_group=group)

    # ------------------------------------------------------------------ files

    def _hash_all(self, names: list[str]) -> None:
        """Finds SHA-256 of the files in some directories, where it is not known."""
        written = sorted(
            str(file.relative_to(self.directory))
            for name in names
            for file in (self.directory / name).iterdir()
        )
        rows, known = self._holders.rows, self._hashes
        own = written[rows.rank :: rows.world]
        mine = {name: known.get(name) or _hash(self.directory / name) for name in own}
        self._hashes = {
            n: of
            for part in self._holders.of_all(mine, "hashes of files")
            for n, of in part.items()
        }

    def _check_hashes(self, hashes: Mapping[str, str]) -> None:
        for name, expected in hashes.items():
            file = self.directory / name
            if not file.exists() or _hash(file) != expected:
                raise FileError(f"'{file}' is damaged or gone")

    def _tidy(self) -> None:
        """Removes what the latest states do not need."""
        there = {m.group(): m for each in self.directory.iterdir() if (m := _match(each))}
        states = sorted((n for n, m in there.items() if m[1] == "state"), key=_number_in)
        whole = [n for n in states if (self.directory / n / _FACTS).exists()]
        used = set(whole[-_KEPT:]) | {name for name, _ in self._parts}
        for name in there.keys() - used:
            shutil.rmtree(self.directory / name, ignore_errors=True)


def _has_states(directory: Path) -> bool:
    return any(directory.glob(f"state-*/{_FACTS}"))


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)


def _number_in(name: str) -> int:
    return int(name.rpartition("-")[2])


def _hash(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _named(problem: ShardedProblem, leaves: list[Tensor]) -> dict[str, Any]:
    """Tensors of a state by place, and those with a number for each element, `[n, D]`, by site,
    too: weights' as DTensors, which know what part of the whole they are."""
    layout, named = problem.layout, {}
    for place, leaf in enumerate(leaves):
        if leaf.shape[1:] != (layout.size,):
            named[str(place)] = leaf
            continue
        same = (leaf.dtype,) * len(layout.names)  # a position has more digits than some weights
        for name, value in dataclasses.replace(layout, dtypes=same).unflatten(leaf).items():
            shard = problem.shards.get(name)
            named[f"{place}/{name}"] = value if shard is None else shard.whole(value)
    return named


def _leaf(problem: ShardedProblem, named: Mapping[str, Any], place: str) -> Tensor:
    """One of them again."""
    if place in named:
        whole: Tensor = named[place]
        return whole
    parts = []
    for name in problem.layout.names:
        tensor = named[f"{place}/{name}"]
        own = tensor.to_local() if name in problem.shards else tensor
        parts.append(own.reshape(len(own), -1))
    return torch.cat(parts, 1)
