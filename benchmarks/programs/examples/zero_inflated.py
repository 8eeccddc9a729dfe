"""Counts with too many zeros: a zero-inflated Poisson regression."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(25)
x = rng.normal(size=150)
counts = rng.binomial(1, 0.7, 150) * rng.poisson(np.exp(0.7 + 0.5 * x))


def model(x, counts=None):
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        rate = torch.exp(alpha + beta * x)
        return pyro.sample("counts", dist.ZeroInflatedPoisson(rate, gate=gate), obs=counts)


data = (torch.tensor(x, dtype=torch.float32), torch.tensor(counts, dtype=torch.float32))
right = ("gate", "alpha", "beta")
