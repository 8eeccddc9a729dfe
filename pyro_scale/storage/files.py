"""Pyro Scale's files: tensors and plain values, after a header with their SHA-256.

torch does not detect changed bytes in its files: most damaged files load, with other numbers in
them.  So bytes are given to torch only if their hash is that in the header.
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
from torch import Tensor

from pyro_scale.errors import ArgumentError, FileError

#: A path of a file or directory, as users pass it.
FilePath = str | os.PathLike[str]
#: What a file contains.
Kind = Literal["results", "checkpoint", "crash dump"]

#: Names of files that are being written.
_TEMPORARY = ".pyro-scale-{}"
#: Name of the file that the writer of a directory locks.
_LOCK = ".lock"
#: Errors of file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
#: Errors of disks without room for a file.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Version of the format of what follows the header.
_FORMAT = 3
#: End of the error message about a file without a header.
_EXPECTED: dict[Kind, str] = {
    "results": "a file of Pyro Scale's does: pass one that save(path) wrote",
    "checkpoint": "a part of a checkpoint does",
    "crash dump": "the last steps of a chain do: pass the file that the NonFiniteError named",
}
_HEADER = r"Pyro Scale %s, format (\d{1,9}), (\d{1,19}) bytes, SHA-256 ([0-9a-f]{64})\n"


def write(path: FilePath, contents: Mapping[str, Any], kind: Kind = "results") -> None:
    """Writes a file completely or not at all: an existing file stays until the new one is complete.

    Args:
        path: path of the file.
        contents: values by name: tensors, strings, numbers, booleans and None, in tuples, lists and
            dicts.
        kind: what the contents are, which the header says.

    Raises:
        ArgumentError: `path` is not a path.
        FileError: the contents have values of other types, or the file cannot be written.
    """
    target = as_path(path)
    buffer = io.BytesIO()
    torch.save({name: _plain(value, name) for name, value in contents.items()}, buffer)
    body = buffer.getbuffer()
    digest = hashlib.sha256(body).hexdigest()
    header = f"Pyro Scale {kind}, format {_FORMAT}, {len(body)} bytes, SHA-256 {digest}\n"
    target = Path(os.path.realpath(target))  # a link is kept, and its target replaced
    temporary = target.with_name(_TEMPORARY.format(secrets.token_hex(8)))
    try:
        with open(temporary, "xb") as file:
            file.write(header.encode())
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        fix = (
            "free some space, put the directory back, or make it writable"
            if kind == "checkpoint"
            else "free some space, or pass a file on another disk"
            if error.errno in _FULL
            else "pass a file in a directory that is there and can be written to"
        )
        raise FileError(
            f"'{target}' cannot be written ({error.strerror or error}): {fix}",
            code="cannot-write",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read(path: FilePath, kind: Kind = "results") -> dict[str, Any]:
    """The contents of a file that `write` wrote, by name, with tensors on the CPU.

    Args:
        path: path of the file.
        kind: kind of contents that the file must have.

    Raises:
        ArgumentError: `path` is not a path.
        FileError: the file cannot be read, has another kind or format, or is damaged.
    """
    target = as_path(path)
    try:
        content = target.read_bytes()
    except OSError as error:
        raise FileError(f"'{target}' cannot be read ({error.strerror or error})") from error
    header = re.match(_HEADER.encode() % kind.encode(), content)
    if header is None:
        raise FileError(f"'{target}' does not begin as {_EXPECTED[kind]}")
    version, size, digest = header.groups()
    if int(version) != _FORMAT:
        raise FileError(
            f"'{target}' has format {int(version)}, but this version of Pyro Scale reads format "
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
        contents = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        _check_size(contents, len(body), target)
        return cast(dict[str, Any], contents)
    except FileError:
        raise
    except Exception as error:  # another version of torch may have written it
        raise FileError(
            f"'{target}' is intact, but torch {torch.__version__} cannot read it "
            f"({type(error).__name__}): read it with the version that wrote it"
        ) from error


def _check_uncompressed(body: memoryview, target: Path) -> None:
    """Raises if a record in the file is compressed, since it could expand to more memory than the
    file has bytes.

    Args:
        body: bytes of the file after the header.
        target: path of the file, for the message.

    Raises:
        FileError: a record is compressed; torch writes none.
    """
    with zipfile.ZipFile(io.BytesIO(body)) as records:
        infos = records.infolist()
    packed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
    if packed or sum(info.file_size for info in infos) > len(body):
        raise FileError(f"'{target}' holds compressed records, which Pyro Scale does not write")


def _check_size(contents: Any, size: int, target: Path) -> None:
    """Raises for tensors that are not dense, or larger than the file, as one number expanded to
    terabytes would be.

    Args:
        contents: tensors and plain values that were read.
        size: size of the file in bytes.
        target: path of the file, for the message.

    Raises:
        FileError: a tensor is sparse, on the meta device, or too large.
    """
    stack, visited = [contents], set()
    while stack:
        value = stack.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, Tensor):
            is_dense = value.layout is torch.strided and not value.is_meta
            if not is_dense or value.numel() * value.element_size() > size:
                raise FileError(
                    f"'{target}' declares a tensor {list(value.shape)} that its {size} bytes do "
                    "not hold: take another copy"
                )


@contextlib.contextmanager
def locked(directory: Path, lock: Path | None = None) -> Iterator[None]:
    """Context that locks a directory against other processes that lock it; not against threads of
    this process.

    Args:
        directory: directory to lock.
        lock: path of the lock's file, which is removed afterwards; None for `.lock` in the
            directory.

    Raises:
        FileError: another process has the lock, or the lock's file cannot be written.
    """
    from filelock import FileLock, Timeout

    file = lock or directory / _LOCK
    holder = FileLock(file)
    try:
        file.touch()  # FileLock would wait where the file cannot be created
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
            file.unlink()  # while it is locked, so that no other process locks it in between
        holder.release()


def drop_unfinished(directory: Path) -> None:
    """Deletes partly written (temporary) files from a directory, which killed processes have left
    there.
    """
    for file in directory.glob(_TEMPORARY.format("[0-9a-f]" * 16)):
        with contextlib.suppress(OSError):
            file.unlink()


def as_path(path: FilePath) -> Path:
    """The path that a user passed (a string or a path) as a `Path`, with `~` expanded.

    Raises:
        ArgumentError: `path` is not a path.
    """
    if not isinstance(path, str | Path | os.PathLike) or "\0" in os.fspath(path) or path == "":
        raise ArgumentError(f"path={path!r}: pass a str or a Path")
    return Path(path).expanduser()


def _plain(value: Any, name: str) -> Any:
    """A value as it is written to a file: the same structure, with tensors on the CPU, detached,
    and copied if they are views of larger ones.

    Args:
        value: a tensor, or a plain value that may contain tensors.
        name: name of the value, for the message.

    Raises:
        FileError: the value is, or contains, something else than tensors and plain values.
    """
    if isinstance(value, Tensor):
        return _plain_tensor(value, name)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return type(value)(_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {key: _plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    raise _not_plain(value, name)


def _plain_tensor(value: Tensor, name: str) -> Tensor:
    detached = value.detach()
    if type(detached) is not Tensor or value.layout is not torch.strided or value.is_meta:
        raise _not_plain(value, name)
    on_cpu = detached.cpu()
    # torch.save writes the whole storage of a view
    is_view = on_cpu.untyped_storage().nbytes() > on_cpu.numel() * on_cpu.element_size()
    return on_cpu.clone() if is_view else on_cpu


def _not_plain(value: Any, name: str) -> FileError:
    return FileError(
        f"{name} is a {type(value).__name__}, which cannot be saved: a file holds dense tensors, "
        "strings and numbers, in tuples, lists and dicts; bind other arguments of a model with "
        "functools.partial(model, name=value) before it is run"
    )


@contextlib.contextmanager
def store_errors(path: Path, action: str) -> Iterator[None]:
    """Context that turns errors of the disk or of Zarr into a `FileError`.

    Args:
        path: path of the store, for the message.
        action: what failed, as a participle: `"read"` or `"written"`.
    """
    try:
        yield
    except (ArgumentError, FileError):
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
        reason = getattr(error, "strerror", None) or error
        # the store was removed while it was open
        if isinstance(error, KeyError) and not path.exists():
            reason = "the store is gone: put it back, or begin again"
        raise FileError(f"the draws in '{path}' cannot be {action} ({reason})") from error
