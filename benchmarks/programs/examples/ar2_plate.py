"""An autoregression of second order, all times at once in a plate."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(14)
series = [0.0, 0.3]
for _ in range(118):
    series.append(0.2 + 0.5 * series[-1] + 0.3 * series[-2] + rng.normal(0, 0.5))


def model(y):
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("time", len(y) - 2):
        mean = alpha + phi[0] * y[1:-1] + phi[1] * y[:-2]
        pyro.sample("y", dist.Normal(mean, sigma), obs=y[2:])


data = (torch.tensor(series, dtype=torch.float32),)
right = ("alpha", "phi", "sigma")
