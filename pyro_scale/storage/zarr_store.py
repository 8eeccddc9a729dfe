"""Draws in a Zarr store: appended during a run, and readable then and later.

A store has ArviZ's layout, `<group>/<site>` `[chain, draw, ...]` with named dims and coords, so
xarray and ArviZ can open it.  Readers see its consolidated metadata, which is written last and as
a whole: after an interrupted run, every draw that can be seen is complete.  Every chunk carries its
CRC32.

A file holds draws of one chain, and what is written into it needs no metadata but what the store
was made with.  So any number of processes write, each the files of its own chains; one of them
shows readers how many draws there are of all.
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
from pyro_scale.storage.files import FilePath, as_path, locked, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The groups that draws are appended to, as ArviZ names them: constrained values, and what those
#: are the image of, where that is something else.
_GROUPS = POSTERIOR, UNCONSTRAINED = "posterior", "unconstrained_posterior"
#: Draws' numbers in a chunk of the coordinate.
_NUMBERS = 2**16


@contextlib.contextmanager
def writing_into(path: FilePath) -> Iterator[None]:
    """Keeps the runs of other processes from writing into a store, or making it, meanwhile.

    Raises:
        ArgumentError: the path is none.
        FileError: another run is writing there, or the path cannot be written.
    """
    target = Path(os.path.realpath(as_path(path)))
    with refused(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target, target.with_name(f"{target.name}.lock")):  # in it, Zarr would complain
        yield


@dataclass(frozen=True)
class Field:
    """One array of a store.

    Attributes:
        shape: of one draw.
        dtype: as NumPy names it.
        dims: names of the shape's dimensions.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]


class DrawStore:
    """Arrays `[chain, draw, ...]` on disk.

    Args:
        path: of the store's directory.
        group: the open store.

    Attributes:
        count: draws of each chain that it holds.
        run: what tells its run from others.
        chunk: draws of a chain in one file.
    """

    def __init__(self, path: Path, group: Any):
        self.path, self._group = path, group
        self.count: int = group.attrs["draws"]
        self.run: str = group.attrs["run"]
        self.chunk: int = group.attrs["chunk"]

    @classmethod
    def created(
        cls,
        path: FilePath,
        fields: Mapping[str, Field],
        num_chains: int,
        chunk: int,
        run: str,
    ) -> Self:
        """An empty store.

        Args:
            path: a directory that is not there yet, or holds a store without draws.
            fields: by group and site, `<group>/<site>`; the groups are `POSTERIOR` and
                `UNCONSTRAINED`.
            num_chains: how many chains.
            chunk: draws of a chain in one file.
            run: what tells this run from others.

        Raises:
            ArgumentError: zarr is not installed; something is there already.
            FileError: the store cannot be written.
        """
        zarr, target = _zarr(), as_path(path).absolute()
        with refused(target, "written"):
            if target.exists() and not _is_empty(target):
                raise ArgumentError(
                    f"store='{path}' is there already: pass another path, or resume= to go on with "
                    "the run that it is of"
                )
            group = zarr.create_group(str(target), zarr_format=2, overwrite=True)
            group.attrs.update(draws=0, run=run, chunk=chunk)
            store = cls(target, group)
            for head in _GROUPS:
                of_head = [n.partition("/")[2] for n in fields if n.startswith(f"{head}/")]
                group.create_group(head, attributes={"sites": of_head})
                _array(group, f"{head}/draw", (0,), (_NUMBERS,), "i8", ["draw"])
                store._write(f"{head}/chain", torch.arange(num_chains), ["chain"])
            for name, field in fields.items():
                shape, dims = (num_chains, 0, *field.shape), ("chain", "draw", *field.dims)
                chunks = (1, chunk, *(max(1, n) for n in field.shape))
                _array(group, name, shape, chunks, field.dtype, dims)
                for dim, size in zip(field.dims, field.shape, strict=True):
                    store._write(f"{name.partition('/')[0]}/{dim}", torch.arange(size), [dim])
            store._publish(0)
        return store

    @classmethod
    def opened(cls, path: FilePath) -> Self:
        """One that is there.

        Raises:
            ArgumentError: zarr is not installed.
            FileError: it is not, is not one of ours, or is damaged.
        """
        zarr, target = _zarr(), as_path(path).absolute()
        with refused(target, "read"):
            store = cls(target, zarr.open_group(str(target), mode="r+", use_consolidated=False))
            store._check_metadata()
        return store

    def write(self, draws: Mapping[str, Tensor], start: int, chains: Sequence[int]) -> None:
        """Writes draws of some chains, `[chains, n, ...]`, which readers see once they are shown.

        Args:
            draws: of every field, by group and site; the last ones that are there among them.
            start: the number of the first.
            chains: their numbers.

        Raises:
            FileError: they cannot be written; readers see those before.
        """
        stop = start + next(iter(draws.values())).shape[1]
        with refused(self.path, "written"), _every_file():
            for name, values in draws.items():
                array = _of_length(self._group[name], stop)
                if len(chains) == array.shape[0]:
                    array[:, start:stop] = values.numpy()
                    continue
                for chain, own in zip(chains, values.numpy(), strict=True):
                    array[chain, start:stop] = own

    def show(self, count: int) -> None:
        """Shows readers so many draws, all of which are written.

        Raises:
            FileError: they cannot be shown; readers see those that they did.
        """
        with refused(self.path, "written"):
            self._resize(count)
            self._publish(count)

    def truncate(self, count: int) -> None:
        """Shows readers the first `count` draws alone, and not what `put` wrote.

        Raises:
            FileError: they cannot be shown.
        """
        with refused(self.path, "written"):
            for name in set(self._group.group_keys()) - {*_GROUPS}:
                del self._group[name]
            self._resize(count)
            self._publish(count)

    def drop(self, chains: Sequence[int], count: int) -> None:
        """Removes the files of some chains that only hold draws after the first `count`.

        Raises:
            FileError: they cannot be removed.
        """
        with refused(self.path, "written"):
            for name in self._fields:
                for file in (self.path / name).iterdir():
                    chain, _, rest = file.name.partition(".")
                    number = rest.partition(".")[0]
                    is_own = number.isdecimal() and int(chain) in chains
                    if is_own and int(number) * self.chunk >= count:
                        file.unlink()

    def put(
        self,
        group: str,
        variables: Mapping[str, Tensor],
        chains: Tensor,
        attrs: Mapping[str, Any],
    ) -> None:
        """Writes a further group, `[chains, draws]` of the chains of these numbers, in place of one
        of that name; and the attributes of all groups."""
        with refused(self.path, "written"):
            self._resize(self.count)
            for name, values in variables.items():
                self._write(f"{group}/{name}", values, ["chain", "draw"])
            draws = next(iter(variables.values())).shape[1]
            self._write(f"{group}/chain", chains, ["chain"])
            self._write(f"{group}/draw", torch.arange(draws), ["draw"])
            for each in (self._group, *self._group.group_values()):
                each.attrs.update(attrs)
            self._publish(self.count)

    def read(
        self, name: str, chains: Tensor, draws: Tensor, elements: Tensor | None = None
    ) -> Tensor:
        """Draws of one field, `[len(chains), len(draws), ...]`, or some elements of them, by their
        places in a flattened one, `[len(chains), len(draws), len(elements)]`.

        Raises:
            FileError: they cannot be read, or are damaged.
        """
        files = draws // self.chunk  # of which one after another is in memory
        parts, order = [], []
        with refused(self.path, "read"):
            array = self._own[name]
            rest = (slice(None),) * (array.ndim - 2)
            for file in files.unique():
                self._check_complete(name, array, chains, int(file))
                here = torch.nonzero(files == file)[:, 0]
                places = chains.numpy(), draws[here].numpy(), *rest
                part = torch.as_tensor(array.oindex[places])
                if elements is not None:
                    part = part.reshape(*part.shape[:2], -1)[..., elements]
                parts.append(part)
                order.append(here)
        return torch.cat(parts, 1)[:, torch.cat(order).argsort()]

    def holds(self, chains: Sequence[int], count: int) -> bool:
        """Whether so many draws of some sound chains are written, shown or not.

        Raises:
            FileError: they cannot be read, or are damaged.
        """
        with refused(self.path, "read"):
            arrays = [_of_length(self._own[name], count) for name in self._fields]
            places = list(chains), [count - 1]
            last = [array.oindex[places] for array in arrays if array.dtype.kind == "f"]
        sound = [np.isfinite(values).reshape(len(chains), -1) for values in last]  # or not there
        return bool(np.concatenate(sound, 1).any(1).all())

    def shape_of(self, name: str) -> torch.Size:
        """The shape of one draw of a field."""
        with refused(self.path, "read"):
            return torch.Size(self._own[name].shape[2:])

    def sites(self, group: str) -> list[str]:
        """The sites of a group, in the model's order."""
        with refused(self.path, "read"):
            return list(self._own[group].attrs["sites"])

    def dataset(self, group: str) -> Any:
        """A group as xarray's dataset, of which draws are read when they are needed; what is gone
        or damaged then is a `FileError`.

        Raises:
            FileError: it cannot be read, or its coordinates are gone or damaged.
        """
        import xarray
        from zarr.storage import LocalStore

        from pyro_scale.storage.zarr_checked import WholeStore

        store = WholeStore(LocalStore(self.path, read_only=True), self._check_same_run)
        with refused(self.path, "read"):
            dataset = xarray.open_zarr(store, group=group, chunks=None, consolidated=True)
        return dataset.drop_encoding()  # which other formats do not take

    @property
    def _fields(self) -> list[str]:
        return [f"{group}/{site}" for group in _GROUPS for site in self.sites(group)]

    @property
    def _own(self) -> Any:
        """The open store, if what is at its path is still that of its run."""
        self._check_same_run()
        return self._group

    def _check_same_run(self) -> None:
        """Refuses to read where there is none, or that of another run."""
        with refused(self.path, "read"):
            if json.loads((self.path / ".zattrs").read_text()).get("run") != self.run:
                raise FileError(f"the draws in '{self.path}' are of another run by now")

    def _check_metadata(self) -> None:
        """Refuses arrays that are not laid out as readers are told, for there is no checksum of
        that; their lengths may be ahead of it."""
        told = json.loads((self.path / ".zmetadata").read_text())["metadata"]
        for name in (name for name in told if name.endswith("/.zarray")):
            own = json.loads((self.path / name).read_text())
            codecs = [own.get("compressor"), *(own.get("filters") or [])]
            if any(codec is not None and codec.get("id") != "crc32" for codec in codecs):
                raise FileError(
                    f"the draws in '{self.path}' cannot be read: {name} names a codec that Pyro "
                    "Scale does not write"
                )
            if _layout(own) != _layout(told[name]):
                raise FileError(
                    f"the draws in '{self.path}' cannot be read: {name} and .zmetadata do not "
                    "agree, so one of them is damaged"
                )

    def _check_complete(self, name: str, array: Any, chains: Tensor, file: int) -> None:
        """Refuses to take a file that is not there for one that holds nothing."""
        for chain in chains.tolist() if array.size else ():
            place = ".".join(map(str, (chain, file, *(0 for _ in array.shape[2:]))))
            if not (self.path / name / place).exists():
                raise FileError(f"the draws in '{self.path}' are not whole: {name}/{place} is gone")

    def _write(self, name: str, values: Tensor, dims: Sequence[str]) -> None:
        """A whole array."""
        array = values.numpy()
        chunks = [max(1, n) for n in array.shape]
        with _every_file():
            _array(self._group, name, array.shape, chunks, array.dtype, dims)[:] = array

    def _resize(self, count: int) -> None:
        """Says how many draws there are in all; files stay as they are."""
        with _every_file():
            for name in _GROUPS:
                for array in self._group[name].array_values():
                    dims = _dims_of(array)
                    if dims[:2] == ["chain", "draw"]:
                        # which, were it longer, would drop files that other processes write
                        same = _of_length(array, count)
                        same.resize(same.shape)
                    elif dims == ["draw"]:
                        array.resize((count,))
                        array[:] = np.arange(count)

    def _publish(self, count: int) -> None:
        """Shows readers so many draws."""
        self._group.attrs["draws"] = self.count = count
        _zarr().consolidate_metadata(str(self.path), zarr_format=2)


def _is_empty(target: Path) -> bool:
    """Whether it is a directory with nothing in it, or a store without draws."""
    try:
        return DrawStore.opened(target).count == 0
    except FileError:
        return target.is_dir() and not any(target.iterdir())


def _array(
    group: Any,
    name: str,
    shape: Sequence[int],
    chunks: Sequence[int],
    dtype: Any,
    dims: Sequence[str],
) -> Any:
    """An array, in place of one of that name."""
    import numcodecs

    made = group.create_array(
        name,
        shape=tuple(shape),
        chunks=tuple(chunks),
        dtype=dtype,
        fill_value=float("nan") if np.dtype(dtype).kind == "f" else None,
        compressors=None,  # random digits do not get smaller
        filters=[numcodecs.CRC32()],
        overwrite=True,
    )
    made.attrs["_ARRAY_DIMENSIONS"] = list(dims)  # xarray's convention
    return made


def _of_length(array: Any, count: int) -> Any:
    """An array `[chain, draw, ...]` as if it had so many draws, whatever readers see of it."""
    shape = array.shape[0], count, *array.shape[2:]
    zarr = _zarr()
    return zarr.Array(zarr.AsyncArray(array.metadata.update_shape(shape), array.store_path))


def _layout(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """An array's metadata but for the number of draws, `[chain, draw, ...]` or `[draw]`."""
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
    """Has Zarr write files of zeros and of NaN, too, so that one that is not there is gone."""
    return _zarr().config.set({"array.write_empty_chunks": True})
