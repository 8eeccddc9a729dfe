"""The Pyro model and the network that several contenders share."""

from __future__ import annotations

from itertools import pairwise

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn


def logistic_model(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Logistic regression with standard normal weights."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def mlp(hidden: tuple[int, ...]) -> nn.Sequential:
    """A network from 64 pixels to 10 logits."""
    sizes = (64, *hidden, 10)
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])
