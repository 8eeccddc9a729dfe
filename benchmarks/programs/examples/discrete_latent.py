"""A mixture whose assignments are neither enumerated nor summed out."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(31)
points = torch.tensor(rng.normal(size=50), dtype=torch.float32)


def model(points):
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("data", len(points)):
        z = pyro.sample("z", dist.Categorical(torch.ones(2)))
        pyro.sample("point", dist.Normal(locs[z], 1.0), obs=points)


data = (points,)
refused = "enumerate"
