"""Hidden Markov chains of different lengths side by side: padded, masked and enumerated."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

rng = np.random.default_rng(4)
lengths = torch.tensor(rng.integers(4, 11, size=20))
sequences = np.zeros((20, 10), np.float32)
for row in range(20):
    state = 0
    for t in range(int(lengths[row])):
        state = rng.choice(2, p=[[0.8, 0.2], [0.3, 0.7]][state])
        sequences[row, t] = rng.normal([-1.0, 1.0][state], 0.6)


def model(sequences, lengths):
    rows, longest = sequences.shape
    transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([-1.0, 1.0]), 0.5).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("sequences", rows, dim=-1):
        x = 0
        for t in pyro.markov(range(longest)):
            with poutine.mask(mask=t < lengths):
                x = pyro.sample(
                    f"x_{t}", dist.Categorical(transition[x]), infer={"enumerate": "parallel"}
                )
                pyro.sample(f"y_{t}", dist.Normal(locs[x], scale), obs=sequences[:, t])


data = (torch.tensor(sequences), lengths)
right = ("transition", "locs", "scale")
