"""A Gaussian process in a Hilbert space: weights of sines under the spectral density of an RBF."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(15)
x = np.sort(rng.uniform(-1, 1, 80))
y = np.sin(4 * x) + 0.5 * x + rng.normal(0, 0.3, 80)
WIDTH, NUM_BASIS = 1.5, 12
root = math.pi * torch.arange(1, NUM_BASIS + 1) / (2 * WIDTH)


def model(x, y):
    length = pyro.sample("length", dist.LogNormal(-0.7, 0.5))
    amplitude = pyro.sample("amplitude", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(NUM_BASIS), 1.0).to_event(1))
    density = math.sqrt(2 * math.pi) * length * torch.exp(-0.5 * (length * root) ** 2)
    basis = torch.sin(root * (x[:, None] + WIDTH)) / math.sqrt(WIDTH)
    f = basis @ (amplitude * density.sqrt() * beta)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, noise), obs=y)


data = (torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
right = ("length", "amplitude", "noise", "beta")
