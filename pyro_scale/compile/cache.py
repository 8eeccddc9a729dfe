"""The user's cache, on disk, of compiled C++ libraries. Looking a library up does not import
Inductor, which would take two seconds.

Anyone who can write into the cache runs code as the user. So files and directories that other users
own or can write to are never read, and the bytes that were checked are the bytes that are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import NamedTuple

import platformdirs
import torch

from pyro_scale.compile.trace import Graph

#: Environment variable that names the cache's directory, in place of the platform's.
_VARIABLE = "PYRO_SCALE_CACHE_DIR"
#: Directory of the headers, and the suffixes of precompiled ones; their sources are not deleted.
_HEADERS, _PRECOMPILED = "precompiled_headers", (".gch", ".pch")
_DIGEST_BYTES = hashlib.sha256().digest_size


class Limits(NamedTuple):
    """How large the cache of compiled code on disk may become, in bytes: the oldest files beyond
    these sizes are deleted.

    Attributes:
        code: largest size of all compiled libraries together.
        headers: largest size of all precompiled headers of Inductor together. They have a bound of
            their own because every Python environment has one of about 150 MB.
    """

    code: int = 2**29
    headers: int = 2**29


LIMITS = Limits()


def library_for(
    graph: Graph, form: Hashable, threads: int | None, build: Callable[[], str]
) -> ctypes.CDLL:
    """The C++ library that computes a graph of tensor operations, loaded: from the cache on disk if
    it is there, otherwise built now and cached.

    Args:
        graph: graph of the function that the library computes.
        form: what else the generated C++ depends on, such as the kind of function; any hashable
            object, a part of the cache's key.
        threads: number of threads that the C++ code uses; None for torch's number.
        build: function that builds the library and returns its path; called if there is none in the
            cache.
    """
    return library(key_of(graph, form, threads), build)


def library(key: str, build: Callable[[], str]) -> ctypes.CDLL:
    """The C++ library that is cached under a key, loaded. If there is none, it is built and cached.

    Args:
        key: hash of everything that the library depends on.
        build: function that builds the library and returns its path.
    """
    code = read(key)
    if code is None:
        with building(key):
            code = read(key)  # another process may have built it in between
            if code is None:
                code = Path(build()).read_bytes()
                write(key, code)
    return _load(code)


def _load(code: bytes) -> ctypes.CDLL:
    """Loads a library from its bytes. The bytes are written to a file that nobody else can change
    before it is loaded.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        copy = Path(directory) / "loop.so"
        copy.write_bytes(code)
        return ctypes.CDLL(str(copy))


def key_of(graph: Graph, form: Hashable, threads: int | None) -> str:
    """The key of a compiled library in the cache: a hash of everything that the code depends on,
    which are the graph, the shapes, strides and dtypes of its inputs, the machine, and the files of
    this package, which write the C++.

    Args:
        graph: graph of the function.
        form: what else the generated C++ depends on, such as the kind of function; any hashable
            object.
        threads: number of threads that C++ kernels use; None for torch's number.
    """
    geometry = [(x.dtype, tuple(x.shape), x.stride()) for x in graph.examples]
    cores = torch.get_num_threads() if threads is None else threads
    machine = torch.__version__, torch.backends.cpu.get_cpu_capability(), cores
    digest = hashlib.sha256(repr((machine, form, geometry)).encode())
    digest.update(graph.module.code.encode())
    for writer in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(writer.read_bytes())
    return digest.hexdigest()


def directory() -> Path:
    """The directory of the cache of compiled code: the one that the environment variable
    `PYRO_SCALE_CACHE_DIR` names, otherwise one in the user's cache directory. If other users can
    write to it, a temporary directory that this process removes at its end.
    """
    with contextlib.suppress(OSError):
        path = Path(os.environ.get(_VARIABLE) or platformdirs.user_cache_dir("pyro-scale"))
        if path.is_absolute():  # without a home, "~" stays as it is
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and _is_ours(status)
            if is_ours and os.access(path, os.W_OK | os.X_OK):
                return path
    return for_this_process(os.getpid())


@functools.cache
def for_this_process(pid: int) -> Path:
    """A temporary directory, made at the first call and returned again at later ones, that the
    process with number `pid` removes at its end.
    """
    made = Path(tempfile.mkdtemp(prefix="pyro-scale-"))

    def remove() -> None:
        if os.getpid() == pid:  # not in a fork of the process
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


def read(key: str) -> bytes | None:
    """The bytes of the library that is cached under a key; None if there is none, or if the file is
    damaged or could have been written by other users. The file then counts as the most recently
    used.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        number = os.open(directory() / f"{key}.so", flags | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with open(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
            return None
        content = file.read()
        with contextlib.suppress(OSError):
            os.utime(number if os.utime in os.supports_fd else file.name)
    code = content[:-_DIGEST_BYTES]
    return code if _digest(key, code) == content[-_DIGEST_BYTES:] else None


def write(key: str, code: bytes, limits: Limits = LIMITS) -> None:
    """Caches a library's bytes under a key, and deletes the oldest files beyond the cache's limits;
    does nothing if the file cannot be written."""
    kept = directory()
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=kept, delete=False) as new:
            new.write(code + _digest(key, code))
        os.replace(new.name, kept / f"{key}.so")  # at once, as other processes look there, too
        _drop_oldest(kept, limits)


@contextlib.contextmanager
def building(key: str) -> Iterator[None]:
    """A context in which no other process or thread builds the library of this key. On file systems
    without locks, others may build it at the same time.
    """
    from filelock import FileLock

    file = directory() / f"{key}.lock"
    lock = FileLock(file)
    with contextlib.suppress(OSError):  # a file system without locks: both build it
        lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()


def _drop_oldest(kept: Path, limits: Limits) -> None:
    files = [Path(folder) / name for folder, _, names in os.walk(kept) for name in names]
    code = [file for file in files if _HEADERS not in file.relative_to(kept).parts]
    _drop_beyond(limits.code, code)
    _drop_beyond(limits.headers, [file for file in files if file.suffix in _PRECOMPILED])


def _drop_beyond(most_bytes: int, files: list[Path]) -> None:
    ages = []
    for file in files:
        with contextlib.suppress(OSError):
            status = file.lstat()
            ages.append((status.st_mtime, status.st_size, file))
    total = sum(size for _, size, _ in ages)
    for _, size, file in sorted(ages):
        if total <= most_bytes:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        total -= size


def _digest(key: str, code: bytes) -> bytes:
    """A hash of a library's key and bytes, which is stored with the library. A file whose hash does
    not match is not loaded: loading an incomplete library would kill the process.
    """
    return hashlib.sha256(key.encode() + code).digest()


def _is_ours(status: os.stat_result) -> bool:
    """True if a file belongs to the effective user, and nobody else can write to it; always True on
    Windows, which keeps profiles apart by itself.
    """
    if not hasattr(os, "geteuid"):  # Windows keeps profiles apart by itself
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
