"""Refuses models that write to the tensors that they are given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ModelError


@contextmanager
def forbid_writes(model: Callable[..., Any], arguments: Arguments) -> Iterator[Arguments]:
    """Copies of the arguments to run the model on, so that nothing of the user's is changed.

    Tensors that the model holds (of its closure, of the module that it is defined in, bound by
    `functools.partial`, attributes of an object) are not copied, but a write to them by torch is
    found as well; one by NumPy is found in the arguments alone.

    Raises:
        ModelError: once it has run, if it has written to one of them.
    """
    copies = rows.map_rows(lambda leaf: leaf.clone(), arguments)
    held = {
        name: (value, value._version)
        for name, value in _held(model).items()
        if isinstance(value, Tensor) and not value.is_inference()  # which count no versions
    }
    yield copies
    written = [f"'{name}'" for name, (value, version) in held.items() if value._version != version]
    originals = dict(rows.named_leaves(arguments))
    written += [
        f"its argument {name}"
        for name, leaf in rows.named_leaves(copies)
        if isinstance(leaf, Tensor) and not _are_same(leaf, originals[name])
    ]
    if written:
        raise ModelError(
            f"the model writes to {written[0]} in place, so that every evaluation would change "
            "the data: write x = x - 1 instead of x.sub_(1) or x -= 1, or x = x.clone() first"
        )


def _are_same(copy: Tensor, original: Tensor) -> bool:
    """Whether a copy holds what it was made of, NaN included."""
    if copy.shape != original.shape:
        return False
    return bool(((copy == original) | ((copy != copy) & (original != original))).all())


def _held(model: Any) -> dict[str, Any]:
    """What a model reads besides its arguments, by name; not a module's own weights and buffers,
    of which those that change while they are read are refused by the layer's name."""
    if isinstance(model, functools.partial):
        held = {f"argument {place}": value for place, value in enumerate(model.args)}
        for each in (model.func, *model.args):  # a handler binds the model that it is around
            held = {**(_held(each) if callable(each) else {}), **held}
        return {**held, **model.keywords}
    if inspect.ismethod(model):
        return {**_held(model.__func__), **_held(model.__self__)}
    function = inspect.unwrap(model)
    if not inspect.isfunction(function):
        return {**getattr(model, "__dict__", {})}
    code, cells = function.__code__, function.__closure__ or ()
    names = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # a variable that has no value
            continue
    return names
