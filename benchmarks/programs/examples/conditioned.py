"""A model that only generates, conditioned on the data by pyro.condition."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(29)
x = torch.tensor(rng.normal(size=60), dtype=torch.float32)
y = torch.tensor(1.0 - 0.5 * x.numpy() + rng.normal(0, 0.4, 60), dtype=torch.float32)


def generate(x):
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(alpha + beta * x, sigma))


model = pyro.condition(generate, {"y": y})
data = (x,)
right = ("alpha", "beta", "sigma")
