"""A growth curve: capacity, rate and midpoint of a logistic function, multiplicative noise."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(16)
days = torch.linspace(0.0, 20.0, 30)
curve = 50 / (1 + np.exp(-0.5 * (days.numpy() - 9)))
size = torch.tensor(curve * np.exp(rng.normal(0, 0.1, 30)), dtype=torch.float32)


def model(days, size):
    capacity = pyro.sample("capacity", dist.LogNormal(4.0, 0.5))
    rate = pyro.sample("rate", dist.LogNormal(-1.0, 0.5))
    midpoint = pyro.sample("midpoint", dist.Normal(10.0, 5.0))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    curve = capacity / (1 + torch.exp(-rate * (days - midpoint)))
    with pyro.plate("data", len(days)):
        pyro.sample("size", dist.LogNormal(curve.log(), noise), obs=size)


data = (days, size)
right = ("capacity", "rate", "midpoint", "noise")
