"""The modules that a model runs: their names, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_scale.errors import ModelError


def describe(path: str, module: nn.Module) -> str:
    """A module in words, by its path in a network."""
    kind = type(module).__name__
    return f"submodule '{path}' ({kind})" if path else kind


class ModuleTrace:
    """The modules whose forward ran.

    Attributes:
        modules: in the order of their calls, outermost first.
        drew: the innermost module whose forward moved torch's generator; the first one.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.drew: nn.Module | None = None

    def describe(self, module: nn.Module) -> str:
        """A module in words, by its path in the outermost network that ran."""
        networks = [m for m in self.modules if not isinstance(m, PyroModule)]
        for root in [*networks, *self.modules]:
            for path, each in root.named_modules():
                if each is module:
                    return describe(path, module)
        return describe("", module)


@contextmanager
def trace_modules() -> Iterator[ModuleTrace]:
    """Lists the modules whose forward runs, each checked before it does.

    Raises:
        ModelError: a module whose rows would depend on each other or on chance, or one that wrote
            to its buffers; they are put back.
    """
    trace = ModuleTrace()
    buffers: dict[Tensor, Tensor] = {}
    generators: list[Tensor] = []

    def before(module: nn.Module, _: Any) -> None:
        trace.modules.append(module)
        _check_batch_norm(module, trace)
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
                "evaluations of the likelihood would differ: call .eval(), and write to none in "
                "its forward",
                code="batchnorm",
            )


def _check_batch_norm(module: nn.Module, trace: ModuleTrace) -> None:
    """BatchNorm in train mode and active dropout."""
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
    dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    inside = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
    rate = float(module.p if dropout else module.dropout if inside else 0.0)  # type: ignore[arg-type]
    if module.training and rate > 0:
        raise ModelError(
            f"{trace.describe(module)} has active dropout (p={rate:g}): the likelihood would be "
            "random; call .eval()",
            code="dropout",
        )
