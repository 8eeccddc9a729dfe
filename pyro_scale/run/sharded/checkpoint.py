"""Checkpoints of a sharded network's chain, by `torch.distributed.checkpoint`: one directory for
any number of processes.

The latest two states are in `state-<number>`, and the draws kept between states in
`draws-<number>`: directories to which every rank writes its part.  The file `facts` of a state is
written last and has the hashes of all other files, so a state without it is incomplete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batches
from pyro_scale.distributed.workers import Workers
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import FileError, PyroScaleWarning
from pyro_scale.run.problem import Problem
from pyro_scale.run.resume import check_same_run
from pyro_scale.run.sharded.chain import ShardedChain
from pyro_scale.storage import files

#: Number of states that are kept: if the latest one is damaged, the run resumes from the one
#: before.
_KEPT = 2
_FACTS = "facts"
_NAME = re.compile(r"(state|draws)-(\d{1,9})")


class ShardedCheckpoints:
    """Writes and reads the checkpoints of a sharded network's run, on all ranks together.

    Args:
        path: the directory, which all ranks can read and write.
        every: seconds from one checkpoint to the next.
        workers: the processes.
        resumes: whether the run continues from the latest checkpoint in the directory.

    Raises:
        FileError: there is no intact checkpoint to continue from, or the directory cannot be
            created.
    """

    def __init__(self, path: Path, every: float, workers: Workers, resumes: bool):
        self.directory, self._every, self._workers = path, every, workers
        self._facts: dict[str, Any] = {}
        self._hashes: dict[str, str] = {}
        self._parts: list[tuple[str, int]] = []
        self._kept, self._written = 0, time.monotonic()
        latest: Any = self._open(resumes) if workers.is_first else None
        latest = workers.broadcast(latest, "a checkpoint")
        if isinstance(latest, FileError):
            raise latest
        self._number, self.last = latest

    def _open(self, resumes: bool) -> tuple[int, dict[str, Any] | None] | FileError:
        """(A number for the next checkpoint, which no checkpoint in the directory has yet; the
        contents of the file `facts` of the state to continue from, None for a new run). Returns an
        error instead of raising it, so that all ranks can raise it.
        """
        try:
            self.directory.mkdir(exist_ok=True)
            names = list(self._files())
        except OSError as error:
            return FileError(
                f"checkpoint: '{self.directory}' cannot be made or read "
                f"({error.strerror or error})",
                code="cannot-write",
            )
        number = 1 + max(map(_number_in, names), default=-1)
        if not resumes:
            return number, None
        for name in sorted(filter(_is_state, names), key=_number_in, reverse=True):
            try:
                held = files.read(self.directory / name / _FACTS, "checkpoint")
                self._check_hashes(held["hashes"])
                return number, {**held, "name": name}
            except FileError as error:
                if (self.directory / name / _FACTS).exists():
                    warn(PyroScaleWarning, f"state {_number_in(name)} is left out: {error}")
        return FileError(
            f"resume='{self.directory}' holds no intact checkpoint of a sharded network",
            code="resume",
        )

    @property
    def seed(self) -> int | None:
        """The seed of the run that is resumed; None for a new run."""
        return None if self.last is None else int(self.last["facts"]["seed"])

    def check_same_run(self, facts: Mapping[str, Any], num_samples: int) -> None:
        """Stores the settings of the run for its checkpoints, and raises if the checkpoint to
        continue from is of another run.

        Args:
            facts: settings, data and model of this run, by name.
            num_samples: number of draws of this run.

        Raises:
            FileError: the checkpoint is of another run; the message lists what differs.
            ArgumentError: the checkpoint has more than `num_samples` draws.
        """
        self._facts = dict(facts)
        if self.last is not None:
            kept = sum(count for _, count in self.last["parts"])
            check_same_run(self.directory, self.last["facts"], facts, kept, num_samples)

    @property
    def due(self) -> bool:
        """Whether the time between two checkpoints has passed since the last one, by rank 0's
        clock. All ranks must ask together."""
        is_due = time.monotonic() - self._written >= self._every
        assert self._workers.rows is not None
        return bool(self._workers.rows.sum(torch.tensor(int(is_due and self._workers.is_first))))

    # ------------------------------------------------------------------ on all ranks together

    def restore(self, chain: ShardedChain, batches: Batches, draws: Draws) -> None:
        """Sets the chain's state, the minibatches' place in the data and the draws so far to those
        of the latest checkpoint, in place; does nothing for a new run."""
        if self.last is None:
            return
        leaves, structure = pytree.tree_flatten(chain.state)
        chain.state = pytree.tree_unflatten(
            self._load(self.last["name"], chain.problem, leaves), structure
        )
        chain.count = int(self.last["step"])
        batches.seek(chain.count, self.last["batches"])
        self._hashes = dict(self.last["hashes"])
        self._parts = [tuple(part) for part in self.last["parts"]]
        for name, count in self._parts:
            stop = self._kept + count
            like = chain.state.position.new_empty(count, draws.positions.shape[2])
            (draws.positions[0, self._kept : stop],) = self._load(name, chain.problem, [like])
            self._kept = stop
        draws.log_joint[0, : self._kept] = self.last["log_joint"]

    def write(self, chain: ShardedChain, batches: Batches, draws: Draws, kept: int) -> None:
        """Writes the next checkpoint, and deletes files that are no longer needed.

        Args:
            chain: the chain after its latest step.
            batches: the minibatches of the chain's steps.
            draws: the draws of the run.
            kept: number of draws so far.
        """
        problem, state = chain.problem, f"state-{self._number}"
        if kept > self._kept:
            name = f"draws-{self._number}"
            self._save(name, problem, [draws.positions[0, self._kept : kept]])
            self._parts, self._kept = [*self._parts, (name, kept - self._kept)], kept
        self._save(state, problem, pytree.tree_leaves(chain.state))
        self._hash_all([*(name for name, _ in self._parts), state])
        if self._workers.is_first:
            held = {
                "facts": self._facts,
                "step": chain.count,
                "batches": batches.position(chain.count),
                "parts": [list(part) for part in self._parts],
                "log_joint": draws.log_joint[0, :kept].clone(),
                "hashes": self._hashes,
            }
            files.write(self.directory / state / _FACTS, held, "checkpoint")
            self._tidy()
        self._workers.broadcast(None, "the end of a checkpoint")
        self._number, self._written = self._number + 1, time.monotonic()

    def _save(self, name: str, problem: Problem, tensors: list[Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        assert self._workers.rows is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own deprecations
            save(
                _to_named(problem, tensors),
                checkpoint_id=self.directory / name,
                process_group=self._workers.rows.group,
            )

    def _load(self, name: str, problem: Problem, like: list[Tensor]) -> list[Tensor]:
        """Reads this rank's parts of the tensors that `_save` wrote into a subdirectory.

        Args:
            name: name of the subdirectory.
            problem: the chain's problem, which says which parts are this rank's.
            like: tensors with the shapes, dtypes and devices of the results.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        assert self._workers.rows is not None
        named = _to_named(problem, [tensor.clone() for tensor in like])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(
                named,
                checkpoint_id=self.directory / name,
                process_group=self._workers.rows.group,
            )
        loaded = [_from_named(problem, named, str(place)) for place in range(len(like))]
        return [new.to(old.device) for new, old in zip(loaded, like, strict=True)]

    # ------------------------------------------------------------------ files

    def _files(self) -> dict[str, Path]:
        """The saved states and draws in the directory: a dict from their names, such as "state-3"
        or "draws-3", to the paths of their subdirectories."""
        return {path.name: path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)}

    def _hash_all(self, names: list[str]) -> None:
        """Computes SHA-256 hashes of the files of some saved states and draws, by which damaged
        files are detected later, and stores them on all ranks. Files that were hashed before are
        skipped; each rank hashes some of the others.

        Args:
            names: names of the saved directories.
        """
        written = sorted(
            str(file.relative_to(self.directory))
            for name in names
            for file in (self.directory / name).iterdir()
        )
        mine = {
            name: self._hashes.get(name) or _hash(self.directory / name)
            for name in self._workers.share.of(written)
        }
        by_rank = self._workers.gather(mine, "hashes of files")
        self._hashes = {name: value for part in by_rank for name, value in part.items()}

    def _check_hashes(self, hashes: Mapping[str, str]) -> None:
        for name, expected in hashes.items():
            file = self.directory / name
            if not file.exists() or _hash(file) != expected:
                raise FileError(f"'{file}' is damaged or gone")

    def _tidy(self) -> None:
        """Deletes saved states but the latest two, and draws that these do not refer to."""
        names = self._files()
        states = sorted(filter(_is_state, names), key=_number_in)
        intact = [name for name in states if (self.directory / name / _FACTS).exists()]
        used = {*intact[-_KEPT:], *(name for name, _ in self._parts)}
        for name in names.keys() - used:
            shutil.rmtree(self.directory / name, ignore_errors=True)


def _is_state(name: str) -> bool:
    return name.startswith("state-")


def _number_in(name: str) -> int:
    return int(name.rpartition("-")[2])


def _hash(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _to_named(problem: Problem, tensors: list[Tensor]) -> dict[str, Any]:
    """A dict of tensors for `torch.distributed.checkpoint`, from a list of tensors.

    Names are indices in the list. Tensors of positions `[n, D]` are divided by site, with names
    "index/site". Parts of weights become DTensors, which know which part of the whole weight they
    are.
    """
    layout, named = problem.engine.layout, {}
    for place, tensor in enumerate(tensors):
        if tensor.shape[1:] != (layout.size,):
            named[str(place)] = tensor
            continue
        same = (tensor.dtype,) * len(layout.names)  # a position has more digits than some weights
        by_site = dataclasses.replace(layout, dtypes=same).unflatten(tensor)
        for name, value in by_site.items():
            shard = problem.shards.get(name)
            named[f"{place}/{name}"] = value if shard is None else shard.whole(value)
    return named


def _from_named(problem: Problem, named: Mapping[str, Any], place: str) -> Tensor:
    """One tensor of the list that was passed to `_to_named`, put together from the dict that this
    function returned.

    Args:
        problem: the chain's problem.
        named: dict of tensors that `torch.distributed.checkpoint` has filled.
        place: index of the tensor in the list, as text.
    """
    if place in named:
        whole: Tensor = named[place]
        return whole
    parts = []
    for name in problem.engine.layout.names:
        value = named[f"{place}/{name}"]
        part = value.to_local() if name in problem.shards else value
        parts.append(part.reshape(len(part), -1))
    return torch.cat(parts, 1)
