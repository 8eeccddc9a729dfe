"""Our files: tensors and plain values behind a header with their SHA-256.

torch does not notice a changed byte in its files, and most such files load with other numbers in
them.  So torch only gets bytes whose hash is the one in the header.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from pyro_scale.errors import ArgumentError, FileError

#: Where a file is, as users say it.
FilePath = str | os.PathLike[str]
#: What a file holds.
Kind = Literal["results", "checkpoint", "crash dump"]

#: The names of files that are being written.
_TEMPORARY = ".pyro-scale-{}"
#: That of the file which who writes into a directory has locked.
_LOCK = ".lock"
#: What a file system says that has no locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
#: What a disk says that has no room for a file.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Of what follows the header; another number, another way to read it.
_FORMAT = 3
_WROTE: dict[Kind, str] = {
    "results": "a file of Pyro Scale's does: pass one that save(path) wrote",
    "checkpoint": "a part of a checkpoint does",
    "crash dump": "the last steps of a chain do: pass the file that the NonFiniteError named",
}
_HEADER = r"Pyro Scale %s, format (\d{1,9}), (\d{1,19}) bytes, SHA-256 ([0-9a-f]{64})\n"


def write(path: FilePath, contents: Mapping[str, Any], kind: Kind = "results") -> None:
    """Writes a file, as a whole or not at all: one that was there stays until the new one is
    complete.

    Args:
        path: where to.
        contents: by name: tensors, strings, numbers, booleans and None, in tuples, lists and
            dicts.
        kind: what they are.

    Raises:
        ArgumentError: the path is none.
        FileError: something else is among the contents, or the file cannot be written.
    """
    target = as_path(path)
    saved = io.BytesIO()
    torch.save({name: _plain(value, name) for name, value in contents.items()}, saved)
    body = saved.getbuffer()
    digest = hashlib.sha256(body).hexdigest()
    header = f"Pyro Scale {kind}, format {_FORMAT}, {len(body)} bytes, SHA-256 {digest}\n"
    target = Path(os.path.realpath(target))  # what a link points to, not the link
    temporary = target.with_name(_TEMPORARY.format(secrets.token_hex(8)))
    try:
        with open(temporary, "xb") as file:
            file.write(header.encode())
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        instead = (
            "free some space, put the directory back, or make it writable"
            if kind == "checkpoint"
            else "free some space, or pass a file on another disk"
            if error.errno in _FULL
            else "pass a file in a directory that is there and can be written to"
        )
        raise FileError(
            f"'{target}' cannot be written ({error.strerror or error}): {instead}",
            code="cannot-write",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read(path: FilePath, kind: Kind = "results") -> dict[str, Any]:
    """What `write` wrote, its tensors in the processor's memory.

    Raises:
        ArgumentError: the path is none.
        FileError: there is no such file, it is not one of ours or of another format, or it is not
            as it was written.
    """
    target = as_path(path)
    try:
        content = target.read_bytes()
    except OSError as error:
        raise FileError(f"'{target}' cannot be read ({error.strerror or error})") from error
    header = re.match(_HEADER.encode() % kind.encode(), content)
    if header is None:
        raise FileError(f"'{target}' does not begin as {_WROTE[kind]}")
    form, size, digest = header.groups()
    if int(form) != _FORMAT:
        raise FileError(
            f"'{target}' has format {int(form)}, but this version of Pyro Scale reads format "
            f"{_FORMAT}: read it with the version that wrote it"
        )
    body = memoryview(content)[header.end() :]
    if len(body) != int(size):
        state = "was cut off" if len(body) < int(size) else "has something after its end"
        raise FileError(
            f"'{target}' {state}: {len(body)} bytes follow the header, not {int(size)}; take "
            "another copy"
        )
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise FileError(
            f"'{target}' is damaged: its contents do not have the SHA-256 that it says; take "
            "another copy"
        )
    try:
        _check_uncompressed(body, target)
        found_in = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        _check_size(found_in, len(body), target)
        return cast(dict[str, Any], found_in)
    except FileError:
        raise
    except Exception as error:  # of another version of torch
        raise FileError(
            f"'{target}' is whole, but torch {torch.__version__} cannot read it "
            f"({type(error).__name__}): read it with the version that wrote it"
        ) from error


def _check_uncompressed(body: memoryview, target: Path) -> None:
    """Refuses records that would take more memory than they have bytes; torch writes none."""
    with zipfile.ZipFile(io.BytesIO(body)) as records:
        infos = records.infolist()
    packed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
    if packed or sum(info.file_size for info in infos) > len(body):
        raise FileError(f"'{target}' holds compressed records, which Pyro Scale does not write")


def _check_size(contents: Any, size: int, target: Path) -> None:
    """Refuses tensors that declare more numbers than the file has room for, such as one number
    expanded to terabytes, and those that are no plain ones."""
    left, seen = [contents], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, Tensor):
            plain = value.layout is torch.strided and not value.is_meta
            if not plain or value.numel() * value.element_size() > size:
                raise FileError(
                    f"'{target}' declares a tensor {list(value.shape)} that its {size} bytes do "
                    "not hold: take another copy"
                )


@contextlib.contextmanager
def locked(directory: Path, lock: Path | None = None) -> Iterator[None]:
    """Keeps other processes that ask for it out of a directory, until the end or that of the
    process; not other threads of this one.

    Args:
        directory: which.
        lock: the file that is locked, and gone afterwards; `.lock` in the directory by default.

    Raises:
        FileError: another one has it, or the file cannot be written.
    """
    file = lock or directory / _LOCK
    holder = FileLock(file)
    try:
        file.touch()  # where it cannot be made, a lock would be waited for
        holder.acquire(timeout=0)
    except Timeout:
        raise FileError(
            f"another run is writing into '{directory}': wait for its end, or pass another "
            "directory"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise FileError(
                f"'{directory}' cannot be written ({error.strerror or error})",
                code="cannot-write",
            ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()  # while it is locked: nobody else can have it in between
        holder.release()


def drop_unfinished(directory: Path) -> None:
    """Drops what processes that were killed have left half written."""
    for file in directory.glob(_TEMPORARY.format("[0-9a-f]" * 16)):
        with contextlib.suppress(OSError):
            file.unlink()


def as_path(path: FilePath) -> Path:
    """A path that a user passed.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(path, str | Path | os.PathLike) or "\0" in os.fspath(path) or path == "":
        raise ArgumentError(f"path={path!r}: pass a str or a Path")
    return Path(path).expanduser()


def _plain(value: Any, name: str) -> Any:
    """The value with its tensors as they are to be written.

    Raises:
        FileError: it is, or holds, something else than tensors and plain values.
    """
    if isinstance(value, Tensor):
        return _plain_tensor(value, name)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return type(value)(_plain(each, f"{name}[{i}]") for i, each in enumerate(value))
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {key: _plain(each, f"{name}[{key!r}]") for key, each in value.items()}
    raise _not_plain(value, name)


def _plain_tensor(value: Tensor, name: str) -> Tensor:
    detached = value.detach()
    if type(detached) is not Tensor or value.layout is not torch.strided or value.is_meta:
        raise _not_plain(value, name)
    here = detached.cpu()
    # a view would take all that it is a view of into the file
    is_part = here.untyped_storage().nbytes() > here.numel() * here.element_size()
    return here.clone() if is_part else here


def _not_plain(value: Any, name: str) -> FileError:
    return FileError(
        f"{name} is a {type(value).__name__}, which cannot be saved: a file holds dense tensors, "
        "strings and numbers, in tuples, lists and dicts; bind other arguments of a model with "
        "functools.partial(model, name=value) before it is run"
    )


@contextlib.contextmanager
def refused(path: Path, what: str) -> Iterator[None]:
    """Our error for what the disk or a codec refuses of draws in a directory."""
    try:
        yield
    except (ArgumentError, FileError):
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, KeyError) and not path.exists():  # of what Zarr had open
            reason = "the store is gone: put it back, or begin again"
        raise FileError(f"the draws in '{path}' cannot be {what} ({reason})") from error
