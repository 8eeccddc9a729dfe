"""Rows that are passed after a run, beside those that it had."""

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

#: Columns of a frame that an error names all.
_MOST_LISTED = 20


def check_like_run(log_posterior: LogPosterior, data: Data | None, *batches: object) -> None:
    """Refuses arguments that the model would silently take for others: one row for many, one column
    for another.

    Other sizes pass: of images, of sequences, of whatever a model takes at any size.

    Args:
        log_posterior: what was run.
        data: what it was run on, whose columns may have names; None where that is not known.
        batches: the model's arguments as they are passed: those by position, those by name.

    Raises:
        CallError: rows have another number of dimensions; a data frame has columns of other names,
            or in another order.
    """
    model, info = log_posterior.model, log_posterior.model_info
    if info.is_function:
        return
    known = info.example
    shapes = {argument_name(model, known, n): leaf.shape[1:] for n, leaf in rows.named_rows(known)}
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
    if names == expected or _are_words(names) != _are_words(expected):
        return  # a frame of an array has numbers for names
    pairs = zip_longest(names, expected)
    first = next((place for place, (one, other) in enumerate(pairs) if one != other), 0)
    instead = f"{name}[{_listed(expected, first)}]"
    if len(names) == len(expected) and set(names) != set(expected):
        instead += f", or {name}.to_numpy() if they are the same by other names"
    raise _refusal(
        f"argument {name} has the columns {_listed(names, first)}, and the run had "
        f"{_listed(expected, first)}; they are taken by position: pass {instead}"
    )


def _listed(names: list[Any], first: int) -> str:
    """Names, in a long list those from the first that differs on."""
    if len(names) <= _MOST_LISTED:
        return str(names)
    return f"[..., {str(names[first : first + 3])[1:-1]}, ...]"


def _are_words(names: list[Any]) -> bool:
    return any(isinstance(name, str) for name in names)


def _check_dimensions(name: str, leaf: Any, trailing: list[int]) -> None:
    shape = list(leaf.shape if isinstance(leaf, Tensor) else np.shape(leaf))
    if len(shape) == 1 + len(trailing):
        return
    instead = "rows with as many dimensions"
    if shape == trailing:
        is_series = hasattr(leaf, "to_frame")
        instead = f"one row as {name}.to_frame().T" if is_series else f"one row as {name}[None]"
    elif trailing == [1] and len(shape) == 1:
        instead = f"{name}.to_frame()" if hasattr(leaf, "to_frame") else f"{name}[:, None]"
    elif not trailing and shape[1:] == [1]:
        instead = f"{name}.squeeze(1)" if not hasattr(leaf, "columns") else f"{name}.iloc[:, 0]"
    rest = ", ".join(map(str, ["N", *trailing]))
    raise _refusal(
        f"argument {name} has shape {shape}, and the run had rows of shape [{rest}]: pass {instead}"
    )


def _refusal(message: str) -> CallError:
    return CallError(message, code="not-rows")
