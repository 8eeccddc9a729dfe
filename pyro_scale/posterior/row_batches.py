"""Which rows are predicted together: all of them, or some at a time where that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Independent
from torch.utils.data import DataLoader

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.data.loaders import check_tensors
from pyro_scale.distributed.shares import WHOLE, Share
from pyro_scale.errors import ArgumentError, CannotDrawError, DataError
from pyro_scale.fullbatch.chunks import CHUNK_ROWS, Chunk, is_row_wise, split
from pyro_scale.model.classify import close
from pyro_scale.model.guards import trace_modules
from pyro_scale.model.log_posterior import Params
from pyro_scale.model.recorder import LatentShapeChanged, Recorder
from pyro_scale.model.sites import Site
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.site_rows import chosen_sites, data_sites, row_axes


class RowBatches(NamedTuple):
    """Rows to predict for.

    Attributes:
        chunks: the rows, so many at a time; of these, a rank's share.
        axes: sites that have a value a row -> the rows' axis in it, from the right.
    """

    chunks: Iterator[Chunk]
    axes: Mapping[str, int]


def row_batches(
    result: PosteriorDraws,
    arguments: Arguments,
    batch_size: int | None,
    return_sites: Sequence[str] | None = None,
    share: Share = WHOLE,
    may_split: bool = False,
) -> RowBatches:
    """The rows of a call in batches.

    Before rows are split, a draw of the first two batches and of the last two is taken together
    and apart: each row's distribution has to be the same.

    Args:
        result: of the run.
        arguments: the model's own.
        batch_size: rows to hold at a time; None for all of them.
        return_sites: which sites are predicted; None for the default ones.
        share: a rank's.
        may_split: whether rows may be split where no batch size is asked for.

    Raises:
        DataError: there are no rows, or less than the model takes; a loader among the arguments.
        ArgumentError: `batch_size` of rows that depend on each other.
    """
    num_rows = _num_rows(result, arguments)
    size = batch_size = (
        None if batch_size is None else as_count("batch_size", batch_size, hint=", or None for all")
    )
    whole = RowBatches(share.of(split(result.log_posterior, [arguments])), row_axes(result))
    if num_rows is None or result.log_posterior.model_info.own_plate is not None:
        return whole  # one that subsamples by itself takes no more rows at a time
    if size is None and may_split and is_row_wise(result.log_posterior):
        size = CHUNK_ROWS
    if share.world > 1 and _is_drawn_by_row(result):
        size = share.size(size or num_rows, num_rows)
    if size is None or size >= num_rows:
        return whole
    is_asked = batch_size is not None and batch_size < num_rows
    try:
        axes = _axes_of_batches(result, arguments, size, num_rows, return_sites)
    except _RowsDepend as error:
        if is_asked:
            raise ArgumentError(
                f"batch_size={batch_size}: site '{error}' is not the same for a row by itself as "
                "beside other rows (a lag, a sum or a mean over rows, ...), so all rows have to be "
                "predicted together: leave batch_size out"
            ) from None
        return whole
    except LatentShapeChanged as error:
        if is_asked:
            raise ArgumentError(
                f"batch_size={batch_size}: site '{error.name}' has a value for each row that the "
                "model was run on, so all of them have to be predicted together: leave batch_size "
                "out"
            ) from None
        return whole
    except Exception:  # the model's own, on fewer rows
        if is_asked:
            raise
        return whole
    starts = range(0, num_rows, size)
    parts = [rows.take(arguments, slice(start, start + size)) for start in starts]
    return RowBatches(share.of(split(result.log_posterior, parts)), axes)


def _num_rows(result: PosteriorDraws, arguments: Arguments) -> int | None:
    """How many rows the arguments have; None without any."""
    check_tensors(arguments)
    for name, leaf in rows.named_leaves(arguments):
        if isinstance(leaf, DataLoader):
            raise DataError(
                f"predict: argument {name} is a DataLoader: pass what the model takes, for each of "
                "its batches, or the tensors with batch_size="
            )
    num_rows = rows.count(arguments)
    if num_rows == 0:
        raise DataError("predict: the arguments have no rows")
    own = result.log_posterior.model_info
    if own.own_plate is not None and num_rows is not None and num_rows < own.batch_size:
        raise DataError(
            f"predict: the model takes {own.batch_size} rows at a time in plate "
            f"'{own.own_plate}', but {num_rows} are passed: pass at least {own.batch_size}"
        )
    return num_rows


def _is_drawn_by_row(result: PosteriorDraws) -> bool:
    """Whether what is drawn of some rows is nothing to the others."""
    log_posterior = result.log_posterior
    observed = {n for n, site in log_posterior.model_info.sites.items() if site.kind == "observed"}
    return is_row_wise(log_posterior) and observed <= data_sites(result).keys()


class _RowsDepend(Exception):
    """The named site's rows depend on other rows."""


def _axes_of_batches(
    result: PosteriorDraws,
    arguments: Arguments,
    size: int,
    num_rows: int,
    return_sites: Sequence[str] | None,
) -> dict[str, int]:
    """The axis, from the right, along which each of the sites follows the rows.

    Raises:
        _RowsDepend: a batch of some rows has other values than all of them.
    """
    rules = result.log_posterior.model_info.scaling.rules
    last = (num_rows - 1) // size * size  # where the last batch starts
    axes: dict[str, int] = {}
    for start in dict.fromkeys((0, last - size)):
        count = min(2 * size, num_rows - start)
        both = rows.take(arguments, slice(start, start + count))
        run = run_at_first_draw(result, both)
        names = chosen_sites(result, run.sites, return_sites)
        for name in names:
            if name in rules and rules[name].whole_data:
                raise _RowsDepend(name)
        drawn = {name: run.sites[name].value for name in run.drawn}
        again = run_at_first_draw(result, both, drawn=drawn, seed=1).sites
        is_random = not all(_are_alike(result, run.sites[n], again[n], None) for n in names)
        for part in (slice(0, size), slice(size, count)):
            some = rows.take(both, part)
            alone = run_at_first_draw(result, some).sites
            every = {
                n: _axis(run.sites[n], alone[n], count) for n in dict.fromkeys([*names, *drawn])
            }
            axes |= {name: axis for name in names if (axis := every[name]) is not None}
            if is_random:  # by itself, so that nothing can be compared
                continue
            kept = {name: _rows(value, every[name], part) for name, value in drawn.items()}
            alone = run_at_first_draw(result, some, drawn=kept).sites
            for name in names:
                if not _are_alike(result, run.sites[name], alone[name], every[name], part):
                    raise _RowsDepend(name)
    return axes


def run_at_first_draw(
    result: PosteriorDraws,
    arguments: Arguments,
    indices: Tensor | None = None,
    drawn: Params | None = None,
    seed: int = 0,
) -> Recorder:
    """The model at the first draw, its observations drawn anew, or as they were drawn; NaN where a
    distribution has no draws."""
    params, values = result.layout.unflatten(result.positions[0, 0]), dict(drawn or {})
    while True:
        try:
            with own_generator(seed), torch.no_grad(), trace_modules():
                return result.log_posterior.simulate(params, arguments, indices, values)
        except CannotDrawError as error:
            values |= error.missing


def _axis(site: Site, alone: Site, count: int) -> int | None:
    """Where a site's value follows so many rows, from the right, given a part of them; None where
    it does not.

    Raises:
        _RowsDepend: it follows them otherwise than with a value a row.
    """
    shape, other = site.value.shape, alone.value.shape
    follows = [i for i, (n, m) in enumerate(zip(shape, other, strict=False)) if n != m]
    if len(shape) != len(other) or len(follows) > 1:
        raise _RowsDepend(site.name)
    if not follows:
        return None
    if shape[follows[0]] != count:
        raise _RowsDepend(site.name)
    return follows[0] - len(shape)


def _are_alike(
    result: PosteriorDraws, site: Site, other: Site, axis: int | None, part: slice = slice(None)
) -> bool:
    """Whether some rows are distributed as they are in another run, or have the same values."""
    (here, event_dim), (there, _) = _compared(site), _compared(other)
    if axis is not None and axis + event_dim >= 0:  # a joint density of all rows
        return False
    here = _rows(here, axis if axis is None else axis + event_dim, part)
    if here.shape != there.shape:
        return False
    same = (here == there) | ((here != here) & (there != there))
    here, there = (torch.where(same, 0, values) for values in (here, there))
    return close(here, there, dtype=result.layout.dtype)


def _compared(site: Site) -> tuple[Tensor, int]:
    """(What rows are compared by, how many of the value's dimensions it lacks): of a distribution,
    the log densities of a draw's elements."""
    if site.kind != "observed":
        return site.value.double(), 0
    fn = site.fn
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn.log_prob(site.value), len(fn.event_shape)


def _rows(values: Tensor, axis: int | None, part: slice) -> Tensor:
    return values if axis is None else values.movedim(axis, 0)[part].movedim(0, axis)
