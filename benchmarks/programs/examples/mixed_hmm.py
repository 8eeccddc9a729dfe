"""Enumerated states of activity; a masked mixture makes rest exactly zero, movement a gamma."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(27)
steps = np.zeros((12, 8), np.float32)
for row in range(12):
    state = 0
    for t in range(8):
        state = rng.choice(2, p=[[0.8, 0.2], [0.3, 0.7]][state])
        steps[row, t] = rng.gamma(4.0, 0.5 + state) if rng.random() < [0.5, 0.9][state] else 0.0


def model(steps):
    animals, times = steps.shape
    with pyro.plate("states", 2):
        stay = pyro.sample("stay", dist.Beta(2.0, 1.0))
        moves = pyro.sample("moves", dist.Beta(2.0, 2.0))
    rate = pyro.sample("rate", dist.LogNormal(torch.tensor([0.7, -0.3]), 0.2).to_event(1))
    with pyro.plate("animals", animals, dim=-1):
        x = torch.tensor(0.0)
        for t in pyro.markov(range(times)):
            second = torch.where(x == 0, 1 - stay[0], stay[1])
            x = pyro.sample(f"x_{t}", dist.Bernoulli(second), infer={"enumerate": "parallel"})
            state = x.long()
            has_converged = steps[:, t] == 0
            pyro.sample(f"rest_{t}", dist.Bernoulli(1 - moves[state]), obs=has_converged.float())
            movement = dist.Gamma(4.0, rate[state])
            rest = dist.Delta(torch.zeros_like(rate[state]))
            pyro.sample(
                f"step_{t}", dist.MaskedMixture(has_converged, movement, rest), obs=steps[:, t]
            )


data = (torch.tensor(steps),)
right = ("stay", "moves", "rate")
