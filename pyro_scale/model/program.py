"""Runs a Pyro model and leaves no trace in Pyro's or torch's settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from torch import Tensor, nn

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.rows import Arguments
from pyro_scale.model.call_with import call_with
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import Point


class Program:
    """A Pyro model, and the modules whose weights are swapped when it is run.

    Attributes:
        model: the user's callable.
        owned: param site -> (module, the weight's name in it), for weights of modules.
    """

    def __init__(self, model: Callable[..., Any]):
        self.model = model
        self.owned: dict[str, tuple[nn.Module, str]] = {}

    def run(self, arguments: Arguments, recorder: Recorder, validate: bool = False) -> Recorder:
        """Runs the model under the recorder, without a trace left in Pyro's or torch's settings."""
        swapped = {
            name: point.unconstrained
            for name, point in recorder.given_points.items()
            # the recorder answers for a PyroParam; only plain weights are read past it
            if name in self.owned and not self.owned[name][1].endswith("_unconstrained")
        }
        with (
            exclusive,
            _left_when_interrupted(),
            _hidden_from_other_recorders(),
            pyro.validation_enabled(validate),
            pyro.get_param_store().scope(),
            _without_fused_attention(),
            recorder,
        ):
            if swapped:
                self._run_swapped(arguments, swapped)
            else:
                rows.call(self.model, arguments)
        return recorder

    def _run_swapped(self, arguments: Arguments, swapped: Mapping[str, Tensor]) -> Any:
        modules = list({id(m): m for m, _ in self.owned.values()}.values())
        root = _Root(self.model, modules)
        places = {id(module): f"modules_.{i}" for i, module in enumerate(modules)}
        values = {}
        for name, value in swapped.items():
            module, path = self.owned[name]
            values[f"{places[id(module)]}.{path}"] = value
        with warnings.catch_warnings():  # of pyro.module, about tensors that are no parameters
            warnings.filterwarnings("ignore", message=".*was not registered in the param store")
            return call_with(root, values, (arguments,))

    def find_owners(self, points: Mapping[str, Point], executed: list[nn.Module]) -> None:
        """Finds the module that each weight among the points belongs to."""
        for point in points.values():
            for module in executed if point.parameter is not None else ():
                path = next(
                    (p for p, tensor in module.named_parameters() if tensor is point.parameter),
                    None,
                )
                if path is not None:
                    self.owned[point.name] = module, path
                    break


@contextmanager
def _left_when_interrupted() -> Iterator[None]:
    """Takes what a handler leaves on Pyro's stacks when the user interrupts it while it opens or
    closes, and which every later run would meet."""
    handlers, dims = list(_PYRO_STACK), list(_DIM_ALLOCATOR._stack)
    try:
        yield
    except BaseException:
        _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = handlers, dims
        raise


@contextmanager
def _hidden_from_other_recorders() -> Iterator[None]:
    """A model that evaluates another log posterior: the sites of that one are in the value that
    it gives, and are not the outer model's as well."""
    handlers, dims = list(_PYRO_STACK), list(_DIM_ALLOCATOR._stack)
    is_nested = any(isinstance(each, Recorder) for each in handlers)
    if is_nested:  # the last one may say where its latents start
        own = [each for each in handlers[-1:] if isinstance(each, InitMessenger)]
        _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = own, []
    try:
        yield
    finally:
        if is_nested:
            _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = handlers, dims


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    """torch's Transformer layers have a second way of computing the same, without a derivative,
    which depends on the values of padding masks."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


class _Root(nn.Module):
    """Makes the modules that a model calls reachable for `torch.func.functional_call`."""

    def __init__(self, model: Callable[..., Any], modules: list[nn.Module]):
        super().__init__()
        self._model = [model]  # in a list, so that a module does not become a child twice
        self.modules_ = nn.ModuleList(modules)

    def forward(self, arguments: Arguments) -> Any:
        return rows.call(self._model[0], arguments)
