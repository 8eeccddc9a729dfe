"""Radon in houses: intercepts vary by county, and each house knows its county's index."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

NUM_COUNTIES = 12
rng = np.random.default_rng(1)
county = torch.tensor(rng.integers(NUM_COUNTIES, size=250))
floor = torch.tensor(rng.binomial(1, 0.3, 250), dtype=torch.float32)
intercepts = rng.normal(1.5, 0.4, NUM_COUNTIES)
radon = rng.normal(intercepts[county] - 0.7 * floor.numpy(), 0.8)
log_radon = torch.tensor(radon, dtype=torch.float32)


def model(county, floor, log_radon=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("counties", NUM_COUNTIES):
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
    with pyro.plate("houses", len(county)):
        mean = alpha[county] + slope * floor
        return pyro.sample("log_radon", dist.Normal(mean, sigma), obs=log_radon)


data = (county, floor, log_radon)
right = ("mu", "tau", "slope", "sigma", "alpha")
