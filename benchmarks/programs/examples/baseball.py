"""Batting averages of 18 players after 45 at bats, partially pooled (Efron and Morris 1975)."""

import pyro
import pyro.distributions as dist
import torch

at_bats = torch.full((18,), 45.0)
hits = torch.tensor([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7.0])


def model(at_bats, hits=None):
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("players", len(at_bats)):
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
        return pyro.sample("hits", dist.Binomial(at_bats, phi), obs=hits)


data = (at_bats, hits)
right = ("m", "phi")  # kappa has no variance
