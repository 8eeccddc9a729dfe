"""A batch: the model's arguments, whose tensors contain rows of data.

The arguments are a tuple (by position) or a dict (by name), and may be nested. Every tensor in them
with at least one dimension counts as rows of data, and all of these have the same first dimension,
the number of rows; anything else passes unchanged. Arrays and data frames are converted to tensors
when data are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.layout import dtype_name
from pyro_scale.core.tables import check_order, is_table, names_of, tensor_of
from pyro_scale.errors import DataError

#: The model's arguments: a tuple by position, or a dict by name.
Arguments = tuple[Any, ...] | dict[str, Any]
#: A Pyro model: a function or module that is called with its arguments.
Model = Callable[..., Any]
#: Data as users pass them: a loader, or the model's own arguments (a tensor or table, a tuple by
#: position, a dict by name); None for a model without arguments.
DataLike = Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable[Any] | None


class Fixed(NamedTuple):
    """Source of a tensor of the minibatches for a compiled loop: the tensor is the same at every
    step.
    """

    tensor: Tensor


class PerStep(NamedTuple):
    """Source of a tensor of the minibatches for a compiled loop: a tensor `[chains, steps, ...]`
    with an entry for every step.
    """

    tensor: Tensor


class Gathered(NamedTuple):
    """Source of a tensor of the minibatches for a compiled loop: the rows of a table `[N, ...]` at
    indices `[chains, steps, B]`.
    """

    table: Tensor
    indices: Tensor


#: From where a compiled loop reads one tensor of each step's batch.
Source = Fixed | PerStep | Gathered


def is_rows(leaf: object) -> bool:
    """Whether an object among the model's arguments holds rows of data: it is a tensor with at
    least one dimension. Other objects are passed to the model as they are.
    """
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def as_arguments(batch: object) -> Arguments:
    """Data from a loader or a user as the model's arguments: a tuple or a dict, with arrays and
    data frames converted to tensors.

    Args:
        batch: a tuple or list of the arguments, a dict of them by name, or a single argument.

    Raises:
        DataError: an array or data frame cannot be a tensor.
    """
    return tables_as_tensors(by_place_or_name(batch))


def column_names(batch: object) -> dict[str, list[Any]]:
    """A dict from the name of each argument that is a data frame to its column names."""
    leaves = named_leaves(by_place_or_name(batch))
    return {name: names_of(leaf) for name, leaf in leaves if is_table(leaf) and names_of(leaf)}


def by_place_or_name(batch: object) -> Arguments:
    """Data from a loader or a user as a tuple (arguments by position) or a dict (arguments by
    name). A list becomes a tuple, and a single argument a tuple of one. The arguments themselves
    are not converted.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def tables_as_tensors(arguments: Arguments) -> Arguments:
    """The model's arguments with arrays and data frames converted to tensors.

    Raises:
        DataError: an array or data frame cannot be a tensor, or frames have their rows in different
            orders.
    """
    if not any(map(is_table, pytree.tree_leaves(arguments))):
        return arguments
    check_order(named_leaves(arguments))
    tensors = [
        tensor_of(leaf, name) if is_table(leaf) else leaf for name, leaf in named_leaves(arguments)
    ]
    return pytree.tree_unflatten(tensors, pytree.tree_structure(arguments))


def call(model: Model, arguments: Arguments) -> Any:
    """Calls the model with its arguments, a tuple (by position) or a dict (by name). Returns what
    the model returns."""
    if isinstance(arguments, dict):
        return model(**arguments)
    return model(*arguments)


def map_rows(function: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """The model's arguments after a function was applied to every tensor of rows; other objects are
    unchanged."""
    return pytree.tree_map(lambda leaf: function(leaf) if is_rows(leaf) else leaf, arguments)


def take(arguments: Arguments, index: Any) -> Arguments:
    """The model's arguments with only the rows at `index` of every tensor; other objects are
    unchanged.

    Args:
        arguments: the model's arguments.
        index: a slice, or a tensor of row numbers of any shape; that shape replaces the tensors'
            first dimension.
    """
    return map_rows(lambda rows: rows[index], arguments)


def named_leaves(arguments: Arguments) -> list[tuple[str, Any]]:
    """(Name, object) for every tensor or other object among the model's arguments, nested ones
    included; names are like `0`, `'x'` or `0['x']`."""
    return [
        (pytree.keystr(path[:1])[1:-1] + pytree.keystr(path[1:]), leaf)
        for path, leaf in pytree.tree_flatten_with_path(arguments)[0]
    ]


def named_rows(arguments: Arguments) -> list[tuple[str, Tensor]]:
    """(Name, tensor) for every tensor of rows among the model's arguments; names as in
    `named_leaves`."""
    return [(name, leaf) for name, leaf in named_leaves(arguments) if is_rows(leaf)]


def count(arguments: Arguments) -> int | None:
    """Number of rows of data in the model's arguments, the first dimension of all their tensors;
    None if no argument is rows.

    Raises:
        DataError: the tensors' first dimensions differ.
    """
    sizes = {name: leaf.shape[0] for name, leaf in named_rows(arguments)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise DataError(
            f"the tensors' first dimensions differ ({listed}): every tensor passed to the model "
            "is rows; bind tensors that are not with functools.partial(model, name=tensor)",
            code="not-rows",
        )
    return next(iter(sizes.values()), None)


def described(arguments: Arguments) -> str:
    """A phrase for messages with the names, dtypes and shapes of all tensors of rows among the
    model's arguments.
    """
    descriptions = [
        f"{name} is {dtype_name(leaf.dtype)} {list(leaf.shape)}"
        for name, leaf in named_rows(arguments)
    ]
    return ", ".join(descriptions) or "no tensors"


def leaves(arguments: Arguments) -> list[Tensor]:
    """All tensors of rows among the model's arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves(arguments) if is_rows(leaf)]


def device(arguments: Arguments) -> torch.device | None:
    """Device of the first tensor of rows of data among the model's arguments; None if there is no
    such tensor.
    """
    return next((leaf.device for leaf in leaves(arguments)), None)


def are_finite(arguments: Arguments) -> bool:
    """True if no number in the rows of data is NaN or infinite."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves(arguments))


def to_clean(arguments: Arguments, begin: int = 0, among: str = " of the batch") -> str:
    """A sentence for an error message: that rows of data contain NaN or infinite numbers, with the
    argument and the row of the first one. Empty ("") if all numbers are finite. Nothing is raised.

    Args:
        arguments: the model's arguments.
        begin: number of the first row, for the message.
        among: phrase for what rows are counted in, such as " of the data".
    """
    for name, leaf in named_rows(arguments):
        bad = (~torch.isfinite(leaf)).nonzero()
        if len(bad):
            what = "NaN" if bool(torch.isnan(leaf[tuple(bad[0])])) else "infinite"
            return (
                f"argument {name} is {what} in row {begin + int(bad[0, 0])}{among}: leave such "
                "rows out, or put numbers there if a mask leaves them out"
            )
    return ""


def other_columns(arguments: Arguments, expected: Arguments) -> str:
    """A sentence for an error message about the first argument whose rows have another shape than
    in an earlier batch; empty ("") if there is none.

    Args:
        arguments: the model's arguments.
        expected: the arguments of the earlier batch, with which these are compared by name.
    """
    shapes = {name: list(leaf.shape[1:]) for name, leaf in named_rows(expected)}
    for name, leaf in named_rows(arguments):
        if shapes.get(name, list(leaf.shape[1:])) != list(leaf.shape[1:]):
            return (
                f"argument {name} has rows of shape {list(leaf.shape[1:])}, and those that the "
                f"model was run on have {shapes[name]}"
            )
    return ""


def vmap_dims(arguments: Arguments, dim: int | None) -> Any:
    """The `in_dims` of `torch.vmap` for the model's arguments, in their structure: `dim` for rows,
    None for other objects."""
    return pytree.tree_map(lambda leaf: dim if is_rows(leaf) else None, arguments)


def by_column(table: Tensor) -> Tensor:
    """A copy of a table `[rows, columns]` of the same shape, stored column by column in memory, so
    that sums over rows are fast.
    """
    return table.mT.contiguous().mT


def are_alike(one: Arguments, other: Arguments) -> bool:
    """Whether two batches differ only in the numbers in their rows: structure, shapes, dtypes and
    all other objects are equal."""
    first, structure = pytree.tree_flatten(one)
    second, same = pytree.tree_flatten(other)
    return structure == same and all(map(_is_alike, first, second))


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return is_rows(one) or torch.equal(one, other)


def concatenate(parts: Sequence[Arguments]) -> Arguments:
    """One batch with the rows of several batches of the same structure.

    Raises:
        DataError: their rows differ in shape.
    """
    return _join(torch.cat, parts)


def stack(parts: Sequence[Arguments]) -> Arguments:
    """One batch made of several of the same structure and size: each tensor is stacked, with a new
    first dimension of length `len(parts)`.

    Raises:
        DataError: their rows differ in shape.
    """
    return _join(torch.stack, parts)


def different_shapes(error: RuntimeError) -> DataError:
    """The error to raise if batches cannot be joined because the shapes of their rows differ;
    `error` is torch's."""
    return DataError(
        f"batches differ in the shape of their rows ({error}): let the collate function pad all "
        "rows to one length, or make all batches of one shape"
    )


def _join(join: Callable[[list[Tensor]], Tensor], parts: Sequence[Arguments]) -> Arguments:
    columns = zip(*(pytree.tree_leaves(part) for part in parts), strict=True)
    try:
        joined = [join(list(column)) if is_rows(column[0]) else column[0] for column in columns]
    except RuntimeError as error:
        raise different_shapes(error) from error
    return pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))
