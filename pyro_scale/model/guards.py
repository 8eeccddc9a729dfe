"""Context managers that watch a run of a model: modules that make it random or depend on other
rows, and writes to the data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.errors import ModelError


def describe(path: str, module: nn.Module) -> str:
    """A phrase for messages that names a module: its path in a network and its class; the class
    alone if the path is empty."""
    kind = type(module).__name__
    return f"submodule '{path}' ({kind})" if path else kind


class ModuleTrace:
    """Records the modules whose `forward` ran during a run of the model.

    Attributes:
        modules: the modules in the order of their calls; a module comes before those that it calls.
        drew: the first module whose forward advanced torch's generator; of nested ones, the
            innermost; None if none did.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.drew: nn.Module | None = None

    def describe(self, module: nn.Module) -> str:
        """A phrase for messages that names a module by its path in the outermost network that
        ran.
        """
        networks = [m for m in self.modules if not isinstance(m, PyroModule)]
        for root in [*networks, *self.modules]:
            for path, part in root.named_modules():
                if part is module:
                    return describe(path, module)
        return describe("", module)


@contextmanager
def trace_modules() -> Iterator[ModuleTrace]:
    """Context that records the modules whose `forward` runs inside it, and checks each before its
    call. Yields the record.

    Raises:
        ModelError: a module whose rows would depend on each other or on chance (BatchNorm,
            dropout), or, at the end, one that wrote to its buffers; the buffers are restored.
    """
    trace = ModuleTrace()
    buffers: dict[Tensor, Tensor] = {}
    generators: list[Tensor] = []

    def before(module: nn.Module, _: Any) -> None:
        trace.modules.append(module)
        _check_module(module, trace)
        for buffer in module.buffers():
            buffers.setdefault(buffer, buffer.clone())
        generators.append(torch.random.get_rng_state())

    def after(module: nn.Module, *_: Any) -> None:
        moved = not torch.equal(generators.pop(), torch.random.get_rng_state())
        if moved and trace.drew is None:
            trace.drew = module

    handles = [
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after),
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
        written = [b for b, before in buffers.items() if not torch.equal(b, before)]
        for buffer in written:
            buffer.copy_(buffers[buffer])
    for module in reversed(trace.modules):
        if any(buffer is b for b in written for buffer in module.buffers()):
            raise ModelError(
                f"{trace.describe(module)} writes to its buffers whenever it is called, so two "
                "evaluations of the likelihood would differ: call .eval(), and write to no buffer "
                "in its forward",
                code="batchnorm",
            )


def _check_module(module: nn.Module, trace: ModuleTrace) -> None:
    """Raises a `ModelError` for BatchNorm in train mode or without running statistics, and for
    active dropout."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module.running_mean is None:
            raise ModelError(
                f"{trace.describe(module)} keeps no running statistics, so a row's likelihood "
                "depends on the other rows of its batch, in eval mode too: build it with "
                "track_running_stats=True and train them first, or put a layer in its place that "
                "normalizes rows by themselves (pyro_scale.replace_batchnorm)",
                code="batchnorm",
            )
        if module.training:
            raise ModelError(
                f"{trace.describe(module)} in train mode: a row's likelihood would depend on the "
                "other rows of its batch, and the batch's statistics would be written into your "
                "module; call .eval(), or pyro_scale.replace_batchnorm(net) before training",
                code="batchnorm",
            )
    rate = 0.0
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rate = float(module.p)
    elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        rate = float(module.dropout)
    if module.training and rate > 0:
        raise ModelError(
            f"{trace.describe(module)} has active dropout (p={rate:g}): the likelihood would be "
            "random; call .eval()",
            code="dropout",
        )


@contextmanager
def forbid_writes(model: Model, arguments: Arguments) -> Iterator[Arguments]:
    """Context that yields copies of the arguments to run the model on, and at its end checks that
    the model wrote to none of them.

    Raises:
        ModelError: at the end of the context, if the model has written to one of them.
    """
    copies = rows.map_rows(lambda leaf: leaf.clone(), arguments)
    versions = {
        name: (value, value._version)
        for name, value in _held_values(model).items()
        # inference tensors have no version counter
        if isinstance(value, Tensor) and not value.is_inference()
    }
    yield copies
    written = [f"'{name}'" for name, (value, old) in versions.items() if value._version != old]
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
    """Whether two tensors have the same shape and equal elements, with NaN equal to NaN."""
    if copy.shape != original.shape:
        return False
    return bool(((copy == original) | ((copy != copy) & (original != original))).all())


def _held_values(model: Any) -> dict[str, Any]:
    """Values that a model reads besides its arguments, by name: from closures, globals,
    `functools.partial` and attributes. Left out are a module's weights and buffers: `trace_modules`
    finds those that a forward changes."""
    if isinstance(model, functools.partial):
        held = {f"argument {place}": value for place, value in enumerate(model.args)}
        for inner in (model.func, *model.args):  # a handler binds the model that it wraps
            held = {**(_held_values(inner) if callable(inner) else {}), **held}
        return {**held, **model.keywords}
    if inspect.ismethod(model):
        return {**_held_values(model.__func__), **_held_values(model.__self__)}
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
