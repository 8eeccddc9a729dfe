"""Continues a run from a checkpoint: where it is written, and whether it is the same run."""

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
from pyro_scale.core.layout import Layout, dtype_name
from pyro_scale.core.rows import Arguments
from pyro_scale.data.sources import Data, IndexedData, OwnSubsamples, TensorData
from pyro_scale.data.stream import StreamData
from pyro_scale.distributed.ranks import ALONE, Ranks
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
    """A run's directory, if it has one.

    Attributes:
        path: where the run is written; None for nowhere.
        every: seconds from one checkpoint to the next.
        saved: what the run goes on from; nothing for its beginning.
        ranks: the processes of the run.
    """

    path: Path | None
    every: float
    saved: tuple[Part, ...] = ()
    ranks: Ranks = ALONE

    @classmethod
    def open(
        cls,
        checkpoint: FilePath | None,
        every: float,
        resume: FilePath | None,
        ranks: Ranks = ALONE,
    ) -> Journal:
        """What a user asked for.

        A process that torchrun has restarted goes on with what is in the directory.

        Raises:
            ArgumentError: no path, a time below 0, two directories, one that another run is in.
            FileError: there is nothing whole to go on from.
        """
        if isinstance(every, bool) or not isinstance(every, int | float) or not every >= 0:
            raise ArgumentError(f"checkpoint_every={every!r}: pass seconds, 0 or more")
        if resume is None and checkpoint is not None:
            if not was_restarted():
                check_unused(checkpoint, places_in(checkpoint))
            elif holds_parts(checkpoint):
                resume = checkpoint
        if resume is None:
            if checkpoint is None:
                return cls(None, every, ranks=ranks)
            return cls(as_path(checkpoint), every, ranks=ranks)
        if checkpoint is not None and as_path(checkpoint).resolve() != as_path(resume).resolve():
            raise ArgumentError(
                f"checkpoint='{checkpoint}', but resume='{resume}', where the run goes on being "
                "written: leave checkpoint out"
            )
        return cls(as_path(resume), every, tuple(read_parts(resume)), ranks)

    @property
    def last(self) -> Checkpoint | None:
        """The furthest state; its facts are those of all."""
        return max(self.saved, key=progress).last if self.saved else None

    def parts(self, problem: Problem) -> list[Part]:
        """The parts in which this process's chains go on, or begin."""
        chains, num_chains = tuple(problem.chains), len(problem.positions)
        if self.path is None:
            return [Part(None, chains, None)]
        is_one = len(self.saved) == 1 and len(self.saved[0].chains) == num_chains
        if self.ranks.is_alone and (is_one or not self.saved):
            return [Part(self.path, chains, self.last)]
        with contextlib.suppress(OSError):  # else whoever writes tells of it
            self.path.mkdir(exist_ok=True)
        number = self.ranks.of_first(generation(self.path), "where checkpoints go")
        if not problem.is_split and not self.ranks.is_first:  # which all ranks move
            return [Part(None, chains, self.last)]
        parts = parts_of(chains, self.saved, self.path, self.ranks.rank, number)
        return parts if problem.is_writer else [part._replace(path=None) for part in parts]

    def tidy(self, parts: Sequence[Part]) -> None:
        """Removes the parts that these have taken over, once all of them are written."""
        if self.path is None or (self.ranks.is_alone and not self.saved):
            return
        names = [part.path.name for part in parts if part.path is not None]
        used = self.ranks.of_all(names, "where checkpoints are")
        if self.ranks.is_first:
            drop_others(self.path, [name for each in used for name in each])

    def seed(self, asked: int | None) -> int | None:
        """The seed that was asked for, or else that of the run to go on with."""
        return self.last.facts["seed"] if asked is None and self.last is not None else asked

    @property
    def halvings(self) -> int:
        """How often the run to go on with has halved its step size."""
        return 0 if self.last is None else int(self.last.facts["halvings"])

    def check_same_run(self, facts: Mapping[str, Any], num_samples: int) -> None:
        """Refuses to go on with another run.

        Raises:
            FileError: it lists what differs.
            ArgumentError: more draws than are asked for have been kept.
        """
        if self.last is None:
            return
        lines = differences_of_runs(self.last.facts, facts)
        if lines:
            raise FileError(
                f"resume='{self.path}' is another run ({'; '.join(lines)}): build the method and "
                "call run as they were, but for num_samples and progress",
                code="resume",
            )
        kept = self.last.positions.shape[1]
        if kept > num_samples:
            raise ArgumentError(
                f"num_samples={num_samples}: '{self.path}' holds {kept} draws a chain already; it "
                "is their number in all",
                code="resume",
            )
        _LOG.info(
            "resume: going on from step %d; schedules and other functions cannot be compared",
            self.last.run_state.step,
        )

    @property
    def hint(self) -> str:
        """How to go on with what has been written, in words, if something has."""
        if self.path is None or not holds_parts(self.path):
            return ""
        return f"; the same call with resume='{self.path}' goes on"

    @contextlib.contextmanager
    def writer(
        self, part: Part, facts: Mapping[str, Any], halvings: int
    ) -> Iterator[Checkpoints | None]:
        """What writes a part of the run, while no other one can."""
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
        """What a part goes on from at a step size that was halved that often."""
        last = part.last
        return last if last is not None and last.facts["halvings"] == halvings else None


def was_restarted() -> bool:
    """Whether torchrun has started this process again, after one has died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


#: The name of the log densities where chain 0 starts, which tell models and data apart, and by how
#: much rounding may change them.
_START, _ROUNDING = "log densities at the start", 1e-5


def differences_of_runs(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two runs differ by their facts, in words: what a checkpoint adds to these is left
    out, and the log joint at the start may be rounded otherwise."""
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
    hyperparameters: Any,
    fitted: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Facts by name that a checkpoint and the run that resumes it must have in common.

    Args:
        problem: of the run.
        attrs: facts of its own.
        hyperparameters: as they were asked for.
        fitted: numbers by name that have to be alike but for rounding.
    """
    layout = problem.engine.layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    of_rows: dict[str, Any] = _facts_of_rows(problem) if problem.has_all_rows else _OF_EACH_RANK
    return {
        **attrs,
        **facts_of_model(layout, shapes, hyperparameters),
        "num_data": problem.log_posterior.num_data,
        **of_rows,
        _START: {**of_rows[_START], **(fitted or {})},
        "seed": problem.seed,
    }


def facts_of_model(
    layout: Layout, shapes: Mapping[str, torch.Size], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """What tells methods and models apart.

    Args:
        layout: of a position.
        shapes: of the sites, each as a whole.
        hyperparameters: as they were asked for.
    """
    sites = zip(layout.names, layout.dtypes, strict=True)
    return {
        "hyperparameters": {name: _plain(value) for name, value in hyperparameters.items()},
        "sites": {name: f"{list(shapes[name])} {dtype_name(dtype)}" for name, dtype in sites},
        "version": version("pyro_scale"),
        "random numbers": "Philox 4x32-10",
    }


def _facts_of_rows(problem: Problem) -> dict[str, Any]:
    """What tells the rows apart, and what the model says of the first of them."""
    log_posterior, data = problem.log_posterior, problem.data
    params = problem.engine.layout.unflatten(problem.positions[0])
    start = model_fingerprint(
        log_posterior,
        params,
        data.first(),
        log_posterior.first_indices(),
        "where chain 0 starts",
    )
    if isinstance(data, IndexedData):  # whose rows have no digest
        for batch, indices in data.spread(1):
            start |= model_fingerprint(log_posterior, params, batch, indices, "of rows further on")
    size = "auto" if problem.chooses_batches else data.batch_size
    return facts_of_data(data, size, start)


def facts_of_data(data: Data, batch_size: Any, start: Mapping[str, float]) -> dict[str, Any]:
    """The same, given the log densities where chain 0 starts."""
    return {"data": fingerprint(data), "batch_size": batch_size, _START: dict(start)}


#: The same where each rank has rows of its own.
_OF_EACH_RANK = {"data": "of each rank", "batch_size": "of each rank", _START: {}}


def fingerprint(data: Data) -> str:
    """What kind of data they are; of tensors, of all rows."""
    if isinstance(data, IndexedData | StreamData):
        how = "read by index" if isinstance(data, IndexedData) else "as they come"
        parts = data.loader, getattr(data.loader, "dataset", None)
        kinds = " of ".join(type(part).__name__ for part in parts if part is not None)
        return f"{kinds}, {how}"
    assert isinstance(data, TensorData | OwnSubsamples)
    return digest_of(data.arguments)


def digest_of(arguments: Arguments) -> str:
    """Tensors of rows in short, to compare them with others."""
    digest = hashlib.sha256()
    for leaf in rows.leaves(arguments):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"tensors {digest.hexdigest()[:16]}"


def _plain(hyper: Any) -> Any:
    """A hyperparameter's value as far as it can be compared."""
    if isinstance(hyper, Mapping):
        return {site: _plain(value) for site, value in hyper.items()}
    if dataclasses.is_dataclass(hyper) and not isinstance(hyper, type):
        return {"schedule": type(hyper).__name__, **_plain(dataclasses.asdict(hyper))}
    if callable(hyper):
        return "a function"
    return float(hyper) if isinstance(hyper, Real) else hyper
