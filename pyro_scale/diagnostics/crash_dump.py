"""Files with the last steps of chains that broke, which `replay` reads."""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.exclusive import exclusive
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.engine.draws import Draws, Failure
from pyro_scale.errors import FileError
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.serialization import model_contents
from pyro_scale.run.problem import Problem
from pyro_scale.storage import files

#: Bytes of all files of a run, at most: a step may take the whole data.
_MOST_BYTES = 2**30
#: Temporary directories that this process has made, the latest last, and how many it leaves.
_made: deque[Path] = deque()
_MOST_DIRECTORIES = 8


def written(problem: Problem, method: str, draws: Draws, directory: Path | None) -> str:
    """Writes what chains did last, and says in a sentence how to see it, or why that could not be
    written; nothing where there is nothing to see.

    The steps of a frozen base's features are not written, as rows are not among them.

    Args:
        problem: what the run started from.
        method: its name.
        draws: what it kept.
        directory: of the run's checkpoints; a new one among temporary files by default.
    """
    failures = [failure for failure in draws.failures if failure.chain in draws.last_steps]
    if problem.features is not None:
        return ""
    if not failures:
        return "" if directory is None else _written_before(problem, draws.failures, directory)
    paths: list[Path] = []
    reason = f"they take more than {_MOST_BYTES / 2**30:.3g} GiB"
    # whatever is in the way of a file, the error that it belongs to goes first
    try:
        for path in _write(problem, method, failures, draws, directory):
            paths.append(path)
    except Exception as error:
        reason = format(error.__cause__ or error)
    if not paths:
        return f"The last steps, which tell why, could not be written down ({reason})"
    others = f" ({paths[1].name}, ... beside it has those of others)" if len(paths) > 1 else ""
    return _pointer(paths[0], failures[0].chain, len(draws.last_steps[failures[0].chain])) + others


def _written_before(problem: Problem, failures: list[Failure], directory: Path) -> str:
    """How to see the last steps of a run that goes on, if they were written when it broke."""
    for failure in failures:
        path = directory / f"crash-dump-{failure.chain}"
        with contextlib.suppress(FileError):
            contents = files.read(path, "crash dump")
            if (contents["step"], contents["attrs"]["seed"]) == (failure.step, problem.seed):
                return _pointer(path, failure.chain, len(contents["steps"]))
    return ""


def _pointer(path: Path, chain: int, count: int) -> str:
    steps = f"last {count} steps" if count > 1 else "last step"
    return f"ps.replay('{path}', model) reruns the {steps} of chain {chain} and says why it broke"


def _write(
    problem: Problem, method: str, failures: list[Failure], draws: Draws, directory: Path | None
) -> Iterator[Path]:
    """Writes a file for each, as long as there is room for it."""
    room = _MOST_BYTES
    for failure in failures:
        contents = _contents(problem, method, failure, draws)
        room -= _num_bytes(contents)
        if room < 0:
            return
        # in a directory of its own nobody else can read it
        directory = directory or _temporary()
        path = directory / f"crash-dump-{failure.chain}"
        files.write(path, contents, "crash dump")
        yield path


def _temporary() -> Path:
    """A new directory, in place of this process's oldest where it has made a few."""
    with exclusive:
        while len(_made) >= _MOST_DIRECTORIES:
            shutil.rmtree(_made.popleft(), ignore_errors=True)
        _made.append(Path(mkdtemp(prefix="pyro-scale-")))
        return _made[-1]


def _contents(problem: Problem, method: str, failure: Failure, draws: Draws) -> dict[str, Any]:
    """What `replay` needs of one chain."""
    engine, density = problem.engine, problem.engine.density
    corrected = density if isinstance(density, ControlVariates) else None
    return {
        "method": method,
        "kernel": type(engine.kernel).__name__,
        "chain": failure.chain,
        "step": failure.step,
        "site": failure.site,
        "attrs": facts_of(problem.log_posterior, problem.seed),
        "num_latents": engine.num_latents,
        "vectorized": engine.vectorized,
        "anchor": corrected and corrected.anchor,
        "anchor_gradient": corrected and corrected.gradient,
        "steps": [dict(vars(step)) for step in draws.last_steps[failure.chain]],
        **model_contents(problem.log_posterior, engine.layout, problem.data.first()),
    }


def _num_bytes(contents: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(contents) if isinstance(leaf, Tensor))
