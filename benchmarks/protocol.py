"""A contender in a process of its own: set up once, then timed whenever it is asked.

Contenders share neither an interpreter nor a thread pool, so none slows another down, and they
can be timed in turns: whatever the machine does meanwhile falls on all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

#: The environment of a worker with one thread, whatever the library.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}

#: Seconds after which a contender that has not answered is given up.
PATIENCE = 600.0


@dataclass
class Timing:
    """What a contender reports of one round.

    Attributes:
        seconds: of a chain-step, by what was measured; "" is the contender itself.
        draws: what it sampled, `[draws, D]`, where it can be compared with the others'.
        accuracy: of its network on the training rows, after the round.
    """

    seconds: Mapping[str, float]
    draws: np.ndarray | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: what the table calls it.
        problem: "module:function"; the function sets up and returns a `() -> Timing`.
        arguments: of that function.
        pinned: whether to one core.
        one_thread: whether to one thread; otherwise the library's own choice is left alone.
    """

    name: str
    problem: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = True
    one_thread: bool = True


@dataclass(frozen=True)
class Answer:
    """A timing, its draws reduced to their moments; or why there is none."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    mean: np.ndarray | None = None
    variance: np.ndarray | None = None
    accuracy: float | None = None
    failure: str = ""


class Worker:
    """A contender's process, seen from outside."""

    def __init__(self, contender: Contender):
        self.contender = contender
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender), daemon=True)
        with _environment(ONE_THREAD if contender.one_thread else {}):
            self._process.start()
        theirs.close()

    def answer(self) -> Answer:
        """What it says next: an empty answer once it is set up, then one for each `ask`."""
        try:
            if self._connection.poll(PATIENCE):
                return self._connection.recv()
        except EOFError:
            self._process.join()
            return Answer(failure=f"its process died (exit code {self._process.exitcode})")
        self.stop()
        return Answer(failure=f"no answer within {PATIENCE:.0f} s")

    def ask(self) -> Answer:
        """Times it once."""
        with contextlib.suppress(BrokenPipeError):  # it died meanwhile, as `answer` finds out
            self._connection.send(True)
        return self.answer()

    def stop(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(timeout=10)
        self._process.terminate()
        self._process.join()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment that a process started within inherits."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection: Connection, contender: Contender) -> None:
    """A worker's life: sets up, says so, and times itself until the other end is gone."""
    warnings.simplefilter("ignore")
    try:
        if contender.pinned and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        module, function = contender.problem.split(":")
        time: Callable[[], Timing] = getattr(importlib.import_module(module), function)(
            **contender.arguments
        )
        connection.send(Answer())
        while True:
            connection.recv()
            connection.send(_reduced(time()))
    except EOFError:
        pass
    except Exception as error:  # a peer that fails is a line of the table
        first_line = next(iter(str(error).splitlines()), "")
        connection.send(Answer(failure=f"{type(error).__name__}: {first_line}"))


def _reduced(timing: Timing) -> Answer:
    if timing.draws is None:
        return Answer(timing.seconds, accuracy=timing.accuracy)
    draws = np.asarray(timing.draws, dtype=float)
    return Answer(timing.seconds, draws.mean(0), draws.var(0), timing.accuracy)
