"""Sparse regression with a horseshoe prior, non-centered."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(10)
features = rng.normal(size=(80, 8))
response = features @ np.array([2.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0]) + rng.normal(size=80)


def model(x, y):
    tau = pyro.sample("tau", dist.HalfCauchy(0.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("features", x.shape[1]):
        lambda_ = pyro.sample("lambda", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    beta = pyro.deterministic("beta", tau * lambda_ * z)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


data = (
    torch.tensor(features, dtype=torch.float32),
    torch.tensor(response, dtype=torch.float32),
)
right = ("beta", "sigma")
