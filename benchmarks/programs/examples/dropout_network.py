"""A Bayesian last layer on a network that is still in training mode: dropout draws anew."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import nn

rng = np.random.default_rng(30)
x = torch.tensor(rng.normal(size=(60, 3)), dtype=torch.float32)
y = torch.tensor(rng.normal(size=60), dtype=torch.float32)
features = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Dropout(0.5))


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(10), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(features(x).detach() @ w, 1.0), obs=y)


data = (x, y)
refused = ".eval()"
