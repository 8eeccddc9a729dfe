"""Regression with outliers: Student's t, its degrees of freedom unknown."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(22)
x = rng.normal(size=100)
y = 1.0 + 2.0 * x + 0.5 * rng.standard_t(2.5, 100)


def model(x, y=None):
    alpha = pyro.sample("alpha", dist.Normal(0.0, 5.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 5.0))
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    df = pyro.sample("df", dist.Gamma(2.0, 0.5))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.StudentT(df, alpha + beta * x, scale), obs=y)


data = (torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
right = ("alpha", "beta", "scale", "df")
