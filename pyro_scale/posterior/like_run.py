"""Checks that rows which are passed after a run have the form of the run's rows."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.tables import is_table
from pyro_scale.data.sources import Data, OwnSubsamples, TensorData
from pyro_scale.errors import CallError
from pyro_scale.model.call_errors import argument_name
from pyro_scale.model.log_posterior import LogPosterior

#: An error message lists the columns of a frame up to this number.
_MAX_LISTED = 20


def check_like_run(log_posterior: LogPosterior, data: Data | None, *batches: object) -> None:
    """Raises for arguments that a model would silently misread: a single row passed as many rows,
    or a wrong column.

    Sizes are not checked, because a model may take images or sequences of any size.

    Args:
        log_posterior: model of the run, whose first batch is compared with.
        data: data of the run, whose columns may have names; None if they are not kept.
        batches: what the user passes as the model's arguments: the tuple of those by position, the
            dict of those by name.

    Raises:
        CallError: rows have another number of dimensions than in the run; or a data frame has
            columns of other names, or in another order.
    """
    model, info = log_posterior.model, log_posterior.model_info
    if info.is_function:
        return
    example = info.example
    shapes = {
        argument_name(model, example, place): leaf.shape[1:]
        for place, leaf in rows.named_rows(example)
    }
    columns = {}
    if isinstance(data, TensorData | OwnSubsamples):
        columns = {argument_name(model, data.arguments, n): c for n, c in data.columns.items()}
    for batch in batches:
        arguments = rows.by_place_or_name(batch)
        names = rows.column_names(arguments)
        for place, leaf in rows.named_leaves(arguments):
            name = argument_name(model, arguments, place)
            if name in columns and place in names:
                _check_columns(name, names[place], list(columns[name]))
            if name in shapes and (rows.is_rows(leaf) or is_table(leaf)):
                _check_dimensions(name, leaf, list(shapes[name]))


def _check_columns(name: str, names: list[Any], expected: list[Any]) -> None:
    """Raises a `CallError` if a data frame's columns are not those of the run. Frames of which only
    one has words for column names are not compared.

    Args:
        name: name of the model's argument.
        names: column names of the frame.
        expected: column names in the run.
    """
    if names == expected or _are_words(names) != _are_words(expected):
        return  # frames made from arrays have numbers for names
    pairs = zip_longest(names, expected)
    first = next((place for place, (one, other) in enumerate(pairs) if one != other), 0)
    fix = f"{name}[{_listed(expected, first)}]"
    if len(names) == len(expected) and set(names) != set(expected):
        fix += f", or {name}.to_numpy() if they are the same by other names"
    raise _not_like_run(
        f"argument {name} has the columns {_listed(names, first)}, and the run had "
        f"{_listed(expected, first)}; they are taken by position: pass {fix}"
    )


def _listed(names: list[Any], first: int) -> str:
    """The column names as a list in words, for an error message; of more than 20 names, three of
    them, from index `first` on."""
    if len(names) <= _MAX_LISTED:
        return str(names)
    return f"[..., {str(names[first : first + 3])[1:-1]}, ...]"


def _are_words(names: list[Any]) -> bool:
    return any(isinstance(name, str) for name in names)


def _check_dimensions(name: str, leaf: Any, trailing: list[int]) -> None:
    """Raises a `CallError` if an argument has another number of dimensions than in the run; sizes
    may differ.

    Args:
        name: name of the model's argument.
        leaf: the tensor, array or data frame that was passed.
        trailing: shape of one row in the run.
    """
    shape = list(leaf.shape if isinstance(leaf, Tensor) else np.shape(leaf))
    if len(shape) == 1 + len(trailing):
        return
    fix = "rows with as many dimensions"
    if shape == trailing:
        is_series = hasattr(leaf, "to_frame")
        fix = f"one row as {name}.to_frame().T" if is_series else f"one row as {name}[None]"
    elif trailing == [1] and len(shape) == 1:
        fix = f"{name}.to_frame()" if hasattr(leaf, "to_frame") else f"{name}[:, None]"
    elif not trailing and shape[1:] == [1]:
        fix = f"{name}.squeeze(1)" if not hasattr(leaf, "columns") else f"{name}.iloc[:, 0]"
    expected = ", ".join(map(str, ["N", *trailing]))
    raise _not_like_run(
        f"argument {name} has shape {shape}, and the run had rows of shape [{expected}]: pass {fix}"
    )


def _not_like_run(message: str) -> CallError:
    return CallError(message, code="not-rows")
