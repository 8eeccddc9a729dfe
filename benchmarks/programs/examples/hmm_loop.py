"""Hidden Markov chains one after another: a plate as a Python loop around enumerated chains."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(5)
lengths = torch.tensor([6, 4, 8, 5])
sequences = np.zeros((4, 8), np.float32)
for row in range(4):
    state = 0
    for t in range(int(lengths[row])):
        state = rng.choice(2, p=[[0.8, 0.2], [0.3, 0.7]][state])
        sequences[row, t] = rng.normal([-1.0, 1.0][state], 0.6)


def model(sequences, lengths):
    with pyro.plate("states", 2):
        stay = pyro.sample("stay", dist.Beta(2.0, 1.0))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([-1.0, 1.0]), 0.5).to_event(1))
    for i in pyro.plate("sequences", len(sequences)):
        x = torch.tensor(0)
        for t in pyro.markov(range(int(lengths[i]))):
            second = torch.where(x == 0, 1 - stay[0], stay[1])
            x = pyro.sample(f"x_{i}_{t}", dist.Bernoulli(second), infer={"enumerate": "parallel"})
            x = x.long()
            pyro.sample(f"y_{i}_{t}", dist.Normal(locs[x], 0.6), obs=sequences[i, t])


data = (torch.tensor(sequences), lengths)
right = ("stay", "locs")
