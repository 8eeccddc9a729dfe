"""Pyro Scale on plain Pyro models, as a user calls it: what is not named here is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from models import logistic_model, mlp
from problems import (
    FRICTION,
    LOGISTIC_BATCH,
    LOGISTIC_LR,
    LOGISTIC_THINNING,
    MLP_BATCH,
    MLP_LR,
    MLP_THINNING,
    WARMUP,
    digits,
    logistic_data,
)
from protocol import Timing
from torch import Tensor, nn

import pyro_scale as ps


def sampler(model: Any, lr: float) -> Any:
    """The contender."""
    return ps.SGHMC(model, lr=lr, friction=FRICTION)


def mlp_model(net: nn.Module) -> Callable[..., Tensor]:
    """A classifier with standard normal weights."""
    bayesian = ps.bayesianize(net, prior=dist.Normal(0.0, 1.0))

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = bayesian(x)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model


def logistic(
    rows: int = 768,
    batch_size: int | None = LOGISTIC_BATCH,
    chains: int = 1,
    steps: int = 200_000,
    **special: Any,
) -> Callable[[], Timing]:
    """`batch_size` None takes all rows at every step; `special` goes to `run`."""
    mcmc = sampler(logistic_model, LOGISTIC_LR)
    options = {
        "batch_size": batch_size,
        "num_chains": chains,
        "warmup_steps": WARMUP,
        "thinning": LOGISTIC_THINNING,
        **special,
    }
    run = _timed_run(mcmc, logistic_data(rows), steps, options)

    def timing() -> Timing:
        return Timing(run(), draws=mcmc.get_samples()["w"].numpy())

    return timing


def network(
    hidden: tuple[int, ...],
    chains: int = 1,
    steps: int = 1000,
    rows: int | None = None,
    **special: Any,
) -> Callable[[], Timing]:
    """A Bayesian network on digits; `special` goes to `run`."""
    net = mlp(hidden)
    mcmc = sampler(mlp_model(net), MLP_LR)
    x, y = digits(rows)
    options = {
        "batch_size": MLP_BATCH,
        "num_chains": chains,
        "warmup_steps": MLP_THINNING,
        "thinning": MLP_THINNING,
        **special,
    }
    run = _timed_run(mcmc, (x, y), steps, options)
    seen_x, seen_y = torch.from_numpy(x[:2000]), torch.from_numpy(y[:2000])

    def timing() -> Timing:
        seconds = run()
        last = {name: value[-1] for name, value in mcmc.get_samples().items()}
        guess = torch.func.functional_call(net, last, (seen_x,)).argmax(-1)
        return Timing(seconds, accuracy=float((guess == seen_y).float().mean()))

    return timing


def _timed_run(
    mcmc: Any, data: tuple[np.ndarray, np.ndarray], steps: int, options: dict[str, Any]
) -> Callable[[], dict[str, float]]:
    """Seconds a chain-step of the sampling alone, of `run` as a whole, and of the processors in it;
    compiles first."""
    tensors = tuple(torch.from_numpy(a) for a in data)
    num_samples = (steps - options["warmup_steps"]) // options["thinning"]
    chain_steps = steps * options["num_chains"]
    seeds = count()

    def run() -> dict[str, float]:
        start, start_of_processors = time.perf_counter(), time.process_time()
        mcmc.run(tensors, num_samples=num_samples, seed=next(seeds), progress=False, **options)
        whole = time.perf_counter() - start
        processors = time.process_time() - start_of_processors
        sampling = mcmc.to_arviz(log_likelihood=False).posterior.attrs["sampling_time"]
        return {
            "": sampling / chain_steps,
            "the whole run()": whole / chain_steps,
            "the whole run(), all processors": processors / chain_steps,
        }

    run()
    return run
