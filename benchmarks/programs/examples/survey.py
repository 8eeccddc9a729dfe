"""A survey: one multinomial of all answers, its total taken from the counts."""

import pyro
import pyro.distributions as dist
import torch

counts = torch.tensor([12.0, 30.0, 7.0, 51.0])


def model(counts):
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(4)))
    pyro.sample("answers", dist.Multinomial(int(counts.sum()), shares), obs=counts)


data = (counts,)
right = ("shares",)
