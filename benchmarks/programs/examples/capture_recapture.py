"""Capture and recapture (Cormack-Jolly-Seber): who is alive is enumerated."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

rng = np.random.default_rng(7)
first = rng.integers(5, size=60)
alive, captures = np.ones(60), np.zeros((60, 7))
for t in range(7):
    alive = np.where(t > first, alive * rng.binomial(1, 0.75, 60), alive)
    seen = np.where(t > first, alive * rng.binomial(1, 0.6, 60), t == first)
    captures[:, t] = seen


def model(captures):
    animals, occasions = captures.shape
    survival = pyro.sample("survival", dist.Uniform(0.0, 1.0))
    detection = pyro.sample("detection", dist.Uniform(0.0, 1.0))
    with pyro.plate("animals", animals, dim=-1):
        z = torch.ones(animals)
        captured = torch.zeros(animals, dtype=torch.bool)
        for t in pyro.markov(range(occasions)):
            alive = torch.where(captured, survival * z, 1.0)
            z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer={"enumerate": "parallel"})
            with poutine.mask(mask=captured):
                pyro.sample(f"y_{t}", dist.Bernoulli(detection * z), obs=captures[:, t])
            captured = captured | captures[:, t].bool()


data = (torch.tensor(captures, dtype=torch.float32),)
right = ("survival", "detection")
