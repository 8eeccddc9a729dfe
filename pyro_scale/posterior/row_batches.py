"""Which sites a prediction has, where the rows are in them, and which rows are predicted together:
all rows, or batches of rows where that changes nothing."""

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
from pyro_scale.curvature.chunks import CHUNK_ROWS, Chunk, is_row_wise, split
from pyro_scale.data.loaders import check_tensors
from pyro_scale.distributed.shares import WHOLE, Share
from pyro_scale.errors import ArgumentError, CannotDrawError, DataError
from pyro_scale.model.classify import close
from pyro_scale.model.guards import trace_modules
from pyro_scale.model.log_posterior import Params
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.recorder import LatentShapeChanged, Recorder
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import unwrap
from pyro_scale.posterior.draws import PosteriorDraws

# ------------------------------------------------------------------ sites


def data_sites(result: PosteriorDraws) -> dict[str, int]:
    """The observed sites that have a value for each row: a dict from their names to the axis of the
    rows in the value, negative and from the right."""
    return data_axes(result.log_posterior.model_info)


def data_axes(info: ModelInfo, apart: bool = False) -> dict[str, int]:
    """The observed sites of a model that have a value for each row: a dict from their names to the
    axis of the rows in the value, negative and from the right.

    Args:
        info: result of the model's preflight.
        apart: whether to leave out sites whose rows depend on each other.
    """
    axes = {}
    for name, rule in info.scaling.rules.items():
        if rule.dim is not None and (rule.role == "rows" or not apart):
            for part in name.split("+"):
                site = info.sites[part]
                if site.kind == "observed":
                    axes[part] = rule.dim - len(unwrap(site.fn, rule.depth).event_shape)
    return axes


def row_axes(result: PosteriorDraws) -> dict[str, int]:
    """A dict from each observed or deterministic site that has a value for each row to the axis of
    the rows in this value, negative and from the right; along it, predictions of batches are
    joined."""
    return {**result.log_posterior.model_info.row_axes, **data_sites(result)}


def chosen_sites(
    result: PosteriorDraws, sites: Mapping[str, Site], return_sites: Sequence[str] | None
) -> Sequence[str]:
    """Names of the sites that `predict` returns.

    Args:
        result: draws and facts of the run.
        sites: all sites of a run of the model, by name.
        return_sites: the user's `return_sites=`; None for all sites but latents and those that
            `get_samples` returns.

    Raises:
        ArgumentError: `return_sites` is a string, or names a site that is not in the model.
    """
    if isinstance(return_sites, str):
        raise ArgumentError(f"return_sites={return_sites!r}: pass a list of sites' names")
    for name in return_sites or ():
        if name not in sites:
            raise ArgumentError(f"return_sites: no site '{name}'; the model has {sorted(sites)}")
    if return_sites is not None:
        return return_sites
    latents, steady = result.log_posterior.latents, result.log_posterior.model_info.steady
    hidden = {"observed": latents, "deterministic": {*latents, *steady}}
    return [name for name, site in sites.items() if name not in hidden.get(site.kind, sites)]


# ------------------------------------------------------------------ batches


class RowBatches(NamedTuple):
    """Rows to predict for, in chunks.

    Attributes:
        chunks: the chunks of rows that this process predicts for.
        axes: for sites that have a value for each row, the axis of the rows in this value, negative
            and from the right.
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
    """The rows of a call of `predict`, split into batches.

    Before rows are split, the first two batches and the last two are each predicted together and
    separately, at one draw. The distribution of every row must be the same in both cases.

    Args:
        result: draws and facts of the run.
        arguments: the model's arguments.
        batch_size: rows of a batch; None for all rows in one batch, or for this function's choice
            with `may_split`.
        return_sites: names of the sites to predict; None for the default sites.
        share: which of the batches this process predicts.
        may_split: whether rows may be split without a `batch_size`.

    Raises:
        DataError: there are no rows, or fewer than the model takes; an argument is a loader.
        ArgumentError: `batch_size` for rows that depend on each other.
    """
    num_rows = _num_rows(result, arguments)
    if batch_size is not None:
        batch_size = as_count("batch_size", batch_size, hint=", or None for all")
    size = batch_size
    together = RowBatches(share.of(split(result.log_posterior, [arguments])), row_axes(result))
    if num_rows is None or result.log_posterior.model_info.own_plate is not None:
        return together  # a model that subsamples by itself always takes the same number of rows
    if size is None and may_split and is_row_wise(result.log_posterior):
        size = CHUNK_ROWS
    if share != WHOLE and _is_row_wise_draw(result):
        size = share.size(size or num_rows, num_rows)
    if size is None or size >= num_rows:
        return together
    try:
        axes = _axes_of_batches(result, arguments, size, num_rows, return_sites)
    except Exception as error:  # fewer rows may be an error of any kind for the model
        if batch_size is None or batch_size >= num_rows:
            return together
        if isinstance(error, _RowsDepend):
            reason = (
                f"site '{error}' is not the same for a row by itself as beside other rows (a lag, "
                "a sum or a mean over rows, ...)"
            )
        elif isinstance(error, LatentShapeChanged):
            reason = f"site '{error.name}' has a value for each row that the model was run on"
        else:
            raise
        raise ArgumentError(
            f"batch_size={batch_size}: {reason}, so all rows have to be predicted together: leave "
            "batch_size out"
        ) from None
    starts = range(0, num_rows, size)
    parts = [rows.take(arguments, slice(start, start + size)) for start in starts]
    return RowBatches(share.of(split(result.log_posterior, parts)), axes)


def _num_rows(result: PosteriorDraws, arguments: Arguments) -> int | None:
    """The number of rows of the arguments; None if no argument has rows.

    Raises:
        DataError: there are no rows, fewer than the model subsamples, or an argument is a
            DataLoader.
    """
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
    info = result.log_posterior.model_info
    if info.own_plate is not None and num_rows is not None and num_rows < info.batch_size:
        raise DataError(
            f"predict: the model takes {info.batch_size} rows at a time in plate "
            f"'{info.own_plate}', but {num_rows} are passed: pass at least {info.batch_size}"
        )
    return num_rows


def _is_row_wise_draw(result: PosteriorDraws) -> bool:
    """Whether predictive draws of a row are independent of the other rows, given the latents, so
    that rows may be predicted separately."""
    log_posterior = result.log_posterior
    sites = log_posterior.model_info.sites
    observed = {name for name, site in sites.items() if site.kind == "observed"}
    return is_row_wise(log_posterior) and observed <= data_sites(result).keys()


class _RowsDepend(Exception):
    """Raised, with the name of a site, if the site's values for some rows depend on which other
    rows are passed, so that rows cannot be predicted in batches."""


def _axes_of_batches(
    result: PosteriorDraws,
    arguments: Arguments,
    size: int,
    num_rows: int,
    return_sites: Sequence[str] | None,
) -> dict[str, int]:
    """For the sites that have a value for each row, the axis of the rows in the value, negative and
    from the right. Checks, on the first and the last two batches, that rows are the same in a batch
    by itself and in two batches together.

    Args:
        result: draws and facts of the run.
        arguments: the model's arguments, all rows.
        size: rows of a batch.
        num_rows: number of all rows.
        return_sites: names of the sites to predict; None for the default sites.

    Raises:
        _RowsDepend: a batch by itself has other values or distributions than as part of two
            batches.
    """
    rules = result.log_posterior.model_info.scaling.rules
    last = (num_rows - 1) // size * size  # the start of the last batch
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
            batch = rows.take(both, part)
            alone = run_at_first_draw(result, batch).sites
            part_axes = {
                n: _axis(run.sites[n], alone[n], count) for n in dict.fromkeys([*names, *drawn])
            }
            axes |= {name: axis for name in names if (axis := part_axes[name]) is not None}
            if is_random:  # two runs differ on the same rows, so there is nothing to compare
                continue
            kept = {name: _rows(value, part_axes[name], part) for name, value in drawn.items()}
            alone = run_at_first_draw(result, batch, drawn=kept).sites
            for name in names:
                if not _are_alike(result, run.sites[name], alone[name], part_axes[name], part):
                    raise _RowsDepend(name)
    return axes


def run_at_first_draw(
    result: PosteriorDraws,
    arguments: Arguments,
    indices: Tensor | None = None,
    drawn: Params | None = None,
    seed: int = 0,
) -> Recorder:
    """Runs the model once at the first posterior draw, with observations drawn from their
    distributions, to see which sites it has and how they depend on the rows.

    Args:
        result: draws and facts of the run.
        arguments: the model's arguments.
        indices: indices of the rows, for a model that subsamples by itself.
        drawn: values by site to use instead of new draws; None for none.
        seed: seed of the new draws.

    Returns:
        The recorder of the run, with all sites. Sites whose distributions cannot be sampled have
        NaN.
    """
    params, values = result.layout.unflatten(result.positions[0, 0]), dict(drawn or {})
    while True:
        try:
            with own_generator(seed), torch.no_grad(), trace_modules():
                return result.log_posterior.simulate(params, arguments, indices, values)
        except CannotDrawError as error:
            values |= error.missing


def _axis(site: Site, alone: Site, count: int) -> int | None:
    """The axis of a site's value, negative and from the right, whose size is the number of rows;
    None if no axis changes with the rows.

    Args:
        site: the site in a run on `count` rows.
        alone: the same site in a run on some of these rows.
        count: number of rows.

    Raises:
        _RowsDepend: the shape changes, but not as one value for each row.
    """
    shape, other = site.value.shape, alone.value.shape
    changed = [i for i, (n, m) in enumerate(zip(shape, other, strict=False)) if n != m]
    if len(shape) != len(other) or len(changed) > 1:
        raise _RowsDepend(site.name)
    if not changed:
        return None
    if shape[changed[0]] != count:
        raise _RowsDepend(site.name)
    return changed[0] - len(shape)


def _are_alike(
    result: PosteriorDraws, site: Site, other: Site, axis: int | None, part: slice = slice(None)
) -> bool:
    """Whether a site has the same log densities (if observed) or values (if not), up to rounding,
    for some rows in two runs.

    Args:
        result: draws and facts of the run; gives the dtype for rounding.
        site: the site in a run on all rows.
        other: the site in a run on a part of the rows.
        axis: axis of the rows in the site's value, negative and from the right; None if the site
            has no rows.
        part: which of the rows the other run has.
    """
    (value, event_dim), (other_value, _) = _compared(site), _compared(other)
    if axis is not None and axis + event_dim >= 0:  # a joint density of all rows
        return False
    value = _rows(value, axis if axis is None else axis + event_dim, part)
    if value.shape != other_value.shape:
        return False
    are_same = (value == other_value) | (value.isnan() & other_value.isnan())
    value, other_value = (torch.where(are_same, 0, v) for v in (value, other_value))
    return close(value, other_value, dtype=result.layout.dtype)


def _compared(site: Site) -> tuple[Tensor, int]:
    """The numbers by which a site is compared with that of another run: log densities of an
    observed site, values of any other.

    Returns:
        (The numbers, how many dimensions they have less than the site's value).
    """
    if site.kind != "observed":
        return site.value.double(), 0
    fn = site.fn
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn.log_prob(site.value), len(fn.event_shape)


def _rows(values: Tensor, axis: int | None, part: slice) -> Tensor:
    """The rows `part` of a tensor whose rows are along `axis`; the tensor unchanged if `axis` is
    None, which is for sites without rows."""
    return values if axis is None else values.movedim(axis, 0)[part].movedim(0, axis)
