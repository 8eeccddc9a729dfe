"""Compiled loops on disk, found again without Inductor, whose import alone takes two seconds."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

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
    kept = _directory() / f"{key_of(graph, kinds, threads)}.so"
    if not _is_whole(kept):
        code = Path(build()).read_bytes()
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as new:
            new.write(code + hashlib.sha256(code).digest())
        os.replace(new.name, kept)  # at once, for other processes look there too
    return ctypes.CDLL(str(kept))


def _is_whole(kept: Path) -> bool:
    """Whether a library is there, with the digest of all of it at its end: the system would
    kill the process for loading a part of one."""
    if not kept.exists():
        return False
    content = kept.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _directory() -> Path:
    """Beside Inductor's own cache."""
    own = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", own)) / "pyro_scale"


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
