"""Steps to the mode of a network in the coordinates of a fit.

It prints the log joint after some steps of Adam on all rows, for its best learning rate (in
brackets): `python benchmarks/approximations/preconditioned.py`.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torchopt

import pyro_scale as ps

ROWS, FEATURES, WIDTH = 400, 8, 32
RATES = (1e-3, 3e-3, 1e-2)
LOOKS = (10, 100, 1000)


def problem(seed: int) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """A regression by two hidden layers, on features whose scales differ by a factor of 100."""
    torch.manual_seed(seed)
    x = torch.randn(ROWS, FEATURES) * torch.logspace(-1, 1, FEATURES)
    y = x[:, 0].sin() + 0.1 * x[:, -1] + 0.1 * torch.randn(ROWS)
    layers = [torch.nn.Linear(FEATURES, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)]
    net = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    bayesian = ps.bayesianize(net, prior=dist.Normal(0.0, 1.0))

    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        f = bayesian(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    return model, (x, y)


def compare(seed: int) -> None:
    """One data set: a rough mode, a fit of each structure there, and Adam from there."""
    model, data = problem(seed)
    quiet = {"seed": 0, "progress": False}
    rough = ps.MAP(model).run(data, num_steps=300, **quiet)
    start = dict(rough.get_samples().items())
    for structure in (None, "diag", "low_rank", "kron"):
        fit = None
        if structure is not None:
            fit = ps.Laplace(model, structure=structure).run(data, mode=rough, **quiet)
        best = {look: (-float("inf"), 0.0) for look in LOOKS}
        for rate in RATES:
            how = {"optimizer": torchopt.adam(rate), "precondition": fit, "compile": True}
            mode = ps.MAP(model, init_strategy=start, **how).run(data, num_steps=LOOKS[-1], **quiet)
            for look in LOOKS:
                best[look] = max(best[look], (float(mode.trace[0, look - 1]), rate))
        cells = " | ".join(f"{value:.1f} ({rate:g})" for value, rate in best.values())
        print(f"| {seed} | {structure} | {cells} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    for each in range(parser.parse_args().seeds):
        compare(each)
