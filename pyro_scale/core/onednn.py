"""oneDNN's switch, which is the whole process's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_switching = threading.Lock()


@contextmanager
def without_onednn() -> Iterator[None]:
    """Its recurrent layers are opaque to whoever records them; without it they are traced like
    any other."""
    with _switching, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        with torch.backends.mkldnn.flags(enabled=False):
            yield
