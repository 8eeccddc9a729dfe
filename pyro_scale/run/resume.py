"""Continues a run from a checkpoint: where it is written, and whether it is the same run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from pyro_scale.core import rows
from pyro_scale.core.layout import dtype_name
from pyro_scale.data.sources import Data, IndexedData, OwnSubsamples, TensorData
from pyro_scale.data.stream import StreamData
from pyro_scale.engine.checkpoint import (
    Checkpoint,
    Checkpoints,
    check_unused,
    differences,
    holds_state,
    read,
)
from pyro_scale.errors import ArgumentError, FileError
from pyro_scale.run.problem import Problem
from pyro_scale.storage.files import FilePath, as_path, locked

_LOG = logging.getLogger("pyro_scale")


@dataclass(frozen=True)
class Journal:
    """A run's directory, if it has one.

    Attributes:
        path: where the run is written; None for nowhere.
        every: seconds from one checkpoint to the next.
        last: what the run goes on from; None for its beginning.
    """

    path: Path | None
    every: float
    last: Checkpoint | None

    @classmethod
    def open(cls, checkpoint: FilePath | None, every: float, resume: FilePath | None) -> Journal:
        """What a user asked for.

        Raises:
            ArgumentError: no path, a time below 0, two directories, one that another run is in.
            FileError: there is nothing whole to go on from.
        """
        if isinstance(every, bool) or not isinstance(every, int | float) or not every >= 0:
            raise ArgumentError(f"checkpoint_every={every!r}: pass seconds, 0 or more")
        if resume is None:
            if checkpoint is None:
                return cls(None, every, None)
            check_unused(checkpoint)
            return cls(as_path(checkpoint), every, None)
        if checkpoint is not None and as_path(checkpoint).resolve() != as_path(resume).resolve():
            raise ArgumentError(
                f"checkpoint='{checkpoint}', but resume='{resume}', where the run goes on being "
                "written: leave checkpoint out"
            )
        return cls(as_path(resume), every, read(resume))

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
        then = {k: v for k, v in self.last.facts.items() if k not in ("halvings", START)}
        now = {k: v for k, v in facts.items() if k != START}
        lines = differences(then, now)
        start, here = self.last.facts[START], facts[START]
        if not lines and not math.isclose(start, here, rel_tol=1e-6):
            lines = [f"the log joint where chain 0 starts was {start:.8g}, is {here:.8g}"]
        if lines:
            raise FileError(
                f"resume='{self.path}' is another run ({'; '.join(lines)}): build the method and "
                "call run as they were, but for num_samples and progress"
            )
        kept = self.last.positions.shape[1]
        if kept > num_samples:
            raise ArgumentError(
                f"num_samples={num_samples}: '{self.path}' holds {kept} draws a chain already; it "
                "is their number in all"
            )
        _LOG.info(
            "resume: going on from step %d; schedules and other functions cannot be compared",
            self.last.run_state.step,
        )

    @property
    def hint(self) -> str:
        """How to go on with what has been written, in words, if something has."""
        if self.path is None or not holds_state(self.path):
            return ""
        return f"; the same call with resume='{self.path}' goes on"

    @contextlib.contextmanager
    def writer(self, facts: Mapping[str, Any], halvings: int) -> Iterator[Checkpoints | None]:
        """What writes the run, while no other one can."""
        if self.path is None:
            yield None
            return
        last = self.last if halvings == self.halvings else None
        writer = Checkpoints(self.path, self.every, {**facts, "halvings": halvings}, last)
        with locked(self.path):
            yield writer


#: The name of the log joint where chain 0 starts, which tells models and data apart.
START = "log joint at the start"


def identity_of(problem: Problem, attrs: Mapping[str, Any], hyperparameters: Any) -> dict[str, Any]:
    """What has to be alike for one run to go on with another."""
    layout = problem.engine.layout
    shapes = zip(layout.names, layout.shapes, layout.dtypes, strict=True)
    params = layout.unflatten(problem.positions[0])
    log_posterior = problem.log_posterior
    with torch.no_grad():
        start = log_posterior(params, problem.data.first(), log_posterior.first_indices()).log_joint
    return {
        **attrs,
        "hyperparameters": {name: _plain(value) for name, value in hyperparameters.items()},
        "num_data": log_posterior.num_data,
        "data": _fingerprint(problem.data),
        "batch_size": "auto" if problem.chooses_batches else problem.data.batch_size,
        "sites": {name: f"{list(shape)} {dtype_name(dtype)}" for name, shape, dtype in shapes},
        "seed": problem.seed,
        "version": version("pyro_scale"),
        "random numbers": "Philox 4x32-10",
        START: float(start),
    }


def _fingerprint(data: Data) -> str:
    """What kind of data they are; of tensors, of all rows."""
    if isinstance(data, IndexedData | StreamData):
        how = "read by index" if isinstance(data, IndexedData) else "as they come"
        parts = data.loader, getattr(data.loader, "dataset", None)
        kinds = " of ".join(type(part).__name__ for part in parts if part is not None)
        return f"{kinds}, {how}"
    assert isinstance(data, TensorData | OwnSubsamples)
    digest = hashlib.sha256()
    for leaf in rows.leaves(data.arguments):
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
