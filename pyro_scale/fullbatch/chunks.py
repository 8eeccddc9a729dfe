"""The whole data, piece by piece, as the model takes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.data.sources import Data
from pyro_scale.model.log_posterior import LogPosterior

#: Rows that are evaluated together, unless the caller says otherwise.
PIECE_ROWS = 4096


class Piece(NamedTuple):
    """Part of the data, as the model takes it.

    Attributes:
        arguments: the model's arguments.
        indices: which rows, for a model that subsamples by itself.
        keep: which of the piece's rows are new.
        num_rows: how many rows the piece has.
    """

    arguments: Arguments
    indices: Tensor | None
    keep: slice
    num_rows: int

    @property
    def num_new(self) -> int:
        """How many of them are new."""
        return len(range(*self.keep.indices(self.num_rows)))


def pieces_of(
    log_posterior: LogPosterior, data: Data, num_rows: int | None = None
) -> Iterator[Piece]:
    """All rows once, in the data's order, about so many at a time; all of them together for a
    model that takes nothing less."""
    size = (num_rows or PIECE_ROWS) if is_row_wise(log_posterior) else None
    return split(log_posterior, data.in_order(size))


def pieces_with(
    log_posterior: LogPosterior, data: Data, chosen: Tensor
) -> Iterator[tuple[Piece, Tensor]]:
    """(Pieces that hold chosen rows, where those are among a piece's new rows).

    Args:
        log_posterior: what takes the pieces.
        data: all rows.
        chosen: the rows' places, in order.
    """
    begin = 0
    takes_less = is_row_wise(log_posterior)
    for piece in pieces_of(log_posterior, data):
        new = piece.num_new
        here = chosen[(chosen >= begin) & (chosen < begin + new)] - begin
        begin += new
        if not len(here):
            continue
        if takes_less and piece.indices is None:
            taken = rows.take(piece.arguments, here.to(rows.device(piece.arguments)))
            yield piece._replace(arguments=taken, num_rows=len(here)), torch.arange(len(here))
        else:
            yield piece, here


def is_row_wise(log_posterior: LogPosterior) -> bool:
    """Whether the model takes parts of the data."""
    known = log_posterior.model_info
    joint = any(rule.whole_data for rule in known.scaling.rules.values())
    return not (joint or known.whole_only)


def split(log_posterior: LogPosterior, batches: Iterable[Arguments]) -> Iterator[Piece]:
    """Batches as the model takes them; one that subsamples by itself gets blocks of indices."""
    known = log_posterior.model_info
    for arguments in batches:
        total = rows.count(arguments)
        if known.own_plate is None:
            yield Piece(arguments, None, slice(None), total or known.batch_size)
            continue
        size, total = known.batch_size, total or log_posterior.num_data
        for start in range(0, total, size):
            begin = max(0, min(start, total - size))  # the last block overlaps the one before
            indices = torch.arange(begin, begin + size)
            yield Piece(arguments, indices, slice(start - begin, None), size)
