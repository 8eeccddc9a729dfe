"""Compiled loops on disk, found again without Inductor, whose import alone takes two seconds."""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from pyro_scale.drive import cache
from pyro_scale.drive.trace import StepGraph


def library_for(
    graph: StepGraph, kinds: list[str], threads: int | None, build: Callable[[], str]
) -> ctypes.CDLL:
    """The library of a step's loop: one that was built before, or a new one.

    Args:
        graph: the step.
        kinds: of its inputs.
        threads: that its kernels use.
        build: builds the library and returns its path.
    """
    key = key_of(graph, kinds, threads)
    code = cache.read(key)
    if code is None:
        with cache.building(key):
            code = cache.read(key)  # another process may have built it in between
            if code is None:
                code = Path(build()).read_bytes()
                cache.write(key, code)
    return _load(code)


def _load(code: bytes) -> ctypes.CDLL:
    """Loads a library from a copy that nobody else can change before it is loaded."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        copy = Path(own) / "loop.so"
        copy.write_bytes(code)
        return ctypes.CDLL(str(copy))


def key_of(graph: StepGraph, kinds: list[str], threads: int | None) -> str:
    """All that compiled code depends on: the graph, its inputs' geometry, what wrote it."""
    geometry = [(x.dtype, tuple(x.shape), x.stride()) for x in graph.examples]
    cores = torch.get_num_threads() if threads is None else threads
    machine = torch.__version__, torch.backends.cpu.get_cpu_capability(), cores
    digest = hashlib.sha256(repr((machine, kinds, graph.position, geometry)).encode())
    digest.update(graph.module.code.encode())
    for writer in ("inductor.py", "plan.py", "loop.py"):
        digest.update(Path(__file__).with_name(writer).read_bytes())
    return digest.hexdigest()
