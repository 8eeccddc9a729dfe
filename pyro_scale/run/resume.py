"""Resumes a run: finds the directory of its checkpoints, and checks that they were written by a run
with the same settings, model and data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from pyro_scale.core import rows
from pyro_scale.core.layout import dtype_name
from pyro_scale.core.rows import Arguments
from pyro_scale.data.sources import Data, IndexedData, OwnSubsamples, TensorData
from pyro_scale.data.stream import StreamData
from pyro_scale.engine.checkpoint import (
    Checkpoint,
    Checkpoints,
    check_unused,
    differences,
)
from pyro_scale.errors import ArgumentError, FileError
from pyro_scale.model.fingerprint import first_difference, model_fingerprint
from pyro_scale.run.parts import (
    CHAINS,
    Part,
    drop_others,
    generation,
    holds_parts,
    parts_of,
    places_in,
    progress,
    read_parts,
)
from pyro_scale.run.problem import Problem
from pyro_scale.storage.files import FilePath, as_path, locked

_LOG = logging.getLogger("pyro_scale")


@dataclass(frozen=True)
class Journal:
    """The checkpoints of a run: where they are written, and those from which the run continues.

    Attributes:
        path: the run's directory; None if no checkpoints are written.
        every: seconds from one checkpoint to the next.
        saved: the groups of chains to continue, with their checkpoints; empty for a new run.
    """

    path: Path | None
    every: float
    saved: tuple[Part, ...] = ()

    @classmethod
    def open(
        cls,
        checkpoint: FilePath | None,
        every: float,
        resume: FilePath | None,
    ) -> Journal:
        """The journal of a run with these arguments.

        A process that torchrun has restarted continues from the checkpoints in the directory.

        Args:
            checkpoint: directory for checkpoints, as the user passed it; None to write none.
            every: seconds from one checkpoint to the next.
            resume: directory of the run to resume, as the user passed it; None for a new run.

        Raises:
            ArgumentError: not a path, a negative time, two directories, or a directory with another
                run.
            FileError: there is no intact checkpoint to continue from.
        """
        path, resumes = choose_directory(checkpoint, every, resume)
        saved = tuple(read_parts(path)) if path is not None and resumes else ()
        return cls(path, every, saved)

    @property
    def last(self) -> Checkpoint | None:
        """The checkpoint of the most advanced saved group of chains; None for a new run. Its
        `facts` are the same for all groups."""
        return max(self.saved, key=progress).last if self.saved else None

    def parts(self, problem: Problem) -> list[Part]:
        """The groups of this process's chains that have checkpoints of their own, as `Part`s: for
        each, its chains, the directory to write to (None on a process that does not write), and the
        checkpoint to continue from (None for a new run)."""
        chains, num_chains = tuple(problem.chains), len(problem.positions)
        if self.path is None:
            return [Part(None, chains, None)]
        is_one = len(self.saved) == 1 and len(self.saved[0].chains) == num_chains
        if problem.is_alone and (is_one or not self.saved):
            return [Part(self.path, chains, self.last)]
        with contextlib.suppress(OSError):  # the first write raises the error
            self.path.mkdir(exist_ok=True)
        number = problem.broadcast(generation(self.path), "where checkpoints go")
        if not problem.is_split and not problem.is_first:  # the first process writes for all
            return [Part(None, chains, self.last)]
        parts = parts_of(chains, self.saved, self.path, problem.process, number)
        return parts if problem.is_writer else [part._replace(path=None) for part in parts]

    def tidy(self, problem: Problem, parts: Sequence[Part]) -> None:
        """Deletes directories of groups of chains that are not in `parts` of any process, once the
        groups that replace them have been written."""
        path = self.path
        if path is None or (problem.is_alone and not self.saved):
            return

        def drop(by_process: list[list[str]]) -> None:
            drop_others(path, [name for names in by_process for name in names])

        names = [part.path.name for part in parts if part.path is not None]
        problem.reduce(drop, names, "where checkpoints are")

    def seed(self, seed: int | None) -> int | None:
        """The seed that the run is to use: the user's `seed`, or, if that is None, the seed of the
        run that is resumed; None for a new run without one, which draws a seed."""
        return self.last.facts["seed"] if seed is None and self.last is not None else seed

    @property
    def halvings(self) -> int:
        """How many times the run that is resumed has halved its step size after a chain diverged; 0
        for a new run.
        """
        return 0 if self.last is None else int(self.last.facts["halvings"])

    def check_same_run(self, facts: Mapping[str, Any], num_samples: int) -> None:
        """Raises if the checkpoint to continue from is of another run, or has too many draws; does
        nothing for a new run.

        Args:
            facts: settings, data and model of this run, by name, from `identity_of`.
            num_samples: number of draws of each chain of this run.

        Raises:
            FileError: the checkpoint is of another run; the message lists what differs.
            ArgumentError: the checkpoint has more than `num_samples` draws.
        """
        if self.last is None:
            return
        kept = self.last.positions.shape[1]
        check_same_run(self.path, self.last.facts, facts, kept, num_samples)
        _LOG.info(
            "resume: going on from step %d; schedules and other functions cannot be compared",
            self.last.run_state.step,
        )

    @property
    def hint(self) -> str:
        """Text for the end of an error message that says how to resume the run; empty if there is
        no checkpoint."""
        if self.path is None or not holds_parts(self.path):
            return ""
        return f"; the same call with resume='{self.path}' goes on"

    @contextlib.contextmanager
    def writer(
        self, part: Part, facts: Mapping[str, Any], halvings: int
    ) -> Iterator[Checkpoints | None]:
        """A context that locks the directory of a group of chains and yields the writer of the
        group's checkpoints; yields None if no checkpoints are written.

        Args:
            part: the group of chains.
            facts: settings that must be the same when the run is resumed, by name.
            halvings: how many times the run has halved its step size.
        """
        if part.path is None:
            yield None
            return
        facts = {**facts, "halvings": halvings}
        if part.path != self.path:
            facts[CHAINS] = list(part.chains)
        writer = Checkpoints(part.path, self.every, facts, self.goes_on_from(part, halvings))
        with locked(part.path):
            yield writer

    def goes_on_from(self, part: Part, halvings: int) -> Checkpoint | None:
        """The checkpoint from which a group of chains continues; None if the group has none, or if
        it was written at another step size, after another number of halvings.

        Args:
            part: the group of chains, with its saved checkpoint.
            halvings: how many times the run has halved its step size.
        """
        last = part.last
        return last if last is not None and last.facts["halvings"] == halvings else None


def choose_directory(
    checkpoint: FilePath | None, every: float, resume: FilePath | None
) -> tuple[Path | None, bool]:
    """(The directory for the run's checkpoints, None to write none; True if the run resumes from
    checkpoints in that directory). A process that torchrun has restarted resumes from `checkpoint`.

    Args:
        checkpoint: directory for checkpoints, as the user passed it; None to write none.
        every: seconds from one checkpoint to the next.
        resume: directory of the run to resume, as the user passed it; None for a new run.

    Raises:
        ArgumentError: not a path, a negative time, two directories, or a directory with another
            run.
    """
    if isinstance(every, bool) or not isinstance(every, int | float) or not every >= 0:
        raise ArgumentError(f"checkpoint_every={every!r}: pass seconds, 0 or more")
    if resume is None and checkpoint is not None:
        if not _was_restarted():
            check_unused(checkpoint, places_in(checkpoint))
        elif holds_parts(checkpoint):
            resume = checkpoint
    if resume is None:
        return None if checkpoint is None else as_path(checkpoint), False
    if checkpoint is not None and as_path(checkpoint).resolve() != as_path(resume).resolve():
        raise ArgumentError(
            f"checkpoint='{checkpoint}', but resume='{resume}': a resumed run is written to the "
            "directory that it resumes: leave checkpoint out"
        )
    return as_path(resume), True


def check_same_run(
    path: Path | None,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    kept: int,
    num_samples: int,
) -> None:
    """Raises if a checkpoint was written by another run than the one that is to continue from the
    checkpoint.

    Args:
        path: the checkpoint's directory, for messages.
        then: settings, data and model of the run in the checkpoint, by name.
        now: settings, data and model of this run, by name.
        kept: number of draws of each chain in the checkpoint.
        num_samples: number of draws of each chain of this run.

    Raises:
        FileError: the checkpoint is of another run; the message lists what differs.
        ArgumentError: the checkpoint has more draws than the run.
    """
    lines = differences_of_runs(then, now)
    if lines:
        raise FileError(
            f"resume='{path}' is another run ({'; '.join(lines)}): build the method and "
            "call run as they were, but for num_samples and progress",
            code="resume",
        )
    if kept > num_samples:
        raise ArgumentError(
            f"num_samples={num_samples}: '{path}' holds {kept} draws a chain already: pass the "
            "number of all draws, those included",
            code="resume",
        )


def _was_restarted() -> bool:
    """True if torchrun has started this process again, after a process of the run died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


#: The fact with log densities where chain 0 starts, which differ between models and between data;
#: and the relative difference that rounding may cause.
_START, _ROUNDING = "log densities at the start", 1e-5


def differences_of_runs(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines such as "seed was 0, is 1", one for each setting, data set or model in which two runs
    differ; empty if they are the same run.

    Settings of `then`, the earlier run, are compared with those of `now`; log densities, up to
    rounding. Entries that only checkpoints have are left out.
    """
    others = ("halvings", CHAINS, _START)
    lines = differences(
        {name: fact for name, fact in then.items() if name not in others},
        {name: fact for name, fact in now.items() if name not in others},
    )
    if not lines and (line := first_difference(then.get(_START, {}), now[_START], _ROUNDING)):
        return [line]
    return lines


def identity_of(
    problem: Problem,
    attrs: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    fitted: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Settings, data and model of a run, by name, that must be the same in a checkpoint and in the
    run that resumes it, and in all processes of a run.

    Args:
        problem: model, data and starts of the run.
        attrs: the method's own settings.
        hyperparameters: hyperparameters as the user passed them, by name.
        fitted: numbers by name that must be the same up to rounding; None for none.
    """
    layout = problem.engine.layout
    full_shapes = {name: shard.shape for name, shard in problem.shards.items()}
    sites = {
        name: f"{list(full_shapes.get(name, shape))} {dtype_name(dtype)}"
        for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True)
    }
    facts: dict[str, Any] = _facts_of_rows(problem) if problem.has_all_rows else _OF_EACH_RANK
    return {
        **attrs,
        "hyperparameters": {name: _plain(value) for name, value in hyperparameters.items()},
        "sites": sites,
        "version": version("pyro_scale"),
        "random numbers": "Philox 4x32-10",
        "num_data": problem.log_posterior.num_data,
        **facts,
        _START: {**facts[_START], **(fitted or {})},
        "seed": problem.seed,
    }


def _facts_of_rows(problem: Problem) -> dict[str, Any]:
    """The entries of `identity_of` that depend on rows, by name: a digest of the data, the batch
    size, and log densities of some rows at the parameters where chain 0 starts."""
    return {
        "data": fingerprint(problem.data),
        "batch_size": "auto" if problem.chooses_batches else problem.data.batch_size,
        _START: _densities_at_start(problem),
    }


def _densities_at_start(problem: Problem) -> dict[str, float]:
    """Log densities of the first batch, by name, at the parameters at which chain 0 starts. Another
    batch is added if the data are read by index, as all rows have no digest then.
    """
    log_posterior, data = problem.log_posterior, problem.data
    params = problem.engine.layout.unflatten(problem.positions[0])
    if problem.shards:  # no process has the density of a whole weight
        evaluation = problem.engine.density.plain_grad(params, problem.take_part(data.first()))[1]
        return {"log joint where it starts": float(evaluation.log_joint)}
    start = model_fingerprint(
        log_posterior,
        params,
        data.first(),
        log_posterior.first_indices(),
        "where chain 0 starts",
    )
    if isinstance(data, IndexedData):
        for batch, indices in data.spread(1):
            start |= model_fingerprint(log_posterior, params, batch, indices, "of rows further on")
    return start


#: These facts if each process has its own rows.
_OF_EACH_RANK = {"data": "of each rank", "batch_size": "of each rank", _START: {}}


def fingerprint(data: Data) -> str:
    """Text that tells data sets apart: a digest of all rows of tensors; for loaders, only the
    classes of loader and data set."""
    if isinstance(data, IndexedData | StreamData):
        how = "read by index" if isinstance(data, IndexedData) else "as they come"
        parts = data.loader, getattr(data.loader, "dataset", None)
        kinds = " of ".join(type(part).__name__ for part in parts if part is not None)
        return f"{kinds}, {how}"
    assert isinstance(data, TensorData | OwnSubsamples)
    return digest_of(data.arguments)


def digest_of(arguments: Arguments) -> str:
    """Text with a hash of all tensors of rows of data among the model's arguments. Equal data have
    equal texts; other data, in practice, never do.
    """
    digest = hashlib.sha256()
    for leaf in rows.leaves(arguments):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"tensors {digest.hexdigest()[:16]}"


def _plain(hyper: Any) -> Any:
    """A hyperparameter (number, tensor, schedule or dict by site) as plain numbers, text and dicts,
    which can be compared and written to a file. Every plain function becomes the text "a function",
    as functions cannot be compared."""
    if isinstance(hyper, Mapping):
        return {site: _plain(value) for site, value in hyper.items()}
    if dataclasses.is_dataclass(hyper) and not isinstance(hyper, type):
        return {"schedule": type(hyper).__name__, **_plain(dataclasses.asdict(hyper))}
    if callable(hyper):
        return "a function"
    return float(hyper) if isinstance(hyper, Real) else hyper
