"""A read-only Zarr store that refuses missing or damaged data."""

from __future__ import annotations

import re
from collections.abc import Callable

from numcodecs import CRC32
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore

from pyro_scale.errors import FileError
from pyro_scale.storage.files import refused

#: The end of the name of a file of draws, `<chain>.<number>...`, or of a coordinate, `<number>`.
_VALUES = re.compile(r"/\d+(?:\.\d+)*$")


class WholeStore(WrapperStore[LocalStore]):
    """Raises `FileError` for a file of draws that is damaged, or is not there, which Zarr takes for
    one of NaN, and of a coordinate, which it takes for one of zeros.

    Args:
        store: which.
        refuse_another: raises it where the store is of another run by now.
    """

    def __init__(self, store: LocalStore, check_same_run: Callable[[], None]):
        super().__init__(store)
        self._check_same_run = check_same_run

    def _with_store(self, store: LocalStore) -> WholeStore:
        return WholeStore(store, self._check_same_run)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """What a file holds."""
        self._check_same_run()
        path = self._store.root
        with refused(path, "read"):
            value = await super().get(key, prototype, byte_range)
            if not _VALUES.search(key):
                return value
            if value is None:
                raise FileError(f"the draws in '{path}' are not whole: {key} is gone")
            CRC32().decode(value.to_bytes())  # which raises; of Zarr's own check it is no FileError
        return value
