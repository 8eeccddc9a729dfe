"""A mixture of two Gaussians, assignments summed out by enumeration."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate

rng = np.random.default_rng(2)
points = np.where(rng.random(200) < 0.35, rng.normal(-2.0, 1.0, 200), rng.normal(2.5, 1.0, 200))


@config_enumerate
def model(points):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    # a prior that tells the components apart
    locs = pyro.sample("locs", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0).to_event(1))
    with pyro.plate("data", len(points)):
        component = pyro.sample("component", dist.Categorical(weights))
        pyro.sample("point", dist.Normal(locs[component], scale), obs=points)


data = (torch.tensor(points, dtype=torch.float32),)
right = ("weights", "scale", "locs")
