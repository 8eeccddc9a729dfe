"""Eight schools, non-centered: standard normal effects in a vector of their own (Rubin 1981)."""

import pyro
import pyro.distributions as dist
import torch

y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def model(sigma, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    eta = pyro.sample("eta", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    theta = pyro.deterministic("theta", mu + tau * eta)
    pyro.sample("obs", dist.Normal(theta, sigma).to_event(1), obs=y)


data = (sigma, y)
right = ("mu", "tau", "theta")
