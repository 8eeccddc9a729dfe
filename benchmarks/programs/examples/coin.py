"""A coin's fairness: a beta prior, ten flips."""

import pyro
import pyro.distributions as dist
import torch

flips = torch.tensor([1.0] * 6 + [0.0] * 4)


def model(flips):
    fairness = pyro.sample("fairness", dist.Beta(10.0, 10.0))
    with pyro.plate("flips", len(flips)):
        pyro.sample("flip", dist.Bernoulli(fairness), obs=flips)


data = (flips,)
right = ("fairness",)
