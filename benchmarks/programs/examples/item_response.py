"""Item response theory: one ability a person, one difficulty an item, a row for each answer."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

PERSONS, ITEMS = 25, 8
rng = np.random.default_rng(21)
person, item = (a.ravel() for a in np.indices((PERSONS, ITEMS)))
logits = rng.normal(0, 1, PERSONS)[person] - rng.normal(0.3, 1, ITEMS)[item]
correct = rng.binomial(1, 1 / (1 + np.exp(-logits)))


def model(person, item, correct=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(2.0))
    with pyro.plate("persons", PERSONS):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
    with pyro.plate("items", ITEMS):
        difficulty = pyro.sample("difficulty", dist.Normal(mean, spread))
    with pyro.plate("answers", len(person)):
        logits = ability[person] - difficulty[item]
        return pyro.sample("correct", dist.Bernoulli(logits=logits), obs=correct)


data = (
    torch.tensor(person),
    torch.tensor(item),
    torch.tensor(correct, dtype=torch.float32),
)
right = ("mean", "spread", "ability", "difficulty")
