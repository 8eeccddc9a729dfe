"""Compiled libraries on disk, found again without Inductor, whose import takes two seconds."""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path

import torch

from pyro_scale.compile import cache_directory
from pyro_scale.compile.trace import Graph


def library_for(
    graph: Graph, form: Hashable, threads: int | None, build: Callable[[], str]
) -> ctypes.CDLL:
    """The library of a graph: one that was built before, or a new one.

    Args:
        graph: the function.
        form: what else the C++ around its kernels depends on.
        threads: that its kernels use.
        build: builds the library and returns its path.
    """
    return library(key_of(graph, form, threads), build)


def library(key: str, build: Callable[[], str]) -> ctypes.CDLL:
    """The library that is kept under a key, or a new one.

    Args:
        key: a hash of all that the library depends on.
        build: builds it and returns its path.
    """
    code = cache_directory.read(key)
    if code is None:
        with cache_directory.building(key):
            code = cache_directory.read(key)  # another process may have built it in between
            if code is None:
                code = Path(build()).read_bytes()
                cache_directory.write(key, code)
    return _load(code)


def _load(code: bytes) -> ctypes.CDLL:
    """Loads a library from a copy that nobody else can change before it is loaded."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        copy = Path(own) / "loop.so"
        copy.write_bytes(code)
        return ctypes.CDLL(str(copy))


def key_of(graph: Graph, form: Hashable, threads: int | None) -> str:
    """All that compiled code depends on: the graph, its inputs' geometry, its form, and the files
    beside this one, which write it."""
    geometry = [(x.dtype, tuple(x.shape), x.stride()) for x in graph.examples]
    cores = torch.get_num_threads() if threads is None else threads
    machine = torch.__version__, torch.backends.cpu.get_cpu_capability(), cores
    digest = hashlib.sha256(repr((machine, form, geometry)).encode())
    digest.update(graph.module.code.encode())
    for writer in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(writer.read_bytes())
    return digest.hexdigest()
