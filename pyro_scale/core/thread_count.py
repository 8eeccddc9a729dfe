"""How many threads a run computes on: torch's, or one.

Threads that share an operation wait for the slowest of them. If another process occupies a core,
that takes milliseconds, in which one thread would compute all operations of a small step alone. So
a run with a small model computes each chain on one thread, and its chains are distributed over the
threads. Threads of a run with a large model sleep while they wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")
#: Arithmetic of one evaluation of a log density from which threads share its operations: about ten
#: milliseconds for a gradient on one thread.  Below that, two threads gain nothing.
_WORTH_THREADS = 2**22
#: Multiplications of matrices that take as long as one element of another operation.
_PER_ELEMENT = 16
#: Elements of a sum that torch shares among threads.
_SHARED = 2**16
#: The quota of a container, as (microseconds of processors, microseconds).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_PRODUCTS = {"mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "convolution"}
_FACTORIZATIONS = ("linalg_", "cholesky", "triangular_solve")
#: Functions that compiled code computes one number at a time.
_SPECIAL = {
    "lgamma",
    "digamma",
    "erf",
    "erfc",
    "special_log_ndtr",
    "log1p",
    "expm1",
    "sigmoid",
    "log_sigmoid_forward",
    "softplus",
    "logsumexp",
    "_log_softmax",
    "_softmax",
}


class _Run(threading.local):
    """The number of threads of the run that the current thread executes.

    Attributes:
        threads: number of threads that the run may use; None outside of runs.
        ends: callbacks to call at the end of the run; None outside of runs.
    """

    threads: int | None = None
    ends: contextlib.ExitStack | None = None


_run = _Run()
#: Held where torch's number for threads that begin later is changed for a moment.
_changing = threading.Lock()


@contextmanager
def restored_threads() -> Iterator[None]:
    """Context around a run, inside of which `choose_threads` may change torch's number of threads;
    at the end, torch has the same number as before.
    """
    before, outer = torch.get_num_threads(), (_run.threads, _run.ends)
    with contextlib.ExitStack() as _run.ends:
        _run.ends.callback(_set_threads, before)
        _run.threads = outer[0] or available_threads()
        try:
            yield
        finally:
            _run.threads, _run.ends = outer


def available_threads() -> int:
    """Number of threads over which chains can be distributed: torch's number of threads, but no
    more than the cores that the process may use.
    """
    cores = _cores()
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a quota
        used, period = _QUOTA.read_text().split()
        cores = min(cores, math.ceil(int(used) / int(period)))
    return min(_run.threads or torch.get_num_threads(), cores)


def _cores() -> int:
    """Number of cores on which the system may run the process."""
    with contextlib.suppress(AttributeError):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_threads(arithmetic: Callable[[], float]) -> None:
    """Sets torch's number of threads for this thread's run; does nothing outside of runs.

    Args:
        arithmetic: function that evaluates the run's log density once and returns the arithmetic of
            that, as `Arithmetic` counts it; it is called only if there are several threads.
    """
    if _run.threads is None or _run.ends is None:
        return
    shares = _run.threads > 1 and arithmetic() >= _WORTH_THREADS
    _set_threads(_run.threads if shares else 1)
    if shares:
        _run.ends.enter_context(_sleeping_threads())


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Context in which OpenMP's threads go to sleep as soon as they wait for one another.

    GNU's OpenMP lets them wait in a loop, for milliseconds, which costs most where another process
    has the core of the thread that they wait for: steps of a network then took five times as long.
    They sleep at once if the process has more of OpenMP's threads than cores (GCC's manual of
    libgomp, GOMP_SPINCOUNT).  So this keeps a team of threads that never compute.
    """
    begun, over = threading.Event(), threading.Event()

    def keep_a_team() -> None:
        # at the interpreter's end, or at a limit of the system, a run does without
        with contextlib.suppress(RuntimeError), _changing:
            of_others = torch.get_num_threads()
            torch.set_num_threads(_cores() + 1)
            torch.ones(_SHARED).sum()  # OpenMP's threads begin
            torch.set_num_threads(of_others)
        begun.set()
        over.wait()

    team = threading.Thread(target=keep_a_team, daemon=True)
    try:
        with contextlib.suppress(RuntimeError):
            team.start()
            begun.wait()
        yield
    finally:
        over.set()
        if team.is_alive():
            team.join()


def _set_threads(count: int) -> None:
    """Sets torch's number of threads for the current thread only. (`torch.set_num_threads` would
    also set the number for threads that begin later.)
    """
    if count == torch.get_num_threads():
        return
    with _changing:
        of_others = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        _in_new_thread(lambda: torch.set_num_threads(of_others))


def _in_new_thread(function: Callable[[], Result]) -> Result:
    """The result of a function that is called in a new thread.  (An executor's threads cannot
    begin once the main thread has ended.)"""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class Arithmetic(TorchDispatchMode):
    """Context that measures the arithmetic of torch operations inside of it: for each operation,
    the number of elements of its largest tensor or, for products and factorizations of matrices,
    the number of multiplications divided by `_PER_ELEMENT`.

    (`torch.utils.flop_counter` counts matrix products only, and many models have none.)

    Attributes:
        total: the sum so far.
        elements: the part of `total` that is not of products and factorizations.
        special: the part of `elements` that is of functions such as `lgamma`.
        operations: number of operations so far, those included that only view a tensor.
        numbers: elements of all results so far, which autograd may keep in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total, self.elements, self.special = 0.0, 0.0, 0.0
        self.operations, self.numbers = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if not func.is_view:
            name = func.overloadpacket.__name__
            results = _tensors(result)
            count = _count(name, _tensors([args, kwargs]), results)
            self.total += count
            if name not in _PRODUCTS and not name.startswith(_FACTORIZATIONS):
                self.elements += count
                self.special += count if name in _SPECIAL else 0.0
            self.numbers += sum(map(Tensor.numel, results))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _count(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """The arithmetic of one ATen operation: the number of elements of its largest tensor or, for
    products and factorizations of matrices, the number of multiplications divided by
    `_PER_ELEMENT`.

    Args:
        name: name of the operation, such as "mm".
        inputs: the operation's arguments that are tensors.
        outputs: the operation's results.
    """
    largest = max([*inputs, *outputs], key=Tensor.numel, default=None)
    if largest is None or not outputs:
        return 0.0
    if name in _PRODUCTS:  # of [n, k] and [k, m]: n k m
        left, right = inputs[-2:]
        return math.sqrt(left.numel() * right.numel() * outputs[0].numel()) / _PER_ELEMENT
    if name.startswith(_FACTORIZATIONS):
        return largest.numel() * largest.shape[-1] / _PER_ELEMENT
    return float(largest.numel())
