"""Whether nutpie takes pointers as we hand them over.

It is tried once a version, in a process of its own, which a wrong interface would end.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import warnings

import torch
from torch import Tensor

from pyro_scale.compile import cache
from pyro_scale.compile.compiled import compile_value_and_gradient
from pyro_scale.compile.trace import trace
from pyro_scale.core.layout import Layout
from pyro_scale.exact.log_density import LogDensity
from pyro_scale.exact.nutpie_api import KNOWN_VERSIONS, Chain, Settings, version

_MEAN = (1.0, -2.0, 3.0)
_TRY = "from pyro_scale.exact.pointer_check import check; check()"
_SECONDS = 300


@functools.cache
def takes_pointers() -> bool:
    """Whether machine code may be handed to nutpie.

    Raises:
        ArgumentError: nutpie is not installed.
    """
    if version() not in KNOWN_VERSIONS:
        return False
    parts = ("nutpie", version(), sys.version, torch.__version__)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    if cache.read(key) is None:
        if not _passes():
            return False
        cache.write(key, b"passed")
    return True


def check() -> None:
    """Samples a normal distribution by pointer, and compares nutpie's log densities with its own.

    Raises:
        AssertionError: they differ.
    """
    mean = torch.tensor(_MEAN, dtype=torch.float64)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return -(x - mean).square().sum() / 2, mean - x

    native = compile_value_and_gradient(trace(function, [torch.zeros_like(mean)]))
    density = LogDensity(native, Layout.from_tensors({"x": mean}), "compiled log density")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain = Chain(density, True, torch.zeros_like(mean), Settings(50, 50, 10, 0.8, False), 0)
        draws = chain.wait(_SECONDS)
    if draws is None:
        raise AssertionError("the chain does not end")
    expected = torch.stack([function(position)[0] for position in draws.positions])
    torch.testing.assert_close(draws.sample_stats["lp"], expected)
    if draws.sample_stats["acceptance_rate"].mean() < 0.5:
        raise AssertionError("gradients are not those of the log density")


def _passes() -> bool:
    command = [sys.executable, "-c", _TRY]
    try:
        return not subprocess.run(command, capture_output=True, timeout=_SECONDS).returncode
    except (OSError, subprocess.SubprocessError):
        return False
