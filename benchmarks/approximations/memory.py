"""How much memory a dense GGN of 5,000 parameters over 60,000 rows takes, beyond model and data.

Run as a script, `python memory.py curvature` or `laplace`, it prints a line of JSON: bytes at the
peak beyond those before, and seconds.  It needs Linux, whose kernel keeps a process's peak.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_scale as ps

#: 64 inputs, 76 hidden units and one output: 5,017 parameters.
WIDTHS, ROWS = (64, 76, 1), 60_000


def main(what: str) -> None:
    """Measures one of both."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, hidden, outputs = WIDTHS
    net = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    bayesian = ps.bayesianize(net, prior=dist.Normal(0.0, 1.0))

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = bayesian(x)[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    x = torch.randn(ROWS, inputs)
    y = torch.bernoulli(torch.full((ROWS,), 0.5))

    def curvature(x: Tensor, y: Tensor) -> None:
        ps.Curvature(ps.LogPosterior(model, num_data=len(x))).dense(weights, (x, y))

    def laplace(x: Tensor, y: Tensor) -> None:
        fit = ps.Laplace(model, structure="dense")
        fit.run((x, y), mode=weights, seed=0, progress=False)

    run: Callable[[Tensor, Tensor], None] = {"curvature": curvature, "laplace": laplace}[what]
    diagonal = ps.Curvature(ps.LogPosterior(model, num_data=100))
    diagonal.diagonal(weights, (x[:100], y[:100]))  # loads what is loaded on first use
    before = _forget_peak()
    begin = time.perf_counter()
    run(x, y)
    seconds = time.perf_counter() - begin
    size = sum(weight.numel() for weight in weights.values())
    print(json.dumps({"bytes": _status("VmHWM") - before, "seconds": seconds, "size": size}))


def _forget_peak() -> int:
    """Sets the kernel's record of the peak back to what is resident, which it returns."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(sys.argv[1])
