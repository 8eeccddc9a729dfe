"""Poisson regression: counts of different exposures."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(17)
x = rng.normal(size=(150, 2))
exposure = rng.uniform(0.5, 5.0, 150)
counts = rng.poisson(exposure * np.exp(0.3 + x @ [0.5, -0.4]))


def model(x, exposure, counts=None):
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        rate = exposure * torch.exp(alpha + x @ beta)
        return pyro.sample("counts", dist.Poisson(rate), obs=counts)


data = tuple(torch.tensor(a, dtype=torch.float32) for a in (x, exposure, counts))
right = ("alpha", "beta")
