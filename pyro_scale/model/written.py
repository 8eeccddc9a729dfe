"""Refuses models that write to the tensors that they are given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ModelError


@contextmanager
def refused_writes(model: Callable[..., Any], arguments: Arguments) -> Iterator[Arguments]:
    """Copies of the arguments to run the model on, so that nothing of the user's is changed.

    Tensors that the model holds (of its closure, of the module that it is defined in, bound by
    `functools.partial`) are not copied, but a write to them is found as well.

    Raises:
        ModelError: once it has run, if it has written to one of them.
    """
    copies = rows.map_rows(lambda leaf: leaf.clone(), arguments)
    named = {
        **{f"its argument {name}": leaf for name, leaf in rows.named_leaves(copies)},
        **{f"'{name}'": value for name, value in _held(model).items()},
    }
    before = {name: leaf._version for name, leaf in named.items() if isinstance(leaf, Tensor)}
    yield copies
    for name, version in before.items():
        if named[name]._version != version:
            raise ModelError(
                f"the model writes to {name} in place, so that every evaluation would change the "
                "data: write x = x - 1 instead of x.sub_(1) or x -= 1, or x = x.clone() first"
            )


def _held(model: Any) -> Mapping[str, Any]:
    """What a function reads besides its arguments, by name."""
    if isinstance(model, functools.partial):
        bound = {f"argument {place}": value for place, value in enumerate(model.args)}
        return {**_held(model.func), **bound, **model.keywords}
    function = inspect.unwrap(model)
    if not inspect.isfunction(function):
        return {}
    read = inspect.getclosurevars(function)
    return {**read.globals, **read.nonlocals}
