"""A hidden Markov chain as one distribution: Pyro's DiscreteHMM, summed in parallel over time."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(6)
state, series = 0, []
for _ in range(60):
    state = rng.choice(2, p=[[0.9, 0.1], [0.2, 0.8]][state])
    series.append(rng.normal([-1.0, 1.0][state], 0.7))


def model(y):
    transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([-1.0, 1.0]), 0.5).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    hmm = dist.DiscreteHMM(
        torch.zeros(2), transition.log(), dist.Normal(locs, scale), duration=len(y)
    )
    pyro.sample("y", hmm, obs=y)


data = (torch.tensor(series, dtype=torch.float32),)
right = ("transition", "locs", "scale")
