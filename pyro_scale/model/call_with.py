"""Calls a module with given weights instead of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def call_with(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What `torch.func.functional_call` returns, with tied weights tied.

    By itself it leaves the last call's weights in a module that a network holds at two places: both
    are swapped, and the second one's own weight is taken to be the first one's new one.
    """
    ids = dict(_weights(module, every_path=True))
    places: dict[int, list[str]] = {}
    for name, weight in _weights(module, every_path=False):
        places.setdefault(weight, []).append(name)
    by_place = {
        place: value
        for name, value in weights.items()
        for place in (places[ids[name]] if name in ids else [name])
    }
    return torch.func.functional_call(module, by_place, args, kwargs, tie_weights=False)


def _weights(module: nn.Module, *, every_path: bool) -> Iterator[tuple[str, int]]:
    """(Name, id) of weights and buffers, read past a `PyroModule`'s attributes, which draw.

    A weight that several modules have comes by each of them; a module that is held at several
    places comes once, or by every path to it.
    """
    for path, part in module.named_modules(remove_duplicate=not every_path):
        for name, value in [*part._parameters.items(), *part._buffers.items()]:
            if value is not None:
                yield f"{path}.{name}" if path else name, id(value)
