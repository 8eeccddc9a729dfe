"""Stochastic volatility: a random walk of log volatilities, one innovation a day."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(12)
log_volatility = np.cumsum(rng.normal(0, 0.25, 60)) - 0.5
returns = torch.tensor(rng.normal(0, np.exp(log_volatility)), dtype=torch.float32)


def model(returns):
    sigma = pyro.sample("sigma", dist.Gamma(4.0, 16.0))
    start = pyro.sample("start", dist.Normal(0.0, 1.0))
    with pyro.plate("days", len(returns)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        h = start + sigma * z.cumsum(-1)
        pyro.sample("returns", dist.Normal(0.0, h.exp()), obs=returns)


data = (returns,)
right = ("sigma", "start", "z")
