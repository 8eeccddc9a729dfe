"""Overdispersed counts: a negative binomial as a gamma mixture of Poissons, with offsets."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(18)
x = rng.normal(size=150)
log_offset = np.log(rng.uniform(1.0, 4.0, 150))
mean = np.exp(0.8 + 0.6 * x + log_offset)
counts = rng.poisson(mean * rng.gamma(3.0, 1 / 3.0, 150))


def model(x, log_offset, counts):
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    concentration = pyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    with pyro.plate("data", len(x)):
        mean = torch.exp(alpha + beta * x + log_offset)
        pyro.sample("counts", dist.GammaPoisson(concentration, concentration / mean), obs=counts)


data = tuple(torch.tensor(a, dtype=torch.float32) for a in (x, log_offset, counts))
right = ("alpha", "beta", "concentration")
