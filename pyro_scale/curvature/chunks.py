"""The whole data in chunks that the model can take."""

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

#: Rows that are evaluated together, unless the caller says otherwise.
CHUNK_ROWS = 4096


class Chunk(NamedTuple):
    """Part of the data, as the model takes it.

    Attributes:
        arguments: the model's arguments.
        indices: which rows, for a model that subsamples by itself.
        keep: which of the chunk's rows are new.
        num_rows: how many rows the chunk has.
    """

    arguments: Arguments
    indices: Tensor | None
    keep: slice
    num_rows: int

    @property
    def num_new(self) -> int:
        """How many of them are new."""
        return len(range(*self.keep.indices(self.num_rows)))


def chunks_of(
    log_posterior: LogPosterior, data: Data, num_rows: int | None = None, share: Share = WHOLE
) -> Iterator[Chunk]:
    """All rows once, in the data's order, about so many at a time; all of them together for a
    model that takes nothing less.  Of these, a rank's share."""
    size = _size(log_posterior, data, num_rows, share)
    if isinstance(data, IndexedData) and share != WHOLE and size:  # which reads no rows of others
        own = list(share.of(data.subset.split(size)))
        if not own:
            return iter(())
        return split(log_posterior, dataclasses.replace(data, subset=torch.cat(own)).in_order(size))
    return share.of(split(log_posterior, data.in_order(size)))


def _size(
    log_posterior: LogPosterior, data: Data, num_rows: int | None, share: Share
) -> int | None:
    """How many rows to take together."""
    size = (num_rows or CHUNK_ROWS) if is_row_wise(log_posterior) else None
    if size is None or share == WHOLE or not isinstance(data, TensorData | IndexedData):
        return size
    return share.size(size, num_rows_in(data))


def num_rows_in(data: TensorData | IndexedData) -> int:
    """How many rows the data hold."""
    if isinstance(data, IndexedData):
        return len(data.subset)
    return rows.count(data.arguments) or 0


def chunks_with(
    log_posterior: LogPosterior, data: Data, chosen: Tensor, share: Share = WHOLE
) -> Iterator[tuple[Chunk, Tensor]]:
    """(Chunks that hold chosen rows, where those are among a chunk's new rows).

    Args:
        log_posterior: what takes the chunks.
        data: all rows.
        chosen: the rows' places, in order.
        share: which of these chunks.
    """
    return share.of(_with(log_posterior, data, chosen, share))


def _with(
    log_posterior: LogPosterior, data: Data, chosen: Tensor, share: Share
) -> Iterator[tuple[Chunk, Tensor]]:
    begin = 0
    takes_less = is_row_wise(log_posterior)
    for chunk in chunks_of(log_posterior, data, _size(log_posterior, data, None, share)):
        new = chunk.num_new
        here = chosen[(chosen >= begin) & (chosen < begin + new)] - begin
        begin += new
        if not len(here):
            continue
        if takes_less and chunk.indices is None:
            taken = rows.take(chunk.arguments, here.to(rows.device(chunk.arguments)))
            yield chunk._replace(arguments=taken, num_rows=len(here)), torch.arange(len(here))
        else:
            yield chunk, here


def is_row_wise(log_posterior: LogPosterior) -> bool:
    """Whether the model takes parts of the data."""
    info = log_posterior.model_info
    joint = any(rule.whole_data for rule in info.scaling.rules.values())
    return not (joint or info.whole_only)


def split(log_posterior: LogPosterior, batches: Iterable[Arguments]) -> Iterator[Chunk]:
    """Batches as the model takes them; one that subsamples by itself gets blocks of indices."""
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
