"""Opens the data that users pass: determines N, B and the source of batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import default_collate

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, DataLike
from pyro_scale.core.validation import as_count
from pyro_scale.data.loaders import check_tensors, is_iterable_style, to_device
from pyro_scale.data.sources import Data, IndexedData, TensorData
from pyro_scale.data.stream import StreamData
from pyro_scale.errors import ArgumentError, DataError


def open_data(
    data: DataLike,
    batch_size: int | None = None,
    num_data: int | None = None,
    device: torch.device | None = None,
) -> Data:
    """The data that a user passes (tensors, a loader, nothing) as a source of minibatches, with N
    and B: a `TensorData`, `IndexedData` or `StreamData`.

    Args:
        data: a loader (any iterable with `.dataset`), or the model's own arguments: a tensor, a
            tuple by position, a dict by name, None for a model without arguments.
        batch_size: B, for the model's arguments; None for all rows, and for a loader, which has its
            own.
        num_data: N, which overrides the number of rows that the data have; None to use that number.
        device: device to which batches are moved; None to leave them where they are.

    Raises:
        DataError: the data are empty, of unknown length, smaller than a batch, or not tensors.
        ArgumentError: `batch_size` is not a positive integer, or is passed with a loader.
    """
    if batch_size is not None:
        batch_size = as_count("batch_size", batch_size, hint=", or None for all rows")
    if num_data is not None:
        num_data = as_count("num_data", num_data)
    if data is None:
        data = ()
    if isinstance(data, Tensor | tuple | Mapping) or hasattr(data, "__array__") or _is_row(data):
        opened = _open_tensors(rows.as_arguments(data), batch_size, num_data, device)
        opened.columns = rows.column_names(data)
        return opened
    if not isinstance(data, Iterable):
        raise DataError(
            f"data is a {type(data).__name__}: pass a DataLoader, or the model's own arguments "
            "as a tensor, tuple or dict of tensors",
            code="not-rows",
        )
    if batch_size is not None:
        raise ArgumentError(
            f"batch_size={batch_size} beside a loader, which has its own: set it there, or pass "
            "the tensors"
        )
    return _open_loader(data, num_data, device)


def _open_tensors(
    arguments: Arguments, batch_size: int | None, num_data: int | None, device: torch.device | None
) -> TensorData:
    check_tensors(arguments)
    num_rows = rows.count(arguments)
    if num_rows is None and batch_size is not None:
        raise DataError(
            f"batch_size={batch_size}, but there is no tensor among the data to take rows of"
        )
    if num_rows is not None:
        _check_size(num_rows, batch_size)
    if batch_size == num_rows:
        batch_size = None
    total = num_data if num_data is not None else num_rows
    return TensorData(to_device(arguments, device), total, batch_size)


def _open_loader(loader: Any, num_data: int | None, device: torch.device | None) -> Data:
    dataset = getattr(loader, "dataset", None)
    length = _length(dataset)
    if length is None and num_data is None:
        raise DataError(
            "the data's number of rows N is unknown: the loader has no .dataset with a length; "
            "pass num_data=N (rows, not batches)",
            code="no-length",
        )
    if length == 0:
        raise DataError("the data set is empty")
    total = num_data if num_data is not None else length
    sampler = _batch_sampler(loader)
    subset = None if sampler is None else _indices_of(sampler.sampler, length)
    if sampler is not None and subset is None and num_data is None:
        drawn = _length(sampler.sampler)
        if drawn not in (None, length):
            raise DataError(
                f"the loader's sampler draws {drawn} of the data set's {length} rows in an epoch: "
                "wrap those rows in torch.utils.data.Subset, or pass num_data=N if it draws all N "
                "equally often in the long run"
            )
    if sampler is None or subset is None:
        if is_iterable_style(loader) and loader.drop_last:
            raise DataError(
                "drop_last=True drops the same rows in every epoch of a loader that cannot be read "
                "by index: set drop_last=False (a ragged tail is carried into the next epoch)"
            )
        return StreamData(loader, total, device)
    if num_data is None:
        total = len(subset)
    assert total is not None
    _check_size(len(subset), sampler.batch_size)
    if loader.collate_fn is default_collate:
        tensors = _tensors_of(dataset, subset)
        if tensors is not None:
            return _open_tensors(tensors, sampler.batch_size, total, device)
    return IndexedData(loader, subset, total, sampler.batch_size, device)


def _batch_sampler(loader: Any) -> torch_data.BatchSampler | None:
    """The batch sampler that torch made for a DataLoader over a map-style data set; None for other
    loaders, and for a sampler of batches that the user wrote.

    Raises:
        DataError: the DataLoader's batching is switched off.
    """
    if not isinstance(loader, torch_data.DataLoader):
        return None
    if loader.batch_sampler is None and not is_iterable_style(loader):
        raise DataError(
            "the DataLoader has batch_size=None, which switches its batching off: give it a "
            "batch_size, or your sampler of batches as batch_sampler="
        )
    sampler: Any = loader.batch_sampler
    return sampler if _is_plain(sampler, "BatchSampler") else None


def _indices_of(sampler: Any, length: int | None) -> Tensor | None:
    """Indices of the rows that torch's sampler draws with equal probability; None for a sampler
    that the user wrote.

    Args:
        sampler: sampler of a DataLoader.
        length: number of rows of the data set.

    Raises:
        DataError: the sampler draws rows with unequal probabilities.
    """
    if isinstance(sampler, torch_data.WeightedRandomSampler):
        raise DataError(
            "a WeightedRandomSampler draws rows with unequal probability, so the batches do not "
            "estimate the likelihood of the data; weigh rows by poutine.scale in the model instead"
        )
    if isinstance(sampler, torch_data.SubsetRandomSampler):
        return torch.as_tensor(list(sampler.indices))
    if _is_plain(sampler, "SequentialSampler", "RandomSampler"):
        return torch.arange(length or 0)
    return None


def _is_plain(sampler: Any, *names: str) -> bool:
    """Whether a sampler is of one of torch's (or torchdata's) own classes with one of these names;
    False for a class that the user has derived from it.
    """
    kind = type(sampler)
    return kind.__name__ in names and kind.__module__.split(".")[0] in ("torch", "torchdata")


def _tensors_of(dataset: Any, index: Tensor) -> Arguments | None:
    """The tensors of a TensorDataset, or of a subset of one, at the rows `index`, as the model's
    arguments; None for other data sets, which have to be read through their loader.
    """
    while isinstance(dataset, torch_data.Subset):
        index = torch.as_tensor(dataset.indices)[index]
        dataset = dataset.dataset
    if type(dataset) is not torch_data.TensorDataset:
        return None
    if torch.equal(index, torch.arange(len(dataset))):
        return tuple(dataset.tensors)
    return tuple(tensor[index] for tensor in dataset.tensors)


def _check_size(num_rows: int, batch_size: int | None) -> None:
    if num_rows == 0:
        raise DataError("the data have no rows")
    if batch_size is not None and batch_size > num_rows:
        raise DataError(
            f"batch_size={batch_size} is more than the {num_rows} rows of the data: pass at most "
            f"{num_rows}, or None for all of them"
        )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _is_row(data: DataLike) -> bool:
    """Whether the data are a list of arrays: as a loader's collate function returns the model's
    arguments.
    """
    return isinstance(data, list) and bool(data) and all(hasattr(d, "__array__") for d in data)
