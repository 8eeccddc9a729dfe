"""Draws in a Zarr store: appended during a run, and readable then and later.

A store has ArviZ's layout: arrays `<group>/<site>`, `[chain, draw, ...]`, with named dims and
coords, which xarray and ArviZ can open.  Readers use the consolidated metadata, which is replaced
in one operation after draws are written.  So after an interrupted run, every draw that readers see
is complete.  Every chunk has a CRC32 checksum.

A file holds draws of one chain, and writing it does not change any metadata.  So several processes
can write into one store, each the files of its chains.  One process makes the draws that all
chains have visible to readers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError, FileError
from pyro_scale.storage.files import FilePath, as_path, locked, store_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The groups to which draws are appended, by ArviZ's names: constrained values, and unconstrained
#: values of the sites that have a transform.
_GROUPS = POSTERIOR, UNCONSTRAINED = "posterior", "unconstrained_posterior"
#: Chunk length of the coordinate `draw`.
_COORDINATE_CHUNK = 2**16


@contextlib.contextmanager
def writing_into(path: FilePath) -> Iterator[None]:
    """Context that locks the path of a store against the runs of other processes.

    Raises:
        ArgumentError: `path` is not a path.
        FileError: another run is writing there, or the path cannot be written.
    """
    target = Path(os.path.realpath(as_path(path)))
    with store_errors(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target, target.with_name(f"{target.name}.lock")):  # Zarr refuses other files in it
        yield


@dataclass(frozen=True)
class Field:
    """How the draws of one site are stored: shape, dtype and dimension names of a draw in the
    site's array.

    Attributes:
        shape: shape of one draw.
        dtype: NumPy's name of the dtype.
        dims: names of the dimensions of one draw.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]


class DrawStore:
    """A Zarr store on disk with the draws of a run: an array `[chain, draw, ...]` for each site.

    Args:
        path: path of the store's directory.
        group: the store's root group, opened by Zarr.

    Attributes:
        count: number of draws of each chain that readers see.
        run: a random identifier of the run.
        chunk: number of draws of a chain in one file.
    """

    def __init__(self, path: Path, group: Any):
        self.path, self._group = path, group
        self.count: int = group.attrs["draws"]
        self.run: str = group.attrs["run"]
        self.chunk: int = group.attrs["chunk"]

    @classmethod
    def create(
        cls,
        path: FilePath,
        fields: Mapping[str, Field],
        num_chains: int,
        chunk: int,
        run: str,
    ) -> Self:
        """Creates a store without draws on disk, and returns it.

        Args:
            path: path of a directory that does not exist, is empty, or holds a store without draws.
            fields: shape and dtype of each array, by `<group>/<site>`; the groups are `POSTERIOR`
                and `UNCONSTRAINED`.
            num_chains: number of chains.
            chunk: number of draws of a chain in one file.
            run: a random identifier of the run.

        Raises:
            ArgumentError: zarr is not installed; there is something else at the path.
            FileError: the store cannot be written.
        """
        zarr, target = _zarr(), as_path(path).absolute()
        with store_errors(target, "written"):
            if target.exists() and not _is_empty(target):
                raise ArgumentError(
                    f"store='{path}' is there already: pass another path, or resume= to go on with "
                    "the run that it is of"
                )
            group = zarr.create_group(str(target), zarr_format=2, overwrite=True)
            group.attrs.update(draws=0, run=run, chunk=chunk)
            store = cls(target, group)
            for name in _GROUPS:
                sites = [n.partition("/")[2] for n in fields if n.startswith(f"{name}/")]
                group.create_group(name, attributes={"sites": sites})
                _create_array(group, f"{name}/draw", (0,), (_COORDINATE_CHUNK,), "i8", ["draw"])
                store._write(f"{name}/chain", torch.arange(num_chains), ["chain"])
            for name, field in fields.items():
                shape, dims = (num_chains, 0, *field.shape), ("chain", "draw", *field.dims)
                chunks = (1, chunk, *(max(1, n) for n in field.shape))
                _create_array(group, name, shape, chunks, field.dtype, dims)
                for dim, size in zip(field.dims, field.shape, strict=True):
                    store._write(f"{name.partition('/')[0]}/{dim}", torch.arange(size), [dim])
            store._publish(0)
        return store

    @classmethod
    def open(cls, path: FilePath) -> Self:
        """The store at a path, for reading and writing.

        Raises:
            ArgumentError: zarr is not installed.
            FileError: there is no store of Pyro Scale at the path, or it is damaged.
        """
        zarr, target = _zarr(), as_path(path).absolute()
        with store_errors(target, "read"):
            store = cls(target, zarr.open_group(str(target), mode="r+", use_consolidated=False))
            store._check_metadata()
        return store

    def write(self, draws: Mapping[str, Tensor], start: int, chains: Sequence[int]) -> None:
        """Writes draws of some chains to disk. Readers see them after `show`.

        Args:
            draws: draws of every field by `<group>/<site>`, `[chains, n, ...]`.
            start: number of the first of these draws in the run.
            chains: numbers of the chains.

        Raises:
            FileError: the disk cannot be written.
        """
        stop = start + next(iter(draws.values())).shape[1]
        with store_errors(self.path, "written"), _every_file():
            for name, values in draws.items():
                array = _of_length(self._group[name], stop)
                if len(chains) == array.shape[0]:
                    array[:, start:stop] = values.numpy()
                    continue
                for chain, of_chain in zip(chains, values.numpy(), strict=True):
                    array[chain, start:stop] = of_chain

    def show(self, count: int) -> None:
        """Makes the first `count` draws of all chains visible to readers; they must be written.

        Raises:
            FileError: the metadata cannot be written; what readers see does not change.
        """
        with store_errors(self.path, "written"):
            self._resize(count)
            self._publish(count)

    def truncate(self, count: int) -> None:
        """Hides draws after the first `count` from readers, and removes groups written by `put`.

        Raises:
            FileError: the store cannot be written.
        """
        with store_errors(self.path, "written"):
            for name in set(self._group.group_keys()) - {*_GROUPS}:
                del self._group[name]
            self._resize(count)
            self._publish(count)

    def drop(self, chains: Sequence[int], count: int) -> None:
        """Deletes, for some chains, the files on disk that hold only draws after the first `count`.
        A file that also holds earlier draws stays.

        Raises:
            FileError: the files cannot be removed.
        """
        with store_errors(self.path, "written"):
            for name in self._fields:
                for file in (self.path / name).iterdir():
                    chain, number, *_ = (*file.name.split("."), "", "")
                    is_of_chains = number.isdecimal() and int(chain) in chains
                    if is_of_chains and int(number) * self.chunk >= count:
                        file.unlink()

    def put(
        self,
        group: str,
        variables: Mapping[str, Tensor],
        chains: Tensor,
        attrs: Mapping[str, Any],
    ) -> None:
        """Writes another group of variables, or replaces it, and sets attributes on the root and
        all groups.

        Args:
            group: name of the group, such as "sample_stats".
            variables: arrays of the group by name, `[chains, draws]`.
            chains: numbers of the chains.
            attrs: attributes, strings and numbers by name.

        Raises:
            FileError: the disk cannot be written.
        """
        with store_errors(self.path, "written"):
            self._resize(self.count)
            for name, values in variables.items():
                self._write(f"{group}/{name}", values, ["chain", "draw"])
            draws = next(iter(variables.values())).shape[1]
            self._write(f"{group}/chain", chains, ["chain"])
            self._write(f"{group}/draw", torch.arange(draws), ["draw"])
            for described in (self._group, *self._group.group_values()):
                described.attrs.update(attrs)
            self._publish(self.count)

    def read(
        self, name: str, chains: Tensor, draws: Tensor, elements: Tensor | None = None
    ) -> Tensor:
        """Some draws of one field, read from disk: `[len(chains), len(draws), ...]`.

        Args:
            name: the field, `<group>/<site>`.
            chains: numbers of the chains.
            draws: numbers of the draws.
            elements: indices into a draw's flattened value, with which the result is `[len(chains),
                len(draws), len(elements)]`; None for whole draws.

        Raises:
            FileError: draws cannot be read, or are damaged.
        """
        files = draws // self.chunk  # one file after another, to save memory
        parts, order = [], []
        with store_errors(self.path, "read"):
            array = self._checked_group[name]
            every = (slice(None),) * (array.ndim - 2)
            for file in files.unique():
                self._check_complete(name, array, chains, int(file))
                in_file = torch.nonzero(files == file)[:, 0]
                part = torch.as_tensor(array.oindex[chains.numpy(), draws[in_file].numpy(), *every])
                if elements is not None:
                    part = part.reshape(*part.shape[:2], -1)[..., elements]
                parts.append(part)
                order.append(in_file)
        return torch.cat(parts, 1)[:, torch.cat(order).argsort()]

    def holds(self, chains: Sequence[int], count: int) -> bool:
        """Whether the first `count` draws of these chains are on disk, visible to readers or not,
        so that a run can continue from them. The chains must not have stopped before.

        Raises:
            FileError: the files cannot be read, or are damaged.
        """
        with store_errors(self.path, "read"):
            arrays = [_of_length(self._checked_group[name], count) for name in self._fields]
            places = list(chains), [count - 1]
            last = [array.oindex[places] for array in arrays if array.dtype.kind == "f"]
        # a missing file reads as NaN
        is_finite = [np.isfinite(values).reshape(len(chains), -1) for values in last]
        return bool(np.concatenate(is_finite, 1).any(1).all())

    def shape_of(self, name: str) -> torch.Size:
        """The shape of one draw of a field, which is named `<group>/<site>`."""
        with store_errors(self.path, "read"):
            return torch.Size(self._checked_group[name].shape[2:])

    def sites(self, group: str) -> list[str]:
        """The names of the sites of a group, in the model's order."""
        with store_errors(self.path, "read"):
            return list(self._checked_group[group].attrs["sites"])

    def dataset(self, group: str) -> Any:
        """A group as an `xarray.Dataset`, which reads draws when they are used, and raises a
        `FileError` then if they are missing or damaged.

        Raises:
            FileError: the group cannot be read, or its coordinates are missing or damaged.
        """
        import xarray
        from zarr.storage import LocalStore

        from pyro_scale.storage.zarr_checked import CheckedStore

        store = CheckedStore(LocalStore(self.path, read_only=True), self._check_same_run)
        with store_errors(self.path, "read"):
            dataset = xarray.open_zarr(store, group=group, chunks=None, consolidated=True)
        return dataset.drop_encoding()  # other formats do not accept it

    @property
    def _fields(self) -> list[str]:
        return [f"{group}/{site}" for group in _GROUPS for site in self.sites(group)]

    @property
    def _checked_group(self) -> Any:
        """Zarr's root group, to read from; a `FileError` is raised first if the path no longer
        holds the store of this run.
        """
        self._check_same_run()
        return self._group

    def _check_same_run(self) -> None:
        """Raises if the path no longer holds the store of this run.

        Raises:
            FileError: there is no store, or that of another run.
        """
        with store_errors(self.path, "read"):
            if json.loads((self.path / ".zattrs").read_text()).get("run") != self.run:
                raise FileError(f"the draws in '{self.path}' have been replaced by another run's")

    def _check_metadata(self) -> None:
        """Raises unless every array has the layout that the consolidated metadata gives, because
        metadata has no checksum. Arrays may be longer than readers see.

        Raises:
            FileError: an array has another layout or codec.
        """
        consolidated = json.loads((self.path / ".zmetadata").read_text())["metadata"]
        for name in (name for name in consolidated if name.endswith("/.zarray")):
            metadata = json.loads((self.path / name).read_text())
            codecs = [metadata.get("compressor"), *(metadata.get("filters") or [])]
            if any(codec is not None and codec.get("id") != "crc32" for codec in codecs):
                raise FileError(
                    f"the draws in '{self.path}' cannot be read: {name} names a codec that Pyro "
                    "Scale does not write"
                )
            if _layout(metadata) != _layout(consolidated[name]):
                raise FileError(
                    f"the draws in '{self.path}' cannot be read: {name} and .zmetadata do not "
                    "agree, so one of them is damaged"
                )

    def _check_complete(self, name: str, array: Any, chains: Tensor, file: int) -> None:
        """Raises if a file of draws is missing: Zarr would read it as NaN.

        Args:
            name: the field, `<group>/<site>`.
            array: the field's Zarr array.
            chains: numbers of the chains.
            file: number of the file of each chain.

        Raises:
            FileError: a file is missing.
        """
        for chain in chains.tolist() if array.size else ():
            place = ".".join(map(str, (chain, file, *(0 for _ in array.shape[2:]))))
            if not (self.path / name / place).exists():
                raise FileError(
                    f"the draws in '{self.path}' are incomplete: {name}/{place} is gone"
                )

    def _write(self, name: str, values: Tensor, dims: Sequence[str]) -> None:
        """Creates an array with these values, or replaces it. `name` is its path in the store,
        `dims` the names of its dimensions."""
        array = values.numpy()
        chunks = [max(1, n) for n in array.shape]
        with _every_file():
            _create_array(self._group, name, array.shape, chunks, array.dtype, dims)[:] = array

    def _resize(self, count: int) -> None:
        """Sets the number of draws of every array to `count`, in its metadata and coordinates;
        files of draws do not change.
        """
        with _every_file():
            for name in _GROUPS:
                for array in self._group[name].array_values():
                    dims = _dims_of(array)
                    if dims[:2] == ["chain", "draw"]:
                        # shortening it would remove files that other processes write
                        resized = _of_length(array, count)
                        resized.resize(resized.shape)
                    elif dims == ["draw"]:
                        array.resize((count,))
                        array[:] = np.arange(count)

    def _publish(self, count: int) -> None:
        """Writes the store's metadata so that readers see the first `count` draws of all chains."""
        self._group.attrs["draws"] = self.count = count
        _zarr().consolidate_metadata(str(self.path), zarr_format=2)


def _is_empty(target: Path) -> bool:
    """Whether a path is an empty directory, or a store without draws."""
    try:
        return DrawStore.open(target).count == 0
    except FileError:
        return target.is_dir() and not any(target.iterdir())


def _create_array(
    group: Any,
    name: str,
    shape: Sequence[int],
    chunks: Sequence[int],
    dtype: Any,
    dims: Sequence[str],
) -> Any:
    """Creates an array with CRC32 checksums, or replaces it, and returns Zarr's array.

    Args:
        group: the root group.
        name: path of the array in the root group.
        shape: shape of the array.
        chunks: shape of a chunk.
        dtype: NumPy's dtype, or its name.
        dims: names of the array's dimensions.
    """
    import numcodecs

    array = group.create_array(
        name,
        shape=tuple(shape),
        chunks=tuple(chunks),
        dtype=dtype,
        fill_value=float("nan") if np.dtype(dtype).kind == "f" else None,
        compressors=None,  # random digits cannot be compressed
        filters=[numcodecs.CRC32()],
        overwrite=True,
    )
    array.attrs["_ARRAY_DIMENSIONS"] = list(dims)  # xarray's convention
    return array


def _of_length(array: Any, count: int) -> Any:
    """A view of a Zarr array `[chain, draw, ...]` with `count` draws, whatever its metadata
    says.
    """
    shape = array.shape[0], count, *array.shape[2:]
    zarr = _zarr()
    return zarr.Array(zarr.AsyncArray(array.metadata.update_shape(shape), array.store_path))


def _layout(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an array `[chain, draw, ...]` or `[draw]` without the number of draws. Two
    arrays with equal results differ in length alone.
    """
    shape = metadata["shape"]
    return {**metadata, "shape": [*shape[:1], *shape[2:]] if len(shape) > 1 else None}


def _dims_of(array: Any) -> list[str]:
    return list(array.attrs["_ARRAY_DIMENSIONS"])


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ArgumentError(
            "store= needs the package zarr: pip install 'pyro-scale[store]'"
        ) from error
    return zarr


def _every_file() -> Any:
    """Context in which Zarr also writes files that hold only the fill value, so that a missing file
    is always an error."""
    return _zarr().config.set({"array.write_empty_chunks": True})
