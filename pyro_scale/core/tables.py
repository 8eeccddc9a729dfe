"""NumPy arrays and data frames as tensors of rows.

Tensors are copies: later writes to an array do not change them, nor the other way round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.layout import dtype_name
from pyro_scale.errors import DataError

#: Rounding errors, in sds of a column divided by the dtype's epsilon: above the first, digits of
#: the spread are lost; below the second, merging neighbors are harmless, as among many rows.
_MOST_NOISE, _LITTLE_NOISE = 2**13, 2**5
#: Smallest fraction of a column's distinct values that rounding must leave.
_LEAST_DISTINCT = 0.9
#: Number of elements that are compared at once.
_BLOCK = 2**22
#: Integer dtypes with few operations in torch -> the next wider ones.
_WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("uint16"): np.dtype("int32"),
    np.dtype("uint32"): np.dtype("int64"),
}
#: Dict from the kind of a dtype that cannot be converted to (its description, what to pass
#: instead).
_REFUSALS = {
    "O": ("objects", "numbers (.astype(float), where they are)"),
    "U": ("strings", "numbers, such as pandas.factorize(...)[0] for an index"),
    "S": ("strings", "numbers, such as pandas.factorize(...)[0] for an index"),
    "T": ("strings", "numbers, such as pandas.factorize(...)[0] for an index"),
    "M": ("dates", "numbers, such as days since the first date"),
    "m": ("durations", "numbers, such as days"),
    "c": ("complex numbers", "their parts, .real and .imag"),
    "category": ("categories", ".cat.codes for an index, or pandas.get_dummies for columns"),
}


def is_table(leaf: object) -> bool:
    """Whether an object among the model's arguments is an array, a data frame, or anything else
    with dimensions that NumPy reads, but not a tensor."""
    if isinstance(leaf, Tensor | np.generic) or not hasattr(leaf, "__array__"):
        return False
    return int(np.ndim(leaf)) > 0


def names_of(table: Any) -> list[Any]:
    """Column names of a data frame; an empty list for an array or a series."""
    return list(getattr(table, "column_names", getattr(table, "columns", ())))  # Arrow's, pandas'


def tensor_of(table: Any, name: str) -> Tensor:
    """A table as a tensor `[N, ...]`: a frame of numbers is `[N, columns]`, a series `[N]`.

    Floating-point numbers get torch's default dtype; integers and booleans keep theirs.

    Args:
        table: an array, a data frame or a series, for which `is_table` is true.
        name: name of the argument, for messages.

    Raises:
        DataError: there are no numbers, numbers are missing, or the dtype cannot represent them;
            the message names argument and column.
    """
    where, pandas = f"argument {name}", sys.modules.get("pandas")
    if pandas is not None and isinstance(table, pandas.DataFrame | pandas.Series):
        _check_index(table, where)
        if isinstance(table, pandas.Series):
            return _convert(_values_of(table, where), where)
        columns = {f"{where}, column {label!r}": column for label, column in table.items()}
        return _side_by_side({name: _values_of(column, name) for name, column in columns.items()})
    if np.ma.is_masked(table):
        raise _table_error(where, "masked values", "the rows without them")
    try:
        values = np.asarray(table)
    except Exception as error:
        raise _table_error(where, f"no array that NumPy reads ({error})", "a tensor") from error
    return _convert(values, where)


def check_order(leaves: list[tuple[str, Any]]) -> None:
    """Raises an error if data frames or series have the row labels of the first one in another
    order: rows are matched by their number, not by label.

    Args:
        leaves: (name, object) for each of the model's arguments.

    Raises:
        DataError: an order differs; the message names both arguments.
    """
    if (pandas := sys.modules.get("pandas")) is None:
        return
    kinds = pandas.DataFrame | pandas.Series
    labeled = [(name, leaf.index) for name, leaf in leaves if isinstance(leaf, kinds)]
    for name, index in labeled[1:]:
        first, expected = labeled[0]
        if len(index) != len(expected) or index.equals(expected):
            continue
        if expected.is_unique and index.is_unique and index.isin(expected).all():
            raise _table_error(
                f"argument {name}",
                f"the labels of argument {first} in another order, and rows are taken by position",
                "it in the same order, table.loc[other.index]",
            )


def _check_index(table: Any, where: str) -> None:
    """Raises DataError for a frame whose labels would silently be ignored or read twice (a
    MultiIndex, equal column names), or that has no columns. `where` is the argument's name, for the
    message.
    """
    if table.index.nlevels > 1:
        raise _table_error(where, "rows with a MultiIndex", ".reset_index(drop=True)")
    if table.ndim == 1:
        return
    if table.columns.nlevels > 1:
        raise _table_error(where, "columns with a MultiIndex", "one level of names")
    if not table.columns.is_unique:
        twice = list(dict.fromkeys(table.columns[table.columns.duplicated()]))
        raise _table_error(where, f"two columns of one name ({twice})", "each column once")
    if not len(table.columns):
        raise _table_error(where, "no columns", "a frame with some")


def _values_of(column: Any, where: str) -> np.ndarray:
    """The values of a frame's column as a NumPy array; the column may have one of pandas' own
    dtypes (nullable, sparse, Arrow).

    Args:
        column: column of a data frame, or a series.
        where: name of argument and column, for messages.

    Raises:
        DataError: the column has no numbers, or missing ones.
    """
    dtype = column.dtype
    if dtype.name == "category" or dtype.kind not in "biuf":
        kind = "category" if dtype.name == "category" else dtype.kind
        is_text = kind == "O" and "str" in str(dtype)
        raise _unlike_numbers(where, "U" if is_text else kind, dtype)
    if column.isna().any():
        raise _missing(where)
    plain = getattr(dtype, "numpy_dtype", getattr(dtype, "subtype", dtype))
    return np.asarray(column.to_numpy(dtype=plain))


def _side_by_side(columns: dict[str, np.ndarray]) -> Tensor:
    """The columns of a data frame as one tensor `[rows, columns]`, of floating-point numbers if any
    column has them.

    Args:
        columns: dict from a column's name for messages to its values.
    """
    kinds = {values.dtype.kind for values in columns.values()}
    if "f" in kinds:
        return torch.stack([_rounded(values, where) for where, values in columns.items()], -1)
    return torch.stack(_of_one_dtype([_convert(v, where) for where, v in columns.items()]), -1)


def _of_one_dtype(columns: list[Tensor]) -> list[Tensor]:
    """The columns (integers or booleans), converted to the dtype to which all promote."""
    dtype = columns[0].dtype
    for column in columns:
        dtype = torch.promote_types(dtype, column.dtype)
    return [column.to(dtype) for column in columns]


def _convert(values: np.ndarray, where: str) -> Tensor:
    kind = values.dtype.kind
    if kind not in "biuf":
        raise _unlike_numbers(where, kind, values.dtype)
    if kind == "f":
        return _rounded(values, where)
    native = values.dtype.newbyteorder("=")
    if native == np.uint64:
        raise _table_error(where, "uint64, which torch computes little with", ".astype('int64')")
    return torch.from_numpy(np.array(values, dtype=_WIDER.get(native, native), order="C"))


def _rounded(values: np.ndarray, where: str) -> Tensor:
    """An array as a tensor in torch's default dtype.

    Args:
        values: array of numbers.
        where: name of the argument, for messages.

    Raises:
        DataError: a number is NaN, or a column would lose too much to rounding.
    """
    default, is_float = torch.get_default_dtype(), values.dtype.kind == "f"
    wide = np.ascontiguousarray(values, _wide_dtype(values))
    tensor = torch.tensor(np.asarray(wide, np.float64), dtype=default)
    if not wide.size:
        return tensor
    table, rounded = wide.reshape(len(wide), -1), tensor.reshape(len(wide), -1)
    for place in np.flatnonzero(np.isnan(table.min(0))):
        raise _missing(_place(where, values.shape, place))
    if is_float and values.dtype.itemsize <= default.itemsize:
        return tensor
    columns = max(1, _BLOCK // len(table))
    for start in range(0, table.shape[1], columns):
        part = slice(start, start + columns)
        narrow = rounded[:, part].double().numpy()
        for column, why in _losses(table[:, part], narrow, torch.finfo(default).eps):
            raise _table_error(
                _place(where, values.shape, start + column),
                f"numbers that {dtype_name(default)} cannot hold ({why})",
                "it less its mean, or rescaled (or call torch.set_default_dtype(torch.float64))",
            )
    if not is_float and len(rounded.unique()) < len(np.unique(table)):
        raise _table_error(
            where,
            f"integers, some of which are one in {dtype_name(default)}, beside columns of floats",
            "it as an argument of its own, which stays of integers (or .astype('float64'), where "
            "rounding does no harm)",
        )
    return tensor


def _wide_dtype(values: np.ndarray) -> Any:
    """A NumPy dtype that represents the values exactly: float64, or long double for integers and
    wider floats."""
    return np.longdouble if values.dtype.kind != "f" or values.dtype.itemsize > 8 else np.float64


def _losses(wide: np.ndarray, narrow: np.ndarray, eps: float) -> Iterator[tuple[int, str]]:
    """Yields (index of a column, reason as text) for columns that lose too much to rounding.

    Args:
        wide: exact values, `[rows, columns]`.
        narrow: rounded values, `[rows, columns]`.
        eps: relative precision of the rounded dtype.
    """
    finite = np.isfinite(wide)
    for place in np.flatnonzero((finite & ~np.isfinite(narrow)).any(0)):
        yield int(place), "they are too large"
    with np.errstate(all="ignore"):
        values = np.where(finite, wide, 0)
        error = np.sqrt(np.mean(np.where(finite, wide - narrow, 0) ** 2, 0))
        sd = values.std(0)
        is_constant = sd <= 4 * np.finfo(wide.dtype).eps * np.abs(values).max(0)
        noise = np.where(is_constant, 0.0, error / sd) / eps
    for place in np.flatnonzero(noise > _LITTLE_NOISE):
        left, total = (len(np.unique(table[:, place])) for table in (narrow, wide))
        if left < _LEAST_DISTINCT * total:
            yield int(place), f"of {total:,} distinct values {left:,} would be left"
        elif noise[place] > _MOST_NOISE:
            yield int(place), f"rounding would move them by {noise[place] * eps:.1g} sds"


def _place(where: str, shape: tuple[int, ...], place: Any) -> str:
    """A phrase for messages that names a column of an array, such as "argument x, column 3".

    Args:
        where: name of the argument.
        shape: shape of the array.
        place: index of the column, flattened over all dimensions but the first.
    """
    if len(shape) < 2:
        return where
    if len(shape) == 2:
        return f"{where}, column {int(place)}"
    indices = ", ".join(str(int(index)) for index in np.unravel_index(int(place), shape[1:]))
    return f"{where}, element [:, {indices}]"


def _unlike_numbers(where: str, kind: str, dtype: Any) -> DataError:
    what, instead = _REFUSALS.get(kind, ("no numbers", "columns of numbers"))
    return _table_error(where, f"{what} ({dtype})", instead)


def _missing(where: str) -> DataError:
    return _table_error(
        where, "missing values (NaN)", "the rows without them, or values in their place and a mask"
    )


def _table_error(where: str, what: str, instead: str) -> DataError:
    return DataError(f"{where} has {what}: pass {instead}", code="not-rows")
