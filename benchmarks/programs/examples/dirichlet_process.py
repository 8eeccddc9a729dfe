"""A Dirichlet process mixture: broken sticks, assignments enumerated, a plate of a global N."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(3)
points = np.concatenate([rng.normal(-2.0, 0.8, 25), rng.normal(1.5, 0.8, 35)])
data = torch.tensor(points, dtype=torch.float32)
N, T = len(data), 5  # points, sticks
grid = torch.tensor([-3.0, -2.0, 0.0, 1.5, 3.0])


def stick_lengths(beta):
    rest = torch.cumprod(1 - beta, -1)
    return torch.nn.functional.pad(beta, (0, 1), value=1) * torch.nn.functional.pad(
        rest, (1, 0), value=1
    )


def model(data):
    with pyro.plate("breaks", T - 1):
        beta = pyro.sample("beta", dist.Beta(1.0, 1.0))
    with pyro.plate("components", T):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    weights = stick_lengths(beta)
    # labels may switch, the density may not
    kernels = dist.Normal(mu, 0.8).log_prob(grid[:, None]).exp()
    pyro.deterministic("density", (weights * kernels).sum(-1))
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("obs", dist.Normal(mu[z], 0.8), obs=data)


right = ("density",)
