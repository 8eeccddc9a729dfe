"""Gaussian process regression by minibatches: rows of a joint density do not stand alone."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(9)
x = torch.linspace(-3.0, 3.0, 64)
y = torch.tensor(np.sin(1.5 * x.numpy()) + rng.normal(0, 0.3, 64), dtype=torch.float32)


def model(x, y):
    length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    distance = (x[:, None] - x) / length
    kernel = torch.exp(-0.5 * distance**2) + noise**2 * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), kernel), obs=y)


data = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
refused = "one value per row"
