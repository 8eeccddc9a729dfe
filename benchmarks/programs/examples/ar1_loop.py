"""An autoregression of first order as a Python loop over time."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(13)
series = [0.5]
for _ in range(39):
    series.append(0.7 * series[-1] + rng.normal(0, 0.5))


def model(y):
    a = pyro.sample("a", dist.Uniform(-1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    for t in range(1, len(y)):
        pyro.sample(f"y_{t}", dist.Normal(a * y[t - 1], sigma), obs=y[t])


data = (torch.tensor(series, dtype=torch.float32),)
right = ("a", "sigma")
