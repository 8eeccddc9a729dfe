"""Models and data of the calibration benchmark."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

Model = Callable[..., Any]

#: Rows and columns of the logistic regression that is timed.
ROWS, COLUMNS = 768, 8
#: Eight schools' standard errors (Rubin 1981).
SIGMA = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def design(rows: int, columns: int) -> Tensor:
    """Standard normal covariates, always the same."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def factorial(copies: int) -> Tensor:
    """All settings of four factors of -1 and 1: orthogonal columns, `[16 copies, 4]`."""
    return torch.tensor(list(product((-1.0, 1.0), repeat=4))).repeat(copies, 1)


def unknown_noise(x: Tensor, y: Tensor) -> None:
    """A linear regression whose noise is unknown too."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    sd = pyro.sample("sd", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ w, sd), obs=y)


def linear(prior_sd: float) -> Model:
    """A linear regression with noise of sd 1."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), prior_sd).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    return model


def scaled(scale: float) -> Model:
    """The same, with a likelihood that is multiplied by a constant."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
        with poutine.scale(scale=scale), pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    return model


def logistic(x: Tensor, y: Tensor) -> None:
    """A logistic regression."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def schools(sigma: Tensor, y: Tensor) -> None:
    """Eight schools, non-centered, with an effect for each row."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, sigma), obs=y)
