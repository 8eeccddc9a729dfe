"""Pyro's own answer to large data: stochastic variational inference."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from problems import LOGISTIC_BATCH, logistic_data
from protocol import Timing
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import PyroOptim
from torch import Tensor


def svi(steps: int, rows: int = 768) -> Callable[[], Timing]:
    """A step of `SVI` with `AutoNormal` on the logistic regression."""
    pyro.enable_validation(False)
    x, y = (torch.from_numpy(a) for a in logistic_data(rows))

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
        with pyro.plate("data", rows, subsample=torch.arange(len(x))):  # scales by N/B
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    adam = PyroOptim(torch.optim.Adam, {"lr": 0.01})
    inference = SVI(model, AutoNormal(model), adam, Trace_ELBO())

    def run(steps: int) -> None:
        for _ in range(steps):
            chosen = torch.randint(rows, (LOGISTIC_BATCH,))
            inference.step(x[chosen], y[chosen])

    run(100)

    def timing() -> Timing:
        start = time.perf_counter()
        run(steps)
        return Timing({"": (time.perf_counter() - start) / steps})

    return timing
