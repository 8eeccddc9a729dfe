"""oneDNN's switch, which is global to the process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pyro_scale.core.exclusive import exclusive


@contextmanager
def without_onednn() -> Iterator[None]:
    """Its recurrent layers are opaque to whoever records them; without it they are traced like
    any other."""
    with exclusive, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


class PlainLSTM(TorchFunctionMode):
    """Has LSTMs computed without oneDNN, whose own layer has no forward derivative; what else there
    is, such as convolutions, keeps it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.lstm:
            return func(*args, **(kwargs or {}))
        with without_onednn():
            return func(*args, **(kwargs or {}))
