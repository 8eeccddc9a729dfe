"""A read-only Zarr store in which missing or damaged draws are errors.

A module by itself, because its class has a base class in zarr, which may not be installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from numcodecs import CRC32
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore

from pyro_scale.errors import FileError
from pyro_scale.storage.files import store_errors

#: The end of a chunk's key: `<chain>.<number>...` for draws, `<number>` for a coordinate.
_CHUNK = re.compile(r"/\d+(?:\.\d+)*$")


class CheckedStore(WrapperStore[LocalStore]):
    """A read-only Zarr store that raises `FileError` for files of draws that are damaged or
    missing.

    Args:
        store: Zarr's store, from which files are read.
        check_same_run: function that raises `FileError` if the path holds the store of another run.
    """

    def __init__(self, store: LocalStore, check_same_run: Callable[[], None]):
        super().__init__(store)
        self._check_same_run = check_same_run

    def _with_store(self, store: LocalStore) -> CheckedStore:
        return CheckedStore(store, self._check_same_run)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The bytes of a file in the store; None if there is no such file, and its name is not that
        of a chunk.

        Raises:
            FileError: the file is a chunk, and is missing or damaged.
        """
        self._check_same_run()
        path = self._store.root
        with store_errors(path, "read"):
            value = await super().get(key, prototype, byte_range)
            if not _CHUNK.search(key):
                return value
            if value is None:
                raise FileError(f"the draws in '{path}' are incomplete: {key} is gone")
            CRC32().decode(value.to_bytes())  # raises if the checksum differs
        return value
