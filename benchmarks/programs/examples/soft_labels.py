"""Logistic regression on shares between 0 and 1, which only validate_args=False lets through."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(28)
x = rng.normal(size=(120, 2))
share = rng.binomial(5, 1 / (1 + np.exp(-(x @ [1.0, -0.5])))) / 5


def model(x, share):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("share", dist.Bernoulli(logits=x @ w, validate_args=False), obs=share)


data = (torch.tensor(x, dtype=torch.float32), torch.tensor(share, dtype=torch.float32))
right = ("w",)
