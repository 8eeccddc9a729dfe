"""Ordinal regression: ordered cutpoints on a logistic scale."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(19)
x = rng.normal(size=150)
latent = 1.2 * x + rng.logistic(size=150)
rating = np.digitize(latent, [-1.5, 0.0, 1.5])


def model(x, rating=None):
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
    cutpoints = pyro.sample(
        "cutpoints",
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(3), 2.0).to_event(1), [dist.transforms.OrderedTransform()]
        ),
    )
    with pyro.plate("data", len(x)):
        return pyro.sample("rating", dist.OrderedLogistic(beta * x, cutpoints), obs=rating)


data = (torch.tensor(x, dtype=torch.float32), torch.tensor(rating))
right = ("beta", "cutpoints")
