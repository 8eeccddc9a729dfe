"""All rows of the data, in chunks that the model can take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.data.sources import Data, IndexedData, TensorData
from pyro_scale.distributed.shares import WHOLE, Share
from pyro_scale.model.log_posterior import LogPosterior

#: Rows in a chunk, unless the caller chooses.
CHUNK_ROWS = 4096


class Chunk(NamedTuple):
    """Consecutive rows of the data, on which the model is run at once: sums over all rows are
    computed chunk by chunk.

    Attributes:
        arguments: the model's arguments, with the rows of the chunk.
        indices: indices of the chunk's rows in the arguments, for a model that subsamples by
            itself; None for any other model.
        keep: slice of the chunk's rows that no earlier chunk had; chunks of a model that subsamples
            may overlap.
        num_rows: the number of rows in the chunk, including those that an earlier chunk had.
    """

    arguments: Arguments
    indices: Tensor | None
    keep: slice
    num_rows: int

    @property
    def num_new(self) -> int:
        """The number of the chunk's rows that no earlier chunk had."""
        return len(range(*self.keep.indices(self.num_rows)))


def chunks_of(
    log_posterior: LogPosterior, data: Data, num_rows: int | None = None, share: Share = WHOLE
) -> Iterator[Chunk]:
    """Yields chunks of rows whose new rows (`keep`) cover all rows of the data once, in order; with
    a `share`, only those chunks that this process works on.

    Args:
        log_posterior: the model's log posterior; if the model needs all rows together, there is a
            single chunk.
        data: all rows of the data.
        num_rows: the approximate number of rows in a chunk; None for `CHUNK_ROWS`.
        share: which of the chunks this process takes, if several processes divide them among
            themselves; by default all.
    """
    size = _chunk_size(log_posterior, data, num_rows, share)
    if isinstance(data, IndexedData) and share != WHOLE and size:  # do not read others' rows
        parts = list(share.of(data.subset.split(size)))
        if not parts:
            return iter(())
        data = dataclasses.replace(data, subset=torch.cat(parts))
        return split(log_posterior, data.in_order(size))
    return share.of(split(log_posterior, data.in_order(size)))


def chunks_with(
    log_posterior: LogPosterior, data: Data, chosen: Tensor, share: Share = WHOLE
) -> Iterator[tuple[Chunk, Tensor]]:
    """Yields (chunk, indices of the selected rows among the chunk's new rows) for every chunk of
    the data that contains a selected row. A chunk is cut down to the selected rows if the model
    can be run on a part of the data.

    Args:
        log_posterior: the model's log posterior.
        data: all rows.
        chosen: numbers of the selected rows in the data, sorted.
        share: which of these chunks this process takes, if several processes divide them among
            themselves; by default all.
    """
    return share.of(_chunks_with(log_posterior, data, chosen, share))


def _chunks_with(
    log_posterior: LogPosterior, data: Data, chosen: Tensor, share: Share
) -> Iterator[tuple[Chunk, Tensor]]:
    begin, takes_parts = 0, is_row_wise(log_posterior)
    for chunk in chunks_of(log_posterior, data, _chunk_size(log_posterior, data, None, share)):
        end = begin + chunk.num_new
        places = chosen[(chosen >= begin) & (chosen < end)] - begin
        begin = end
        if not len(places):
            continue
        if takes_parts and chunk.indices is None:
            arguments = rows.take(chunk.arguments, places.to(rows.device(chunk.arguments)))
            chunk = chunk._replace(arguments=arguments, num_rows=len(places))
            places = torch.arange(len(places))
        yield chunk, places


def _chunk_size(
    log_posterior: LogPosterior, data: Data, num_rows: int | None, share: Share
) -> int | None:
    """The number of rows in a chunk, about `num_rows` (None for `CHUNK_ROWS`); None if the model
    needs all rows together. If several processes divide the chunks, `share` says how."""
    size = (num_rows or CHUNK_ROWS) if is_row_wise(log_posterior) else None
    if size is None or share == WHOLE or not isinstance(data, TensorData | IndexedData):
        return size
    return share.size(size, num_rows_in(data))


def num_rows_in(data: TensorData | IndexedData) -> int:
    """The number of rows of the data; 0 for a model without arguments that are tensors of rows."""
    if isinstance(data, IndexedData):
        return len(data.subset)
    return rows.count(data.arguments) or 0


def is_row_wise(log_posterior: LogPosterior) -> bool:
    """Whether sums over rows can be computed chunk by chunk: the model can be run on a part of the
    data, and its log likelihood is a sum over rows.
    """
    info = log_posterior.model_info
    joint = any(rule.whole_data for rule in info.scaling.rules.values())
    return not (joint or info.whole_only)


def split(log_posterior: LogPosterior, batches: Iterable[Arguments]) -> Iterator[Chunk]:
    """Yields a chunk for each batch of rows. For a model that subsamples by itself (in
    `pyro.plate`), yields several chunks for each batch: all have the batch's arguments, and each
    has the indices of as many rows as a subsample of the model has.
    """
    info = log_posterior.model_info
    for arguments in batches:
        total = rows.count(arguments)
        if info.own_plate is None:
            yield Chunk(arguments, None, slice(None), total or info.batch_size)
            continue
        size, total = info.batch_size, total or log_posterior.num_data
        for start in range(0, total, size):
            begin = max(0, min(start, total - size))  # the last block overlaps the one before
            indices = torch.arange(begin, begin + size)
            yield Chunk(arguments, indices, slice(start - begin, None), size)
