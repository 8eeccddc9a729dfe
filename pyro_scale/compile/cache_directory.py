"""The user's cache of compiled code.

Anyone who can write there runs code as the user.  So files and directories that others own or can
write are never read, and the bytes that were checked are the bytes that are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock

#: Names the directory, if that of the platform will not do.
_VARIABLE = "PYRO_SCALE_CACHE_DIR"
#: Bytes of code that is kept; and of Inductor's precompiled headers, of which every environment
#: has one of about 150 MB, so that they need a bound of their own.
_MOST_BYTES, _MOST_BYTES_OF_HEADERS = 2**29, 2**29
#: Where the headers are, and what GCC and Clang call them: what they are made of is not dropped.
_HEADERS, _PRECOMPILED = "precompiled_headers", (".gch", ".pch")
_DIGEST_BYTES = hashlib.sha256().digest_size


def directory() -> Path:
    """Where compiled code is kept: the user's cache if it can be written by them alone, else a
    directory that this process removes at its end."""
    with contextlib.suppress(OSError):
        kept = Path(os.environ.get(_VARIABLE) or platformdirs.user_cache_dir("pyro-scale"))
        if kept.is_absolute():  # without a home, "~" stays as it is
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = kept.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and _is_ours(status)
            if is_ours and os.access(kept, os.W_OK | os.X_OK):
                return kept
    return for_this_process(os.getpid())


@functools.cache
def for_this_process(pid: int) -> Path:
    """A new directory that the process with this number removes at its end."""
    made = Path(tempfile.mkdtemp(prefix="pyro-scale-"))

    def remove() -> None:
        if os.getpid() == pid:  # not a fork of it
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


def read(key: str) -> bytes | None:
    """What was kept under a key, if it is as it was written; it counts as new then."""
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


def write(key: str, code: bytes) -> None:
    """Keeps code under a key, if there is space, and drops the oldest files beyond the bound."""
    kept = directory()
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=kept, delete=False) as new:
            new.write(code + _digest(key, code))
        os.replace(new.name, kept / f"{key}.so")  # at once, for other processes look there too
        _drop_oldest(kept)


@contextlib.contextmanager
def building(key: str) -> Iterator[None]:
    """Keeps other processes and threads from building what is kept under a key meanwhile."""
    file = directory() / f"{key}.lock"
    lock = FileLock(file)
    with contextlib.suppress(OSError):  # of a file system that has no locks: both build it
        lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()


def _drop_oldest(kept: Path) -> None:
    files = [Path(folder) / name for folder, _, names in os.walk(kept) for name in names]
    code = [file for file in files if _HEADERS not in file.relative_to(kept).parts]
    _drop_beyond(_MOST_BYTES, code)
    _drop_beyond(_MOST_BYTES_OF_HEADERS, [file for file in files if file.suffix in _PRECOMPILED])


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
    """Of all of it: the system would kill the process for loading a part of a library."""
    return hashlib.sha256(key.encode() + code).digest()


def _is_ours(status: os.stat_result) -> bool:
    """Whether a file belongs to the effective user, and nobody else can write it."""
    if not hasattr(os, "geteuid"):  # Windows keeps profiles apart by itself
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
